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
    /// A process executed another program.
    Replaced {
        /// The process generation that ended.
        ended: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// A process ended.
    Ended {
        /// The process generation that ended.
        process: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
        /// CPU time that it has used, also with the programs that it ran before, ns.
        cpu_ns: u64,
    },
    /// A process that nothing had counted ended or executed another program.
    Uncounted {
        /// The process generation that ended.
        ended: ProcessKey,
        /// CLOCK_MONOTONIC.
        time_ns: u64,
    },
    /// An exec dropped what was noted about a process, which may already have been noted about its new program.
    Reset {
        /// Process id.
        pid: u32,
    },
}
