//! Names for raw stacks: functions, files, lines, inlined calls, found late and off the event path.
//!
//! [`symbolizer::Symbolizer`] names (module, file offset) pairs in batches; [`finish::Finisher`] makes profile stacks
//! of raw ones with these names and those of [`perf_map`]s; [`offline`] does the same for a saved profile. What belongs to a target is read, never mapped, and
//! bounded; debug files in the administrator's directories are trusted.

pub mod by_build_id;
pub mod debug_files;
pub mod demangle;
pub mod finish;
pub mod offline;
pub mod perf_map;
pub mod progress;
pub mod shadow;
pub mod symbolizer;

#[cfg(test)]
mod tests;
