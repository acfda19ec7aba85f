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

pub mod arch;
pub mod attach;
pub mod cli;
pub mod clock;
pub mod cost;
pub mod crash;
pub mod demo;
pub mod doctor;
#[cfg(test)]
mod fuzzed;
pub mod heap;
pub mod host;
pub mod http_client;
pub mod independent;
pub mod invoking_user;
pub mod kernel;
pub mod output;
pub mod privileges;
pub mod progress_line;
pub mod record;
pub mod run;
pub mod sampling;
pub mod serve;
pub mod side_by_side;
pub mod stats;
pub mod symbols;
pub mod terminal;
pub mod top;
pub mod view;

// What is shared with fuzz targets names the crate.
#[cfg(test)]
extern crate self as sampler_user;
