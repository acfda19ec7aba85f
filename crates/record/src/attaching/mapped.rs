//! What a process has mapped.

use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::processes::GenerationId;

/// Modules that a process has mapped.
pub(super) fn modules_of(host: &Host, pid: u32) -> Vec<ModuleId> {
    host.processes().current(pid).map(|generation| generation.space.modules().collect()).unwrap_or_default()
}

/// CLOCK_MONOTONIC when a process mapped a module.
pub(super) fn mapped_since(host: &Host, generation: GenerationId, module: ModuleId) -> u64 {
    let generation = host.processes().get(generation);
    let mapping =
        generation.and_then(|generation| generation.space.current().iter().find(|mapping| mapping.module == module));
    mapping.map_or_else(monotonic_ns, |mapping| mapping.since_ns)
}
