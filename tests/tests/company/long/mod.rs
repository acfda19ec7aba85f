//! The long set: repeats by the hundred, and real programs beyond one of each kind.

mod faults;
mod hostile_python;
