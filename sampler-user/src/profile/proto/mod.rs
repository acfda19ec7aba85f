//! Messages of the protobuf formats, by hand from their public schemas: only what heapbpf writes or reads.

pub mod perfetto;
pub mod pprof;
