//! Stacks that the kernel has walked by frame pointers, converted. (Our own walk is `walk`.)

use crate::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView, UnwinderKind};

/// Builds the stack from `addresses`, the kernel's walk as `bpf_get_stackid` stores it: innermost first, padded with
/// zeros, taken just after the allocator returned to `return_address`. Keeps at most `max_depth` frames.
///
/// The walk begins at the caller's frame pointer, which does not lead to the caller itself, so `return_address` becomes
/// the first frame. The walk cannot know whether it reached the thread's entry, so the stack is never
/// [`Completeness::Complete`]. Symbolization may find that its last function is a thread's entry.
pub fn from_kernel(space: &SpaceView, return_address: u64, addresses: &[u64], max_depth: usize) -> RawStack {
    let walked = addresses.iter().copied().take_while(|address| *address != 0);
    let mut walked = walked.peekable();
    // The first entry is the instruction pointer: the return address, or the kernel's trampoline instead of it.
    walked.next();
    let returns = std::iter::once(return_address).chain(walked);
    let mut frames: Vec<RawFrame> = Vec::new();
    let mut reason = Reason::FramePointersEnd;
    for address in returns {
        if frames.len() >= max_depth {
            reason = Reason::DepthLimit;
            break;
        }
        let frame = space.frame(address.wrapping_sub(1));
        if frame.module.is_none() && !frames.is_empty() {
            // The code used the register for something else, so the rest is noise.
            reason = Reason::UnmappedAddress;
            break;
        }
        frames.push(frame);
    }
    if addresses.len() >= max_depth && addresses.last().is_some_and(|last| *last != 0) {
        reason = Reason::DepthLimit;
    }
    RawStack {
        frames: frames.into(),
        unwinder: UnwinderKind::FramePointers,
        completeness: Completeness::Truncated(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::{Mapping, ModuleId};
    use sampler_ebpf::abi::ProcessKey;

    fn walk(addresses: &[u64], max_depth: usize) -> RawStack {
        let mapping = Mapping { start: 0x1000, end: 0x2000, file_offset: 0x500, module: ModuleId(3), since_ns: 0 };
        let mappings = vec![mapping];
        let space = SpaceView { key: ProcessKey::default(), generation: None, mappings: &mappings };
        from_kernel(&space, 0x1100, addresses, max_depth)
    }

    fn addresses(stack: &RawStack) -> Vec<u64> {
        stack.frames.iter().map(|frame| frame.address).collect()
    }

    #[test]
    fn the_caller_comes_first_and_once() {
        // The kernel's first entry may be its own trampoline instead of the return address.
        for first in [0x1100, 0x7fff_ffff_e000] {
            let stack = walk(&[first, 0x1200, 0x1300, 0, 0], 127);
            assert_eq!(addresses(&stack), [0x10ff, 0x11ff, 0x12ff]);
            assert_eq!(stack.frames[0].file_offset, 0x5ff);
            assert_eq!(stack.completeness, Completeness::Truncated(Reason::FramePointersEnd));
        }
        assert_eq!(addresses(&walk(&[], 127)), [0x10ff]);
    }

    #[test]
    fn what_is_no_code_ends_the_walk() {
        let stack = walk(&[0x1100, 0x1200, 0xdead_0000, 0x1300], 127);
        assert_eq!(addresses(&stack), [0x10ff, 0x11ff]);
        assert_eq!(stack.completeness, Completeness::Truncated(Reason::UnmappedAddress));
    }

    #[test]
    fn limits_are_said() {
        let stack = walk(&[0x1100, 0x1200, 0x1300, 0x1400], 3);
        assert_eq!(addresses(&stack), [0x10ff, 0x11ff, 0x12ff]);
        assert_eq!(stack.completeness, Completeness::Truncated(Reason::DepthLimit));
        assert_eq!(walk(&[0x1100, 0x1200, 0x1300], 3).completeness, Completeness::Truncated(Reason::DepthLimit));
    }
}
