//! Temporary resources of benchmarks that run heapbpf, cleaned up when dropped: a folder, and child processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;

/// A temporary folder of this run; removed when dropped.
pub struct Folder(PathBuf);

impl Folder {
    /// Creates the folder.
    pub fn new() -> std::io::Result<Self> {
        let path = std::env::temp_dir().join(format!("heapbpf-bench-{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A child process that is killed when dropped.
pub struct Running(pub Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
