//! The long set: repetitions, torture, soak, kernels in an emulator.

mod coverage;
mod errors;
mod floods;
mod kernels;
mod python_objects_harmless;
mod soak;
mod torture;
mod torture_targets;
mod workloads;
