//! heapbpf's daemon as a library: a pure middle (decode, weight, live heap, aggregate, symbolize, encode) with
//! I/O at its ends (the kernel on one side, writers and servers on the other).

pub mod arch;
pub mod attach;
pub mod cli;
pub mod cost;
pub mod doctor;
pub mod heap;
pub mod host;
pub mod kernel;
pub mod profile;
pub mod record;
pub mod sampling;
pub mod serve;
pub mod symbols;
#[cfg(test)]
mod testing;
pub mod unwind;
pub mod view;
