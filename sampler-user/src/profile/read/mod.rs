//! Profiles read back: ours, and those of other heap profilers.
//!
//! What is read may be damaged or hostile: every size is bounded, every index checked, every error a sentence.

mod heap_v2;
mod json;
mod parquet;
mod pprof;
mod pprof_comments;
mod strings;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use thiserror::Error;

use super::model::{Profile, Row};

/// Most bytes of a file that are read.
pub const LARGEST_FILE: u64 = 2 << 30;
/// Most bytes that a compressed file may become: 50,000 stacks of 40 frames take 6 MB.
pub const LARGEST_DECOMPRESSED: u64 = 256 << 20;
/// Most frames of all stacks together: 1 GiB of memory, four times what 50,000 stacks of 40 frames take.
const MOST_FRAMES: usize = if cfg!(test) { 200_000 } else { 8_000_000 };
/// Most samples of a profile: a million a second for twelve days.
const MOST_SAMPLES: u64 = 1 << 40;

/// Why a profile could not be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// File.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What is in the file could not be read.
    #[error("cannot read {path}: {source}")]
    Content {
        /// File.
        path: PathBuf,
        /// What is wrong with it.
        source: ContentError,
    },
    /// Scaled by sampling, but by how much is not said.
    #[error("cannot unbias: no sampling interval recorded in {0}")]
    NoInterval(PathBuf),
}

/// What is wrong with the content of a file.
#[derive(Debug, Error)]
pub enum ContentError {
    /// It is nothing that we know.
    #[error(
        "it is {0}; heapbpf reads its own .json, .parquet and .pb.gz, heap profiles of Go and tcmalloc (pprof) and jemalloc's heap_v2"
    )]
    Foreign(String),
    /// It ends too early, or is damaged.
    #[error("as {format} it is damaged: {reason}")]
    Damaged {
        /// What it was read as.
        format: &'static str,
        /// Where it went wrong.
        reason: String,
    },
    /// It would take too much memory.
    #[error("it is too large: {0}")]
    TooLarge(String),
    /// Sampled, but the sampling interval is missing.
    #[error("cannot unbias: no sampling interval recorded")]
    NoInterval,
}

/// Reads a profile from a file (`-`: from standard input). The format is found from the content.
///
/// # Errors
/// A sentence that says what the file is and why it cannot be read.
pub fn open(path: &Path) -> Result<Profile, ReadError> {
    let failed = |source| ReadError::Io { path: path.into(), source };
    let mut bytes = Vec::new();
    let read = if path.as_os_str() == "-" {
        io::stdin().lock().take(LARGEST_FILE + 1).read_to_end(&mut bytes)
    } else {
        File::open(path).map_err(failed)?.take(LARGEST_FILE + 1).read_to_end(&mut bytes)
    };
    read.map_err(failed)?;
    parse(&bytes).map_err(|source| match source {
        ContentError::NoInterval => ReadError::NoInterval(path.into()),
        source => ReadError::Content { path: path.into(), source },
    })
}

/// Reads a profile from memory.
///
/// # Errors
/// What is wrong with it.
pub fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    parse_within(bytes, LARGEST_DECOMPRESSED)
}

fn parse_within(bytes: &[u8], largest_decompressed: u64) -> Result<Profile, ContentError> {
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(ContentError::TooLarge(format!("more than {LARGEST_FILE} bytes")));
    }
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return parse_plain(bytes);
    }
    let mut plain = Vec::new();
    let decoder = MultiGzDecoder::new(bytes);
    decoder
        .take(largest_decompressed + 1)
        .read_to_end(&mut plain)
        .map_err(|error| ContentError::Damaged { format: "gzip", reason: error.to_string() })?;
    if plain.len() as u64 > largest_decompressed {
        return Err(ContentError::TooLarge(format!("more than {largest_decompressed} bytes when decompressed")));
    }
    parse_plain(&plain)
}

fn parse_plain(bytes: &[u8]) -> Result<Profile, ContentError> {
    let profile = parse_content(bytes)?;
    let most = |row: &Row| {
        let sums = [Some(&row.alloc), Some(&row.inuse), Some(&row.at_exit), row.peak.as_ref()];
        sums.into_iter().flatten().map(|sums| sums.samples).max()
    };
    let samples = profile.rows.iter().filter_map(most).fold(0, u64::saturating_add);
    if samples > MOST_SAMPLES {
        return Err(ContentError::TooLarge(format!("{samples} samples")));
    }
    Ok(profile)
}

fn parse_content(bytes: &[u8]) -> Result<Profile, ContentError> {
    let start = bytes.trim_ascii_start();
    if start.is_empty() {
        return Err(ContentError::Foreign("empty".into()));
    }
    if start.starts_with(b"{") {
        return json::parse(bytes);
    }
    if start.starts_with(b"PAR1") {
        return parquet::parse(bytes);
    }
    if start.starts_with(b"heap_v2") || start.starts_with(b"heap profile:") {
        return heap_v2::parse(bytes);
    }
    for (magic, what) in KNOWN_FOREIGN {
        if start.starts_with(magic) {
            return Err(ContentError::Foreign((*what).into()));
        }
    }
    pprof::parse(bytes)
}

/// Beginnings of files that users might mistake for profiles.
const KNOWN_FOREIGN: &[(&[u8], &str)] =
    &[(b"<", "HTML, XML or SVG"), (b"\x7fELF", "a program"), (b"PERFILE2", "perf's data"), (b"[", "a JSON array")];

#[cfg(test)]
mod loss_tests;
#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
