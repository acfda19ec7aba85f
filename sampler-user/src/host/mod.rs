//! The host: processes, their mappings, the files behind these.

pub mod mappings;
