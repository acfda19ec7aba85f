//! Profiles read back: ours, and those of other heap profilers.
