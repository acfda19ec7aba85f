//! Code that a language runtime made: a trait for leaving its frames, which only the runtime itself can describe.

use crate::memory::{Memory, Missing};
use crate::raw::{RawFrame, SpaceView};
use sampler_ebpf::abi::ProcessKey;

/// The registers that matter in a frame of a runtime's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeFrame {
    /// Where execution goes on.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer, if it is known.
    pub fp: Option<u64>,
}

/// What became of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The code is not the runtime's: the walk goes on by its own means.
    NotMine,
    /// The caller.
    To(RuntimeFrame),
    /// A word of the stack is missing.
    Missing(Missing),
    /// The code is the runtime's, but the frame cannot be left; the text says why.
    Stuck(&'static str),
}

/// Knows the code of language runtimes in processes.
pub trait RuntimeCode {
    /// Leaves the frame `at`, whose code lies in no file. Adds what it stands for to `frames`, innermost first. What it
    /// reads of the stack must come from `memory`, as results are cached by what was read.
    fn leave(
        &mut self,
        space: &SpaceView,
        at: RuntimeFrame,
        memory: &mut dyn Memory,
        frames: &mut Vec<RawFrame>,
    ) -> Left;

    /// A number that changes once what was said of a process's code may be true no more: kept walks are of one number.
    fn version(&self, _: ProcessKey) -> u64 {
        0
    }
}

/// No runtime is known.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoRuntime;

impl RuntimeCode for NoRuntime {
    fn leave(&mut self, _: &SpaceView, _: RuntimeFrame, _: &mut dyn Memory, _: &mut Vec<RawFrame>) -> Left {
        Left::NotMine
    }
}
