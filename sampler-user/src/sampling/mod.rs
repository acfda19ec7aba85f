//! The mathematics of sampling: pure functions, no I/O. `docs/sampling.md` derives what is computed here.

pub mod binomial;
pub mod calibrate;
pub mod constants;
pub mod detect;
pub mod estimate;
pub mod estimators;
pub mod gamma;
pub mod growth;
pub mod interval;
pub mod optimum;
pub mod plan;
pub mod predistort;
pub mod simulation;
pub mod size_classes;
pub mod survival;
pub mod weight;
pub mod window_weights;
