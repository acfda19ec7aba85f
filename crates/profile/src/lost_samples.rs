//! Adds allocations whose samples were lost as a row of their process, so that totals include them.
//!
//! Their stacks are unknown, so they get a separate row, [`RECORDS_LOST`]. The number of lost samples and their bytes
//! were counted. They stand for a range of values that follows from that ([`heapbpf_statistics::lost`]), and the exact
//! count says where in the range the value lies. Intervals belong to the samples that arrived, widened by what was lost
//! (`loss_bounds`), and contain the corrected figure.

use std::sync::Arc;

use super::estimates::{Pool, exact};
use super::model::{Frame, Process, Profile, Row, RowKey, SampleSums, Stack};
use super::value::Value;
use heapbpf_statistics::interval::Interval;
use heapbpf_statistics::lost::LostSamples;

/// Name of the frame that stands for the stacks of lost samples.
pub const RECORDS_LOST: &str = "[records lost]";

/// Why such a stack has no frames of its own.
const REASON: &str = "its record was lost";

/// Adds a row for lost samples to each process that lost some and has no such row yet. A process gets none if its
/// losses were not counted or its records were not read in time; its figures have no interval and say so.
pub fn add_rows(profile: &mut Profile) {
    if profile.header.unread.is_some() || profile.header.interval == 0 {
        return;
    }
    let lossy = |process: &Process| !process.losses.unbounded && process.losses.alloc.samples > 0;
    if !profile.header.samples_known || !profile.processes.iter().any(lossy) {
        return;
    }
    let rows_of = profile.rows_of_processes();
    let stack = Arc::new(Stack {
        frames: vec![Arc::new(Frame { function: Some(RECORDS_LOST.into()), ..Frame::default() })],
        unwinder: "",
        cut: Some(REASON.into()),
    });
    let lossy = profile.processes.iter().zip(&rows_of).enumerate().filter(|(_, (process, _))| lossy(process));
    let lossy = lossy.filter(|(_, (_, rows))| !rows.iter().any(|row| row.is_of_lost_samples()));
    let added: Vec<Row> =
        lossy.filter_map(|(index, (_, rows))| row(profile, index, rows, Arc::clone(&stack))).collect();
    profile.rows.extend(added);
}

/// Bytes that the lost samples of a profile stand for.
pub fn bytes(profile: &Profile) -> f64 {
    profile.rows.iter().filter(|row| row.is_of_lost_samples()).map(|row| row.alloc.bytes).sum()
}

/// The row of a process, by its index.
fn row(profile: &Profile, process: usize, rows: &[&Row], stack: Arc<Stack>) -> Option<Row> {
    let losses = &profile.processes[process].losses;
    let used = || {
        rows.iter()
            .filter(|row| !row.is_of_go_runtime())
            .map(|row| row.key.interval)
            .chain(profile.header.intervals())
            .filter(|r| *r > 0)
    };
    let largest_interval = losses.interval.max(used().max()?);
    let lost = LostSamples {
        samples: losses.alloc.samples,
        sampled_bytes: losses.alloc.sampled_bytes,
        smallest_interval: used().min()?.min(largest_interval),
        largest_interval,
    };
    let pool = Pool::of(rows.iter().copied());
    let estimate = |value: Value, range: Interval| {
        let (found, raw) = (pool.total(value), pool.raw_total(value));
        if found != raw && raw > 0.0 {
            // They were lost within time windows, so they also stand for the time between the windows.
            return range.low * found / raw;
        }
        let lacking = exact(profile, Some(process), value).map(|exact| exact as f64 - found);
        lacking.map_or(range.low, |lacking| lacking.clamp(range.low, range.high))
    };
    let criterion = profile.header.criterion;
    let alloc = SampleSums {
        bytes: estimate(Value::AllocSpace, lost.bytes(criterion)),
        objects: estimate(Value::AllocObjects, lost.objects(criterion)),
        ..SampleSums::default()
    };
    let key = RowKey::total(process, largest_interval, stack);
    Some(Row { alloc, peak: rows.iter().find_map(|row| row.peak).map(|_| SampleSums::default()), ..Row::new(key) })
}

#[cfg(test)]
#[path = "lost_samples_tests.rs"]
mod tests;
