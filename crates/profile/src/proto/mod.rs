//! Protobuf messages of pprof, Perfetto and OpenTelemetry, written by hand after their public schemas, with the fields that this
//! crate uses.

#[cfg(feature = "otlp")]
pub mod otlp;
#[cfg(feature = "perfetto")]
pub mod perfetto;
#[cfg(feature = "pprof")]
pub mod pprof;
