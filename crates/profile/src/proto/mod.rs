//! Protobuf messages of pprof, Perfetto and OpenTelemetry. They are written by hand from the public schemas, with only
//! the fields that this crate uses.

#[cfg(feature = "otlp")]
pub mod otlp;
#[cfg(feature = "perfetto")]
pub mod perfetto;
#[cfg(feature = "pprof")]
pub mod pprof;
