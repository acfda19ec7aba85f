//! A recording, from its plan to its output files.
//!
//! Its modules: `plan` holds the options, decided and checked; `ring_sizes` says how large the rings are. `attaching`
//! attaches probes. `intake` reads records. `budget` keeps the overhead of probes within the budget. `profiles` makes
//! profiles of the samples. `outputs` writes them. `session` is the loop that drives all of them. Of these modules,
//! each depends only on those before it. All of them may use the rest: [`cost`] measures what a probe costs, [`output`]
//! writes files, [`stats`] is what `--stats` shows, [`sampling`] has the parameters of the BPF side, and the command
//! reports to its user through [`remarks`], [`progress_line`], [`terminal`] and [`crash`].

// These macros panic if the reader of the output is gone.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod attaching;
mod budget;
pub mod cost;
pub mod crash;
mod descriptors;
mod intake;
pub mod output;
mod outputs;
pub mod plan;
mod profiles;
pub mod progress_line;
pub mod remarks;
pub mod ring_sizes;
pub mod sampling;
mod session;
pub mod stats;
pub mod terminal;

pub use attaching::command::NotStarted;
pub use attaching::start::Misdescribed;
pub use profiles::overflow_bucket::{Code, is_uncounted};
pub use profiles::{recent, requests};
pub use session::main_loop::ActiveRecording;
