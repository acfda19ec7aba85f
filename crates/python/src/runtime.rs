//! The interpreter in a file: its version, and the locations of its parts.

use std::ops::Range;

use heapbpf_elf::{Elf, ElfFile, Image, Pieces, Segment, Symbol, read_range};
use iced_x86::{Decoder, DecoderOptions, FlowControl};
use object::elf::EM_X86_64;

use crate::debug_offsets;
use crate::layout::Layout;
use crate::version::{Unsupported, Version};

/// The interpreter's loop, which runs Python functions.
const LOOP: &[u8] = b"_PyEval_EvalFrameDefault";

/// An interpreter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// Its version.
    pub version: Version,
    /// The layout of this version.
    pub layout: Layout,
    /// Virtual address of `_PyRuntime` in the file.
    pub address: u64,
    /// The code of its loop, as ranges of file offsets.
    pub loops: Vec<Range<u64>>,
    /// The loaded segments of the file.
    pub segments: Vec<Segment>,
    /// Whether the file contains only the interpreter: `python3.11`, `libpython3.11.so.1.0`.
    pub is_alone: bool,
}

impl Runtime {
    /// Finds the interpreter in a file; `None` if there is none. `path`: the path of the file.
    ///
    /// # Errors
    /// [`Unsupported`] if there is one, but its frames cannot be read.
    pub fn find(image: &dyn Image, path: &str) -> Result<Option<Self>, Unsupported> {
        let pieces = Pieces::of(image);
        let Ok(file) = ElfFile::parse(&pieces) else { return Ok(None) };
        let (mut runtime, mut stated, mut hot) = (None, None, None);
        let mut parts = Vec::new();
        for table in [[".dynsym", ".dynstr"], [".symtab", ".strtab"]] {
            file.each_symbol(table, |name, symbol| match name {
                b"_PyRuntime" => runtime = Some(symbol),
                b"Py_Version" => stated = Some(symbol),
                LOOP => hot = Some(symbol),
                _ if name.strip_prefix(LOOP).is_some_and(|rest| rest.starts_with(b".")) => parts.push(symbol),
                _ => {}
            });
        }
        let Some(runtime) = runtime else { return Ok(None) };
        let elf = &file.headers;
        if elf.machine != EM_X86_64.0 {
            return Err(Unsupported::Machine);
        }
        let name = path.rsplit('/').next().unwrap_or(path);
        let soname = file.dynamic().ok().and_then(|dynamic| dynamic.soname);
        let (version, layout) =
            version_of(image, elf, &runtime, stated.as_ref(), &[name, soname.as_deref().unwrap_or("")])?;
        let hot = hot.filter(|symbol| symbol.size > 0).ok_or(Unsupported::NoLoop)?;
        let hot = hot.address..hot.address.saturating_add(hot.size);
        let mut ranges: Vec<Range<u64>> =
            parts.iter().map(|part| part.address..part.address.saturating_add(part.size)).collect();
        if ranges.is_empty() {
            ranges = cold_parts(image, elf, &hot);
        }
        ranges.push(hot);
        let loops = ranges.iter().filter_map(|range| {
            let start = elf.offset_of_address(range.start)?;
            Some(start..start.saturating_add(range.end - range.start))
        });
        let is_alone = name.starts_with("python") || name.starts_with("libpython");
        let loops = loops.collect();
        let segments = elf.segments.iter().filter(|segment| segment.is_loaded()).copied().collect();
        Ok(Some(Self { version, layout, address: runtime.address, loops, segments, is_alone }))
    }

    /// Returns the address of `_PyRuntime` in a process that has `file_offset` of the file mapped at `start`.
    #[must_use]
    pub fn address_in(&self, start: u64, file_offset: u64) -> Option<u64> {
        let mut code = self.segments.iter().filter(|segment| segment.is_executable());
        let bias = code.find_map(|segment| segment.bias(start, file_offset, 0x1000))?;
        Some(bias.wrapping_add(self.address))
    }

    /// Whether code at an offset of the file is the interpreter's loop.
    #[must_use]
    pub fn is_loop(&self, file_offset: u64) -> bool {
        self.loops.iter().any(|range| range.contains(&file_offset))
    }
}

/// Returns the version and its layout. Since 3.13, the runtime begins with a table of its offsets. In 3.11 and 3.12, a
/// constant states the version. Before, only the file's names do.
fn version_of(
    image: &dyn Image,
    elf: &Elf,
    runtime: &Symbol,
    stated: Option<&Symbol>,
    names: &[&str],
) -> Result<(Version, Layout), Unsupported> {
    let read = |address, bytes: usize| {
        let offset = elf.offset_of_address(address)?;
        read_range(image, "a constant", offset, bytes as u64, bytes as u64).ok()
    };
    if let Some(table) = read(runtime.address, debug_offsets::BYTES)
        && let Some(version) = debug_offsets::version(&table)
    {
        return Ok((version, debug_offsets::layout(&table)?));
    }
    let stated = stated.and_then(|symbol| read(symbol.address, 8)?.try_into().ok()).map(u64::from_le_bytes);
    let named = || names.iter().find_map(|name| Version::of_file_name(name));
    let version = stated.map(Version::of_hex).or_else(named).ok_or(Unsupported::NoVersion)?;
    // Versions since 3.11 state their number, so a name alone is not accepted for them.
    let is_believed = stated.is_some() || version < Version::three(11);
    let layout = Layout::of_version(version).filter(|_| is_believed).ok_or(Unsupported::Version(version))?;
    Ok((version, layout))
}

/// Largest function that is disassembled, bytes.
const MOST_CODE_BYTES: u64 = 1 << 20;
/// Largest function table that is read, bytes.
const MOST_TABLE_BYTES: u64 = 16 << 20;

/// Returns the addresses of the other parts of the function at `hot`.
fn cold_parts(image: &dyn Image, elf: &Elf, hot: &Range<u64>) -> Vec<Range<u64>> {
    let Some(offset) = elf.offset_of_address(hot.start) else { return Vec::new() };
    let Ok(code) = read_range(image, "a function", offset, hot.end - hot.start, MOST_CODE_BYTES) else {
        return Vec::new();
    };
    let starts = starts(image, elf);
    let mut parts: Vec<Range<u64>> = Vec::new();
    let decoder = Decoder::with_ip(64, &code, hot.start, DecoderOptions::NONE);
    for instruction in decoder {
        let target = instruction.near_branch_target();
        let leaves = instruction.flow_control() == FlowControl::ConditionalBranch && !hot.contains(&target);
        if !leaves || parts.iter().any(|part| part.contains(&target)) {
            continue;
        }
        let after = starts.partition_point(|start| *start <= target);
        if let (Some(&start), Some(&end)) = (after.checked_sub(1).and_then(|at| starts.get(at)), starts.get(after)) {
            parts.push(start..end);
        }
    }
    parts
}

/// Returns the start address of each function, from the search table of the unwind information.
fn starts(image: &dyn Image, elf: &Elf) -> Vec<u64> {
    let Some(section) = elf.section(".eh_frame_hdr") else { return Vec::new() };
    let Ok(bytes) = section.read(image, MOST_TABLE_BYTES) else { return Vec::new() };
    // Version 1 with the usual encodings: a 32-bit count, and pairs of 32-bit values relative to the section.
    if bytes.len() < 12 || bytes[..4] != [1, 0x1b, 0x03, 0x3b] {
        return Vec::new();
    }
    let pairs = bytes[12..].chunks_exact(8);
    let mut starts: Vec<u64> = pairs
        .map(|pair| {
            section.address.wrapping_add_signed(i64::from(i32::from_le_bytes([pair[0], pair[1], pair[2], pair[3]])))
        })
        .collect();
    starts.sort_unstable();
    starts
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn files_without_an_interpreter_have_none() {
        let program = File::open("/proc/self/exe").expect("it is there");
        assert_eq!(Runtime::find(&program, "/usr/bin/python3.11"), Ok(None));
        assert_eq!(Runtime::find(&vec![0u8; 100], "python3.11"), Ok(None));
    }

    /// The interpreter of this machine, if one is installed.
    #[test]
    fn an_installed_interpreter_is_found_with_its_loop() {
        let Ok(path) = std::fs::canonicalize("/usr/bin/python3") else { return };
        let file = File::open(&path).expect("it is there");
        match Runtime::find(&file, &path.to_string_lossy()) {
            Ok(Some(runtime)) => {
                assert!(runtime.is_alone && !runtime.loops.is_empty(), "{runtime:?}");
                assert!(runtime.loops.iter().all(|range| runtime.is_loop(range.start) && !runtime.is_loop(range.end)));
            }
            Ok(None) => {}
            Err(why) => assert!(!why.to_string().is_empty()),
        }
    }
}
