//! Events in the lives of processes.

use sampler_ebpf::abi::ProcessKey;

/// An event in the life of a process, for the session to act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEvent {
    /// A target forked.
    Forked {
        /// The parent.
        parent: ProcessKey,
        /// The child.
        child: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process replaced its program.
    Replaced {
        /// The incarnation that ended.
        ended: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process ended.
    Ended {
        /// The process incarnation that ended.
        process: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process ended or replaced its program, which nothing had counted.
    Uncounted {
        /// The incarnation that ended.
        ended: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// An exec dropped what was noted of a process, which may have been noted of its new program.
    Reset {
        /// Process id.
        pid: u32,
    },
}
