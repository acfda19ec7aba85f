//! Where each version of CPython stores thread states, frames and code objects: from our own tables for older versions,
//! and from the interpreter's table for 3.13 and later.

use sampler_ebpf::abi::{PYTHON_HEAD_BYTES, PYTHON_IDENTITY_BYTES, PythonProcess};

use crate::version::Version;

const ABSENT: u32 = PythonProcess::ABSENT;

/// How a code object encodes lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineFormat {
    /// Up to 3.9: `co_lnotab`.
    Increments,
    /// 3.10: `co_linetable`.
    Ranges,
    /// Since 3.11: the location table.
    Locations,
}

/// The layout of code objects and the objects that they refer to: offsets and sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeLayout {
    /// Offset of `co_filename`.
    pub file: u32,
    /// Offset of `co_qualname`, or of `co_name` in older versions.
    pub name: u32,
    /// Offset of `co_linetable`, or of `co_lnotab` in older versions.
    pub lines: u32,
    /// Format of that table.
    pub format: LineFormat,
    /// Number of bytes that an instruction index counts.
    pub unit: u32,
    /// Offset of the first instruction, if the code object contains the instructions.
    pub instructions: Option<u32>,
    /// Offset of `_co_firsttraceable`: the index of the first instruction at which a frame counts.
    pub first_traceable: Option<u32>,
    /// Size of the head of an ASCII string.
    pub ascii_head: u32,
    /// Size of the head of any other string.
    pub compact_head: u32,
}

/// How to tell which invocation of the interpreter's loop runs a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundaries {
    /// Each frame has its own invocation.
    EachFrame,
    /// Frames that C code called are marked.
    Marked,
    /// A frame of the loop itself lies between the frames of different invocations. From this number on, the owner of a
    /// frame is the loop.
    Owner(u8),
}

/// The layout of one version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What the BPF programs need to walk frames; [`Layout::of_process`] adds the rest.
    pub process: PythonProcess,
    /// What the daemon needs to read code objects.
    pub code: CodeLayout,
    /// How frames are divided among invocations of the interpreter's loop.
    pub boundaries: Boundaries,
}

/// Maximum number of bytes of a code object that are read.
const MOST_HEAD_BYTES: usize = 512;

/// The owner of frames that belong to a generator or coroutine.
pub const OWNED_BY_GENERATOR: u8 = 1;

impl Layout {
    /// Returns the layout of a version that does not describe itself.
    #[must_use]
    pub fn of_version(version: Version) -> Option<Self> {
        match (version.major, version.minor) {
            (3, 8) => Some(frame_objects(1368, 104)),
            (3, 9) => Some(frame_objects(568, 104)),
            (3, 10) => Some(Self {
                code: CodeLayout { format: LineFormat::Ranges, unit: 2, ..frame_objects(568, 96).code },
                ..frame_objects(568, 96)
            }),
            (3, 11) => Some(three_eleven()),
            (3, 12) => Some(three_twelve()),
            _ => None,
        }
    }

    /// Size of the part of a code object that has all needed fields, bytes: its head, up to the instructions.
    #[must_use]
    pub fn head_bytes(&self) -> usize {
        let first_traceable = self.code.first_traceable.map_or(0, |place| place as usize + 4);
        let line = self.process.code_first_line as usize + 4;
        let pointers = [self.code.file, self.code.name, self.code.lines].map(|place| place as usize + 8);
        let identity = self.process.code_identity as usize + PYTHON_IDENTITY_BYTES;
        pointers.into_iter().chain([first_traceable, line, identity]).max().unwrap_or(0).min(MOST_HEAD_BYTES)
    }

    /// Returns what the BPF programs need to know about a process whose runtime is at this address.
    #[must_use]
    pub fn of_process(&self, runtime: u64) -> PythonProcess {
        // If the head does not fit into a copy, only the daemon reads it.
        let code_bytes = Some(self.head_bytes()).filter(|bytes| *bytes < PYTHON_HEAD_BYTES).unwrap_or(0);
        PythonProcess {
            runtime,
            code_bytes: code_bytes as u32,
            code_name: self.code.name,
            code_file: self.code.file,
            code_lines: self.code.lines,
            ..self.process
        }
    }
}

/// The layout of 3.8 to 3.10. `running`: offset of `_PyRuntime.gilstate.tstate_current`; `last`: offset of `f_lasti`.
fn frame_objects(running: u32, last: u32) -> Layout {
    Layout {
        process: PythonProcess {
            interpreters_head: 32,
            interpreter_next: 0,
            threads_head: 8,
            lock: ABSENT,
            running,
            thread_next: 8,
            thread_interpreter: 16,
            thread_id: 176,
            thread_frame: 24,
            indirect_frame: ABSENT,
            frame_bytes: last + 4,
            frame_code: 32,
            frame_previous: 24,
            frame_instruction: last,
            instruction_is_index: 1,
            frame_owner: ABSENT,
            frame_is_entry: ABSENT,
            code_identity: 96,
            code_first_line: 40,
            ..PythonProcess::default()
        },
        code: CodeLayout {
            file: 104,
            name: 112,
            lines: 120,
            format: LineFormat::Increments,
            unit: 1,
            instructions: None,
            first_traceable: None,
            ascii_head: 48,
            compact_head: 72,
        },
        boundaries: Boundaries::EachFrame,
    }
}

fn three_eleven() -> Layout {
    Layout {
        process: PythonProcess {
            interpreters_head: 40,
            interpreter_next: 0,
            threads_head: 16,
            lock: ABSENT,
            running: 576,
            thread_next: 8,
            thread_interpreter: 16,
            thread_id: 152,
            thread_frame: 56,
            indirect_frame: 8,
            frame_bytes: 72,
            frame_code: 32,
            frame_previous: 48,
            frame_instruction: 56,
            frame_owner: 69,
            frame_is_entry: 68,
            code_identity: 112,
            code_first_line: 72,
            ..PythonProcess::default()
        },
        code: CodeLayout {
            file: 112,
            name: 128,
            lines: 136,
            format: LineFormat::Locations,
            unit: 2,
            instructions: Some(184),
            first_traceable: Some(168),
            ascii_head: 48,
            compact_head: 72,
        },
        boundaries: Boundaries::Marked,
    }
}

fn three_twelve() -> Layout {
    let eleven = three_eleven();
    Layout {
        process: PythonProcess {
            interpreters_head: 40,
            interpreter_next: 0,
            threads_head: 72,
            lock: 384,
            running: 8,
            thread_id: 136,
            indirect_frame: 0,
            frame_code: 0,
            frame_previous: 8,
            frame_owner: 70,
            frame_is_entry: ABSENT,
            code_first_line: 68,
            ..eleven.process
        },
        code: CodeLayout {
            instructions: Some(192),
            first_traceable: Some(176),
            ascii_head: 40,
            compact_head: 56,
            ..eleven.code
        },
        boundaries: Boundaries::Owner(3),
    }
}

#[cfg(test)]
mod tests {
    use sampler_ebpf::abi::PYTHON_FRAME_BYTES;

    use super::*;

    #[test]
    fn known_versions_have_layouts_that_the_programs_can_read() {
        for minor in 8..=12 {
            let Layout { process, .. } = Layout::of_version(Version::three(minor)).expect("known");
            let bytes = process.frame_bytes;
            assert!(bytes as usize <= PYTHON_FRAME_BYTES);
            assert!(process.frame_code + 8 <= bytes && process.frame_previous + 8 <= bytes);
            let instruction = if process.instruction_is_index == 1 { 4 } else { 8 };
            assert!(process.frame_instruction + instruction <= bytes);
            for byte in [process.frame_owner, process.frame_is_entry] {
                assert!(byte == ABSENT || byte < bytes);
            }
        }
        for minor in [0, 7, 13, 99] {
            assert_eq!(Layout::of_version(Version::three(minor)), None);
        }
        assert_eq!(Layout::of_version(Version { major: 2, minor: 8 }), None);
    }
}
