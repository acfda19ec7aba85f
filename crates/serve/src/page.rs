//! What the web page asks for: data, growth between two moments and what was kept of that time, files.
//!
//! `/debug/pprof/heap?format=json` is another answer about the same profile. It is the format of files, which lasts, and which
//! `report`, `diff` and `top` read back with all samples' sums. `/page/data` has what one version of the page draws: stacks in the
//! order of their tree, frames once, intervals ready, a third of the bytes, besides what is no part of a profile (moments, costs).
//! Both share what comes before (`Source`, `shown`) and after (kept encodings, compression); a common encoder would have to be both.

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
use heapbpf_profile::formats::{FORMATS, Format, WriteOptions};
use heapbpf_profile::model::{Process, Profile};
use heapbpf_profile::page::{Figure, Layout, PageData, growth_data, kept_data, next_page_data, totals};
use heapbpf_profile::units::unix_ms;
use heapbpf_profile::value::Value;
use serde::Serialize;

use super::source::Shared;

/// Fast compression, because speed matters here: level 1 output is within a tenth of level 5 on profiles.
const COMPRESSION: Compression = Compression::fast();
/// Confidence level of the page's intervals.
const CONFIDENCE: f64 = 0.95;
/// Largest file that is made for a page, in bytes: it is made in memory.
const LARGEST_FILE: usize = 256 << 20;

/// The answer to a refresh.
#[derive(Serialize)]
struct Answer {
    profile: PageData,
    moments: Vec<MomentEntry>,
    /// `None` for a client that may not see everything.
    serving: Option<Cost>,
    /// Names and extensions.
    formats: Vec<(&'static str, &'static str)>,
}

#[derive(Serialize)]
struct MomentEntry {
    time_ms: u64,
    inuse: Figure,
    alloc: Figure,
}

/// What the recording costs.
#[derive(Serialize)]
struct Cost {
    probe_seconds: Option<f64>,
    daemon_cpu_seconds: f64,
    duration_seconds: f64,
}

/// Which processes a client sees.
#[derive(Clone, PartialEq)]
pub struct Seen {
    /// What it may see.
    pub scope: Filter,
    /// What it asked for.
    pub filter: Filter,
}

impl Seen {
    fn of<'a>(&self, profile: &'a Profile) -> Cow<'a, Profile> {
        shown(profile, &self.scope, &self.filter)
    }

    fn has(&self, profile: &Profile, process: usize) -> bool {
        let process = profile.processes.get(process);
        process.is_some_and(|process| self.scope.matches(process) && self.filter.matches(process))
    }
}

/// Most layouts that are kept: of pages that show different processes.
const MOST_LAYOUTS: usize = 4;

/// Layouts of the last pages, the newest first. A refresh is mostly of the stacks of the one before.
#[derive(Default)]
pub struct Layouts(Mutex<VecDeque<(Seen, Arc<Layout>)>>);

impl Layouts {
    fn last(&self, seen: &Seen) -> Option<Arc<Layout>> {
        let layouts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        layouts.iter().find(|(of, _)| of == seen).map(|(_, layout)| Arc::clone(layout))
    }

    fn keep(&self, seen: &Seen, layout: &Arc<Layout>) {
        let mut layouts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        layouts.retain(|(of, _)| of != seen);
        layouts.truncate(MOST_LAYOUTS - 1);
        layouts.push_front((seen.clone(), Arc::clone(layout)));
    }
}

/// The data of a refresh, as JSON.
///
/// # Errors
/// The data cannot be encoded.
pub fn data(now: &Shared, moments: &[Arc<Shared>], seen: &Seen, layouts: &Layouts) -> io::Result<Bytes> {
    let profile = seen.of(&now.made.profile);
    let moments = moments.iter().map(|shared| {
        let profile = &shared.made.profile;
        let make = || totals(profile, CONFIDENCE, |process| seen.has(profile, process));
        let [inuse, alloc] = shared.totals(&seen.scope, &seen.filter, make);
        MomentEntry { time_ms: unix_ms(profile.header.time), inuse, alloc }
    });
    let stats = &now.made.stats;
    let data = next_page_data(&profile, Value::default_of(&profile), None, CONFIDENCE, layouts.last(seen));
    layouts.keep(seen, data.layout());
    let answer = Answer {
        moments: moments.collect(),
        serving: seen.scope.is_everything().then_some(Cost {
            probe_seconds: stats.probe_seconds,
            daemon_cpu_seconds: stats.daemon_cpu_seconds,
            duration_seconds: profile.header.duration.as_secs_f64(),
        }),
        formats: formats().map(|format| (format.name(), format.extensions()[0])).collect(),
        profile: data,
    };
    json(&answer)
}

/// What grew between two moments, as JSON.
///
/// # Errors
/// The data cannot be encoded.
pub fn growth(before: &Shared, after: &Shared, seen: &Seen) -> io::Result<Bytes> {
    json(&growth_data(&seen.of(&before.made.profile), &seen.of(&after.made.profile), CONFIDENCE))
}

/// What was allocated between two moments and is in use at the second one, as JSON.
///
/// # Errors
/// The later moment does not tell by when blocks were allocated after the earlier one, or the data cannot be encoded.
pub fn kept(before: &Shared, after: &Shared, seen: &Seen) -> io::Result<Bytes> {
    let (from, made) = (&before.made.profile.header, &after.made);
    let untold =
        || io::Error::new(io::ErrorKind::NotFound, "the later moment was begun before the earlier one was kept");
    let since = made.recent.since(from.duration, &made.profile).ok_or_else(untold)?;
    let since = seen.of(&since);
    let notes = unknown_of(&since, from.time);
    json(&kept_data(&since, unix_ms(from.time), notes, CONFIDENCE))
}

/// What is not known of blocks that were allocated after a moment.
fn unknown_of(profile: &Profile, from: SystemTime) -> Vec<String> {
    let unfollowed = |it: &&Process| it.inuse_unknown || it.inuse_since.is_some_and(|since| since > from);
    let (unfollowed, of_go) =
        (profile.processes.iter().filter(unfollowed).count(), profile.rows.iter().any(|row| row.is_of_go_runtime()));
    let mut notes = Vec::new();
    if unfollowed > 0 {
        let noun = if unfollowed == 1 { "process" } else { "processes" };
        notes.push(format!(
            "frees of {unfollowed} {noun} were not followed all of that time: what they kept is not all here"
        ));
    }
    if of_go {
        notes.push("what Go programs keep is not here: their runtimes do not tell when a block was allocated".into());
    }
    notes
}

fn json(value: &impl Serialize) -> io::Result<Bytes> {
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
/// There is no memory.
pub fn compressed(bytes: &[u8]) -> io::Result<Bytes> {
    compressed_while_written(|gzip| gzip.write_all(bytes))
}

/// Bytes that the compressor gets at once. Each call of it costs as much as some thousand bytes: it clears room for its output.
const AT_ONCE: usize = 64 << 10;

/// What `write` writes, compressed.
///
/// # Errors
/// As of `write`.
pub fn compressed_while_written(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<Bytes> {
    let mut gzip = BufWriter::with_capacity(AT_ONCE, GzEncoder::new(Vec::new(), COMPRESSION));
    write(&mut gzip)?;
    Ok(gzip.into_inner()?.finish()?.into())
}

/// The formats that a page offers.
pub fn formats() -> impl Iterator<Item = &'static dyn Format> {
    FORMATS.iter().copied()
}

/// A profile as a file in a format.
///
/// # Errors
/// Says why there is no such file.
pub fn file(profile: &Profile, format: &dyn Format, seen: &Seen) -> Result<Bytes, String> {
    let mut file = Bounded(Vec::new());
    let written = format.write(&seen.of(profile), &WriteOptions::default(), &mut file);
    written.map(|()| file.0.into()).map_err(|error| error.to_string())
}

/// A file in memory that does not become too large.
struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > LARGEST_FILE {
            return Err(io::Error::other("the file would have more than 256 MiB: record it with -o instead"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
