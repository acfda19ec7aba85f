//! What was found in allocators' files, kept for the next process that maps one of them: to read a C library takes tens of
//! milliseconds.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use heapbpf_probes::{InlineFile, Table};

use super::{Refused, preview};

/// Most bytes of code that are kept: a C library has less than 2 MiB. Of larger files, nothing is.
const MOST_BYTES: usize = 16 << 20;

/// The content of a file, as far as that can be told without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Content {
    fn of(file: &File) -> std::io::Result<Self> {
        let data = file.metadata()?;
        Ok(Self {
            device: data.dev(),
            inode: data.ino(),
            bytes: data.len(),
            modified: (data.mtime(), data.mtime_nsec()),
            changed: (data.ctime(), data.ctime_nsec()),
        })
    }
}

/// Files, the one that was read last at the end.
#[derive(Default)]
pub(super) struct KnownFiles(VecDeque<(Content, Arc<InlineFile>)>);

impl KnownFiles {
    /// What is to be hooked in a file. The table must always be the same.
    pub(super) fn functions(&mut self, (path, file): (&str, &File), table: &Table) -> Result<Arc<InlineFile>, Refused> {
        let failed = |source| Refused::Read { what: "the allocator's file", source };
        let content = Content::of(file).map_err(failed)?;
        if let Some((_, known)) = self.0.iter().find(|(known, _)| *known == content) {
            return Ok(Arc::clone(known));
        }
        let found = Arc::new(preview::functions((path, file), table)?);
        // It may have been written to while it was read.
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
        self.0.iter().flat_map(|(_, found)| &found.code).map(|code| code.bytes.len()).sum()
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn libc() -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines()
            .filter_map(|line| line.split_whitespace().nth(5))
            .find(|it| it.contains("/libc.so"))
            .map(Into::into)
    }

    #[test]
    fn a_file_is_read_again_once_it_has_changed() {
        let Some(path) = libc() else { return };
        let folder = tempfile::tempdir().unwrap();
        let copy = folder.path().join("libc.so.6");
        std::fs::copy(path, &copy).unwrap();
        let (file, name) = (File::open(&copy).unwrap(), copy.to_str().unwrap());
        let mut known = KnownFiles::default();
        let table = Table::new(&[]);
        let mut read = || known.functions((name, &file), &table).unwrap();
        let first = read();
        assert!(Arc::ptr_eq(&first, &read()));
        std::fs::File::options().append(true).open(&copy).unwrap().write_all(b"more").unwrap();
        let second = read();
        assert!(!Arc::ptr_eq(&first, &second) && Arc::ptr_eq(&second, &read()));
        // Of the copies, as many are kept as there is room for.
        (0..20).for_each(|_| {
            std::fs::File::options().append(true).open(&copy).unwrap().write_all(b"more").unwrap();
            known.functions((name, &file), &table).unwrap();
        });
        assert!(known.bytes() <= MOST_BYTES && known.0.len() < 22, "{}", known.0.len());
    }
}
