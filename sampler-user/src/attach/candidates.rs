//! Which of the files that a process has mapped are worth analysing.

use std::collections::HashSet;

use super::allocators::LOADERS;
use super::table::Table;

/// A file mapped for execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedFile<'a> {
    /// As the kernel prints it; used for its name only.
    pub path: &'a str,
    /// Device number.
    pub device: u64,
    /// Inode; 0 if the mapping is not of a file.
    pub inode: u64,
}

/// A file to look into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The file.
    pub file: MappedFile<'a>,
    /// Its name is that of an allocator: look here first.
    pub likely: bool,
}

/// Files that may hold an allocator, each once, the likely ones first.
pub fn candidates<'a>(mapped: impl IntoIterator<Item = MappedFile<'a>>, table: &Table) -> Vec<Candidate<'a>> {
    let mut seen = HashSet::new();
    let mut found: Vec<Candidate<'a>> = mapped
        .into_iter()
        .filter(|file| file.inode != 0 && file.path.starts_with('/') && !is_loader(file.path))
        .filter(|file| seen.insert((file.device, file.inode)))
        .map(|file| Candidate { file, likely: table.is_likely(file.path) })
        .collect();
    found.sort_by_key(|candidate| !candidate.likely);
    found
}

fn is_loader(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    LOADERS.iter().any(|loader| name.starts_with(loader))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_file_once_and_allocators_first() {
        let file = |path, inode| MappedFile { path, device: 8, inode };
        let mapped = [
            file("/usr/bin/python3.11", 1),
            file("[vdso]", 0),
            file("/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2", 2),
            file("/usr/lib/x86_64-linux-gnu/libc.so.6", 3),
            file("/usr/lib/x86_64-linux-gnu/libc.so.6", 3),
            file("/memfd:jit (deleted)", 4),
            file("//anon", 0),
        ];
        let table = Table::default();
        let found = candidates(mapped, &table);
        let names: Vec<_> = found.iter().map(|c| (c.file.inode, c.likely)).collect();
        assert_eq!(names, [(3, true), (1, false), (4, false)]);
    }
}
