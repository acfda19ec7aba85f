//! Stacks from the kernel's own frame-pointer walk, by stack ID.

use aya::maps::{MapData, StackTraceMap};

use super::KernelError;
use super::loader::Loader;

/// Opens the map. Returns a function for the addresses of a stack, innermost first; none if there is no stack with this
/// ID.
///
/// # Errors
/// The object has no such map.
pub fn open(loader: &Loader) -> Result<impl Fn(i32) -> Vec<u64> + use<>, KernelError> {
    let traces = StackTraceMap::<MapData>::try_from(loader.typed_map("STACK_TRACES")?);
    let traces = traces.map_err(|error| KernelError::Object(format!("STACK_TRACES: {error}")))?;
    Ok(move |id: i32| {
        let trace = u32::try_from(id).ok().and_then(|id| traces.get(&id, 0).ok());
        trace.map(|trace| trace.frames().iter().map(|frame| frame.ip).collect()).unwrap_or_default()
    })
}
