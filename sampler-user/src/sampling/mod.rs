//! The mathematics of sampling: pure functions, no I/O. `docs/sampling.md` derives what is computed here.

pub mod constants;
pub mod estimate;
pub mod gamma;
pub mod interval;
pub mod weight;
