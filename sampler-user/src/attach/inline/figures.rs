//! What a target with inline hooks counts itself, as counters beside those of the kernel. Pure.

use heapbpf_inline::abi::{SLOTS, SLOTS_OFFSET, STATE, Slot, Totals};
use heapbpf_inline::read::Counts;
use sampler_ebpf::abi::Counters;
use zerocopy::FromBytes as _;

/// What two allocators of a process counted together.
pub fn plus(one: &Counts, other: &Counts) -> Counts {
    Counts {
        calls: one.calls.wrapping_add(other.calls),
        bytes: one.bytes.wrapping_add(other.bytes),
        sampled: one.sampled.wrapping_add(other.sampled),
        reported: one.reported.wrapping_add(other.reported),
        failed: one.failed.wrapping_add(other.failed),
        abandoned: one.abandoned.wrapping_add(other.abandoned),
        unsampled_failed: one.unsampled_failed.wrapping_add(other.unsampled_failed),
        frees_matched: one.frees_matched.wrapping_add(other.frees_matched),
        zero_reallocs: one.zero_reallocs.wrapping_add(other.zero_reallocs),
        threads: one.threads.max(other.threads),
        slots_full: one.slots_full.wrapping_add(other.slots_full),
        set_full: one.set_full.wrapping_add(other.set_full),
    }
}

/// What is to be added to the kernel's counters of a process. `seen`: the sampled calls that are in these already
/// ([`Counters::inline_sampled`]), read after the target's counts were `before` and before they were `now`.
///
/// The sum's hits are the calls that the target has counted, however many the kernel saw. So the accounting identity breaks
/// if sampled calls did not arrive, and more of them than can be on the way.
pub fn addition(before: &Counts, now: &Counts, seen: u64) -> Counters {
    let mut now = *now;
    // The target has ended since it was last read: at least these calls were made, too.
    let unread = seen.saturating_sub(now.reported);
    for counter in [&mut now.calls, &mut now.sampled, &mut now.reported] {
        *counter = counter.wrapping_add(unread);
    }
    let under_way = if may_be_on_the_way(before, seen) { now.reported.saturating_sub(seen) } else { 0 };
    let open = now.sampled.saturating_sub(now.reported).saturating_sub(now.failed);
    Counters {
        calls: now.calls.wrapping_add(now.zero_reallocs).wrapping_sub(seen),
        unsampled: now.calls.saturating_sub(now.sampled),
        unsampled_bytes: now.bytes,
        zero_reallocs: now.zero_reallocs,
        sampled: now.sampled.wrapping_sub(seen),
        unsampled_failed: now.unsampled_failed,
        failed: now.failed,
        lost_abandoned: now.abandoned.min(open),
        lost_in_flight: open.saturating_sub(now.abandoned).saturating_add(under_way),
        counted_inside: now.calls.saturating_sub(seen),
        inline_frees: now.frees_matched,
        ..Counters::default()
    }
}

/// Whether what `counts` report and the kernel has not seen can be between counting a call and its site: at most one call of
/// each thread, which may be off its CPU there for as long as it takes, or have been killed.
const fn may_be_on_the_way(counts: &Counts, seen: u64) -> bool {
    counts.reported.saturating_sub(seen) <= counts.threads
}

/// The same for a process that has left its memory: there is no later read.
pub fn at_end(last: &Counts, seen: u64) -> Counters {
    let mut added = addition(last, last, seen);
    added.lost_abandoned = added.lost_abandoned.saturating_add(added.lost_in_flight);
    added.lost_in_flight = 0;
    added
}

/// Offsets, from the blob's base, of the slots of threads that sample nothing yet and count down from afar.
pub fn not_sampling(state: &[u8]) -> Vec<u64> {
    let first = SLOTS_OFFSET - STATE;
    let slot_bytes = size_of::<Slot>();
    let slots = (0..SLOTS as u64).map(|index| first + index * slot_bytes as u64);
    slots
        .chain([std::mem::offset_of!(Totals, shared) as u64])
        .filter(|at| {
            let bytes = state.get(*at as usize..).and_then(|bytes| bytes.get(..slot_bytes));
            let slot = bytes.and_then(|bytes| Slot::read_from_bytes(bytes).ok());
            slot.is_some_and(|slot| slot.interval == 0 && slot.calls != 0 && slot.countdown.cast_signed() > 0)
        })
        .map(|at| STATE + at)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes as _;

    const NOW: Counts = Counts {
        calls: 100,
        bytes: 5000,
        sampled: 20,
        reported: 17,
        failed: 2,
        abandoned: 0,
        unsampled_failed: 1,
        frees_matched: 0,
        zero_reallocs: 3,
        threads: 1,
        slots_full: 0,
        set_full: 0,
    };

    fn sum(before: &Counts, seen: u64) -> Counters {
        let kernel =
            Counters { calls: seen, sampled: seen, submitted: seen, inline_sampled: seen, ..Counters::default() };
        let mut sum = addition(before, &NOW, seen);
        sum.add(&kernel);
        sum
    }

    fn accounted(counters: &Counters) -> u64 {
        counters.unsampled + counters.submitted + counters.failed + counters.lost_in_flight + counters.lost_abandoned
    }

    #[test]
    fn hits_are_the_calls_of_the_target_and_each_is_accounted_for() {
        let sum = sum(&NOW, 17);
        assert_eq!((sum.hits(), accounted(&sum)), (100, 100));
        assert_eq!((sum.sampled, sum.lost_in_flight, sum.unsampled_bytes), (20, 1, 5000));
        assert_eq!(sum.counted_inside + sum.inline_sampled, 100, "each reached a probe or did not");
    }

    #[test]
    fn a_call_that_was_left_is_not_in_flight() {
        let left = Counts { abandoned: 1, ..NOW };
        let added = addition(&left, &left, 17);
        assert_eq!((added.lost_abandoned, added.lost_in_flight), (1, 0));
    }

    #[test]
    fn a_sampled_call_that_did_not_arrive_breaks_the_identity() {
        let sum = sum(&NOW, 15);
        assert_eq!((sum.hits(), accounted(&sum)), (100, 98), "one thread is late for two calls");
    }

    #[test]
    fn a_thread_that_waits_at_its_site_is_under_way() {
        let sum = sum(&NOW, 16);
        assert_eq!((sum.hits(), accounted(&sum), sum.lost_in_flight), (100, 100, 2));
    }

    #[test]
    fn calls_made_while_the_kernel_was_read_are_under_way() {
        let sum = sum(&Counts { reported: 10, ..NOW }, 15);
        assert_eq!((sum.hits(), accounted(&sum), sum.lost_in_flight), (100, 100, 3));
    }

    #[test]
    fn of_an_ended_target_the_calls_that_the_kernel_saw_count() {
        let sum = sum(&NOW, 27);
        assert_eq!((sum.hits(), accounted(&sum)), (110, 110));
    }

    #[test]
    fn what_the_end_cut_off_is_abandoned_and_more_breaks_the_identity() {
        let accounted = |seen: u64| {
            let kernel =
                Counters { calls: seen, sampled: seen, submitted: seen, inline_sampled: seen, ..Counters::default() };
            let mut sum = at_end(&NOW, seen);
            sum.add(&kernel);
            (sum.hits(), accounted(&sum), sum.lost_abandoned)
        };
        assert_eq!(accounted(17), (100, 100, 1), "a call that never returned");
        assert_eq!(accounted(16), (100, 100, 2), "one of the only thread");
        assert_eq!(accounted(15), (100, 98, 1), "more than it can be");
    }

    #[test]
    fn threads_that_began_before_sampling_did_are_found() {
        let mut state = vec![0; heapbpf_inline::read::COUNTS_BYTES];
        let mut put = |index: usize, slot: Slot| {
            let at = (SLOTS_OFFSET - STATE) as usize + index * size_of::<Slot>();
            state[at..][..size_of::<Slot>()].copy_from_slice(slot.as_bytes());
            (STATE as usize + at) as u64
        };
        let far = Slot { key: 1, calls: 9, countdown: 1 << 29, ..Slot::default() };
        let expected = put(3, far);
        put(4, Slot { interval: 512, ..far });
        put(5, Slot { countdown: 0, discard: 1, ..far });
        assert_eq!(not_sampling(&state), [expected]);
        assert!(not_sampling(&state[..100]).is_empty());
    }
}
