//! Protobuf messages of pprof and Perfetto, written by hand after their public schemas, with the fields that this crate
//! uses.

#[cfg(feature = "perfetto")]
pub mod perfetto;
#[cfg(feature = "pprof")]
pub mod pprof;
