//! Readers of profiles: heapbpf's own and those of other heap profilers.
//!
//! A file may be damaged or hostile, so every size is bounded, every index is checked, and every error is a sentence
//! for the user.

mod foreign;
mod heap_v2;
mod json;
mod newer;
mod parquet;
mod pprof;
mod pprof_comments;
mod strings;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::model::{Profile, Row};
use super::units::ByteUnit;

/// Largest file that is read, in bytes.
pub const LARGEST_FILE: u64 = 2 << 30;
/// Largest decompressed size of a file, in bytes. 50,000 stacks of 40 frames take 6 MB as pprof, and 350 MB as JSON.
pub const LARGEST_DECOMPRESSED: u64 = 1 << 30;
/// Maximum number of frames of all stacks together, which take 1 GiB of memory: four times those of 50,000 stacks of 40
/// frames.
const MOST_FRAMES: usize = if cfg!(test) { 200_000 } else { 8_000_000 };
/// Maximum number of samples in a profile: a million per second for twelve days.
const MOST_SAMPLES: u64 = 1 << 40;

/// Why a profile could not be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// File.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// The contents of the file could not be read.
    #[error("cannot read {path}: {source}")]
    Content {
        /// File.
        path: PathBuf,
        /// What is wrong with the contents.
        source: ContentError,
    },
    /// The figures are samples, but the file does not state the sampling interval.
    #[error("cannot unbias: no sampling interval recorded in {0}")]
    NoInterval(PathBuf),
}

/// What is wrong with the contents of a file.
#[derive(Debug, Error)]
pub enum ContentError {
    /// The contents are in no known format.
    #[error(
        "it is {0}; heapbpf reads its own .json, .parquet and .pb.gz, heap profiles of Go and tcmalloc (pprof) and jemalloc's heap_v2"
    )]
    Foreign(String),
    /// The contents are truncated or damaged.
    #[error("it looks like {format}, but is damaged: {reason}")]
    Damaged {
        /// The format that it was read as.
        format: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// The profile would take too much memory.
    #[error("it is too large: {0}")]
    TooLarge(String),
    /// The figures are samples, but the sampling interval is missing.
    #[error("cannot unbias: no sampling interval recorded")]
    NoInterval,
}

/// Reads a profile from a file, or from standard input if the path is `-`. The format is detected from the contents.
///
/// # Errors
///
/// The file cannot be read, or is not a profile; the message says what it is instead.
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

/// Reads a profile from memory. The format is detected from the contents.
///
/// # Errors
///
/// The bytes are not a profile; the message says what is wrong with them.
pub fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    parse_within(bytes, LARGEST_DECOMPRESSED)
}

fn parse_within(bytes: &[u8], largest_decompressed: u64) -> Result<Profile, ContentError> {
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(ContentError::TooLarge(format!("more than {}", whole(LARGEST_FILE))));
    }
    if !bytes.starts_with(&[0x1f, 0x8b]) {
        return parse_plain(bytes);
    }
    parse_plain(&decompressed(bytes, largest_decompressed)?)
}

/// A limit in its own unit: `1 GiB`.
fn whole(bytes: u64) -> String {
    let unit = ByteUnit::of(bytes as f64);
    format!("{} {}", bytes as f64 / unit.bytes(), unit.name())
}

fn decompressed(bytes: &[u8], largest_decompressed: u64) -> Result<Vec<u8>, ContentError> {
    let mut plain = Vec::new();
    flate2::read::MultiGzDecoder::new(bytes)
        .take(largest_decompressed + 1)
        .read_to_end(&mut plain)
        .map_err(|error| ContentError::Damaged { format: "gzip", reason: error.to_string() })?;
    if plain.len() as u64 > largest_decompressed {
        return Err(ContentError::TooLarge(format!("more than {} when decompressed", whole(largest_decompressed))));
    }
    Ok(plain)
}

fn parse_plain(bytes: &[u8]) -> Result<Profile, ContentError> {
    let profile = parse_content(bytes)?;
    let most = |row: &Row| {
        let in_memory = row.in_memory.as_ref().map(|it| it.resident.samples.max(it.reserved.samples));
        let sums = [Some(&row.alloc), Some(&row.inuse), Some(&row.at_exit), row.peak.as_ref()];
        sums.into_iter().flatten().map(|sums| sums.samples).chain(in_memory).max()
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
    match foreign::kind(bytes) {
        Some(what) => Err(ContentError::Foreign(what.into())),
        // Text may happen to decode as a message, so a file is reported as text only if it cannot be read.
        None => pprof::parse(bytes).map_err(|error| match error {
            ContentError::Damaged { .. } | ContentError::Foreign(_) if foreign::is_text(bytes) => {
                ContentError::Foreign("text, no profile".into())
            }
            error => error,
        }),
    }
}

#[cfg(test)]
mod tests;
