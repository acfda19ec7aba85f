//! The state of each thread: whether it belongs to a target, its draws and its countdown.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use sampler_ebpf::{geometric, rng, sampler};

use crate::config::config;
use crate::counters::{count_no_thread_state, take_number};
use crate::maps::{self, THREADS};
use crate::process::{current_pid_tgid, current_task, process_of, space_of};
use crate::target::{is_target, list_by_rule};
use crate::thread::{IGNORED, TRACKED, ThreadState};

/// The result of a successful trial.
pub struct Success {
    /// Failed trials of this allocation before the successful one.
    pub offset: u64,
    /// Interval of the draw.
    pub interval: u64,
}

impl ThreadState {
    /// The state of the calling thread if it belongs to a target. Counts the hit as lost if the kernel cannot provide
    /// state for it.
    #[inline(always)]
    pub fn of_target() -> Option<&'static mut Self> {
        if let Some(state) = THREADS.current() {
            if state.status == TRACKED || state.admit() {
                return Some(state);
            }
            return None;
        }
        Self::of_new_thread()
    }

    /// Does the same for a thread that has no state yet.
    #[inline(never)]
    fn of_new_thread() -> Option<&'static mut Self> {
        match THREADS.current_or_create() {
            Some(state) => state.admit().then_some(state),
            None => {
                if is_target((current_pid_tgid() >> 32) as u32) {
                    count_no_thread_state();
                }
                None
            }
        }
    }

    /// Decides whether the thread belongs to a target, and if so initializes its state.
    #[inline(never)]
    fn admit(&mut self) -> bool {
        let Some(control) = maps::control() else { return false };
        if self.status == IGNORED && self.generation == control.targets_generation {
            return false;
        }
        let pid_tgid = current_pid_tgid();
        let tgid = (pid_tgid >> 32) as u32;
        if !is_target(tgid) {
            self.status = IGNORED;
            self.generation = control.targets_generation;
            return false;
        }
        list_by_rule(tgid);
        self.tid = pid_tgid as u32;
        let task = current_task();
        self.process = process_of(task);
        self.space = space_of(task, self.process);
        let Some(progress) = maps::progress() else { return false };
        // SAFETY: the pointer is to a counter in the map's value.
        self.ordinal = unsafe { take_number(&raw mut (*progress).threads) } as u32;
        let seed = config!(seed);
        self.random = if seed == 0 {
            // SAFETY: the helper takes no argument and returns an integer.
            let (high, low) = unsafe { (bpf_get_prandom_u32(), bpf_get_prandom_u32()) };
            rng::seed(u64::from(high) << 32 | u64::from(low), 0)
        } else {
            rng::seed(seed, u64::from(self.ordinal))
        };
        self.draw();
        self.status = TRACKED;
        true
    }

    /// Draws the trials until the next success, with the interval now in force.
    #[inline(always)]
    pub fn draw(&mut self) {
        let Some(control) = maps::control() else { return };
        let constants = control.draw;
        self.interval = constants.interval;
        self.remaining = geometric::draw(rng::next(&mut self.random), &constants);
    }

    /// Counts an allocation call and its trials. `Some` means that a trial succeeded: the call is sampled and the next
    /// success is drawn. The call's remaining trials are skipped, and nothing is carried over. The bytes of a sampled
    /// call are counted when it ends.
    #[inline(always)]
    pub fn count_down(&mut self, trials: u64, size: u64) -> Option<Success> {
        let Some(offset) = sampler::step(&mut self.remaining, trials) else {
            self.unsampled += 1;
            self.unsampled_bytes += size;
            return None;
        };
        let success = Success { offset, interval: self.interval };
        self.counters.sampled += 1;
        self.draw();
        Some(success)
    }
}
