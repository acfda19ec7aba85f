//! Turns raw stacks into profile stacks.

use std::sync::Arc;

use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::model::{Frame, SharedFrames, Stack};
use heapbpf_unwind::image::ModuleFiles;
use heapbpf_unwind::raw::{Completeness, RawFrame, RawStack, Reason};

use super::perf_map::PerfMap;
use super::runtime_functions::RuntimeFunctions;
use super::symbolizer::Symbolizer;

/// Outermost functions of threads, processes and coroutines, as named in symbol tables.
const ENTRY_FUNCTIONS: [&str; 12] = [
    "_start",
    "_dl_start_user",
    "__libc_start_main",
    "__libc_start_main_impl",
    "__libc_start_call_main",
    "clone",
    "__clone",
    "clone3",
    "__clone3",
    "start_thread",
    "thread_start",
    "__start_context",
];

/// Turns the raw stacks of one process into profile stacks.
pub struct Finisher<'a> {
    /// The symbolizer, which has already symbolized these stacks.
    pub symbolizer: &'a Symbolizer,
    /// The modules.
    pub modules: &'a dyn ModuleFiles,
    /// Names of Python functions.
    pub runtime_functions: &'a RuntimeFunctions,
    /// Names of the process's JIT code.
    pub perf_map: Option<&'a PerfMap>,
    /// Why there is no perf map. It becomes the reason of frames that would need one.
    pub perf_map_reason: Option<&'a str>,
}

impl Finisher<'_> {
    /// Returns the profile stack for a raw stack. Its frames are shared through `shared`. `module_index` returns a
    /// module's index in the profile.
    pub fn finish(
        &self,
        raw: &RawStack,
        module_index: &mut dyn FnMut(ModuleId) -> usize,
        shared: &mut SharedFrames,
    ) -> Stack {
        let mut frames = Vec::with_capacity(raw.frames.len());
        for frame in &raw.frames {
            self.push(frame, module_index, &mut frames);
        }
        let stands_for = match &raw.completeness {
            Completeness::Truncated(Reason::OverflowBucket) => Some("[other stacks]"),
            Completeness::Truncated(Reason::RecordLost) => Some("[stack lost]"),
            _ => None,
        };
        frames.extend(stands_for.map(|name| Frame { function: Some(name.into()), ..Frame::default() }));
        let cut = match &raw.completeness {
            Completeness::Complete => None,
            Completeness::Truncated(_) if frames.last().is_some_and(is_entry) => None,
            Completeness::Truncated(reason) => Some(reason.text(|module| self.modules.path(module)).into()),
        };
        // Collecting would keep the block of the unshared frames, which is fifteen times as large.
        let mut shared_frames = Vec::with_capacity(frames.len());
        shared_frames.extend(frames.into_iter().map(|frame| shared.share(frame)));
        Stack { frames: shared_frames, unwinder: raw.unwinder.name(), cut }
    }

    fn push(&self, raw: &RawFrame, module_index: &mut dyn FnMut(ModuleId) -> usize, frames: &mut Vec<Frame>) {
        if let Some(frame) = self.runtime_functions.frame(raw) {
            frames.push(frame);
            return;
        }
        let unnamed = Frame {
            module: raw.module.map(module_index),
            address: raw.address,
            file_offset: raw.module.map(|_| raw.file_offset),
            ..Frame::default()
        };
        let is_jit_code = raw.module.is_none_or(|module| self.modules.is_anonymous(module));
        if is_jit_code && let Some(name) = self.perf_map.and_then(|map| map.name(raw.address)) {
            frames.push(Frame { function: Some(name.clone()), ..unnamed });
            return;
        }
        if raw.module.is_none() {
            frames.push(Frame { reason: Some("in no known mapping".into()), ..unnamed });
            return;
        }
        if is_jit_code {
            let reason = self.perf_map_reason.map(|why| format!("code made at run time; {why}"));
            let reason = reason.unwrap_or_else(|| "code made at run time, not in the perf map".into());
            frames.push(Frame { reason: Some(reason.into()), ..unnamed });
            return;
        }
        let symbols = raw.module.map(|module| self.symbolizer.get(module, raw.file_offset)).unwrap_or_default();
        if symbols.is_empty() {
            frames.push(Frame { reason: Some("not symbolized".into()), ..unnamed });
            return;
        }
        frames.extend(symbols.iter().map(|symbol| with_symbol(&unnamed, symbol)));
    }
}

/// Returns a frame with the names that the symbolizer has for its address.
pub(super) fn with_symbol(unnamed: &Frame, symbol: &Frame) -> Frame {
    Frame { module: unnamed.module, address: unnamed.address, file_offset: unnamed.file_offset, ..symbol.clone() }
}

/// Whether a frame belongs to an outermost function.
pub(super) fn is_entry(frame: &Frame) -> bool {
    let name: Option<&Arc<str>> = frame.system_name.as_ref().or(frame.function.as_ref());
    name.is_some_and(|name| ENTRY_FUNCTIONS.contains(&name.split('@').next().unwrap_or_default()))
}
