//! `heapbpf top`: the live view. `heapbpf-top` draws the screen. This module provides the terminal, and profiles from a
//! recording in this process or from a running service.

mod feed;
mod key_decoder;
mod live;
mod output;
mod remote;
mod screen;
mod standard_streams;
mod terminal;

use std::time::Duration;

use heapbpf_profile::report::FrameView;

pub use live::live;
pub use remote::{Address, watched};

/// How the screen looks, and how often it is refreshed.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// Whether to use colours.
    pub color: bool,
    /// Minimum time between two refreshes.
    pub refresh: Duration,
    /// Which frames of stacks are shown.
    pub frames: FrameView,
}
