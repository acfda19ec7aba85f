//! Caches what was found in files for the next process that maps them. Reading a C library takes tens of milliseconds,
//! and looking up a name in one takes a tenth of a millisecond.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::Arc;

use heapbpf_elf::Image;
use heapbpf_inline::{Jumps, Text};
use heapbpf_probes::{AttachError, Code, InlineFile, Table, inline_functions};

use super::Refused;
use crate::content::Content;

/// Maximum number of bytes of code to keep.
const MOST_BYTES: usize = 16 << 20;
/// From a larger piece of code, only the functions are kept. A C library has less than 2 MiB, a browser 200 MiB.
const MOST_PIECE_BYTES: usize = 4 << 20;

/// What inline hooks need to know about an allocator's file.
pub(super) struct Known {
    /// What to hook in it.
    pub(super) found: InlineFile,
    /// The jumps that lead into the functions, at their addresses in the file.
    pub(super) jumps: Jumps,
}

impl Known {
    /// Reads the file that was found at `path`.
    pub(super) fn read((path, file): (&str, &dyn Image), table: &Table) -> Result<Self, Refused> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Refused::Machine);
        }
        let mut found = inline_functions(file, path, table)?;
        let texts: Vec<Text<'_>> =
            found.code.iter().map(|code| Text { address: code.address, bytes: &code.bytes }).collect();
        let jumps = Jumps::new(&texts, found.functions.iter().map(|function| function.address).collect());
        let whole = std::mem::take(&mut found.code);
        found.code = whole.into_iter().flat_map(|code| needed(code, &found)).collect();
        Ok(Self { found, jumps })
    }
}

/// The parts of a piece of code that hooking needs: all of it if it is small, otherwise the functions and what belongs
/// to them.
fn needed(code: Code, found: &InlineFile) -> Vec<Code> {
    if code.bytes.len() <= MOST_PIECE_BYTES {
        return vec![code];
    }
    let of_functions = found.functions.iter().map(|it| [it.address, it.address.saturating_add(it.length)]);
    let mut ranges: Vec<[u64; 2]> = of_functions.chain(found.inner.iter().copied()).collect();
    ranges.sort_unstable();
    let mut merged: Vec<[u64; 2]> = Vec::new();
    for [start, end] in ranges {
        match merged.last_mut() {
            Some(last) if start <= last[1] => last[1] = last[1].max(end),
            _ => merged.push([start, end]),
        }
    }
    let text = Text { address: code.address, bytes: &code.bytes };
    let piece = |[start, end]: [u64; 2]| Some(Code { address: start, bytes: text.range(start, end)?.to_vec() });
    merged.into_iter().filter_map(piece).collect()
}

/// Allocators' files, in the order in which they were read.
#[derive(Default)]
pub(super) struct KnownFiles(VecDeque<(Content, Arc<Known>)>);

impl KnownFiles {
    /// What to hook in a file. The table must always be the same.
    pub(super) fn functions(&mut self, (path, file): (&str, &File), table: &Table) -> Result<Arc<Known>, Refused> {
        let failed = |source| Refused::Read { what: "the allocator's file", source };
        let content = Content::of(file).map_err(failed)?;
        if let Some((_, known)) = self.0.iter().find(|(known, _)| *known == content) {
            return Ok(Arc::clone(known));
        }
        let found = Arc::new(Known::read((path, file), table)?);
        // The file may have been written to while it was read.
        if Content::of(file).is_ok_and(|now| now == content) {
            self.0.push_back((content, Arc::clone(&found)));
            while self.bytes() > MOST_BYTES {
                self.0.pop_front();
            }
        }
        Ok(found)
    }

    /// Bytes of code that are kept.
    fn bytes(&self) -> usize {
        self.0.iter().flat_map(|(_, known)| &known.found.code).map(|code| code.bytes.len()).sum()
    }
}

/// Maximum number of files whose names are kept.
const MOST_FILES: usize = 256;

/// Which names files define. The file to which a name was added last is at the end.
#[derive(Default)]
pub(super) struct KnownNames(RefCell<VecDeque<(Content, HashMap<String, bool>)>>);

impl KnownNames {
    /// Whether a file exports a function with this name. A file that cannot be read counts as defining every name.
    pub(super) fn defines(&self, file: &File, name: &str) -> bool {
        let Ok(content) = Content::of(file) else { return true };
        let known = |files: &VecDeque<(Content, HashMap<String, bool>)>| {
            files.iter().find(|(known, _)| *known == content)?.1.get(name).copied()
        };
        if let Some(defines) = known(&self.0.borrow()) {
            return defines;
        }
        let defines = match heapbpf_probes::defines(file, name) {
            Ok(defines) => defines,
            Err(AttachError::NotElf) => false,
            Err(_) => return true,
        };
        // The file may have been written to while it was read.
        if Content::of(file).is_ok_and(|now| now == content) {
            self.keep(content, name, defines);
        }
        defines
    }

    fn keep(&self, content: Content, name: &str, defines: bool) {
        let mut files = self.0.borrow_mut();
        let at = files.iter().position(|(known, _)| *known == content);
        let mut names = at.and_then(|at| files.remove(at)).map_or_else(HashMap::new, |(_, names)| names);
        names.insert(name.to_owned(), defines);
        files.push_back((content, names));
        if files.len() > MOST_FILES {
            files.pop_front();
        }
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::io::Write as _;
    use std::path::Path;

    use super::*;

    fn libc() -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|it| it.contains("/libc.so"))
            .map(Into::into)
    }

    /// Reads a file that changes, and then this many more changed copies.
    fn read_changing(copies: usize) {
        let Some(path) = libc() else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let copy = dir.path().join("libc.so.6");
        std::fs::copy(path, &copy).expect("there is space");
        let (file, name) = (File::open(&copy).expect("the copy"), copy.to_str().expect("ASCII"));
        let mut known = KnownFiles::default();
        let table = Table::new(&[]);
        let append = |file: &Path| {
            let opened = std::fs::File::options().append(true).open(file);
            opened.and_then(|mut file| file.write_all(b"more")).expect("there is space");
        };
        let mut read = || known.functions((name, &file), &table).expect("an ELF file");
        let first = read();
        assert!(Arc::ptr_eq(&first, &read()));
        append(&copy);
        let second = read();
        assert!(!Arc::ptr_eq(&first, &second) && Arc::ptr_eq(&second, &read()));
        // As many of the copies are kept as fit.
        (0..copies).for_each(|_| {
            append(&copy);
            known.functions((name, &file), &table).expect("an ELF file");
        });
        assert!(known.bytes() <= MOST_BYTES && known.0.len() < 22, "{}", known.0.len());
    }

    #[test]
    fn a_file_is_read_again_once_it_has_changed() {
        read_changing(0);
    }

    mod long {
        use super::*;

        #[test]
        fn as_many_copies_are_kept_as_there_is_space_for() {
            read_changing(20);
        }
    }

    #[test]
    fn a_name_is_looked_up_again_once_its_file_has_changed() {
        let Some(path) = libc() else { return };
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join("libc.so.6");
        std::fs::copy(path, &copy).unwrap();
        let names = KnownNames::default();
        let defines = |name| names.defines(&File::open(&copy).unwrap(), name);
        assert!(defines("malloc") && !defines("je_malloc"));
        assert!(defines("malloc") && !defines("je_malloc"), "it is known now");
        std::fs::write(&copy, b"text").unwrap();
        assert!(!defines("malloc"), "what is no ELF file defines nothing");
    }
}
