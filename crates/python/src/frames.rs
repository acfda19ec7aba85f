//! Frames from the kernel side, divided by the invocation of the interpreter's loop that ran them.

use sampler_ebpf::abi::PythonFrame;

use crate::layout::{Boundaries, Layout, OWNED_BY_GENERATOR};

/// A frame of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Address of its code object.
    pub code: u64,
    /// Checksum of that object.
    pub check: u64,
    /// Byte offset of its current instruction; `None` before the first one.
    pub instruction: Option<u32>,
    /// Whether it belongs to a generator or coroutine.
    pub is_generator: bool,
}

impl Frame {
    /// Whether Python's own tools show it. They do not show a frame that is still being created.
    #[must_use]
    pub fn is_shown(&self, layout: &Layout, first_traceable: u32) -> bool {
        layout.code.first_traceable.is_none()
            || self.is_generator
            || self.instruction.is_some_and(|at| at / layout.code.unit.max(1) >= first_traceable)
    }
}

/// The frames that one invocation of the interpreter's loop ran, innermost first.
pub type Invocation = Vec<Frame>;

/// Divides a thread's frames (innermost first) among invocations. `is_whole`: whether these are all frames. If not, the
/// last invocation may be incomplete, and is left out.
#[must_use]
pub fn invocations(layout: &Layout, frames: &[PythonFrame], is_whole: bool) -> Vec<Invocation> {
    let mut done = Vec::new();
    let mut current = Invocation::new();
    let mut is_open = false;
    for raw in frames {
        let is_loop = matches!(layout.boundaries, Boundaries::Owner(first) if raw.owner() >= first);
        is_open = true;
        if !is_loop {
            current.push(frame(layout, raw));
        }
        let ends = match layout.boundaries {
            Boundaries::EachFrame => true,
            Boundaries::Marked => raw.is_entry(),
            Boundaries::Owner(_) => is_loop,
        };
        if ends {
            done.push(std::mem::take(&mut current));
            is_open = false;
        }
    }
    if is_open && is_whole {
        done.push(current);
    }
    done
}

fn frame(layout: &Layout, raw: &PythonFrame) -> Frame {
    let instruction = match layout.code.instructions {
        // An index of -1 means before the first instruction.
        None => (raw.instruction.cast_signed() >= 0).then(|| raw.instruction.saturating_mul(layout.code.unit)),
        Some(first) => raw.instruction.checked_sub(first),
    };
    let is_generator = layout.code.instructions.is_some() && raw.owner() == OWNED_BY_GENERATOR;
    Frame { code: raw.code, check: raw.check, instruction, is_generator }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::Version;

    fn layout(minor: u8) -> Layout {
        Layout::of_version(Version::three(minor)).expect("known")
    }

    fn raw(code: u64, flags: u32) -> PythonFrame {
        PythonFrame { code, flags, instruction: 200, check: 0 }
    }

    fn codes(minor: u8, frames: &[PythonFrame], is_whole: bool) -> Vec<Vec<u64>> {
        let codes = |invocation: &Invocation| invocation.iter().map(|frame| frame.code).collect();
        invocations(&layout(minor), frames, is_whole).iter().map(codes).collect()
    }

    #[test]
    fn each_version_divides_its_frames_its_own_way() {
        let plain = [raw(1, 0), raw(2, 0)];
        assert_eq!(codes(8, &plain, true), [[1], [2]]);
        // 3.11 marks the frames that C code called.
        let marked = [raw(1, 0), raw(2, 0x100), raw(3, 0x100), raw(4, 0x102)];
        assert_eq!(codes(11, &marked, true), [vec![1, 2], vec![3], vec![4]]);
        // 3.12 has a frame of the loop itself after them.
        let between = [raw(1, 0), raw(2, 1), raw(9, 3), raw(3, 0), raw(9, 3)];
        assert_eq!(codes(12, &between, true), [vec![1, 2], vec![3]]);
    }

    #[test]
    fn an_invocation_that_may_lack_frames_is_left_out() {
        let cut = [raw(1, 0), raw(9, 3), raw(2, 0), raw(3, 0)];
        assert_eq!(codes(12, &cut, false), [[1]]);
        assert_eq!(codes(12, &cut, true), [vec![1], vec![2, 3]]);
        assert_eq!(codes(12, &[], true), Vec::<Vec<u64>>::new());
    }

    #[test]
    fn instructions_are_offsets_in_bytes() {
        let of = |minor, instruction| {
            let frames = [PythonFrame { instruction, ..raw(1, 0x100) }];
            invocations(&layout(minor), &frames, true)[0][0].instruction
        };
        assert_eq!([of(9, 12), of(10, 12), of(11, 184 + 12), of(12, 192 + 12)], [12, 24, 12, 12].map(Some));
        assert_eq!([of(9, u32::MAX), of(10, u32::MAX), of(11, 182), of(12, 0)], [None; 4]);
    }

    #[test]
    fn frames_that_are_being_made_are_not_shown() {
        let of = |minor, instruction, flags: u32| {
            let layout = layout(minor);
            let frames = [PythonFrame { instruction, ..raw(1, flags | 0x100) }];
            invocations(&layout, &frames, true)[0][0].is_shown(&layout, 3)
        };
        assert_eq!([of(11, 184 + 4, 0), of(11, 184 + 6, 0), of(11, 182, 1), of(9, 0, 0)], [false, true, true, true]);
    }
}
