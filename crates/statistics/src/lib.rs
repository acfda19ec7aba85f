#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod announced;
pub mod binomial;
pub mod calibrate;
pub mod criterion;
pub mod detect;
pub mod estimate;
pub mod estimators;
pub mod gamma;
pub mod growth;
pub mod interval;
pub mod lost;
pub mod optimum;
pub mod outliving;
pub mod plan;
pub mod predistort;
pub mod size_classes;
pub mod sums;
pub mod survival;
pub mod survival_band;
pub mod weight;

pub use criterion::Criterion;
pub use estimate::Estimate;
pub use estimators::Estimator;
pub use interval::{Interval, Part};
pub use sums::SampleSums;
pub use weight::{Inclusion, inclusion};
