//! How hooked processes sample: their control pages, which have the same content except for the seed, and the size of
//! their sets of sampled blocks. Pure.

use std::mem::offset_of;

use heapbpf_inline::abi::{Control, DRAWS, ENTRY_BYTES, MAGIC, MAX_SET_LOG2, VERSION};
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::geometric::DrawConstants;
use sampler_ebpf::rng;
use zerocopy::{FromZeros as _, IntoBytes as _};

use super::waits::FIRST_SITES;

/// While nothing is sampled, threads draw with an interval of at least this many trials, because a draw takes about ten
/// times as long as a call.
const LEAST_PAUSED_INTERVAL: u64 = 1 << 16;

/// Ordinal of the first allocator among all that draw with one seed. Threads whose calls probes count have lower ones.
const FIRST_ALLOCATOR: u64 = 1 << 32;

/// What hooked processes are told about sampling.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlPage {
    /// The current page.
    pub(super) page: Control,
}

/// Bytes to write to a control page, in this order, as offset and content. The index of the constants comes last.
pub(super) type Changes = Vec<(u64, Vec<u8>)>;

impl ControlPage {
    /// Samples with these constants from the first call on, or nothing if their interval is 0. `most_pauses` is the
    /// number of pauses after which a wait ends. `None` means that nothing waits.
    pub(super) fn new(draw: DrawConstants, seed: u64, most_pauses: Option<u64>) -> Self {
        let mut draws = [DrawConstants::default(); DRAWS];
        let paused = u64::from(draw.interval == 0);
        draws[0] = if paused == 0 { draw } else { Self::while_paused(draw).unwrap_or(draw) };
        let granted = if most_pauses.is_some() { FIRST_SITES } else { 0 };
        let page = Control {
            magic: MAGIC,
            version: u64::from(VERSION),
            seed,
            paused,
            draws,
            granted,
            most_pauses: most_pauses.unwrap_or(0),
            pauses_end: most_pauses.unwrap_or(0),
            ..Control::new_zeroed()
        };
        Self { page }
    }

    /// The constants that threads draw with during a pause, if `draw` was used before it. `None` if `draw` itself stays
    /// in use.
    fn while_paused(draw: DrawConstants) -> Option<DrawConstants> {
        if draw.interval < LEAST_PAUSED_INTERVAL { draw_constants(LEAST_PAUSED_INTERVAL) } else { None }
    }

    /// The page for the allocator with this number. Each allocator of each process draws numbers of its own, even if
    /// the seed is given, and none that probes draw.
    pub(super) fn of_number(&self, number: u64) -> Control {
        let seed = match self.page.seed {
            0 => 0,
            seed => rng::seed(seed, FIRST_ALLOCATOR.wrapping_add(number)),
        };
        Control { seed, ..self.page }
    }

    /// What to write to a page that nobody reads yet and that was made from an earlier state of this one.
    pub(super) fn changes_since(&self, then: &Control) -> Changes {
        let Control { draw, paused, draws, .. } = self.page;
        if (draw, paused, draws) == (then.draw, then.paused, then.draws) {
            return Changes::new();
        }
        vec![
            (offset_of!(Control, draws) as u64, draws.as_bytes().to_vec()),
            (offset_of!(Control, draw) as u64, draw.to_ne_bytes().to_vec()),
            (offset_of!(Control, paused) as u64, paused.to_ne_bytes().to_vec()),
        ]
    }

    fn in_use(&self) -> DrawConstants {
        self.page.draws[self.page.draw as usize % DRAWS]
    }

    /// Makes threads use these constants from their next draw on. With an interval of 0, nothing is sampled from now
    /// on. Threads keep counting down, and what they have drawn is still valid when sampling resumes, because each
    /// trial is independent of all others. A thread may be reading the constants in use, or be held up in the middle of
    /// reading earlier ones. So an element is not written again until all others have been used.
    pub(super) fn set(&mut self, draw: DrawConstants) -> Changes {
        let paused = u64::from(draw.interval == 0);
        let is_paused = (offset_of!(Control, paused) as u64, paused.to_ne_bytes().to_vec());
        self.page.paused = paused;
        let draw = match paused {
            0 => Some(draw),
            _ => Self::while_paused(self.in_use()),
        };
        let Some(draw) = draw else { return vec![is_paused] };
        let index = (self.page.draw as usize + 1) % DRAWS;
        self.page.draws[index] = draw;
        self.page.draw = index as u64;
        let at = offset_of!(Control, draws) + index * size_of::<DrawConstants>();
        vec![
            (at as u64, draw.as_bytes().to_vec()),
            (offset_of!(Control, draw) as u64, self.page.draw.to_ne_bytes().to_vec()),
            is_paused,
        ]
    }
}

/// The set of sampled blocks has at least 2^16 entries. A page of the set becomes memory when a block is first noted in
/// it.
pub(super) const LEAST_SET_LOG2: u32 = 16;
/// The set is large enough for a process that grows to this size.
const GROWN_BYTES: u64 = 256 << 20;
/// Or to this many times the size that it has when it is hooked.
const GROWTH: u64 = 4;
/// Minimum size of a block in bytes.
const LEAST_BLOCK_BYTES: u64 = 32;

/// How hooked processes sample.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Constants of the draw.
    pub draw: DrawConstants,
    /// Seed of the draws; 0 for unpredictable ones.
    pub seed: u64,
    /// What a trial is: bytes or allocations.
    pub criterion: u32,
    /// Maximum number of sampled blocks that are tracked, over all processes.
    pub live_max: u32,
    /// Whether processes wait when samples come faster than they are taken in, so that none is lost.
    pub lossless: bool,
}

/// What kept the set of sampled blocks in a process from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SetBound {
    /// It was made for this many blocks: as many as the process has at this interval when it has grown.
    Size(u64),
    /// `--live-max`.
    LiveMax(u32),
    /// A limit of the process on this.
    Limit(&'static str),
    /// No set is larger.
    Largest,
}

impl Sampling {
    /// Size of the set for the sampled blocks of a process with this much anonymous memory: it has 2^n entries. Half as
    /// many blocks always find a free entry. `most`: what the process has a limit on, and the maximum size of the set
    /// because of that, in bytes. The smallest set may be larger. Returns n and what decided it.
    pub(super) fn set(&self, anonymous_bytes: u64, most: Option<(&'static str, u64)>) -> (u32, SetBound) {
        let grown = anonymous_bytes.saturating_mul(GROWTH).max(GROWN_BYTES);
        let of_process = grown / self.draw.interval.max(LEAST_BLOCK_BYTES);
        let live_max = u64::from(self.live_max);
        let needed = (2 * of_process.min(live_max)).next_power_of_two().ilog2().max(LEAST_SET_LOG2);
        let most_log2 = most.map_or(MAX_SET_LOG2, |(_, bytes)| (bytes / ENTRY_BYTES).max(1).ilog2());
        let log2 = needed.min(most_log2).clamp(LEAST_SET_LOG2, MAX_SET_LOG2);
        let bound = match most {
            Some((name, _)) if log2 < needed && most_log2 < MAX_SET_LOG2 => SetBound::Limit(name),
            _ if log2 < needed => SetBound::Largest,
            _ if live_max <= of_process => SetBound::LiveMax(self.live_max),
            _ => SetBound::Size(1 << (log2 - 1)),
        };
        (log2, bound)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn draw(interval: u64) -> DrawConstants {
        DrawConstants { interval, ..DrawConstants::default() }
    }

    #[test]
    fn changes_make_a_page_that_says_the_same_and_spare_the_constants_in_use() {
        let mut control = ControlPage::new(draw(7), 1, None);
        let mut target = control.page.as_bytes().to_vec();
        for interval in 8..200 {
            let in_use = heapbpf_inline::read::control(&target).expect("a control page").draw as usize;
            let before = control.in_use().interval;
            for (at, bytes) in control.set(draw(interval)) {
                let now = heapbpf_inline::read::control(&target).expect("a control page");
                assert_eq!(now.draws[in_use].interval, before, "nobody reads what is half written");
                target[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            assert_eq!(heapbpf_inline::read::control(&target), Ok(control.page));
            assert_eq!(control.in_use().interval, interval);
        }
    }

    #[test]
    fn a_page_that_was_made_earlier_is_brought_up_to_date() {
        for set in [vec![], vec![8], vec![8, 0], vec![8, 0, 9, 10]] {
            let mut control = ControlPage::new(draw(7), 1, Some(5));
            let then = Control { granted: 0, ..control.page };
            set.iter().for_each(|interval| drop(control.set(draw(*interval))));
            let mut target = then.as_bytes().to_vec();
            let changes = control.changes_since(&then);
            assert_eq!(changes.is_empty(), set.is_empty());
            for (at, bytes) in changes {
                target[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            let expected = Control { granted: 0, ..control.page };
            assert_eq!(heapbpf_inline::read::control(&target), Ok(expected), "{set:?}");
        }
    }

    #[test]
    fn processes_draw_different_numbers_and_none_of_the_threads_that_probes_count() {
        let given = ControlPage::new(draw(7), 42, None);
        let seeds: HashSet<u64> = (0..1000).map(|number| given.of_number(number).seed).collect();
        assert!(seeds.len() == 1000 && !seeds.contains(&0) && !seeds.contains(&42));
        let first = |seed: u64| (0..100).map(move |thread| rng::seed(seed, thread));
        let probed: HashSet<u64> = first(42).collect();
        assert!(seeds.iter().all(|seed| first(*seed).all(|state| !probed.contains(&state))));
        assert_eq!(ControlPage::new(draw(7), 0, None).of_number(5).seed, 0, "the machine draws it");
    }

    #[test]
    fn a_pause_keeps_what_threads_have_drawn_and_makes_no_draw_frequent() {
        for (before, meanwhile) in [(0, LEAST_PAUSED_INTERVAL), (1, LEAST_PAUSED_INTERVAL), (1 << 19, 1 << 19)] {
            let mut control = ControlPage::new(draw(before), 1, None);
            let at_first = if before == 0 { LEAST_PAUSED_INTERVAL } else { before };
            assert_eq!((control.page.paused, control.in_use().interval), (u64::from(before == 0), at_first));
            let mut target = control.page.as_bytes().to_vec();
            let mut follow = |control: &mut ControlPage, interval| {
                for (at, bytes) in control.set(draw(interval)) {
                    target[at as usize..][..bytes.len()].copy_from_slice(&bytes);
                }
                let page = heapbpf_inline::read::control(&target).expect("a control page");
                assert_eq!(page, control.page);
                (page.paused, page.draws[page.draw as usize].interval)
            };
            assert_eq!(follow(&mut control, 0), (1, meanwhile), "{before}");
            assert_eq!(follow(&mut control, 0), (1, meanwhile), "{before}: twice");
            assert_eq!(follow(&mut control, 7), (0, 7));
        }
    }
}

#[cfg(test)]
mod sampling_tests {
    use super::*;

    #[test]
    fn there_is_space_for_the_blocks_of_a_heap_that_grows() {
        let log2 = |interval, live_max, anonymous_bytes| {
            let draw = DrawConstants { interval, ..DrawConstants::default() };
            Sampling { draw, seed: 0, criterion: 0, live_max, lossless: false }.set(anonymous_bytes, None).0
        };
        let most = 1 << 20;
        assert_eq!([512 << 10, 8 << 10, 4 << 10].map(|interval| log2(interval, most, 10 << 20)), [16, 16, 17]);
        assert_eq!([256, 1, 0].map(|interval| log2(interval, most, 10 << 20)), [21, 21, 21], "--live-max bounds it");
        assert_eq!(log2(512 << 10, most, 64 << 30), 20, "a large process, 256 GiB of blocks");
        assert_eq!(log2(1, 100, 0), 16);
        assert_eq!(log2(1, u32::MAX, u64::MAX), MAX_SET_LOG2);
    }

    #[test]
    fn what_decided_the_size_of_a_set_is_known() {
        let set = |interval, live_max, most_bytes: Option<u64>| {
            let draw = DrawConstants { interval, ..DrawConstants::default() };
            let sampling = Sampling { draw, seed: 0, criterion: 0, live_max, lossless: false };
            sampling.set(10 << 20, most_bytes.map(|bytes| ("bytes", bytes)))
        };
        assert_eq!(set(4 << 10, 1 << 20, None), (17, SetBound::Size(65_536)));
        assert_eq!(set(512 << 10, 1 << 20, Some(1)), (16, SetBound::Size(32_768)), "the smallest is large enough");
        assert_eq!(set(1, 1 << 20, None), (21, SetBound::LiveMax(1 << 20)));
        assert_eq!(set(1, 1 << 20, Some(ENTRY_BYTES << 18)), (18, SetBound::Limit("bytes")));
        assert_eq!(set(1, 1 << 20, Some(0)), (16, SetBound::Limit("bytes")));
        let draw = DrawConstants { interval: 1, ..DrawConstants::default() };
        let most = Sampling { draw, seed: 0, criterion: 0, live_max: u32::MAX, lossless: false };
        assert_eq!(most.set(64 << 30, Some(("bytes", u64::MAX))), (MAX_SET_LOG2, SetBound::Largest));
    }
}
