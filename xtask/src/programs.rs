//! Finds the programs that xtask runs.

use std::env;
use std::path::{Path, PathBuf};

/// Returns the cargo that runs this xtask, or else the one on the PATH.
pub fn host_cargo() -> PathBuf {
    env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

/// Finds a command on the PATH.
pub fn on_path(command: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?).map(|dir| dir.join(command)).find(|path| is_executable(path))
}

/// Whether the path is a file that someone may execute.
pub fn is_executable(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}
