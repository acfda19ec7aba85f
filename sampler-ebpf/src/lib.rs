//! The code that the kernel side and the daemon share: the ABI and the integer mathematics of sampling.
//!
//! `no_std`, no I/O, no allocation: the same code runs inside the BPF programs and in the tests on the host.
#![cfg_attr(not(test), no_std)]

pub mod abi;
mod bits;
pub mod constants;
pub mod countdown;
pub mod filter;
pub mod geometric;
pub mod glob;
pub mod rng;
pub mod trials;
pub mod x86_condition;
