//! A profile as data: its header, processes, rows of sums, stacks and accounting. Every format and report is built only
//! from this.

mod by_address;
mod glibc;
mod header;
mod losses;
mod process;
mod profile;
mod resident;
mod row;
mod row_key;
mod stack;

pub use by_address::ByAddress;
pub use glibc::{Before, Glibc, Recorded, glibc_version};
pub use header::Header;
pub use heapbpf_statistics::criterion::Criterion;
pub use heapbpf_statistics::outliving::Octave;
pub use heapbpf_statistics::sums::SampleSums;
pub use heapbpf_statistics::survival::Lifetimes;
pub use losses::{LossBound, Losses, Unread};
pub use process::{Member, Placement, Process};
pub use profile::Profile;
pub use resident::{HEAP, JIT_CODE, OTHER, PythonArenas, Resident, UNDIVIDED};
pub use row::{InMemory, Row};
pub use row_key::RowKey;
pub use stack::{Frame, GO_RUNTIME, Module, SharedFrames, Stack};

/// Prefix of loss counters among [`Profile::counters`].
pub const LOST_PREFIX: &str = "lost_";

/// The counter of the time that probes took in the targets, in nanoseconds.
pub const PROBE_NS: &str = "probe_ns";

/// The counter of the targets' CPU time during the recording, in nanoseconds.
pub const CPU_NS: &str = "cpu_ns";
