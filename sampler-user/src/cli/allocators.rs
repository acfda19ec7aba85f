//! `--alloc`: allocators that the user describes on the command line or in a file. They are checked before anything is
//! attached.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use heapbpf_probes::Machine;
use heapbpf_probes::{AttachError, CustomAllocator, CustomError, KernelRules, Table, examine};

/// Maximum size of a specification file, in bytes.
const LARGEST_FILE: u64 = 1 << 20;

/// Why a specification cannot be used. All of these are usage errors.
#[derive(Debug, thiserror::Error)]
pub enum AllocatorError {
    /// The specification does not parse.
    #[error(transparent)]
    Malformed(#[from] CustomError),
    /// A line of a file does not parse.
    #[error("{path}, line {line}: {source}")]
    MalformedLine {
        /// The file.
        path: String,
        /// Its line, counted from 1.
        line: usize,
        /// What is wrong.
        source: CustomError,
    },
    /// The specification file cannot be read.
    #[error("--alloc @{path}: {source}")]
    Unreadable {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// The specification's file exists, but does not contain what the specification describes.
    #[error("--alloc: {path}: {source}")]
    Unfit {
        /// The file.
        path: String,
        /// Why.
        source: AttachError,
    },
}

/// Parses all `--alloc` values: each is a specification, or `@FILE` with one per line (`#` begins a comment).
///
/// # Errors
/// A specification does not parse, or names an existing file that lacks a function.
pub fn resolve(specifications: &[String]) -> Result<Vec<CustomAllocator>, AllocatorError> {
    let mut allocators = Vec::new();
    for text in specifications {
        match text.strip_prefix('@') {
            Some(path) => allocators.extend(read_file(path)?),
            None => allocators.push(text.trim().parse()?),
        }
    }
    for allocator in &mut allocators {
        check(allocator)?;
    }
    Ok(allocators)
}

fn read_file(path: &str) -> Result<Vec<CustomAllocator>, AllocatorError> {
    let unreadable = |source| AllocatorError::Unreadable { path: path.to_owned(), source };
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(LARGEST_FILE).read_to_string(&mut text)).map_err(unreadable)?;
    parse_lines(path, &text)
}

fn parse_lines(path: &str, text: &str) -> Result<Vec<CustomAllocator>, AllocatorError> {
    let mut allocators = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let allocator = line.parse().map_err(|source| AllocatorError::MalformedLine {
            path: path.to_owned(),
            line: number + 1,
            source,
        })?;
        allocators.push(allocator);
    }
    Ok(allocators)
}

/// Checks a file that is given by its path. A file that does not exist here may exist in a container.
fn check(allocator: &mut CustomAllocator) -> Result<(), AllocatorError> {
    if !allocator.file.contains('/') {
        return Ok(());
    }
    // The form in which /proc/PID/maps shows the path.
    let Ok(path) = Path::new(&allocator.file).canonicalize() else { return Ok(()) };
    let Ok(file) = File::open(&path) else { return Ok(()) };
    allocator.file = path.to_string_lossy().into_owned();
    let rules = KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), (0, 0));
    let table = Table::new(std::slice::from_ref(allocator));
    examine(&file, &allocator.file, &rules, &table)
        .map(drop)
        .map_err(|source| AllocatorError::Unfit { path: allocator.file.clone(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_specification_per_line() {
        let text = "# arenas\n\nliba.so:take(size=arg0)->ret,free=give(arg0)\n  libb.so:get(size=arg1)->ret\n";
        let files: Vec<String> = parse_lines("x", text).unwrap().into_iter().map(|a| a.file).collect();
        assert_eq!(files, ["liba.so", "libb.so"]);
        let error = parse_lines("allocators.conf", "liba.so:take(size=arg0)->ret\nlibb.so:get()").unwrap_err();
        assert!(error.to_string().starts_with("allocators.conf, line 2: "), "{error}");
    }

    #[test]
    fn a_file_that_is_not_there_is_said_by_name() {
        let error = resolve(&["@/no/such/file".into()]).unwrap_err().to_string();
        assert!(error.contains("/no/such/file") && error.contains("No such file"), "{error}");
    }

    #[test]
    fn a_program_is_looked_into() {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        // The C library is much smaller than this program.
        let mapped = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let Some(libc) = mapped.into_iter().find(|path| path.contains("/libc.so")) else { return };
        let error = resolve(&[format!("{libc}:no_such_function_here(size=arg0)->ret")]).unwrap_err();
        assert!(error.to_string().contains("no function \"no_such_function_here\""), "{error}");
        // The file may exist in a container.
        assert_eq!(resolve(&["/no/such/lib.so:take(size=arg0)->ret".into()]).unwrap().len(), 1);
    }
}
