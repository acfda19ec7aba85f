//! Stops a running process for about a millisecond, maps code and data into it, replaces pages of its text, and undoes
//! all of this.
//!
//! Everything is read and decided before the stop. [`Target::look`] examines the process and says why it must be left
//! alone. A [`Plan`] is made from its mappings. [`Target::hook`] then stops the process and carries out the plan step
//! by step; each step can be undone. [`Target::found`] recognises what an earlier run did to any process, even a run
//! that was killed halfway, and [`Target::take_out`] removes it.
//!
//! ```no_run
//! use heapbpf_remote::{STOP_LIMIT, Target};
//!
//! let target = Target::look(4711)?;
//! for found in target.found() {
//!     let stopped = target.take_out(&found, &(0..0), STOP_LIMIT)?;
//!     println!("{} is out, after a stop of {:?}", found.name, stopped.time);
//! }
//! # Ok::<(), heapbpf_remote::Error>(())
//! ```

#![cfg(target_os = "linux")]
#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "used where processes can be stopped"))]

mod error;
mod found;
mod maps;
mod plan;
mod priority;
mod same_code;
mod status;
mod stopper;
mod wire;
mod work;

#[cfg(target_arch = "x86_64")]
mod at_entry;
#[cfg(target_arch = "x86_64")]
mod entry;
#[cfg(target_arch = "x86_64")]
mod frame;
#[cfg(target_arch = "x86_64")]
mod inject;
#[cfg(target_arch = "x86_64")]
mod interrupted;
#[cfg(target_arch = "x86_64")]
mod memory;
#[cfg(target_arch = "x86_64")]
mod probes;
#[cfg(target_arch = "x86_64")]
mod remote;
#[cfg(target_arch = "x86_64")]
mod remove;
#[cfg(target_arch = "x86_64")]
mod run;
#[cfg(target_arch = "x86_64")]
mod seccomp;
#[cfg(target_arch = "x86_64")]
mod stack;
#[cfg(target_arch = "x86_64")]
mod stop;
#[cfg(target_arch = "x86_64")]
mod sys;
#[cfg(target_arch = "x86_64")]
mod target;
#[cfg(not(target_arch = "x86_64"))]
mod unsupported;

pub use error::{Busy, Error, Refusal};
pub use found::{FoundBlob, blob_range, left_open};
pub use maps::{Mapping, Maps, PAGE_BYTES};
pub use plan::{Data, Displaced, Draft, NAME_PREFIX, Pages, Plan, PlanError, reserved_bytes};
pub use priority::Raised;
pub use same_code::other_code;
pub use status::Status;
pub use stopper::{Stopper, perform, stop_through};
#[cfg(not(target_arch = "x86_64"))]
pub use unsupported::{Exec, NotHeld, STOP_LIMIT, Target, Waiting};
pub use work::{Hooked, Mapped, Stopped, Word};
#[cfg(target_arch = "x86_64")]
pub use {
    entry::{Exec, NotHeld, Waiting},
    stop::STOP_LIMIT,
    target::Target,
};
