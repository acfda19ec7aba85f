//! The long set: hundreds of repetitions, and more than one real program of each kind.

mod fleet;
mod runtimes;
