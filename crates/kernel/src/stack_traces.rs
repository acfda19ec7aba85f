//! Stacks from the kernel's own frame-pointer walk, by stack ID.

use aya::maps::{MapData, StackTraceMap};

use super::KernelError;
use super::loader::Loader;

/// The reading end of the stack map.
pub struct StackTraces(StackTraceMap<MapData>);

impl StackTraces {
    /// Opens the map.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        StackTraceMap::try_from(loader.typed_map("STACK_TRACES")?)
            .map(Self)
            .map_err(|error| KernelError::Object(format!("STACK_TRACES: {error}")))
    }

    /// Addresses of a stack, innermost first. Empty if there is no stack with this ID.
    pub fn read(&self, id: i32) -> Vec<u64> {
        let Ok(id) = u32::try_from(id) else { return Vec::new() };
        self.0.get(&id, 0).map(|trace| trace.frames().iter().map(|frame| frame.ip).collect()).unwrap_or_default()
    }
}
