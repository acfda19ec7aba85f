//! `_Py_DebugOffsets`: the table of offsets at the start of `_PyRuntime`, since 3.13.

use sampler_ebpf::abi::{PYTHON_FRAME_BYTES, PythonProcess};

use crate::layout::{Boundaries, CodeLayout, Layout, LineFormat};
use crate::version::{Unsupported, Version};

/// Number of bytes of the table that are read.
pub const BYTES: usize = 656;

const COOKIE: &[u8; 8] = b"xdebugpy";
/// Largest offset that is accepted. An interpreter's state has a few hundred KiB.
const LARGEST: u64 = 4 << 20;

/// Indices of the needed values, in words of the table. They follow the declaration in each version.
struct Places {
    threads_head: usize,
    lock: usize,
    lock_state: usize,
    holder: usize,
    thread: usize,
    frame: usize,
    code: usize,
    bytes: usize,
    text: usize,
    /// From this number on, the owner of a frame is the interpreter's loop.
    owner: u8,
    code_tags: u64,
}

const THIRTEEN: Places = Places {
    threads_head: 9,
    lock: 14,
    lock_state: 15,
    holder: 18,
    thread: 19,
    frame: 28,
    code: 34,
    bytes: 64,
    text: 67,
    owner: 3,
    code_tags: 0,
};

const FOURTEEN: Places = Places {
    threads_head: 9,
    lock: 15,
    lock_state: 16,
    holder: 19,
    thread: 22,
    frame: 31,
    code: 39,
    bytes: 74,
    text: 77,
    owner: 3,
    code_tags: 3,
};

/// Returns the version that a runtime states, if it describes itself.
#[must_use]
pub fn version(table: &[u8]) -> Option<Version> {
    (table.get(..8)? == COOKIE).then(|| word(table, 1).map(Version::of_hex)).flatten()
}

/// Returns the layout that the table describes.
///
/// # Errors
/// [`Unsupported`]
pub fn layout(table: &[u8]) -> Result<Layout, Unsupported> {
    let version = version(table).ok_or(Unsupported::Malformed)?;
    let places = match (version.major, version.minor) {
        (3, 13) => THIRTEEN,
        (3, 14) => FOURTEEN,
        _ => return Err(Unsupported::Version(version)),
    };
    if word(table, 2) != Some(0) {
        return Err(Unsupported::FreeThreaded(version));
    }
    read(table, &places).ok_or(Unsupported::Malformed)
}

fn word(table: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(table.get(at * 8..at * 8 + 8)?.try_into().ok()?))
}

fn read(table: &[u8], places: &Places) -> Option<Layout> {
    let at = |place: usize| word(table, place).filter(|offset| *offset < LARGEST).map(|offset| offset as u32);
    // The order of fields within each part is the same in both versions.
    let [thread, frame, code] = [places.thread, places.frame, places.code];
    let [previous, executable, instruction, owner] = [at(frame + 1)?, at(frame + 2)?, at(frame + 3)?, at(frame + 5)?];
    let frame_bytes = [previous + 8, executable + 8, instruction + 8, owner + 1].into_iter().max()?;
    let [file, name, qualified, lines] = [at(code + 1)?, at(code + 2)?, at(code + 3)?, at(code + 4)?];
    let instructions = at(code + 9)?;
    // Fields that are read together must lie as expected.
    let is_usual = [name, qualified, lines] == [file + 8, file + 16, file + 24] && instructions >= 16;
    let strings_are_usual = [at(places.bytes + 1)?, at(places.bytes + 2)?] == [16, 32]
        && [at(places.text + 1)?, at(places.text + 2)?, at(places.text + 3)?] == [32, 16, 40];
    if frame_bytes as usize > PYTHON_FRAME_BYTES || !is_usual || !strings_are_usual {
        return None;
    }
    Some(Layout {
        process: PythonProcess {
            code_tags: places.code_tags,
            interpreters_head: at(5)?,
            interpreter_next: at(8)?,
            threads_head: at(places.threads_head)?,
            lock: at(places.lock)?,
            running: at(places.holder)?.checked_sub(at(places.lock_state)?)?,
            thread_next: at(thread + 2)?,
            thread_interpreter: at(thread + 3)?,
            thread_id: at(thread + 5)?,
            thread_frame: at(thread + 4)?,
            indirect_frame: PythonProcess::ABSENT,
            frame_bytes,
            frame_code: executable,
            frame_previous: previous,
            frame_instruction: instruction,
            instruction_is_index: 0,
            frame_owner: owner,
            frame_is_entry: PythonProcess::ABSENT,
            code_identity: file,
            code_first_line: at(code + 5)?,
            ..PythonProcess::default()
        },
        code: CodeLayout {
            file,
            name: qualified,
            lines,
            format: LineFormat::Locations,
            unit: 2,
            instructions: Some(instructions),
            first_traceable: Some(instructions - 16),
            ascii_head: 40,
            compact_head: 56,
        },
        boundaries: Boundaries::Owner(places.owner),
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A table with the published values of 3.14.0 on x86-64.
    pub(crate) fn fourteen() -> Vec<u8> {
        let mut words = [0u64; BYTES / 8];
        words[0] = u64::from_le_bytes(*COOKIE);
        words[1] = 0x030e_00f0;
        for (place, value) in [
            (5, 808),
            (8, 7264),
            (9, 7344),
            (15, 16),
            (16, 7760),
            (19, 7768),
            (24, 8),
            (25, 16),
            (26, 72),
            (27, 152),
            (32, 8),
            (33, 0),
            (34, 56),
            (35, 80),
            (36, 74),
            (40, 112),
            (41, 120),
            (42, 128),
            (43, 136),
            (44, 68),
            (48, 208),
            (75, 16),
            (76, 32),
            (78, 32),
            (79, 16),
            (80, 40),
        ] {
            words[place] = value;
        }
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    fn with(place: usize, value: u64) -> Vec<u8> {
        let mut table = fourteen();
        table[place * 8..place * 8 + 8].copy_from_slice(&value.to_le_bytes());
        table
    }

    #[test]
    fn the_table_of_3_14_gives_its_layout() {
        let layout = layout(&fourteen()).expect("supported");
        let PythonProcess { interpreters_head, running, thread_frame, thread_id, frame_bytes, frame_owner, .. } =
            layout.process;
        assert_eq!((interpreters_head, running, thread_frame, thread_id), (808, 8, 72, 152));
        assert_eq!((frame_bytes, frame_owner, layout.process.code_tags), (75, 74, 3));
        assert_eq!(
            (layout.code.name, layout.code.instructions, layout.code.first_traceable),
            (128, Some(208), Some(192))
        );
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        assert_eq!(layout(&[0; BYTES]), Err(Unsupported::Malformed));
        assert_eq!(layout(b"xdebugpy"), Err(Unsupported::Malformed));
        assert_eq!(layout(&with(1, 0x030f_00f0)), Err(Unsupported::Version(Version::three(15))));
        assert_eq!(layout(&with(2, 1)), Err(Unsupported::FreeThreaded(Version::three(14))));
        // Offsets that the BPF programs could not use, or that contradict each other.
        for (place, value) in [(5, u64::MAX), (36, 200), (43, 160), (48, 8), (78, 40), (19, 1)] {
            assert_eq!(layout(&with(place, value)), Err(Unsupported::Malformed), "{place}");
        }
        assert_eq!(layout(&fourteen()[..400]), Err(Unsupported::Malformed));
    }
}
