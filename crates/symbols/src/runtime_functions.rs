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
/// Below these numbers, unused functions are not looked for.
const FIRST_SWEEP: [usize; 2] = [MOST_FUNCTIONS / 16, MOST_BYTES / 16];

/// The functions of all programs, each once. The event path adds to them, and the profile worker reads them.
#[derive(Debug, Default)]
pub struct RuntimeFunctions(Mutex<Functions>);

#[derive(Debug, Default)]
struct Functions {
    by_number: HashMap<u32, Function>,
    numbers: HashMap<Function, u32>,
    texts: HashSet<Arc<str>>,
    /// Length of all texts, bytes.
    text_bytes: usize,
    /// The next number. None is given twice: a frame never gets the name of another function.
    next: u32,
    /// Number of functions, and bytes of texts, that the last sweep left.
    left: [usize; 2],
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
        let number = functions.next;
        let [count, bytes] = functions.size();
        if count >= MOST_FUNCTIONS || bytes >= MOST_BYTES || number >= FURTHER_FUNCTION {
            return FURTHER_FUNCTION;
        }
        functions.next += 1;
        let function = Function { name: functions.text(name), file: functions.text(file) };
        functions.by_number.insert(number, function.clone());
        functions.numbers.insert(function, number);
        number
    }

    /// Whether there are so many functions that it is worth looking for unused ones: twice as many as the last sweep
    /// left, or as many as there may be.
    pub fn are_many(&self) -> bool {
        let functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [least_count, least_bytes] = FIRST_SWEEP;
        let ([count, bytes], [left, left_bytes]) = (functions.size(), functions.left);
        count >= (2 * left).clamp(least_count, MOST_FUNCTIONS)
            || bytes >= (2 * left_bytes).clamp(least_bytes, MOST_BYTES)
    }

    /// Forgets all functions but those with these numbers.
    pub fn keep_only(&self, needed: &HashSet<u32>) {
        let mut functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        functions.by_number.retain(|number, _| needed.contains(number));
        functions.by_number.shrink_to_fit();
        functions.numbers.retain(|_, number| needed.contains(number));
        functions.numbers.shrink_to_fit();
        // Texts in symbolized stacks stay as long as these.
        functions.texts.retain(|text| Arc::strong_count(text) > 1);
        functions.texts.shrink_to_fit();
        functions.text_bytes = functions.texts.iter().map(|text| text.len()).sum();
        functions.left = functions.size();
    }

    /// Returns the frame for a raw frame, if that belongs to such a function.
    pub fn frame(&self, raw: &RawFrame) -> Option<Frame> {
        let number = number_of(raw)?;
        let functions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(function) = functions.by_number.get(&number) else {
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
    /// Number of functions, and bytes of their texts.
    fn size(&self) -> [usize; 2] {
        [self.by_number.len(), self.text_bytes]
    }

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

/// The number of the function that a raw frame belongs to, if it belongs to such a function.
pub fn number_of(raw: &RawFrame) -> Option<u32> {
    is_of_runtime(raw).then_some((raw.file_offset >> 32) as u32)
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

    #[test]
    fn functions_that_nothing_needs_any_more_make_way_and_their_numbers_are_not_given_again() {
        let names = RuntimeFunctions::default();
        let number = |at: usize| names.number(&format!("f{at}"), "/a.py");
        (0..MOST_FUNCTIONS).for_each(|at| assert_eq!(number(at), at as u32));
        assert!(names.are_many() && number(MOST_FUNCTIONS) == FURTHER_FUNCTION);
        names.keep_only(&HashSet::from([7]));
        assert!(!names.are_many());
        assert_eq!((number(7), number(8)), (7, MOST_FUNCTIONS as u32), "the eighth is a new one");
        let name = |number| names.frame(&raw_frame(number, 1)).expect("it is a runtime's").function;
        assert_eq!((name(7).as_deref(), name(8), name(number(8)).as_deref()), (Some("f7"), None, Some("f8")));
        let functions = names.0.lock().expect("no test has panicked");
        assert_eq!((functions.size(), functions.texts.len()), ([2, "f7f8/a.py".len()], 3));
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
