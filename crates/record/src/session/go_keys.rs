//! Keys of processes that run Go programs, which need not be known from samples.

use std::collections::HashMap;

use heapbpf_host::processes::GenerationId;
use sampler_ebpf::abi::ProcessKey;

/// Keys of processes that run Go programs.
#[derive(Default)]
pub(super) struct GoKeys(pub(super) HashMap<GenerationId, ProcessKey>);
