//! Reads a command's input profiles, with a line of progress for large ones.

use std::path::Path;

use heapbpf_profile::model::Profile;
use heapbpf_profile::read::{self, ReadError};
use heapbpf_profile::units;
use heapbpf_record::progress_line::during;

/// Reads a profile.
///
/// # Errors
/// The file cannot be read, or is not a profile.
pub fn open(path: &Path) -> Result<Profile, ReadError> {
    let bytes = std::fs::metadata(path).map_or(0, |file| file.len());
    let size = if bytes > 0 { format!(" ({})", units::bytes(bytes as f64)) } else { String::new() };
    during(move || format!("reading {}{size}", path.display()), || read::open(path))
}
