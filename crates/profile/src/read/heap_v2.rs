//! Reader of jemalloc's `heap_v2` text and gperftools' similar text: stacks of addresses with counts that are not
//! unbiased yet.
//!
//! A line has the sums of all samples of a stack, so they are unbiased by their mean size, as `jeprof` does. That is
//! exact for blocks of one size, and an approximation otherwise. jemalloc 5.3 and later write numbers for which it is
//! exact on average.

use std::sync::Arc;

use super::{ContentError, MOST_FRAMES};
use crate::model::{Criterion, Frame, Header, Module, Process, Profile, Row, RowKey, SharedFrames, Stack};
use crate::naming::base_name;
use heapbpf_statistics::predistort::{Predistorted, jeprof_scales};
use heapbpf_statistics::sums::SampleSums;

fn damaged(line: usize, reason: &str) -> ContentError {
    ContentError::Damaged { format: "a heap_v2 profile", reason: format!("line {line}: {reason}") }
}

/// Reads the profile.
pub(super) fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim())).peekable();
    let (_, header) = lines.next().unwrap_or_default();
    let interval = interval(header)?;
    // jemalloc writes a stack before its figures, gperftools after them.
    let mut addresses: Option<Vec<u64>> = None;
    let mut found: Vec<(Vec<u64>, Line)> = Vec::new();
    let mut total_frames = 0;
    let mut in_totals = true;
    let mut mappings = Vec::new();
    for (number, line) in lines {
        if line.starts_with("MAPPED_LIBRARIES") {
            mappings.extend(text.lines().skip(number).filter_map(mapping));
            break;
        }
        if let Some(stack) = line.strip_prefix('@') {
            addresses = Some(stack_addresses(stack).ok_or_else(|| damaged(number, "an invalid address"))?);
            in_totals = false;
        } else if let Some(figures) = line.strip_prefix("t*:") {
            // The sum over all threads. The lines for single threads follow and would count twice.
            let figures = Line::parse(figures).ok_or_else(|| damaged(number, "invalid figures"))?;
            if let Some(addresses) = addresses.take() {
                total_frames += addresses.len();
                found.push((addresses, figures));
            }
        } else if let Some((figures, stack)) = line.split_once('@').filter(|_| line.contains('[')) {
            let figures = Line::parse(figures).ok_or_else(|| damaged(number, "invalid figures"))?;
            let addresses = stack_addresses(stack).ok_or_else(|| damaged(number, "an invalid address"))?;
            total_frames += addresses.len();
            found.push((addresses, figures));
            in_totals = false;
        } else if !line.is_empty() && !line.starts_with('t') && !in_totals {
            return Err(damaged(number, "not a stack or its figures"));
        }
        if total_frames > MOST_FRAMES {
            return Err(ContentError::TooLarge(format!("more than {MOST_FRAMES} frames")));
        }
    }
    let mut profile = profile(interval, found, mappings);
    if interval == Some(1) && is_own(&text) {
        // The file does not tell the interval.
        profile.header.interval = 0;
        profile.rows.iter_mut().for_each(|row| row.key.interval = 0);
    }
    Ok(profile)
}

/// R from `heap_v2/524288`, or from gperftools' `heap profile: … @ heap_v2/524288`; `None` for `heapprofile`, which
/// counts every allocation.
fn interval(header: &str) -> Result<Option<u64>, ContentError> {
    let kind = header.rsplit('@').next().unwrap_or(header).trim();
    if kind == "heapprofile" {
        return Ok(None);
    }
    let interval = kind.strip_prefix("heap_v2/").and_then(|interval| interval.trim().parse().ok());
    interval.filter(|&interval| interval > 0).map(Some).ok_or(ContentError::NoInterval)
}

/// Whether heapbpf wrote a profile whose header says R = 1: whatever its interval was, it writes that, and no lines for
/// threads, which jemalloc does.
fn is_own(text: &str) -> bool {
    let is_of_thread = |line: &str| {
        let number = line.trim_start().strip_prefix('t');
        number.is_some_and(|rest| rest.starts_with(|digit: char| digit.is_ascii_digit()))
    };
    text.starts_with("heap_v2/") && !text.lines().any(is_of_thread)
}

fn stack_addresses(text: &str) -> Option<Vec<u64>> {
    text.split_whitespace().map(|address| u64::from_str_radix(address.strip_prefix("0x")?, 16).ok()).collect()
}

/// Figures of a stack, parsed from `objects: bytes [objects: bytes]`: in use, and allocated in total (if jemalloc was
/// configured to record that).
struct Line {
    inuse: (u64, u64),
    alloc: (u64, u64),
}

impl Line {
    fn parse(text: &str) -> Option<Self> {
        let (inuse, alloc) = text.split_once('[')?;
        let pair = |text: &str| {
            let (objects, bytes) = text.split_once(':')?;
            Some((objects.trim().parse().ok()?, bytes.trim().parse().ok()?))
        };
        Some(Self { inuse: pair(inuse)?, alloc: pair(alloc.split(']').next()?)? })
    }
}

/// Parses a line of /proc/PID/maps; only executable mappings of files are kept.
fn mapping(line: &str) -> Option<Module> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    if !fields.next()?.contains('x') {
        return None;
    }
    let offset = fields.next()?;
    let path = fields.nth(2)?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end, file_offset) = (hex(start)?, hex(end)?, hex(offset)?);
    Some(Module { path: path.into(), build_id: None, start, end, file_offset, reason: None })
}

fn profile(sampled: Option<u64>, found: Vec<(Vec<u64>, Line)>, modules: Vec<Module>) -> Profile {
    let interval = sampled.unwrap_or(1);
    let reason: Arc<str> = "heap_v2 holds addresses only".into();
    let mut by_start: Vec<usize> = (0..modules.len()).collect();
    by_start.sort_by_key(|&index| modules[index].start);
    let module_at = |address: u64| {
        let after = by_start.partition_point(|&index| modules[index].start <= address);
        by_start[..after].last().copied().filter(|&index| address < modules[index].end)
    };
    let mut shared = SharedFrames::default();
    let mut frame = |&address: &u64| {
        // These are return addresses; the call is one byte before.
        let address = address.saturating_sub(1);
        let module = module_at(address);
        let file_offset = module.map(|index| {
            let module: &Module = &modules[index];
            (address - module.start).saturating_add(module.file_offset)
        });
        let reason = Some(Arc::clone(&reason));
        shared.share(Frame { module, address, file_offset, reason, ..Frame::default() })
    };
    // Without opt.prof_accum, jemalloc writes zeros for allocation totals.
    let accumulated = found.iter().any(|(_, line)| line.alloc.0 > 0);
    let row = |(addresses, line): &(Vec<u64>, Line)| {
        let frames = addresses.iter().map(&mut frame).collect();
        let stack = Arc::new(Stack { frames, unwinder: "", cut: None });
        Row {
            alloc: unbiased(if accumulated { line.alloc } else { line.inuse }, sampled),
            inuse: unbiased(line.inuse, sampled),
            ..Row::new(RowKey::total(0, interval, stack))
        }
    };
    let rows = found.iter().map(row).collect();
    let exe = modules.first().map_or("", |module| &module.path).to_owned();
    let mut notes =
        vec!["a heap_v2 profile: each stack was unbiased by its mean block size, as jeprof does".to_owned()];
    if !accumulated {
        notes.push("only memory in use was recorded (no prof_accum): allocation totals are not known".into());
    } else if found.iter().all(|(_, line)| line.inuse == (0, 0)) {
        notes.push("no stack has blocks in use: if frees were not tracked, memory in use is not known".into());
    }
    let header = Header { samples_known: false, offsets_known: false, ..Header::new(interval, Criterion::Bytes) };
    let processes = vec![Process { comm: base_name(&exe).into(), exe, coverage: 1.0, ..Process::default() }];
    Profile { processes, rows, modules, notes, ..Profile::new(header) }
}

fn unbiased((objects, bytes): (u64, u64), interval: Option<u64>) -> SampleSums {
    let (objects, bytes) = (objects as f64, bytes as f64);
    let scaled = match interval {
        Some(interval) => jeprof_scales(objects, bytes, interval),
        None => Predistorted { objects, bytes },
    };
    SampleSums { objects: scaled.objects, bytes: scaled.bytes, ..SampleSums::default() }
}
