//! What the kernel keeps of each thread: the countdown, exact totals, calls in progress.

use aya_ebpf::helpers::generated::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_pid_tgid, bpf_get_current_task_btf, bpf_get_prandom_u32,
};
use sampler_ebpf::abi::{Counters, KernelOffsets, ProcessKey, target_rule};
use sampler_ebpf::{geometric, glob, rng, sampler};

use crate::config::config;
use crate::maps::{self, TARGETS, THREADS, read_kernel};
use crate::pending::{Pending, SLOTS};

/// Not looked at yet.
pub const NEW: u32 = 0;
/// Belongs to a target.
pub const TRACKED: u32 = 1;
/// Does not.
pub const IGNORED: u32 = 2;

/// State of one thread. The first 56 bytes are all that an unsampled call or a free of an untracked block touches; the
/// kernel puts a task's value 8 bytes after the beginning of a cache line, so they lie in one.
#[repr(C)]
pub struct ThreadState {
    /// Trials until the next success, at least 1.
    pub remaining: u64,
    /// Unsampled calls.
    pub unsampled: u64,
    /// Bytes they asked for.
    pub unsampled_bytes: u64,
    /// Frees.
    pub frees_seen: u64,
    /// Stack pointer of a call that may end in a jump to another hooked function, or 0.
    pub tail_sp: u64,
    /// Stack pointer of the last outermost call that may call a hooked function inside, or 0: it has returned.
    pub outer_sp: u64,
    /// [`NEW`], [`TRACKED`] or [`IGNORED`].
    pub status: u32,
    /// Bit i: `slots[i]` holds a call in progress.
    pub pending: u32,

    /// Whose address space the thread runs in.
    pub space: ProcessKey,
    /// Return address of the call that may end in a jump.
    pub tail_return: u64,
    /// Its size.
    pub tail_size: u64,
    /// Index of its site.
    pub tail_site: u32,
    /// Index of the site of the call that `outer_sp` is of.
    pub outer_site: u32,
    /// Zero.
    pub reserved_too: u32,
    /// Slot that is evicted next when all are in use.
    pub next_victim: u32,
    /// Generation of the target set when the thread was refused.
    pub generation: u64,
    /// State of the random numbers.
    pub random: u64,
    /// Interval that `remaining` was drawn with; 0 when nothing is sampled.
    pub interval: u64,
    /// Process of the thread.
    pub process: ProcessKey,
    /// The thread's ordinal in this recording, in the upper half of its sample ids.
    pub ordinal: u32,
    /// Samples so far, in the lower half.
    pub sequence: u32,
    /// Thread id.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
    /// Counters of everything but the unsampled path.
    pub counters: Counters,
    /// Calls in progress whose return is awaited.
    pub slots: [Pending; SLOTS],
    /// CLOCK_MONOTONIC at the entry of the system call in progress that maps or unmaps.
    pub mapping_ns: u64,
    /// End of the heap of `brk` at that time.
    pub mapping_brk: u64,
}

/// A sample's place in the sequence of trials.
pub struct Success {
    /// Failed trials of this allocation before the successful one.
    pub offset: u64,
    /// Interval of the draw.
    pub interval: u64,
}

impl ThreadState {
    /// The calling thread's state if it belongs to a target. Counts the hit as lost if the kernel has no state for it.
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

    /// The same for a thread that has no state yet.
    #[inline(never)]
    fn of_new_thread() -> Option<&'static mut Self> {
        match THREADS.current_or_create() {
            Some(state) => state.admit().then_some(state),
            None => {
                if is_target((unsafe_pid_tgid() >> 32) as u32) {
                    maps::count_no_thread_state();
                }
                None
            }
        }
    }

    /// Decides whether the thread belongs to a target, and if so makes it ready.
    #[inline(never)]
    fn admit(&mut self) -> bool {
        let Some(control) = maps::control() else { return false };
        if self.status == IGNORED && self.generation == control.targets_generation {
            return false;
        }
        let pid_tgid = unsafe_pid_tgid();
        let tgid = (pid_tgid >> 32) as u32;
        if !is_target(tgid) {
            self.status = IGNORED;
            self.generation = control.targets_generation;
            return false;
        }
        self.tid = pid_tgid as u32;
        // SAFETY: no argument.
        let task = unsafe { bpf_get_current_task_btf() } as u64;
        self.process = process_of(task);
        self.space = space_of(task, self.process);
        let Some(progress) = maps::progress() else { return false };
        // SAFETY: a field of a map value.
        self.ordinal = maps::take_number(unsafe { &raw mut (*progress).threads }) as u32;
        let seed = config!(seed);
        self.random = if seed == 0 {
            // SAFETY: no argument.
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

    /// Whether no call is in progress that the next one could be part of, as far as is known.
    #[inline(always)]
    pub fn is_idle(&self) -> bool {
        self.outer_sp | self.tail_sp | u64::from(self.pending) == 0
    }

    /// Counts an allocation call if none of its trials succeeds; `false`: one does, and nothing has been counted.
    #[inline(always)]
    pub fn count_unsampled(&mut self, trials: u64, size: u64) -> bool {
        if trials >= self.remaining {
            return false;
        }
        self.remaining -= trials;
        self.unsampled += 1;
        self.unsampled_bytes += size;
        true
    }

    /// Counts an allocation call and its trials. `Some`: one of them succeeded, so it is sampled, and the next success is
    /// drawn; the rest of this call's trials is skipped and nothing carried over. A sampled call's bytes are counted at its
    /// end.
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

    /// Calls so far, this one included if it has been counted.
    #[inline(always)]
    pub fn calls(&self) -> u64 {
        self.unsampled + self.counters.sampled
    }

    /// All counters of the thread.
    #[inline(always)]
    pub fn all_counters(&self) -> Counters {
        Counters {
            unsampled: self.unsampled,
            unsampled_bytes: self.unsampled_bytes,
            frees_seen: self.frees_seen,
            ..self.counters
        }
    }
}

/// Process id in the upper half, thread id in the lower.
#[inline(always)]
pub fn unsafe_pid_tgid() -> u64 {
    // SAFETY: no argument.
    unsafe { bpf_get_current_pid_tgid() }
}

/// The life that a task's process is in.
#[inline(always)]
pub fn process_of(task: u64) -> ProcessKey {
    let leader: u64 = read_kernel(task + config!(offsets.task_group_leader));
    ProcessKey {
        start_ns: read_kernel(leader + config!(offsets.task_start_boottime)),
        tgid: read_kernel(task + config!(offsets.task_tgid)),
        exec_id: read_kernel(task + config!(offsets.task_self_exec_id)),
    }
}

/// Whose address space a task runs in: the owner's, which is another process after `vfork`.
#[inline(always)]
fn space_of(task: u64, process: ProcessKey) -> ProcessKey {
    let owner_offset = config!(offsets.mm_owner);
    if owner_offset == KernelOffsets::ABSENT {
        return process;
    }
    let mm: u64 = read_kernel(task + config!(offsets.task_mm));
    let owner: u64 = read_kernel(mm + owner_offset);
    if mm == 0 || owner == 0 {
        return process;
    }
    let space = process_of(owner);
    if space.tgid == process.tgid || space.tgid == 0 { process } else { space }
}

/// Whether the current task's process is one.
#[inline(always)]
pub fn is_target(tgid: u32) -> bool {
    if tgid == config!(self_tgid) {
        return false;
    }
    let rules = config!(target_rules);
    if rules & target_rule::ALL != 0 || listed(tgid) {
        return true;
    }
    if rules & target_rule::CGROUP != 0 {
        let level = config!(cgroup_level) as i32;
        // SAFETY: a helper call.
        if unsafe { bpf_get_current_ancestor_cgroup_id(level) } == config!(cgroup_id) {
            return true;
        }
    }
    rules & target_rule::COMM != 0 && comm_matches()
}

/// Whether the daemon, or a parent's fork, listed the process.
#[inline(always)]
pub fn listed(tgid: u32) -> bool {
    TARGETS.get_ptr(tgid).is_some()
}

#[inline(always)]
fn comm_matches() -> bool {
    // SAFETY: no argument.
    let task = unsafe { bpf_get_current_task_btf() } as u64;
    let leader: u64 = read_kernel(task + config!(offsets.task_group_leader));
    let comm: [u8; 16] = read_kernel(leader + config!(offsets.task_comm));
    let pattern = config!(comm_pattern);
    glob::matches(&pattern, &comm)
}
