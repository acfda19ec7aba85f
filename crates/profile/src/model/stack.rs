//! Call stacks, their frames, and the modules that frames belong to.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::units;

/// The source of stacks that Go's runtime recorded ([`Stack::source`]).
pub const GO_RUNTIME: &str = "go runtime";

/// A call stack.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stack {
    /// Frames, innermost first. Stacks share frames, because most frames are on many stacks (see [`SharedFrames`]).
    pub frames: Vec<Arc<Frame>>,
    /// The unwinder that produced it: `dwarf`, `fp` or `caller` (only the address of the caller is known), or
    /// [`GO_RUNTIME`].
    pub unwinder: &'static str,
    /// Why the stack was cut; `None` if it reaches the entry of the thread.
    pub cut: Option<Arc<str>>,
}

impl Stack {
    /// The stack with `change` applied to each frame. Frames that are equal afterwards are shared through `shared`.
    #[must_use]
    pub fn with_frames(&self, shared: &mut SharedFrames, change: impl Fn(&mut Frame)) -> Self {
        let changed = |frame: &Arc<Frame>| {
            let mut frame = Frame::clone(frame);
            change(&mut frame);
            shared.share(frame)
        };
        Self { frames: self.frames.iter().map(changed).collect(), unwinder: self.unwinder, cut: self.cut.clone() }
    }

    /// Who recorded the stack, if not heapbpf: [`GO_RUNTIME`]. The row of such a stack covers what the process has in
    /// use since it started, not since the recording began, and has no allocations.
    pub fn source(&self) -> Option<&'static str> {
        (self.unwinder == GO_RUNTIME).then_some(GO_RUNTIME)
    }
}

/// A frame. An inlined function has its own frame, before the frame of the function that it is inlined into.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Demangled function name; `None` if unknown, and `reason` says why.
    pub function: Option<Arc<str>>,
    /// Symbol name before demangling, if it differs.
    pub system_name: Option<Arc<str>>,
    /// Source file.
    pub file: Option<Arc<str>>,
    /// Source line.
    pub line: Option<u32>,
    /// Whether this is a function inlined into the next frame.
    pub inlined: bool,
    /// Start of the function as an address in its ELF file, if its unwind entry gives it and the function has no name.
    pub function_start: Option<u64>,
    /// Why nothing is known about the function. If the function has a start but no name, the module's `reason` says
    /// why.
    pub reason: Option<Arc<str>>,
    /// Index into [`Profile::modules`](super::Profile::modules).
    pub module: Option<usize>,
    /// Address of the call in the process (return address − 1); 0 if unknown.
    pub address: u64,
    /// Offset of the address in the file of the module.
    pub file_offset: Option<u64>,
}

/// A cheap hash: of the location, and of the name only if the address is unknown.
impl Hash for Frame {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.address, self.file_offset, self.line, self.module, self.inlined).hash(state);
        if self.address == 0 {
            self.function.hash(state);
        }
    }
}

/// Number of frames from which frames that no stack uses any more are removed.
const FIRST_SWEEP: usize = 1024;

/// Frames shared by stacks. Equal frames are stored once, as long as a stack uses them.
#[derive(Clone, Debug, Default)]
pub struct SharedFrames {
    known: HashSet<Arc<Frame>>,
    sweep_at: usize,
}

impl SharedFrames {
    /// The shared frame that equals this one.
    pub fn share(&mut self, frame: Frame) -> Arc<Frame> {
        if let Some(known) = self.known.get(&frame) {
            return Arc::clone(known);
        }
        if self.known.len() >= self.sweep_at.max(FIRST_SWEEP) {
            self.sweep();
        }
        let frame = Arc::new(frame);
        self.known.insert(Arc::clone(&frame));
        frame
    }

    /// Removes frames that no stack uses any more. This also happens whenever their number has doubled since the last
    /// time.
    pub fn sweep(&mut self) {
        self.known.retain(|frame| Arc::strong_count(frame) > 1);
        self.sweep_at = 2 * self.known.len();
        self.known.shrink_to(self.sweep_at);
    }

    /// The distinct frames, possibly including some that no stack uses any more.
    pub fn iter(&self) -> impl Iterator<Item = &Frame> {
        self.known.iter().map(AsRef::as_ref)
    }
}

/// A module: a mapped file, the vDSO, or a region of JIT code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Path as the process saw it.
    pub path: Arc<str>,
    /// GNU build ID.
    #[serde(default, serialize_with = "as_hex", deserialize_with = "from_hex")]
    pub build_id: Option<Vec<u8>>,
    /// Start address of its executable mapping in the first process that had it.
    pub start: u64,
    /// End address of that mapping.
    pub end: u64,
    /// File offset of that mapping.
    pub file_offset: u64,
    /// Why its functions have no names; `None` if all have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<Arc<str>>,
}

fn as_hex<S: Serializer>(id: &Option<Vec<u8>>, serializer: S) -> Result<S::Ok, S::Error> {
    id.as_deref().map(units::hex).serialize(serializer)
}

/// Something else is no build ID, and no reason to reject a file.
fn from_hex<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
    Ok(Option::<String>::deserialize(deserializer)?.as_deref().and_then(units::parse_hex))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::frame;

    #[test]
    fn equal_frames_are_kept_once_until_no_stack_has_them() {
        let mut shared = SharedFrames::default();
        let inner = |line| frame(0, 0x10, "inner", "a.c", line);
        let stacks: Vec<Stack> = (0..1_000)
            .map(|line| Stack {
                frames: vec![shared.share(inner(line % 7)), shared.share(frame(0, 0x20, "outer", "a.c", 9))],
                ..Stack::default()
            })
            .collect();
        assert_eq!(shared.iter().count(), 8);
        assert!(stacks.iter().all(|stack| Arc::ptr_eq(&stack.frames[1], &stacks[0].frames[1])));
        // A stack stores one pointer per frame.
        assert_eq!(size_of_val(&*stacks[0].frames), 2 * size_of::<usize>());
        let unnamed = |frame: &mut Frame| frame.line = None;
        let mut again = SharedFrames::default();
        let changed: Vec<Stack> = stacks.iter().map(|stack| stack.with_frames(&mut again, unnamed)).collect();
        assert_eq!((again.known.len(), changed[6].frames[0].line, stacks[6].frames[0].line), (2, None, Some(6)));
        drop(stacks);
        shared.sweep();
        assert_eq!(shared.iter().count(), 0);
    }
}
