//! Functions of the Python and Java runtimes. Their frames have no address in a file. Instead of a module's offset, a
//! raw frame has the number of the function and the line.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_profile::model::Frame;
use heapbpf_unwind::mapping::ModuleId;
use heapbpf_unwind::raw::RawFrame;

/// Stands for a module in raw frames of these functions.
pub const RUNTIME: ModuleId = ModuleId(u32::MAX);

/// Stands for the number of a function whose name could not be read.
pub const UNKNOWN_FUNCTION: u32 = u32::MAX;

/// Stands for the number of every further function once there are too many.
const FURTHER_FUNCTION: u32 = u32::MAX - 1;

/// The reason of a function without a name.
const GONE: &str = "the function was gone before its name could be read";

/// The reason of a further function.
const TOO_MANY: &str = "there are too many Python and Java functions to keep their names";

/// Maximum number of distinct functions, in all processes together.
const MOST_FUNCTIONS: usize = 1 << 18;
/// Maximum number of bytes of their names and paths. The last function may exceed it.
const MOST_BYTES: usize = 64 << 20;

/// The functions of all programs, each once. The event path adds to them, and the profile worker reads them.
#[derive(Debug, Default)]
pub struct RuntimeFunctions(Mutex<Functions>);

#[derive(Debug, Default)]
struct Functions {
    all: Vec<Function>,
    numbers: HashMap<Function, u32>,
    texts: HashSet<Arc<str>>,
    /// Length of all texts, bytes.
    text_bytes: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Function {
    name: Arc<str>,
    file: Arc<str>,
}

impl RuntimeFunctions {
    /// Returns the number of a function. If there are too many functions, all further ones share a number without a
    /// name.
    pub fn number(&self, name: &str, file: &str) -> u32 {
        let mut functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = functions.known(name, file) {
            return known;
        }
        let number = functions.all.len();
        if number >= MOST_FUNCTIONS || functions.text_bytes >= MOST_BYTES {
            return FURTHER_FUNCTION;
        }
        let function = Function { name: functions.text(name), file: functions.text(file) };
        functions.all.push(function.clone());
        functions.numbers.insert(function, number as u32);
        number as u32
    }

    /// Returns the frame for a raw frame, if that belongs to such a function.
    pub fn frame(&self, raw: &RawFrame) -> Option<Frame> {
        if !is_of_runtime(raw) {
            return None;
        }
        let functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = (raw.file_offset >> 32) as u32;
        let Some(function) = functions.all.get(number as usize) else {
            let reason = if number == FURTHER_FUNCTION { TOO_MANY } else { GONE };
            return Some(Frame { reason: Some(reason.into()), ..Frame::default() });
        };
        let name = Some(Arc::clone(&function.name));
        let file = Some(Arc::clone(&function.file)).filter(|file| !file.is_empty());
        let line = Some(raw.file_offset as u32).filter(|line| *line > 0);
        Some(Frame { function: name, file, line, ..Frame::default() })
    }
}

impl Functions {
    fn known(&self, name: &str, file: &str) -> Option<u32> {
        let text = |text: &str| self.texts.get(text).map(Arc::clone);
        self.numbers.get(&Function { name: text(name)?, file: text(file)? }).copied()
    }

    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let text: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&text));
        self.text_bytes += text.len();
        text
    }
}

/// The raw frame of a function at a line. Line 0 means unknown.
pub fn raw_frame(function: u32, line: u32) -> RawFrame {
    RawFrame { address: 0, module: Some(RUNTIME), file_offset: u64::from(function) << 32 | u64::from(line) }
}

/// Whether a raw frame belongs to such a function.
pub fn is_of_runtime(raw: &RawFrame) -> bool {
    raw.module == Some(RUNTIME)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_has_one_number_and_each_of_its_lines_a_frame() {
        let names = RuntimeFunctions::default();
        let (run, other) = (names.number("run", "/a.py"), names.number("run", "/b.py"));
        assert_eq!((run, other, names.number("run", "/a.py")), (0, 1, 0));
        let frame = names.frame(&raw_frame(1, 17)).expect("it is Python's");
        assert_eq!(
            (frame.function.as_deref(), frame.file.as_deref(), frame.line),
            (Some("run"), Some("/b.py"), Some(17))
        );
        assert_eq!((frame.module, frame.address, frame.file_offset), (None, 0, None));
        assert_eq!(names.frame(&raw_frame(0, 0)).expect("it is Python's").line, None);
        assert!(names.frame(&raw_frame(UNKNOWN_FUNCTION, 0)).expect("it is Python's").reason.is_some());
        assert_eq!(names.frame(&RawFrame { address: 1, module: None, file_offset: 0 }), None);
    }

    /// A script makes functions with names as long as possible. The first ones keep their names, and nothing is kept of
    /// the further ones.
    #[test]
    fn names_of_too_many_functions_are_not_kept_and_that_is_said() {
        const LENGTH: usize = 4096;
        let names = RuntimeFunctions::default();
        let number = |at: usize| names.number(&format!("{at:0LENGTH$}"), "/a.py");
        let fits = (MOST_BYTES / LENGTH) as u32;
        let numbers: Vec<u32> = (0..2 * MOST_BYTES / LENGTH).map(number).collect();
        assert!(numbers.iter().zip(0..fits).all(|(number, expected)| *number == expected));
        assert!(numbers[fits as usize..].iter().all(|number| *number == FURTHER_FUNCTION));
        let reason = names.frame(&raw_frame(FURTHER_FUNCTION, 1)).expect("it is Python's").reason;
        assert_eq!(reason.as_deref(), Some(TOO_MANY));
        assert_eq!(number(7), 7, "it is known");
        let functions = names.0.lock().expect("no test has panicked");
        let held: usize = functions.texts.iter().map(|text| text.len()).sum();
        assert!(held == functions.text_bytes && held < MOST_BYTES + LENGTH, "{held}");
    }
}
