//! End-to-end tests that run one at a time: recordings of the whole host or of names that other tests' programs have,
//! killed daemons, `doctor --clean`, measured cost, and changes to the machine.
//!
//! Tests in `long` are the long set (`cargo xtask test --long`), those that are ignored only if it runs as a whole.
//! Ignored tests elsewhere are benchmarks.

mod active;
mod budget;
mod errors;
mod footprint;
mod go;
mod guardian;
mod in_use_processes;
mod inline_left;
mod long;
mod overcommit;
mod privileges;
mod python;
mod systemd;
mod translated;
mod whole_host;
