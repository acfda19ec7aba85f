//! Replaces the interpreter's native frames with Python frames. Pure.

use heapbpf_python::Runtime;
use heapbpf_unwind::mapping::ModuleId;
use heapbpf_unwind::raw::RawFrame;

use super::notes::{MISMATCH, Why};

/// What is merged.
pub struct Parts<'a> {
    /// The native stack, innermost frame first.
    pub native: &'a [RawFrame],
    /// Whether it reaches the thread's entry.
    pub native_is_whole: bool,
    /// The interpreter, and the module that it is in.
    pub runtime: (ModuleId, &'a Runtime),
    /// Python frames by invocation of the interpreter's loop, innermost first.
    pub python: &'a [Vec<RawFrame>],
    /// Whether these are all of them.
    pub python_is_whole: bool,
    /// Whether a module is code that was generated at run time.
    pub is_jit_code: &'a dyn Fn(ModuleId) -> bool,
}

impl Parts<'_> {
    /// The merged stack. Each native frame of the interpreter's loop is replaced by the Python frames that it runs.
    /// What the innermost loop called stays, as do frames of other files wherever they are. The interpreter's own
    /// frames outside its loop, which only lead there, are dropped, unless the interpreter is part of a larger program.
    /// Code generated at run time that calls the loop itself is dropped as well: with `python3 -X perf`, each Python
    /// function has such code, with its name.
    ///
    /// # Errors
    /// [`MISMATCH`]: the number of invocations of the interpreter's loop differs between the native stack and the Python
    /// frames, so one of them is wrong. The native stack must stay as it is.
    pub fn merge(&self) -> Result<Vec<RawFrame>, Why> {
        let (module, runtime) = self.runtime;
        let mut merged = Vec::with_capacity(self.native.len());
        let mut python = self.python.iter();
        let (mut is_inside, mut is_unknown) = (true, false);
        let mut calls_loop = false;
        for frame in self.native {
            let is_trampoline = calls_loop && frame.module.is_none_or(self.is_jit_code);
            calls_loop = false;
            if is_trampoline {
                continue;
            }
            let is_interpreter = frame.module == Some(module);
            if is_interpreter && runtime.is_loop(frame.file_offset) && !is_unknown {
                is_inside = false;
                match python.next() {
                    Some(frames) => {
                        merged.extend_from_slice(frames);
                        calls_loop = true;
                        continue;
                    }
                    None if self.python_is_whole => return Err(MISMATCH),
                    None => is_unknown = true,
                }
            }
            let is_replaced = is_interpreter && runtime.is_alone && !is_inside && !is_unknown;
            if !is_replaced {
                merged.push(*frame);
            }
        }
        if self.native_is_whole && python.next().is_some() {
            return Err(MISMATCH);
        }
        Ok(merged)
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_python::{Layout, Version};
    use heapbpf_symbols::runtime_functions::raw_frame;

    use super::*;

    const INTERPRETER: ModuleId = ModuleId(1);
    const LIBRARY: ModuleId = ModuleId(2);
    const JIT_CODE: ModuleId = ModuleId(3);

    fn runtime(is_alone: bool) -> Runtime {
        let version = Version::three(11);
        let layout = Layout::of_version(version).expect("known");
        Runtime { version, layout, address: 0, loops: vec![100..200, 500..510], is_alone, segments: vec![] }
    }

    /// `L`: the loop; `c`: its cold part; `i`: the rest of the interpreter; `n`: another file; `j`: code generated at
    /// run time; digits: Python's frames.
    fn frames(text: &str) -> Vec<RawFrame> {
        let frame = |letter: char| match letter {
            'L' => RawFrame { address: 150, module: Some(INTERPRETER), file_offset: 150 },
            'c' => RawFrame { address: 505, module: Some(INTERPRETER), file_offset: 505 },
            'i' => RawFrame { address: 300, module: Some(INTERPRETER), file_offset: 300 },
            'n' => RawFrame { address: 150, module: Some(LIBRARY), file_offset: 150 },
            'j' => RawFrame { address: 150, module: Some(JIT_CODE), file_offset: 150 },
            digit => raw_frame(digit.to_digit(10).expect("a digit"), 1),
        };
        text.chars().map(frame).collect()
    }

    fn merge_of(runtime: &Runtime, native: &str, python: &[&str], whole: (bool, bool)) -> Result<Vec<RawFrame>, Why> {
        let (native, python) = (frames(native), python.iter().map(|text| frames(text)).collect::<Vec<_>>());
        let (native_is_whole, python_is_whole) = whole;
        let is_jit_code = |module| module == JIT_CODE;
        let (native, python, runtime) = (native.as_slice(), python.as_slice(), (INTERPRETER, runtime));
        Parts { native, native_is_whole, runtime, python, python_is_whole, is_jit_code: &is_jit_code }.merge()
    }

    fn merge(native: &str, python: &[&str], whole: (bool, bool)) -> Result<Vec<RawFrame>, Why> {
        merge_of(&runtime(true), native, python, whole)
    }

    #[test]
    fn the_loop_becomes_the_frames_that_it_runs() {
        assert_eq!(merge("niiLiin", &["123"], (true, true)), Ok(frames("nii123n")));
        assert_eq!(merge("iLiiLin", &["12", "3"], (true, true)), Ok(frames("i123n")));
        assert_eq!(merge("iciiLin", &["12", "3"], (true, true)), Ok(frames("i123n")));
        // A generator that is only being created has no frame to show.
        assert_eq!(merge("iLiLn", &["", "3"], (true, true)), Ok(frames("i3n")));
    }

    #[test]
    fn frames_of_extensions_stay_in_their_places() {
        assert_eq!(merge("niLinniLn", &["1", "2"], (true, true)), Ok(frames("ni1nn2n")));
    }

    #[test]
    fn stacks_that_do_not_agree_are_told() {
        assert_eq!(merge("iLiLn", &["1"], (true, true)), Err(MISMATCH));
        assert_eq!(merge("iLn", &["1", "2"], (true, true)), Err(MISMATCH));
        assert_eq!(merge("iin", &["1"], (true, true)), Err(MISMATCH));
    }

    #[test]
    fn what_is_missing_on_one_side_is_no_contradiction() {
        assert_eq!(merge("iLi", &["1", "2"], (false, true)), Ok(frames("i1")));
        // Frames beyond the limit: from there on the native ones stay.
        assert_eq!(merge("iLiLiLn", &["1"], (true, false)), Ok(frames("i1LiLn")));
    }

    #[test]
    fn a_program_that_contains_an_interpreter_keeps_its_frames() {
        assert_eq!(merge_of(&runtime(false), "iLiiLin", &["1", "2"], (true, true)), Ok(frames("i1ii2in")));
    }

    #[test]
    fn a_function_that_was_called_through_code_of_its_own_appears_once() {
        assert_eq!(merge("iLjiiLjin", &["1", "2"], (true, true)), Ok(frames("i12n")));
        // Code made by a compiler of Python code stays: it calls no loop.
        assert_eq!(merge("ijniLjijiLn", &["1", "2"], (true, true)), Ok(frames("ijni1j2n")));
        // Frames beyond the limit: from there on the native ones stay, and the generated code says what runs.
        assert_eq!(merge("iLjiLjLn", &["1"], (true, false)), Ok(frames("i1LjLn")));
        assert_eq!(merge_of(&runtime(false), "iLjiiLin", &["1", "2"], (true, true)), Ok(frames("i1ii2in")));
    }
}
