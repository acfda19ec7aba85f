//! Which threads belong to a target, and the state that they get.

use aya_ebpf::helpers::generated::bpf_get_prandom_u32;
use sampler_ebpf::abi::fault;
use sampler_ebpf::rng;

use crate::config::config;
use crate::counters::take_number;
use crate::maps::{self, THREADS};
use crate::process::{current_pid_tgid, current_task, process_of, space_of};
use crate::target::{kind_of, list_by_rule};
use crate::thread::{ANNOUNCED, IGNORED, ThreadState};

/// Not a kind of link: a call counts whichever links serve its process.
const ANY_LINK: u32 = 0;

/// Whether a thread has already got state.
#[inline(always)]
fn is_not_first() -> bool {
    // SAFETY: the pointer is to a counter in the map's value.
    maps::progress().is_some_and(|progress| unsafe { (*progress).threads != 0 })
}

impl ThreadState {
    /// Returns the state of the calling thread if it belongs to a target whose calls count at this kind of link, one of
    /// [`link_kind`](sampler_ebpf::abi::link_kind). An instruction may have links of both kinds, and a call must count
    /// once. If the kernel cannot provide state for a target's thread, calls `without_state` to count the loss.
    #[inline(always)]
    pub fn of_target(link: u32, without_state: impl FnOnce()) -> Option<&'static mut Self> {
        if let Some(state) = THREADS.current() {
            if state.status == link || state.admit() && state.status == link {
                return Some(state);
            }
            return None;
        }
        Self::of_new_thread(link, without_state)
    }

    /// Returns the state of the calling thread if it belongs to a target, whichever links serve it.
    #[inline(always)]
    pub fn of_any_target(without_state: impl FnOnce()) -> Option<&'static mut Self> {
        if let Some(state) = THREADS.current() {
            return (state.is_tracked() || state.admit()).then_some(state);
        }
        Self::of_new_thread(ANY_LINK, without_state)
    }

    /// Returns the state of the calling thread if it belongs to a target whose announcements count at this kind of
    /// link. A process may be listed as announcing after its threads were admitted.
    #[inline(always)]
    pub fn of_announcing_target(link: u32, without_state: impl FnOnce()) -> Option<&'static mut Self> {
        if link != ANNOUNCED {
            return Self::of_target(link, without_state);
        }
        if kind_of((current_pid_tgid() >> 32) as u32) != Some(ANNOUNCED) {
            return None;
        }
        let state = Self::of_any_target(without_state)?;
        state.status = ANNOUNCED;
        Some(state)
    }

    /// Same as the functions above, for a thread that has no state yet.
    #[inline(never)]
    fn of_new_thread(link: u32, without_state: impl FnOnce()) -> Option<&'static mut Self> {
        let state = if config!(faults) & fault::NO_THREAD_STATE != 0 && is_not_first() {
            None
        } else {
            THREADS.current_or_create()
        };
        match state {
            Some(state) => (state.admit() && (link == ANY_LINK || state.status == link)).then_some(state),
            None => {
                let kind = kind_of((current_pid_tgid() >> 32) as u32);
                if kind.is_some_and(|kind| link == ANY_LINK || kind == link) {
                    without_state();
                }
                None
            }
        }
    }

    /// Decides whether the thread belongs to a target and which links serve it, and initializes its state if so.
    #[inline(never)]
    fn admit(&mut self) -> bool {
        if self.is_tracked() {
            // The other kind of link counts this call.
            return true;
        }
        let Some(control) = maps::control() else { return false };
        if self.status == IGNORED && self.generation == control.targets_generation {
            return false;
        }
        let pid_tgid = current_pid_tgid();
        let tgid = (pid_tgid >> 32) as u32;
        let Some(kind) = kind_of(tgid) else {
            self.status = IGNORED;
            self.generation = control.targets_generation;
            return false;
        };
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
        self.status = kind;
        true
    }
}
