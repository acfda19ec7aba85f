//! Sampling parameters as the BPF side reads them.

pub mod size_classes;

use heapbpf_statistics::criterion::Criterion;
use sampler_ebpf::trials;

/// The number that stands for a criterion in the BPF side's configuration.
pub fn criterion_code(criterion: Criterion) -> u64 {
    match criterion {
        Criterion::Bytes => trials::CRITERION_BYTES,
        Criterion::Allocations => trials::CRITERION_ALLOCATIONS,
        Criterion::SizeClass => trials::CRITERION_SIZE_CLASS,
    }
}
