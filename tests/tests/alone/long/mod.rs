//! The long set: repetitions, torture, studies of coverage, soak, kernels in an emulator.

mod coverage;
mod floods;
mod kernels;
mod python_objects_harmless;
mod soak;
mod torture;
mod torture_targets;
mod workloads;
