//! The file that is mapped into a target: header, shared code, tables and stubs, inside an ELF file with symbols, so
//! that tools can name its addresses.

use sampler_ebpf::abi::inline::{SYMBOL_FREEING, SYMBOL_REALLOCATING, SYMBOL_RESULT, SYMBOL_UNSEEN};
use sampler_ebpf::geometric::{LOGARITHMS, RECIPROCALS};
use zerocopy::IntoBytes;

use crate::abi::{
    BUCKET_BYTES, CODE, Function, HEADER, HEADER_RDRAND, Header, Lead, MAGIC, MAX_SET_LOG2, MIN_SET_LOG2, STUB_BYTES,
    STUBS, TABLES, TEXT_BYTES, VERSION,
};
use crate::code::Code;
use crate::elf_file::{self, Symbol};
use crate::error::BuildError;
use crate::frame_rows::FrameRow;
use crate::stub::Stub;

/// Settings that may differ between blobs for the same functions.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// One of [`CRITERION_BYTES`](crate::abi::CRITERION_BYTES),
    /// [`CRITERION_ALLOCATIONS`](crate::abi::CRITERION_ALLOCATIONS).
    pub criterion: u32,
    /// The set has capacity for 2^`set_log2` sampled blocks; half as many always find a place.
    pub set_log2: u32,
    /// Whether the machine has `rdrand`.
    pub has_rdrand: bool,
    /// See [`Header::file`].
    pub file: [u64; 3],
}

/// FNV-1a, 64 bits. It only serves to tell builds apart.
#[must_use]
pub fn code_hash(code: &Code<'_>) -> u64 {
    code.bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Puts `bytes` at offset `at`.
fn put(image: &mut [u8], at: u64, bytes: &[u8]) {
    image[at as usize..][..bytes.len()].copy_from_slice(bytes);
}

/// Builds the whole file.
pub(crate) fn file(
    code: &Code<'_>,
    settings: &Settings,
    functions: &[Function],
    names: &[&str],
    (stubs, leads): (&[Stub], &[Lead]),
) -> Result<Vec<u8>, BuildError> {
    if code.bytes.len() as u64 > TABLES - CODE {
        return Err(BuildError::CodeTooLong(code.bytes.len()));
    }
    if !(MIN_SET_LOG2..=MAX_SET_LOG2).contains(&settings.set_log2) {
        return Err(BuildError::SetSize(settings.set_log2));
    }
    let mut image = vec![0; TEXT_BYTES as usize];
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        criterion: settings.criterion,
        code_hash: code_hash(code),
        set_log2: settings.set_log2,
        functions: functions.len() as u32,
        set_mask: (8 << settings.set_log2) - BUCKET_BYTES,
        flags: if settings.has_rdrand { HEADER_RDRAND } else { 0 },
        file: settings.file,
        leads: std::array::from_fn(|at| leads.get(at).copied().unwrap_or_default()),
    };
    put(&mut image, HEADER, header.as_bytes());
    let mut functions = functions.to_vec();
    let original = |index: usize| (STUBS + index as u64 * STUB_BYTES) as u32 + stubs[index].original;
    for (index, function) in functions.iter_mut().enumerate() {
        function.original = original(index);
        function.twin = function.twin.checked_sub(1).map_or(0, |twin| original(twin as usize));
    }
    put(&mut image, HEADER + size_of::<Header>() as u64, functions.as_bytes());
    put(&mut image, CODE, code.bytes);
    put(&mut image, TABLES, LOGARITHMS.as_bytes());
    put(&mut image, TABLES + size_of_val(&LOGARITHMS) as u64, RECIPROCALS.as_bytes());
    let mut symbols = site_symbols(code);
    let mut frames = Vec::new();
    for (index, stub) in stubs.iter().enumerate() {
        let address = STUBS + index as u64 * STUB_BYTES;
        image[address as usize..][..STUB_BYTES as usize].fill(0xcc);
        put(&mut image, address, &stub.bytes);
        frames.extend(stub.frame.iter().map(|row| FrameRow { at: address as u32 + row.at, rules: row.rules.clone() }));
        let name = names.get(index).map_or_else(String::new, |name| format!("heapbpf_inline:{name}"));
        symbols.push(Symbol { name, address, bytes: STUB_BYTES });
    }
    Ok(elf_file::wrap(&image, &symbols, (&code.entries, &frames)))
}

fn site_symbols(code: &Code<'_>) -> Vec<Symbol> {
    let entries = &code.entries;
    let shared = Symbol { name: "heapbpf_inline".to_owned(), address: CODE, bytes: code.bytes.len() as u64 };
    let sites = [
        (SYMBOL_RESULT, entries.site_result),
        (SYMBOL_FREEING, entries.site_freeing),
        (SYMBOL_REALLOCATING, entries.site_reallocating),
        (SYMBOL_UNSEEN, entries.site_unseen),
    ];
    let site =
        |(name, offset): (&str, u32)| Symbol { name: name.to_owned(), address: CODE + u64::from(offset), bytes: 5 };
    [shared].into_iter().chain(sites.map(site)).collect()
}

/// Offsets of the sites in the file, as uprobes take them: result, freeing, reallocating, unseen.
#[must_use]
pub fn site_offsets(code: &Code<'_>) -> [u64; 4] {
    let entries = &code.entries;
    [entries.site_result, entries.site_freeing, entries.site_reallocating, entries.site_unseen]
        .map(|offset| CODE + u64::from(offset))
}
