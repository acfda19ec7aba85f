//! Intake of records: reads them from the rings, puts them in order of time, joins them with their stacks and adds them
//! to the heap. Also counts what was lost on the way.

pub mod announced;
pub mod counters;
pub mod java;
mod join;
pub mod lives;
pub mod losses;
mod outer_stacks;
pub mod python;
pub mod recorder;
mod stack_limits;
