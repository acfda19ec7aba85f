//! Probes on the allocators of programs.
//!
//! [`files`] examines files and plans their probes, [`linker`] is the way to the kernel, and [`hooks`] decides which links
//! to make for which processes. [`libraries`] predicts which files a command will allocate with, before it runs. [`rules`] says how this kernel runs
//! what is probed. [`detours`] leads interpreters around copies of their object allocator.

mod audit;
pub mod detours;
pub mod dropped;
pub mod files;
mod frees;
pub mod hooks;
pub mod inline;
pub mod libraries;
pub mod linker;
pub mod rules;
