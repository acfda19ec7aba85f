//! The host: processes, their mappings, the files behind these.

pub mod build_id;
pub mod cgroup;
pub mod events;
pub mod limits;
pub mod mappings;
pub mod modules;
pub mod open;
pub mod perf_ring;
pub mod proc_maps;
pub mod process;
pub mod record;
pub mod vdso;

/// What can go wrong when the host is looked at.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// Process events cannot be had.
    #[error(
        "cannot listen to process events (perf_event_open): {source}; run as root, or with CAP_PERFMON and CAP_BPF"
    )]
    Events {
        /// The kernel's reason.
        source: std::io::Error,
    },
}
