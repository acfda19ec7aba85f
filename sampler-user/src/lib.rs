//! heapbpf's daemon as a library: a pure middle (decode, weight, live heap, aggregate, symbolize, encode) with I/O at
//! its ends (the kernel on one side, writers and servers on the other).
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

// These macros panic if their reader has closed the pipe.
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod cli;
pub mod command;
pub mod demo;
pub mod doctor;
pub mod run;
pub mod top;
pub mod view;
