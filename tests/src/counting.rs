//! An independent count of a program's allocations: a preloaded library that writes the number of calls and bytes to a
//! file.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::program::library;

/// The library and its output file, for one program.
pub struct Counting {
    library: PathBuf,
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl Default for Counting {
    fn default() -> Self {
        Self::new()
    }
}

impl Counting {
    /// Builds the library. A program that loads it creates the file.
    ///
    /// # Panics
    /// If it does not compile.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("count");
        Self { library: library("counting", "counting.so", &["-ldl"]), file, _dir: dir }
    }

    /// Environment variables for the program.
    pub fn variables(&self) -> [(&'static str, OsString); 2] {
        [("LD_PRELOAD", self.library.clone().into()), ("COUNTING_FILE", self.file.clone().into())]
    }

    /// Numbers of successful calls, of their bytes, and of processes so far.
    ///
    /// # Panics
    /// If the library was not loaded.
    pub fn now(&self) -> [u64; 3] {
        let bytes = std::fs::read(&self.file).expect("the counting library was loaded");
        let word = |i: usize| u64::from_ne_bytes(bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        [word(0), word(1), word(2)]
    }
}
