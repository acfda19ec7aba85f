//! Stacks of this process, and made-up ones, compared with known truth.

#![allow(clippy::unwrap_used)]

#[cfg(target_arch = "x86_64")]
mod assembly;
mod compiled;
mod hostile;
mod made_up;
mod plain;
#[cfg(target_arch = "x86_64")]
mod random_walks;
#[cfg(target_arch = "x86_64")]
mod runtime;
