//! What a process has mapped.

use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::processes::IncarnationId;

/// Modules that a process has mapped.
pub(super) fn modules_of(host: &Host, pid: u32) -> Vec<ModuleId> {
    host.processes().current(pid).map(|incarnation| incarnation.space.modules().collect()).unwrap_or_default()
}

/// CLOCK_MONOTONIC when a process mapped a module.
pub(super) fn mapped_since(host: &Host, incarnation: IncarnationId, module: ModuleId) -> u64 {
    let incarnation = host.processes().get(incarnation);
    let mapping =
        incarnation.and_then(|incarnation| incarnation.space.current().iter().find(|mapping| mapping.module == module));
    mapping.map_or_else(monotonic_ns, |mapping| mapping.since_ns)
}
