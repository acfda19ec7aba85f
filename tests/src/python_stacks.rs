//! Python frames of stacks, and the stacks that Python programs write down themselves.

use std::path::Path;

use serde::Deserialize;

use crate::output::{Frame, Profile, Stack};

/// A note of a program that writes down its own stacks (`python_truth.py`).
#[derive(Clone, Debug, Deserialize)]
pub struct Noted {
    /// Size of the allocation.
    pub bytes: u64,
    /// Its stack, innermost frame first.
    pub frames: Vec<Named>,
}

/// Function, file and line.
pub type Named = (String, String, u32);

/// Reads what a program has noted in a file.
///
/// # Panics
/// If the file is missing or malformed.
#[must_use]
pub fn truth_of(file: &Path) -> Vec<Noted> {
    let text = std::fs::read_to_string(file).expect("the program has written its truth");
    serde_json::from_str(&text).expect("a list of notes")
}

/// Whether a frame is Python's.
#[must_use]
pub fn is_python(frame: &Frame) -> bool {
    frame.module.is_none()
}

fn agrees(frame: &Frame, (function, file, line): &Named) -> bool {
    frame.function.as_ref() == Some(function) && frame.file.as_ref() == Some(file) && frame.line == Some(*line)
}

/// Whether these are the Python frames of a stack. A truncated stack may have only the innermost of them.
#[must_use]
pub fn has(stack: &Stack, frames: &[Named]) -> bool {
    let python: Vec<&Frame> = stack.frames.iter().filter(|frame| is_python(frame)).collect();
    let is_whole = python.len() == frames.len() || (stack.cut.is_some() && (1..frames.len()).contains(&python.len()));
    is_whole && python.iter().zip(frames).all(|(frame, named)| agrees(frame, named))
}

/// Number of sampled stacks of Python programs that show only native frames, whatever the reason, as the profile says.
#[must_use]
pub fn only_native(profile: &Profile) -> u64 {
    let told = |note: &String| {
        let (failed, rest) = note.split_once(" of ")?;
        let is_it = rest.contains(" sampled stacks of Python programs show only native frames");
        failed.parse::<u64>().ok().filter(|_| is_it)
    };
    profile.notes.iter().filter_map(told).sum()
}

/// Number of stacks that have only native frames because, as the profile says, Python's could not be read. A probe
/// cannot wait for a page that the kernel is moving.
#[must_use]
pub fn unread(profile: &Profile) -> u64 {
    let reason = "frames or code objects could not be read (";
    let count = |note: &String| note.split_once(reason)?.1.split_once(')')?.0.parse::<u64>().ok();
    profile.notes.iter().filter_map(count).sum()
}
