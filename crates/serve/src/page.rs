//! What the web page requests: data, growth between two moments, what was kept since a moment, and files.
//!
//! `/debug/pprof/heap?format=json` is a different answer about the same profile. That is the stable file format, which
//! `report`, `diff` and `top` read back with the sums of all samples. `/page/data` has what one version of the page
//! draws: stacks in tree order, each frame once, intervals computed, a third of the bytes, and things that are not in a
//! profile (moments, costs). Both share what comes before (`Source`, `shown`) and after (kept encodings, compression).
//! A common encoder would have to be both.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, BufWriter, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use heapbpf_access::filter::{Filter, shown};
use heapbpf_profile::escape::escaped_json;
use heapbpf_profile::estimates::{Pool, exact};
use heapbpf_profile::formats::{FORMATS, Format, WriteOptions};
use heapbpf_profile::model::{Process, Profile};
use heapbpf_profile::page::{Layout, PageData, growth_data, kept_data, next_page_data};
use heapbpf_profile::report::FrameView;
use heapbpf_profile::units::unix_ms;
use heapbpf_profile::value::Value;
use serde::Serialize;

use super::source::Shared;

/// Fast compression, because speed matters here: level 1 output is within a tenth of level 5 on profiles.
const COMPRESSION: Compression = Compression::fast();
/// Confidence level of the page's intervals.
pub const CONFIDENCE: f64 = 0.95;
/// Maximum size of a file made for a page, in bytes. It is made in memory.
const LARGEST_FILE: usize = 256 << 20;

/// The answer to a refresh.
#[derive(Serialize)]
struct Answer {
    profile: PageData,
    /// Times of the moments that can be compared, Unix time in milliseconds.
    moments: Vec<u64>,
    /// `None` for a client that may not see everything.
    serving: Option<Cost>,
    /// Names and extensions.
    formats: Vec<(&'static str, &'static str)>,
}

/// What the recording costs.
#[derive(Serialize)]
struct Cost {
    probe_seconds: Option<f64>,
    daemon_cpu_seconds: f64,
    duration_seconds: f64,
}

/// Which processes a client sees.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientView {
    /// What the client may see.
    pub scope: Filter,
    /// What the client asked for.
    pub filter: Filter,
}

impl ClientView {
    /// What the client sees of a profile.
    pub fn of<'a>(&self, profile: &'a Profile) -> Cow<'a, Profile> {
        shown(profile, &self.scope, &self.filter)
    }

    /// Whether no process is left out.
    pub const fn is_everything(&self) -> bool {
        self.scope.is_everything() && self.filter.is_everything()
    }
}

/// Maximum number of layouts kept. Pages that show different processes have different layouts.
const MOST_LAYOUTS: usize = 4;

/// The layouts of the last pages, newest first. A refresh shows mostly the stacks of the one before.
#[derive(Default)]
pub struct Layouts(Mutex<VecDeque<(ClientView, Arc<Layout>)>>);

impl Layouts {
    fn last(&self, seen: &ClientView) -> Option<Arc<Layout>> {
        let layouts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        layouts.iter().find(|(of, _)| of == seen).map(|(_, layout)| Arc::clone(layout))
    }

    fn keep(&self, seen: &ClientView, layout: &Arc<Layout>) {
        let mut layouts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        layouts.retain(|(of, _)| of != seen);
        layouts.truncate(MOST_LAYOUTS - 1);
        layouts.push_front((seen.clone(), Arc::clone(layout)));
    }
}

/// Returns the data of a refresh, as JSON. `moments`: times of those that can be compared.
///
/// # Errors
/// The data cannot be encoded.
pub fn data(
    now: &Shared,
    moments: Vec<u64>,
    seen: &ClientView,
    layouts: &Layouts,
    frames: FrameView,
) -> io::Result<Bytes> {
    let profile = seen.of(&now.made.profile);
    let stats = &now.made.stats;
    let options = WriteOptions { confidence: CONFIDENCE, frames, ..WriteOptions::default() };
    let data = next_page_data(&profile, Value::default_of(&profile), &options, layouts.last(seen));
    layouts.keep(seen, data.layout());
    let answer = Answer {
        moments,
        serving: seen.scope.is_everything().then_some(Cost {
            probe_seconds: stats.probe_seconds,
            daemon_cpu_seconds: stats.daemon_cpu_seconds,
            duration_seconds: profile.header.duration.as_secs_f64(),
        }),
        formats: FORMATS.iter().map(|format| (format.name(), format.extensions[0])).collect(),
        profile: data,
    };
    json(&answer)
}

/// Returns what grew between two moments, as JSON.
///
/// # Errors
/// The data cannot be encoded.
pub fn growth(before: &Shared, after: &Shared, seen: &ClientView, frames: FrameView) -> io::Result<Bytes> {
    json(&growth_data(&seen.of(&before.made.profile), &seen.of(&after.made.profile), CONFIDENCE, frames))
}

/// Returns what was allocated between two moments and is in use at the second one, as JSON.
///
/// # Errors
/// The later moment does not distinguish blocks allocated after the earlier one, or the data cannot be encoded.
pub fn kept(before: &Shared, after: &Shared, seen: &ClientView, frames: FrameView) -> io::Result<Bytes> {
    let (from, made) = (&before.made.profile.header, &after.made);
    let not_known = || {
        io::Error::new(
            io::ErrorKind::NotFound,
            "nothing is known of what was kept between these two moments: choose others",
        )
    };
    let since = made.recent.since(from.duration, &made.profile).ok_or_else(not_known)?;
    let since = seen.of(&since);
    let allocated = allocated_between(&seen.of(&before.made.profile), &since);
    let unknown = unknown_of(&since, from.time);
    json(&kept_data(&since, unix_ms(from.time), allocated, unknown, CONFIDENCE, frames))
}

/// Bytes allocated between two moments: counted, or estimated if not all of them were counted.
fn allocated_between(before: &Profile, after: &Profile) -> Option<u64> {
    let counted = |profile: &Profile| exact(profile, None, Value::AllocSpace);
    if let (Some(before), Some(after)) = (counted(before), counted(after)) {
        return after.checked_sub(before);
    }
    let estimated = |profile: &Profile| Pool::whole(profile).total(Value::AllocSpace);
    let bytes = estimated(after) - estimated(before);
    (bytes >= 0.0).then(|| bytes.round() as u64)
}

/// Returns notes on what is unknown about blocks allocated after a moment.
fn unknown_of(profile: &Profile, from: SystemTime) -> Vec<String> {
    let unfollowed = |it: &&Process| it.inuse_unknown || it.inuse_since.is_some_and(|since| since > from);
    let (unfollowed, of_go) =
        (profile.processes.iter().filter(unfollowed).count(), profile.rows.iter().any(|row| row.is_of_go_runtime()));
    let mut notes = Vec::new();
    if unfollowed > 0 {
        let noun = if unfollowed == 1 { "process" } else { "processes" };
        notes.push(format!(
            "frees of {unfollowed} {noun} were not tracked all of that time: what they kept is incomplete"
        ));
    }
    if of_go {
        notes.push("Go programs are left out: their runtimes do not report when a block was allocated".into());
    }
    if profile.rows.iter().any(|row| row.is_of_mappings() && row.inuse.samples > 0) {
        notes.push("mappings (--mmap) count here with all of their address space".into());
    }
    notes
}

/// Returns plain data as JSON.
///
/// # Errors
/// The data cannot be encoded.
pub fn json(value: &impl Serialize) -> io::Result<Bytes> {
    let text = serde_json::to_string(value)?;
    let escaped = match escaped_json(&text) {
        Cow::Owned(escaped) => Some(escaped),
        Cow::Borrowed(_) => None,
    };
    Ok(escaped.unwrap_or(text).into())
}

/// Compresses an answer.
///
/// # Errors
/// Out of memory.
pub fn compressed(bytes: &[u8]) -> io::Result<Bytes> {
    compressed_while_written(|gzip| gzip.write_all(bytes))
}

/// Number of bytes passed to the compressor at once. Each call costs as much as some thousand bytes, because it clears
/// space for its output.
const AT_ONCE: usize = 64 << 10;

/// Returns what `write` writes, compressed.
///
/// # Errors
/// Those of `write`.
pub fn compressed_while_written(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<Bytes> {
    let mut gzip = BufWriter::with_capacity(AT_ONCE, GzEncoder::new(Vec::new(), COMPRESSION));
    write(&mut gzip)?;
    Ok(gzip.into_inner()?.finish()?.into())
}

/// Returns a profile as a file in a format.
///
/// # Errors
/// Returns the reason why the file cannot be made.
pub fn file(profile: &Profile, format: &Format, seen: &ClientView, frames: FrameView) -> Result<Bytes, String> {
    let mut file = Bounded(Vec::new());
    let options = WriteOptions { frames, ..WriteOptions::default() };
    let written = format.write(&seen.of(profile), &options, &mut file);
    written.map(|()| file.0.into()).map_err(|error| error.to_string())
}

/// A file in memory of limited size.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LARGEST_FILE {
            return Err(io::Error::other("the file would be larger than 256 MiB: record it with -o instead"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::model::InMemory;
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn mappings_that_were_kept_are_said_to_count_in_full() {
        let mut profile = testing::small();
        let notes = |profile: &Profile| unknown_of(profile, profile.header.time);
        assert!(notes(&profile).is_empty(), "{:?}", notes(&profile));
        let reserved = profile.rows[0].inuse;
        profile.rows[0].in_memory = Some(Box::new(InMemory { reserved, ..InMemory::NONE }));
        assert_eq!(notes(&profile), ["mappings (--mmap) count here with all of their address space"]);
        profile.rows[0].inuse = InMemory::NONE.reserved;
        assert!(notes(&profile).is_empty(), "none of them was kept");
    }
}
