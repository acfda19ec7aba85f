//! Keys of processes that run Go programs, which need not be known from samples.

use std::collections::HashMap;

use sampler_ebpf::abi::ProcessKey;

use crate::host::processes::IncarnationId;

/// Keys of processes that run Go programs.
#[derive(Default)]
pub(super) struct GoKeys(pub(super) HashMap<IncarnationId, ProcessKey>);
