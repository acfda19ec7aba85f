//! Code that a language runtime generated: a trait for unwinding its frames, which only the runtime itself can
//! describe.

use crate::memory::{Memory, Missing};
use crate::raw::{RawFrame, SpaceView};
use sampler_ebpf::abi::ProcessKey;

/// The registers that matter in a frame of a runtime's code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuntimeFrame {
    /// Where execution continues.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer, if it is known.
    pub fp: Option<u64>,
}

/// The result of unwinding a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The code does not belong to the runtime: the walk continues by its own means.
    NotMine,
    /// The caller.
    To(RuntimeFrame),
    /// A word of the stack is missing.
    Missing(Missing),
    /// The code belongs to the runtime, but the walk cannot get past the frame; the text says why.
    Stuck(&'static str),
}

/// Knows the code that language runtimes generated in processes.
pub trait RuntimeCode {
    /// Unwinds the frame `at`, whose code lies in no file. Appends the frames that it stands for to `frames`, innermost
    /// first. Must read the stack only through `memory`, because results are cached by the words that were read.
    fn leave(
        &mut self,
        space: &SpaceView,
        at: RuntimeFrame,
        memory: &mut dyn Memory,
        frames: &mut Vec<RawFrame>,
    ) -> Left;

    /// A number that changes when earlier answers about a process's code may no longer hold. Cached walks are only
    /// valid for one number.
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
