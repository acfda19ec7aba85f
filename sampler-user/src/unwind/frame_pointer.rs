//! Stacks from the kernel's own walk along frame pointers.

use super::raw::{Completeness, RawFrame, RawStack, Reason, SpaceView, UnwinderKind};

/// The stack that the kernel's walk found: `addresses` as `bpf_get_stackid` keeps them (innermost first, zero-padded),
/// taken just after the allocator's return to `return_address`. The walk begins at the caller's frame pointer, which
/// says nothing about the caller itself, so the caller is put in front unless the walk has it.
///
/// Such a walk cannot know that it reached the thread's entry; symbolization upgrades it if the last function is one.
pub fn from_kernel(space: &SpaceView, return_address: u64, addresses: &[u64], max_depth: usize) -> RawStack {
    let walked = addresses.iter().copied().take_while(|address| *address != 0);
    let mut walked = walked.peekable();
    // The first entry is the instruction pointer: the return address, or the kernel's trampoline in its place.
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
            // Code that used the register for something else: what follows is noise.
            reason = Reason::UnmappedAddress;
            break;
        }
        frames.push(frame);
    }
    if addresses.len() >= max_depth && addresses.last().is_some_and(|last| *last != 0) {
        reason = Reason::DepthLimit;
    }
    RawStack { frames: frames.into(), unwinder: UnwinderKind::FramePointers, completeness: Completeness::Cut(reason) }
}
