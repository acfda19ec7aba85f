//! Resizes the rings to what the recording needs.

use heapbpf_attach::inline::InlineHooks;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::priority::RaisedPriority;
use heapbpf_kernel::KernelError;
use sampler_ebpf::abi::stack_kind;

use super::errors::Step;
use super::state::{KernelMaps, Session};
use crate::ring_sizes::{RingSizes, WAKE_SHARE};

impl KernelMaps {
    /// Size of both rings.
    fn ring_bytes(&self) -> u64 {
        self.events.size_bytes() + self.stacks.size_bytes()
    }

    /// Checks how full the rings are, and replaces those that should have another size. Returns whether it did.
    fn fit_rings(&mut self, now_ns: u64) -> Result<bool, KernelError> {
        let mut replaced = false;
        for (ring, growth) in [(&mut self.events, &mut self.growth.events), (&mut self.stacks, &mut self.growth.stacks)]
        {
            ring.give_back();
            let (before, begun_ns) = (ring.size_bytes(), monotonic_ns());
            if let Some(bytes) = growth.look(before, ring.fill_bytes(), now_ns)
                && ring.resize(bytes)?
            {
                let ms = (monotonic_ns() - begun_ns) as f64 * 1e-6;
                log::debug!("the ring {} has {bytes} bytes instead of {before}, after {ms:.1} ms", ring.name());
                replaced = true;
            }
        }
        Ok(replaced)
    }
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
            let before_bytes = self.kernel.ring_bytes();
            let fitted = self.kernel.fit_rings(now_ns);
            // After an error, one of them may have been replaced.
            if self.errors.note(Step::Rings, fitted, now_ns) != Some(false) {
                self.kernel.growth.replaced = true;
            }
            if self.kernel.ring_bytes() < before_bytes {
                // A burst is over. What its records took is given back, although no process has ended.
                self.housekeeping.forgotten.0 = self.housekeeping.forgotten.0.max(1);
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
        (growth.events.limits, growth.stacks.limits) = (sizes.events, sizes.stacks);
        self.fit_rings(0);
    }
}

/// Time without a ring that fills up, after which the priority is reset.
const CALM_NS: u64 = 2_000_000_000;

/// A raised priority while a ring fills up: long stack copies arrive at hundreds of megabytes a second, and a daemon
/// that waits for a CPU loses them.
#[derive(Default)]
pub(super) struct Hurry {
    priority: Option<RaisedPriority>,
    until_ns: u64,
}

impl Hurry {
    /// Notes the state of the rings at a given moment (CLOCK_MONOTONIC).
    pub(super) fn look(&mut self, is_filling: bool, now_ns: u64) {
        if is_filling {
            self.until_ns = now_ns + CALM_NS;
            // If the priority was raised while another one was held, that one has lowered it again by now.
            if self.priority.as_ref().is_none_or(|priority| !priority.has_raised()) {
                self.priority = Some(RaisedPriority::begin());
            }
        } else if now_ns >= self.until_ns {
            self.priority = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_fills_up_raises_the_priority_for_a_while() {
        let mut hurry = Hurry::default();
        hurry.look(false, 1);
        assert!(hurry.priority.is_none());
        hurry.look(true, 2);
        hurry.look(false, 1 + CALM_NS);
        assert!(hurry.priority.is_some());
        hurry.look(false, 2 + CALM_NS);
        assert!(hurry.priority.is_none());
    }
}
