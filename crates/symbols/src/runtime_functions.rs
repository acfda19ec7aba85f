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

/// The reason of a function without a name.
const GONE: &str = "a function that was gone before its name could be read";

/// Maximum number of distinct functions, in all processes together.
const MOST_FUNCTIONS: usize = 1 << 18;

/// The functions of all programs, each once. The event path adds to them, and the profile worker reads them.
#[derive(Debug, Default)]
pub struct RuntimeFunctions(Mutex<Functions>);

#[derive(Debug, Default)]
struct Functions {
    all: Vec<Function>,
    numbers: HashMap<Function, u32>,
    texts: HashSet<Arc<str>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Function {
    name: Arc<str>,
    file: Arc<str>,
}

impl RuntimeFunctions {
    /// Returns the number of a function. `None` if there are too many.
    pub fn number(&self, name: &str, file: &str) -> Option<u32> {
        let mut functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let function = Function { name: functions.text(name), file: functions.text(file) };
        if let Some(number) = functions.numbers.get(&function) {
            return Some(*number);
        }
        let number = functions.all.len();
        if number >= MOST_FUNCTIONS {
            return None;
        }
        functions.all.push(function.clone());
        functions.numbers.insert(function, number as u32);
        Some(number as u32)
    }

    /// Returns the frame for a raw frame, if that belongs to such a function.
    pub fn frame(&self, raw: &RawFrame) -> Option<Frame> {
        if !is_of_runtime(raw) {
            return None;
        }
        let functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(function) = functions.all.get((raw.file_offset >> 32) as usize) else {
            return Some(Frame { reason: Some(GONE.into()), ..Frame::default() });
        };
        let name = Some(Arc::clone(&function.name));
        let file = Some(Arc::clone(&function.file)).filter(|file| !file.is_empty());
        let line = Some(raw.file_offset as u32).filter(|line| *line > 0);
        Some(Frame { function: name, file, line, ..Frame::default() })
    }
}

impl Functions {
    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return Arc::clone(known);
        }
        let text: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&text));
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
        assert_eq!((run, other, names.number("run", "/a.py")), (Some(0), Some(1), Some(0)));
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
}
