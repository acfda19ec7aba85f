//! A C library of a measurement's own: another inode, so that no other recording's probes on this host are in it.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

const NAME: &str = "libc.so.6";

/// A copy of the C library, gone with this value.
pub struct PrivateLibrary(TempDir);

impl PrivateLibrary {
    /// Copies the one that this program uses; `None` if it uses none of that name (it is linked statically).
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn copy() -> std::io::Result<Option<Self>> {
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let path = maps
            .lines()
            .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
            .find(|path| path.file_name().is_some_and(|name| name == NAME));
        let Some(path) = path else { return Ok(None) };
        let folder = tempfile::tempdir()?;
        std::fs::copy(&path, folder.path().join(NAME))?;
        Ok(Some(Self(folder)))
    }

    /// The folder for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }
}
