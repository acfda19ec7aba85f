//! Resizes the rings to what the recording needs.

use heapbpf_attach::inline::InlineHooks;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::rings::Ring;
use sampler_ebpf::abi::stack_kind;

use super::errors::Step;
use super::state::{KernelMaps, Session};
use crate::ring_sizes::{RingSizes, WAKE_SHARE};

impl KernelMaps {
    /// Checks how full the rings are, and replaces those that should have another size. Returns whether it did.
    fn fit_rings(&mut self, now_ns: u64) -> Result<bool, KernelError> {
        let mut replaced = false;
        for (ring, growth) in [(&mut self.events, &mut self.growth.events), (&mut self.stacks, &mut self.growth.stacks)]
        {
            ring.give_back();
            if let Some(bytes) = growth.look(ring.size_bytes(), ring.fill_bytes(), now_ns) {
                replaced |= resize(ring, bytes)?;
            }
        }
        Ok(replaced)
    }
}

fn resize(ring: &mut Ring, bytes: u64) -> Result<bool, KernelError> {
    let before = ring.size_bytes();
    let begun_ns = monotonic_ns();
    let done = ring.resize(bytes)?;
    if done {
        let ms = (monotonic_ns() - begun_ns) as f64 * 1e-6;
        log::debug!("the ring {} has {bytes} bytes instead of {before}, after {ms:.1} ms", ring.name());
    }
    Ok(done)
}

impl Session {
    /// Replaces rings that should have another size. `longest_copy_bytes`: the longest stack copy since the last call.
    pub(super) fn fit_rings(&mut self, longest_copy_bytes: u64) {
        self.kernel.growth.stacks.note_copy(longest_copy_bytes);
        let now_ns = monotonic_ns();
        // Done whether or not rings can be replaced: a raised priority must not stay raised.
        let (stacks, is_fixed) = (&self.kernel.stacks, self.plan.kernel.rings.are_fixed());
        let is_filling = !is_fixed && stacks.fill_bytes() >= stacks.size_bytes() / WAKE_SHARE;
        let is_awaited = self.attaching.inline.as_ref().is_some_and(InlineHooks::may_wait);
        self.hurry.look(is_filling || is_awaited, now_ns);
        if self.may_try(Step::Rings) {
            let fitted = self.kernel.fit_rings(now_ns);
            // After an error, one of them may have been replaced.
            if self.errors.note(Step::Rings, fitted, now_ns) != Some(false) {
                self.kernel.growth.replaced = true;
            }
        }
    }

    /// Makes the rings large enough for what this interval samples, before it is set.
    pub(super) fn make_space_for(&mut self, interval: u64) {
        let (plan, growth) = (&self.plan, &mut self.kernel.growth);
        if plan.kernel.rings.are_fixed() {
            return;
        }
        let copies = plan.kernel.config.stack_kind == stack_kind::COPIED;
        let sizes = RingSizes::of_interval(interval, plan.sampling.criterion, copies);
        growth.events.set_limits(sizes.events);
        growth.stacks.set_limits(sizes.stacks);
        self.fit_rings(0);
    }
}
