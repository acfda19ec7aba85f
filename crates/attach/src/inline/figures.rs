//! Converts the counts of a target with inline hooks into counters that complement those of the kernel. Pure.

use heapbpf_inline::read::Counts;
use sampler_ebpf::abi::Counters;

/// The sum of what two allocators of a process counted.
pub fn plus(one: &Counts, other: &Counts) -> Counts {
    Counts { threads: one.threads.max(other.threads), ..one.with(*other, u64::wrapping_add) }
}

/// The counts without those of other processes.
pub fn minus(all: &Counts, of_others: &Counts) -> Counts {
    let Counts { threads, slots_full, set_full, .. } = *all;
    Counts { threads, slots_full, set_full, ..all.with(*of_others, u64::saturating_sub) }
}

/// Sampled calls of a process that are already in the kernel's counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelSampled {
    /// [`Counters::inline_sampled`].
    pub calls: u64,
    /// [`Counters::inline_sampled_bytes`].
    pub bytes: u64,
}

impl KernelSampled {
    /// Those in the counters of a process.
    pub const fn of(counters: &Counters) -> Self {
        Self { calls: counters.inline_sampled, bytes: counters.inline_sampled_bytes }
    }

    /// Adds those of another process in the same memory.
    pub const fn add(&mut self, other: Self) {
        self.calls = self.calls.wrapping_add(other.calls);
        self.bytes = self.bytes.wrapping_add(other.bytes);
    }
}

/// Maximum number of bytes that a successful call can have requested. No address space has more.
const MOST_BYTES: u64 = 1 << 47;

/// Whether a process can have counted this with `cpu_ns` of CPU time, if the kernel has `seen` this many of its sampled
/// calls between the two reads. No call takes less than a nanosecond, and reported calls have arrived, except those
/// that are on the way.
pub fn are_possible([before, now]: &[Counts; 2], cpu_ns: u64, seen: Option<KernelSampled>) -> bool {
    let calls = [now.calls, now.sampled, now.reported, now.failed, now.unsampled_failed, now.frees_matched];
    let most_bytes = now.calls.saturating_mul(MOST_BYTES);
    calls.iter().chain([&now.abandoned, &now.zero_reallocs]).all(|calls| *calls <= cpu_ns)
        && now.bytes <= most_bytes
        && now.sampled_bytes <= most_bytes
        && seen.is_none_or(|seen| may_be_on_the_way(before, seen.calls))
}

/// Returns what to add to the kernel's counters of a process, which include the calls in `seen`. These counters were
/// read after the target's counts were `before`, and before they were `now`. For a process that has left its memory
/// (`has_ended`) there is no later read, so both are the same, and no call is in progress.
///
/// The hits of the sum are the calls that the target has counted, however many the kernel saw. So the accounting
/// identity breaks if sampled calls did not arrive, and more of them than can be on the way.
pub fn difference(before: &Counts, now: &Counts, seen: KernelSampled, has_ended: bool) -> Counters {
    let mut now = *now;
    // If the target has ended since it was last read, at least these calls were made as well.
    let unread = seen.calls.saturating_sub(now.reported);
    for counter in [&mut now.calls, &mut now.sampled, &mut now.reported] {
        *counter = counter.wrapping_add(unread);
    }
    let unread_bytes = seen.bytes.saturating_sub(now.sampled_bytes);
    for counter in [&mut now.bytes, &mut now.sampled_bytes] {
        *counter = counter.wrapping_add(unread_bytes);
    }
    let is_on_the_way = may_be_on_the_way(before, seen.calls);
    let under_way = if is_on_the_way { now.reported.saturating_sub(seen.calls) } else { 0 };
    let open = now.sampled.saturating_sub(now.reported).saturating_sub(now.failed);
    let abandoned = now.abandoned.min(open);
    let in_flight = open.saturating_sub(now.abandoned).saturating_add(under_way);
    let (lost_abandoned, lost_in_flight) =
        if has_ended { (abandoned.saturating_add(in_flight), 0) } else { (abandoned, in_flight) };
    // What did not arrive for an unknown reason must show as a difference between exact and estimated figures.
    let open_bytes = if is_on_the_way { now.sampled_bytes.saturating_sub(seen.bytes) } else { 0 };
    // How much of it belongs to abandoned calls is unknown. If there are any, all of it counts as lost.
    let (in_flight_bytes, lost_call_bytes) = if lost_abandoned == 0 { (open_bytes, 0) } else { (0, open_bytes) };
    Counters {
        calls: now.calls.wrapping_add(now.zero_reallocs).wrapping_sub(seen.calls),
        unsampled: now.calls.saturating_sub(now.sampled),
        unsampled_bytes: now.bytes.wrapping_sub(in_flight_bytes),
        zero_reallocs: now.zero_reallocs,
        sampled: now.sampled.wrapping_sub(seen.calls),
        unsampled_failed: now.unsampled_failed,
        failed: now.failed,
        lost_abandoned,
        lost_in_flight,
        lost_call_bytes,
        counted_inside: now.calls.saturating_sub(seen.calls),
        inline_frees: now.frees_matched,
        ..Counters::default()
    }
}

/// Corrects the counts of a process that samples every call (at an interval of 1 from its first call on). A call that
/// was counted but not sampled, or sampled without its bytes, is between two steps: it was read, or its thread was
/// killed, in the middle. There is at most one per thread. It counts as sampled.
pub fn of_every_call(counts: &Counts) -> Counts {
    let decided = counts.sampled.saturating_add(counts.unsampled_failed);
    let undecided = counts.calls.saturating_sub(decided);
    let ended = counts.reported.saturating_add(counts.failed);
    let open = counts.sampled.saturating_sub(ended).saturating_add(undecided);
    if open == 0 || undecided > counts.threads {
        return *counts;
    }
    Counts { sampled: counts.sampled + undecided, sampled_bytes: counts.bytes.max(counts.sampled_bytes), ..*counts }
}

/// Whether the calls that `counts` report and the kernel has not seen can be between being counted and their site. That
/// holds for at most one call of each thread, which may be off its CPU there for any length of time, or have been
/// killed.
const fn may_be_on_the_way(counts: &Counts, seen: u64) -> bool {
    counts.reported.saturating_sub(seen) <= counts.threads
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Counts = Counts {
        calls: 100,
        bytes: 5000,
        sampled: 20,
        sampled_bytes: 1800,
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

    /// The kernel's counters after it has seen this many sampled calls of 100 bytes each.
    fn kernel(seen: u64) -> Counters {
        Counters {
            calls: seen,
            sampled: seen,
            submitted: seen,
            inline_sampled: seen,
            inline_sampled_bytes: seen * 100,
            ..Counters::default()
        }
    }

    fn addition(before: &Counts, now: &Counts, seen: KernelSampled) -> Counters {
        difference(before, now, seen, false)
    }

    fn at_end(last: &Counts, seen: KernelSampled) -> Counters {
        difference(last, last, seen, true)
    }

    fn sum(before: &Counts, seen: u64) -> Counters {
        let mut sum = addition(before, &NOW, KernelSampled::of(&kernel(seen)));
        sum.add(&kernel(seen));
        sum
    }

    fn accounted(counters: &Counters) -> u64 {
        counters.unsampled + counters.submitted + counters.failed + counters.lost_in_flight + counters.lost_abandoned
    }

    #[test]
    fn hits_are_the_calls_of_the_target_and_each_is_accounted_for() {
        let sum = sum(&NOW, 17);
        assert_eq!((sum.hits(), accounted(&sum)), (100, 100));
        assert_eq!((sum.sampled, sum.lost_in_flight, sum.unsampled_bytes), (20, 1, 4900));
        assert_eq!(sum.counted_inside + sum.inline_sampled, 100, "each reached a probe or did not");
    }

    #[test]
    fn a_call_that_was_left_is_not_in_flight() {
        let left = Counts { abandoned: 1, ..NOW };
        let added = addition(&left, &left, KernelSampled::of(&kernel(17)));
        assert_eq!((added.lost_abandoned, added.lost_in_flight), (1, 0));
        assert_eq!((added.lost_call_bytes, added.unsampled_bytes), (100, 5000));
    }

    /// Exact figures include a call that was cut off; samples do not. So its bytes must be among the losses.
    #[test]
    fn the_bytes_of_calls_count_where_the_calls_do() {
        let of = |added: Counters| (added.unsampled_bytes, added.lost_call_bytes);
        assert_eq!(of(addition(&NOW, &NOW, KernelSampled::of(&kernel(17)))), (4900, 0), "one is in flight");
        assert_eq!(of(addition(&NOW, &NOW, KernelSampled::of(&kernel(16)))), (4800, 0), "one more is at its site");
        assert_eq!(of(at_end(&NOW, KernelSampled::of(&kernel(17)))), (5000, 100));
        assert_eq!(of(at_end(&NOW, KernelSampled::of(&kernel(16)))), (5000, 200));
        assert_eq!(of(at_end(&NOW, KernelSampled::of(&kernel(15)))), (5000, 0), "what is broken stays visible");
        assert_eq!(of(addition(&NOW, &NOW, KernelSampled::of(&kernel(19)))), (5100, 0), "it has ended unread");
    }

    #[test]
    fn a_call_that_was_counted_and_not_yet_sampled_is_no_unsampled_one() {
        let all = Counts { calls: 21, bytes: 1900, ..NOW };
        // 20 are sampled by now: 17 of them have arrived, two failed, one is in the allocator. One failed unsampled,
        // because its size does not fit into memory.
        let every = of_every_call(&Counts { calls: 22, ..all });
        assert_eq!((every.sampled, every.sampled_bytes, every.reported), (21, 1900, 17));
        let added = at_end(&every, KernelSampled::of(&kernel(17)));
        assert_eq!((added.unsampled, added.lost_abandoned, added.lost_call_bytes), (1, 2, 200));
        let decided = Counts { bytes: 1800, ..all };
        assert_eq!(of_every_call(&decided), decided, "all are decided");
        // The last call is sampled, but its bytes are not counted yet.
        let without_bytes =
            Counts { calls: 21, sampled: 21, bytes: 1900, sampled_bytes: 1800, unsampled_failed: 0, ..NOW };
        let added = at_end(&of_every_call(&without_bytes), KernelSampled { calls: 17, bytes: 1700 });
        assert_eq!((added.unsampled, added.lost_abandoned, added.lost_call_bytes), (0, 2, 200));
        let ended = Counts { reported: 18, failed: 3, ..without_bytes };
        assert_eq!(of_every_call(&ended), ended, "no call is open");
        let broken = Counts { calls: 23, ..all };
        assert_eq!(of_every_call(&broken), broken, "more than there are threads");
    }

    #[test]
    fn what_no_process_can_have_counted_is_noticed() {
        let seen = KernelSampled::of(&kernel(17));
        let possible = |now: Counts| are_possible(&[NOW, now], 100, Some(seen));
        assert!(possible(NOW), "a nanosecond for each call");
        assert!(possible(Counts { bytes: 100 << 47, ..NOW }));
        for (what, now) in [
            ("faster than any processor", Counts { calls: 101, ..NOW }),
            ("more frees than time", Counts { frees_matched: 101, ..NOW }),
            ("more bytes than there are addresses", Counts { bytes: (100 << 47) + 1, ..NOW }),
            ("less than nothing", Counts { sampled_bytes: 0_u64.wrapping_sub(1), ..NOW }),
        ] {
            assert!(!possible(now), "{what}");
        }
        assert!(are_possible(&[NOW, NOW], 100, Some(KernelSampled::of(&kernel(16)))), "one thread is at its site");
        assert!(
            !are_possible(&[NOW, NOW], 100, Some(KernelSampled::of(&kernel(15)))),
            "sampled calls that never arrived"
        );
    }

    #[test]
    fn without_what_the_target_says_there_is_what_the_kernel_saw() {
        let nothing = Counts::default();
        for added in [
            addition(&nothing, &nothing, KernelSampled::of(&kernel(17))),
            at_end(&nothing, KernelSampled::of(&kernel(17))),
        ] {
            let mut sum = kernel(17);
            sum.add(&added);
            assert_eq!((sum.hits(), accounted(&sum), sum.sampled, sum.unsampled_bytes), (17, 17, 17, 1700));
        }
    }

    #[test]
    fn sampled_calls_that_have_not_arrived_are_under_way_or_break_the_identity() {
        let of = |before: &Counts, seen| {
            let sum = sum(before, seen);
            (sum.hits(), accounted(&sum), sum.lost_in_flight)
        };
        assert_eq!(of(&NOW, 16), (100, 100, 2), "a thread waits at its site");
        assert_eq!(of(&Counts { reported: 10, ..NOW }, 15), (100, 100, 3), "they were made while the kernel was read");
        let (hits, accounted, _) = of(&NOW, 15);
        assert_eq!((hits, accounted), (100, 98), "one thread is late for two calls");
        let (hits, accounted, _) = of(&NOW, 27);
        assert_eq!((hits, accounted), (110, 110), "the target has ended");
    }

    #[test]
    fn what_the_end_cut_off_is_abandoned_and_more_breaks_the_identity() {
        let accounted = |seen: u64| {
            let mut sum = at_end(&NOW, KernelSampled::of(&kernel(seen)));
            sum.add(&kernel(seen));
            (sum.hits(), accounted(&sum), sum.lost_abandoned)
        };
        assert_eq!(accounted(17), (100, 100, 1), "a call that never returned");
        assert_eq!(accounted(16), (100, 100, 2), "one of the only thread");
        assert_eq!(accounted(15), (100, 98, 1), "more than it can be");
    }
}
