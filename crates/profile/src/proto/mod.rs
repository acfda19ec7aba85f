//! Protobuf messages of pprof, Perfetto and OpenTelemetry. They are written by hand from the public schemas, with only
//! the fields that this crate uses.

pub mod otlp;
pub mod perfetto;
pub mod pprof;
