//! heapbpf's daemon as a library: a pure middle (decode, weight, live heap, aggregate, symbolize, encode) with
//! I/O at its ends (the kernel on one side, writers and servers on the other).
//!
//! ```text
//!    target process                      kernel                                    heapbpf (one tokio thread)
//!  ┌────────────────┐  trap   ┌───────────────────────────┐
//!  │ malloc(n)  ────┼────────►│ decide: countdown −= n     │ unsampled: two adds, no return trap
//!  │                │         │   crossed? ──► slot, draw  │
//!  │   …returns ────┼────────►│ outcome: live map ← sample │──EVENTS ring──► decode ──┐
//!  │                │         │   registers + stack copy ──┼──STACKS ring──► unwind ──┤ join by sample id
//!  │ free(p)  ──────┼────────►│ live map hit? ─────────────┼──EVENTS ring──► free  ──┤
//!  └────────────────┘         │ fork / exec / exit ────────┼──EVENTS ring──► processes
//!    forks, maps files ──────►│ dummy perf events ─────────┼──perf rings──► mappings │
//!                             └───────────────────────────┘                          ▼
//!                                                              weight 1/P per sample, add to the row
//!                                                              (process, thread, function, stack, R)
//!                                   thread iterator, totals ──► exact counts          │
//!                                   live map (the truth)    ──► reconcile             ▼
//!                              files, report, HTTP ◄── encode ◄── symbolize ◄── snapshot: Profile
//! ```
//!
//! Without the feature `daemon`, which is on by default, it is what reads foreign bytes: [`host`], [`symbols`], the decoder of [`heap`], the
//! parameters and tokens of [`serve`], and the [`clock`] and [`http_client`] that they use.

// They panic if nobody reads what they print.
#![warn(clippy::print_stderr, clippy::print_stdout)]

#[cfg(feature = "daemon")]
pub mod arch;
#[cfg(feature = "daemon")]
pub mod attach;
#[cfg(feature = "daemon")]
pub mod cli;
pub mod clock;
#[cfg(feature = "daemon")]
pub mod command;
#[cfg(feature = "daemon")]
pub mod cost;
#[cfg(feature = "daemon")]
pub mod crash;
#[cfg(feature = "daemon")]
pub mod demo;
#[cfg(feature = "daemon")]
pub mod doctor;
#[cfg(test)]
mod fuzzed;
pub mod heap;
pub mod helper;
pub mod host;
pub mod http_client;
#[cfg(feature = "daemon")]
pub mod independent;
#[cfg(feature = "daemon")]
pub mod invoking_user;
#[cfg(feature = "daemon")]
pub mod kernel;
#[cfg(feature = "daemon")]
pub mod output;
#[cfg(feature = "daemon")]
pub mod privileges;
#[cfg(feature = "daemon")]
pub mod progress_line;
#[cfg(feature = "daemon")]
pub mod record;
#[cfg(feature = "daemon")]
pub mod remarks;
#[cfg(feature = "daemon")]
pub mod run;
#[cfg(feature = "daemon")]
pub mod sampling;
pub mod serve;
#[cfg(feature = "daemon")]
pub mod side_by_side;
#[cfg(feature = "daemon")]
pub mod stats;
pub mod symbols;
#[cfg(feature = "daemon")]
pub mod terminal;
#[cfg(feature = "daemon")]
pub mod top;
#[cfg(feature = "daemon")]
pub mod view;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as sampler_user;
