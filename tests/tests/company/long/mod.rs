//! The long set: hundreds of repetitions, and more than one real program of each kind.

mod faults;
mod fleet;
mod hostile_python;
mod runtimes;
