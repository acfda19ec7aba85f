#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod axis;
mod draw;
mod error;
mod figure;
mod letters;
mod overhead;
mod picture;
mod plan;
mod survival;
mod timeline;

pub use axis::{Axis, Unit};
pub use error::PlotError;
pub use figure::{Curve, Entry, Figure, Key, Mark, Panel, Point};
pub use overhead::overhead;
pub use picture::PictureError;
pub use plan::plan;
pub use survival::survival;
pub use timeline::timeline;

use heapbpf_profile::escape::escaped;
use heapbpf_profile::group::GroupBy;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{FrameView, StackFigures};
use heapbpf_profile::value::Value;

/// Options that all plots of profiles share.
#[derive(Clone, Copy, Debug)]
pub struct PlotOptions {
    /// The value to show, or to choose stacks by; `None`: bytes in use, or bytes allocated if nothing is in use.
    pub value: Option<Value>,
    /// Confidence level of bands, 0 to 1.
    pub confidence: f64,
    /// The grouping of stacks; `None`: by program if there are several processes.
    pub group_by: Option<GroupBy>,
    /// Maximum number of stacks that get a curve of their own.
    pub stacks: usize,
    /// Which frames of stacks are shown, and under which names.
    pub frames: FrameView,
}

impl Default for PlotOptions {
    fn default() -> Self {
        Self { value: None, confidence: 0.95, group_by: None, stacks: 5, frames: FrameView::default() }
    }
}

/// The profiles of a recording in order of time, the last one, and when the recording began.
///
/// # Errors
/// There are fewer than two points in time, which `what` needs.
fn snapshots<'a>(
    profiles: &'a [Profile],
    what: &'static str,
) -> Result<(Vec<&'a Profile>, &'a Profile, std::time::SystemTime), PlotError> {
    let mut order: Vec<&Profile> = profiles.iter().collect();
    order.sort_by_key(|profile| profile.header.time);
    let start = order.iter().map(|profile| profile.header.started).min();
    match (order.first().copied(), order.last().copied(), start) {
        (Some(first), Some(last), Some(start)) if first.header.time != last.header.time => Ok((order, last, start)),
        _ => Err(PlotError::NeedsSnapshots(what)),
    }
}

/// Maximum number of functions of a stack in its name.
const CALLS: usize = 4;

/// The name of a stack in a legend: `cache_insert ← handle_request ← main`, with the group in front.
fn stack_name(stack: &StackFigures) -> String {
    let mut calls: Vec<&str> = stack.calls.iter().take(CALLS).map(String::as_str).collect();
    if stack.calls.len() > CALLS {
        calls.push("…");
    }
    if calls.is_empty() {
        calls.push("[no stack]");
    }
    let group = if stack.group.is_empty() { String::new() } else { format!("{}: ", stack.group) };
    escaped(&format!("{group}{}", calls.join(" ← "))).into_owned()
}

/// Seconds from one moment to a later one.
fn seconds_between(from: std::time::SystemTime, to: std::time::SystemTime) -> f64 {
    to.duration_since(from).unwrap_or_default().as_secs_f64()
}

/// A point in time as `2023-11-14 22:13:20 UTC`.
fn moment(time: std::time::SystemTime) -> String {
    let text = heapbpf_profile::units::rfc3339(time);
    let (day, of_day) = text.split_once('T').unwrap_or((&text, ""));
    format!("{day} {} UTC", &of_day[..of_day.len().min("00:00:00".len())])
}

#[cfg(test)]
mod golden;
