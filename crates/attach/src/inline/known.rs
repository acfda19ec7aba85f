//! Caches what was found in files for the next process that maps them. Reading a C library takes tens of milliseconds,
//! and looking up a name in one takes a tenth of a millisecond.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use heapbpf_elf::Image;
use heapbpf_inline::{Jumps, Text, merged};
use heapbpf_probes::{AttachError, Code, FileImage, InlineFile, Table, inline_functions, inline_functions_in};
use sampler_ebpf::abi::Site;

use super::Refused;
use crate::content::Content;

/// Maximum number of bytes of code to keep.
const MOST_BYTES: usize = 16 << 20;
/// From a larger piece of code, only the functions are kept. A C library has less than 2 MiB, a browser 200 MiB.
const MOST_PIECE_BYTES: usize = 4 << 20;

/// What inline hooks need to know about an allocator's file.
pub(super) struct KnownFile {
    /// What to hook in it.
    pub(super) found: InlineFile,
    /// The jumps that lead into the functions, at their addresses in the file.
    pub(super) jumps: Jumps,
}

impl KnownFile {
    /// Reads the file that was found at `path`.
    pub(super) fn read((path, file): (&str, &dyn Image), table: &Table) -> Result<Self, Refused> {
        if cfg!(not(target_arch = "x86_64")) {
            return Err(Refused::Machine);
        }
        Ok(Self::of(inline_functions(file, path, table)?))
    }

    fn of(mut found: InlineFile) -> Self {
        let texts: Vec<Text<'_>> =
            found.code.iter().map(|code| Text { address: code.address, bytes: &code.bytes }).collect();
        let jumps = Jumps::new(&texts, found.functions.iter().map(|function| function.address).collect());
        let whole = std::mem::take(&mut found.code);
        found.code = whole.into_iter().flat_map(|code| needed(code, &found)).collect();
        Self { found, jumps }
    }

    /// The sites of its functions.
    pub(super) fn sites(&self) -> Vec<Site> {
        self.found.functions.iter().map(|function| function.site).collect()
    }
}

/// The parts of a piece of code that hooking needs: all of it if it is small, otherwise the functions and what belongs
/// to them.
fn needed(code: Code, found: &InlineFile) -> Vec<Code> {
    if code.bytes.len() <= MOST_PIECE_BYTES {
        return vec![code];
    }
    let of_functions = found.functions.iter().map(|it| [it.address, it.address.saturating_add(it.length)]);
    let ranges = merged(of_functions.chain(found.inner.iter().copied()).collect());
    let text = Text { address: code.address, bytes: &code.bytes };
    let piece = |[start, end]: [u64; 2]| Some(Code { address: start, bytes: text.range(start, end)?.to_vec() });
    ranges.into_iter().filter_map(piece).collect()
}

/// Allocators' files, in the order in which they were read. Several threads read files, at the same time.
#[derive(Clone, Default)]
pub(super) struct KnownFiles(Arc<Mutex<Known>>);

type Known = VecDeque<(Content, Arc<KnownFile>)>;

impl KnownFiles {
    /// What hooking needs to know about the file that was found at `path`. It is read unless that is known. The table
    /// must always be the same.
    pub(super) fn functions(&self, (path, file): (&str, &File), table: &Table) -> Result<Arc<KnownFile>, Refused> {
        let failed = |source| Refused::Read { what: "the allocator's file", source };
        let content = Content::of(file).map_err(failed)?;
        if let Some(known) = self.of_content(content) {
            return Ok(known);
        }
        Ok(self.keep(content, file, KnownFile::read((path, file), table)?))
    }

    /// What is known about a file without reading it.
    pub(super) fn known(&self, file: &File) -> Option<Arc<KnownFile>> {
        self.of_content(Content::of(file).ok()?)
    }

    /// Takes a file that was read while it had this content.
    pub(super) fn note(&self, content: Content, file: &File, image: FileImage<'_>, table: &Table) {
        // What is wrong with it is reported when it is to be hooked.
        if let Ok(found) = inline_functions_in(image, table) {
            self.keep(content, file, KnownFile::of(found));
        }
    }

    fn of_content(&self, content: Content) -> Option<Arc<KnownFile>> {
        let files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        files.iter().find(|(known, _)| *known == content).map(|(_, known)| Arc::clone(known))
    }

    fn keep(&self, content: Content, file: &File, known: KnownFile) -> Arc<KnownFile> {
        let known = Arc::new(known);
        // The file may have been written to while it was read.
        if Content::of(file).is_ok_and(|now| now == content) {
            let mut files = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Another thread may have read it at the same time.
            if let Some((_, kept)) = files.iter().find(|(kept, _)| *kept == content) {
                return Arc::clone(kept);
            }
            files.push_back((content, Arc::clone(&known)));
            while bytes(&files) > MOST_BYTES {
                files.pop_front();
            }
        }
        known
    }
}

/// Bytes of code that are kept.
fn bytes(files: &Known) -> usize {
    files.iter().flat_map(|(_, known)| &known.found.code).map(|code| code.bytes.len()).sum()
}

/// Maximum number of files whose names are kept.
const MOST_FILES: usize = 256;

/// Which names files define. The file to which a name was added last is at the end.
#[derive(Default)]
pub(super) struct KnownNames(Mutex<Names>);

/// Which of the names that were looked up each file defines.
type Names = VecDeque<(Content, HashMap<String, bool>)>;

impl KnownNames {
    fn lock(&self) -> MutexGuard<'_, Names> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a file exports a function with this name. A file that cannot be read counts as defining every name.
    pub(super) fn defines(&self, file: &File, name: &str) -> bool {
        let Ok(content) = Content::of(file) else { return true };
        let known = |files: &Names| files.iter().find(|(known, _)| *known == content)?.1.get(name).copied();
        if let Some(defines) = known(&self.lock()) {
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
        let mut files = self.lock();
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

    use heapbpf_probes::{KernelRules, Machine};

    use super::*;
    use crate::files::ExaminedFiles;

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
        let known = KnownFiles::default();
        let table = Table::new(&[]);
        let append = |file: &Path| {
            let opened = std::fs::File::options().append(true).open(file);
            opened.and_then(|mut file| file.write_all(b"more")).expect("there is space");
        };
        let read = || known.functions((name, &file), &table).expect("an ELF file");
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
        let files = known.0.lock().expect("nobody has panicked");
        assert!(bytes(&files) <= MOST_BYTES && files.len() < 22, "{}", files.len());
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
    fn a_file_that_was_examined_aside_is_not_read_again() {
        let Some(path) = libc() else { return };
        let (file, table, known) = (Arc::new(File::open(&path).unwrap()), Table::default(), KnownFiles::default());
        let mut files = ExaminedFiles::new(KernelRules::of(Machine::X86_64, (6, 1)), Table::default());
        let noting = known.clone();
        files.read_on = Some(Arc::new(move |content: Content, file: &File, image: FileImage<'_>, table: &Table| {
            noting.note(content, file, image, table);
        }));
        assert!(known.known(&file).is_none() && files.examine_aside(&path, &file, false));
        assert!(files.examine(&path, &file).unwrap().1, "it has an allocator");
        let noted = known.known(&file).expect("it was noted");
        let read = KnownFile::read((&*path, &*file), &table).unwrap_or_else(|refused| panic!("{refused}"));
        assert!(!noted.sites().is_empty());
        assert_eq!(noted.sites(), read.sites());
        assert!(Arc::ptr_eq(&noted, &known.functions((&*path, &*file), &table).unwrap()));
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
