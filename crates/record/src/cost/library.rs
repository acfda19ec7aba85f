//! A private copy of the C library for measurements. Probes belong to an inode, so the copy has none of another
//! recording.

use std::path::Path;

use procfs::process::{MMapPath, Process};
use tempfile::TempDir;

const NAME: &str = "libc.so.6";

/// A private copy of the C library, deleted when dropped.
pub struct PrivateLibrary(TempDir);

impl PrivateLibrary {
    /// Copies the C library that this program uses; `None` if it uses no `libc.so.6` (it is linked statically).
    ///
    /// # Errors
    /// It cannot be copied.
    pub fn copy() -> std::io::Result<Option<Self>> {
        let maps = Process::myself().and_then(|process| process.maps()).map_err(std::io::Error::other)?;
        let path = maps.iter().find_map(|map| match &map.pathname {
            MMapPath::Path(path) if path.file_name().is_some_and(|name| name == NAME) => Some(path),
            _ => None,
        });
        let Some(path) = path else { return Ok(None) };
        let dir = tempfile::tempdir()?;
        std::fs::copy(path, dir.path().join(NAME))?;
        Ok(Some(Self(dir)))
    }

    /// The directory that contains it, for `LD_LIBRARY_PATH`.
    pub fn dir(&self) -> &Path {
        self.0.path()
    }
}
