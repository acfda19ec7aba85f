//! Samples that a program announces itself, through USDT probes of the provider `otel_memory`: `alloc(pointer, size,
//! weighted_bytes)` and `free(pointer)`. Mappings are announced by `mmap(address, size)` and `munmap(address, size)`;
//! they are no samples.
//!
//! Each probe is a no-op. A note in the section `.note.stapsdt` says where it is, where its semaphore is, and where its
//! arguments are at that moment.

use std::collections::BTreeSet;

use heapbpf_audit::{FileKind, Missing};
use heapbpf_elf::{ElfFile, Image, Pieces, build_id, read_range};
use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::ReadRef;
use object::read::elf::NoteIterator;
use sampler_ebpf::abi::{FileRanges, Operand, Site};

use crate::arch;
use crate::error::AttachError;
use crate::placement::{Arguments, KernelRules, Machine};
use crate::plan::{AllocatorFile, PlannedSite, ReturnProbe};
use crate::table::{ANNOUNCED, ANNOUNCED_MMAP};

/// The probes' provider.
const PROVIDER: &str = "otel_memory";
/// Section of the notes, and the owner in each note.
const SECTION: &str = ".note.stapsdt";
const OWNER: &[u8] = b"stapsdt";
/// Type of a note. No other was ever defined.
const NOTE_TYPE: u32 = 3;
/// Section whose address the notes state. If the section is at another address, the file was moved after linking
/// (prelink).
const BASE_SECTION: &str = ".stapsdt.base";
/// Largest section of notes that is read, bytes. PostgreSQL's, with 400 probes, has 40 KiB.
const MOST_NOTE_BYTES: u64 = 4 << 20;
/// Most probes of a file that are used.
const MOST_SITES: usize = 256;
/// Maximum bytes of an instruction.
const INSTRUCTION_BYTES: u64 = 15;

/// A probe of the provider, as its note states it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Note {
    /// Its name, without the provider's.
    name: String,
    /// Address of the instruction.
    address: u64,
    /// Address of the counter of listeners; 0 if there is none.
    semaphore: u64,
    /// Where the arguments are: descriptors with spaces between them.
    arguments: String,
}

/// Number of arguments of a probe of the provider; `None` if the name is not one of the contract's.
fn arguments_of(name: &str) -> Option<usize> {
    match name {
        "alloc" => Some(3),
        "free" => Some(1),
        "mmap" | "munmap" => Some(2),
        _ => None,
    }
}

/// The probe that announces the end of what this one announces, and what follows if there is none.
fn end_of(name: &str) -> Option<(&'static str, &'static str)> {
    match name {
        "alloc" => Some(("free", "what was allocated counts as in use until the process ends")),
        "mmap" => Some(("munmap", "what was mapped counts as in use until the process ends")),
        _ => None,
    }
}

/// Plans the probes for the samples and mappings that the program in a file announces; `None` if it announces none.
///
/// # Errors
/// [`AttachError`] if it is not a program for this machine, or one of these probes cannot be used.
pub fn announced(file: &dyn Image, rules: &KernelRules) -> Result<Option<AllocatorFile>, AttachError> {
    let pieces = Pieces::of(file);
    let elf = ElfFile::parse(&pieces)?;
    let notes = notes(&elf)?;
    let Some(first) = notes.iter().find(|note| end_of(&note.name).is_some()) else { return Ok(None) };
    if rules.machine != Machine::X86_64 || elf.headers.machine != object::elf::EM_X86_64.0 {
        return Err(unusable(&first.name, "its arguments can be read on x86-64 only".into()));
    }
    let mut sites = notes.iter().map(|note| site(file, &elf, rules, note)).collect::<Result<Vec<_>, _>>()?;
    sites.sort_by_key(|site| site.site.offset);
    let names: BTreeSet<&str> = notes.iter().map(|note| note.name.as_str()).collect();
    let without_end = names.iter().filter_map(|name| end_of(name)).filter(|(end, _)| !names.contains(end));
    let limit = |(end, why): (&str, &str)| {
        Missing::new(format!("{PROVIDER}:{end}"), format!("the file has no such probe: {why}"))
    };
    let limits = without_end.map(limit).collect();
    Ok(Some(AllocatorFile {
        allocator: format!("{PROVIDER} (USDT)"),
        kind: if elf.interpreter().is_some() { FileKind::Executable } else { kind_of(&elf) },
        build_id: build_id::of(file).unwrap_or_default(),
        sites,
        ranges: FileRanges::default(),
        own: Vec::new(),
        may_call_out: false,
        may_be_interposed: false,
        covered: Vec::new(),
        missing: Vec::new(),
        limits,
    }))
}

/// A file with an entry point that names no libraries and has no soname is a static program.
fn kind_of<'d, R: ReadRef<'d>>(elf: &ElfFile<'d, R>) -> FileKind {
    let dynamic = elf.dynamic().unwrap_or_default();
    let alone = elf.headers.entry != 0 && dynamic.soname.is_none() && dynamic.needed.is_empty();
    if alone { FileKind::StaticExecutable } else { FileKind::Library }
}

fn unusable(name: &str, why: String) -> AttachError {
    AttachError::Unhookable { what: format!("USDT probe {PROVIDER}:{name}"), why }
}

/// The notes of the provider's probes.
fn notes<'d, R: ReadRef<'d>>(elf: &ElfFile<'d, R>) -> Result<Vec<Note>, AttachError> {
    let Some(section) = elf.headers.section(SECTION) else { return Ok(Vec::new()) };
    if section.bytes > MOST_NOTE_BYTES || section.is_compressed() {
        return Err(AttachError::Damaged("USDT notes"));
    }
    let bytes = elf.section_bytes(section).map_err(|_| AttachError::Damaged("USDT notes"))?;
    let base = elf.headers.section(BASE_SECTION).map(|section| section.address);
    let damaged = |_| AttachError::Damaged("USDT notes");
    let mut iterator = NoteIterator::<FileHeader64<LittleEndian>>::new(LittleEndian, 4, bytes).map_err(damaged)?;
    let mut notes = Vec::new();
    while let Some(note) = iterator.next().map_err(damaged)? {
        if note.name() != OWNER || note.n_type(LittleEndian).0 != NOTE_TYPE {
            continue;
        }
        let Some(found) = parse(note.desc(), base) else { continue };
        if notes.len() >= MOST_SITES {
            return Err(unusable(&found.name, format!("the file has more than {MOST_SITES} probes of {PROVIDER}")));
        }
        notes.push(found);
    }
    Ok(notes)
}

/// The probe that a note describes, if it is one of the provider's.
fn parse(description: &[u8], base: Option<u64>) -> Option<Note> {
    let word = |at: usize| Some(u64::from_le_bytes(description.get(at..at + 8)?.try_into().ok()?));
    let (address, stated_base, semaphore) = (word(0)?, word(8)?, word(16)?);
    let mut texts = description.get(24..)?.split(|byte| *byte == 0).map(|text| std::str::from_utf8(text).ok());
    let (provider, name, arguments) = (texts.next()??, texts.next()??, texts.next()??);
    if provider != PROVIDER || arguments_of(name).is_none() {
        return None;
    }
    let moved = base.map_or(0, |base| base.wrapping_sub(stated_base));
    Some(Note {
        name: name.to_owned(),
        address: address.wrapping_add(moved),
        semaphore: if semaphore == 0 { 0 } else { semaphore.wrapping_add(moved) },
        arguments: arguments.to_owned(),
    })
}

/// The site of a probe.
fn site<'d, R: ReadRef<'d>>(
    file: &dyn Image,
    elf: &ElfFile<'d, R>,
    rules: &KernelRules,
    note: &Note,
) -> Result<PlannedSite, AttachError> {
    let refused = |why: String| unusable(&note.name, why);
    let segments = || elf.headers.segments.iter();
    let code = segments().find(|segment| segment.is_executable() && segment.holds(note.address));
    let offset = code.and_then(|segment| segment.offset_of_address(note.address));
    let offset = offset.ok_or_else(|| refused("its note states an address outside of the file's code".into()))?;
    let semaphore = match note.semaphore {
        0 => 0,
        address => {
            let data = segments().find(|segment| segment.is_writable() && segment.holds(address));
            let offset = data.and_then(|segment| segment.offset_of_address(address)).filter(|it| it % 2 == 0);
            offset.ok_or_else(|| refused("its note states a semaphore outside of the file's data".into()))?
        }
    };
    let left_bytes = file.length_bytes().unwrap_or(0).saturating_sub(offset).min(INSTRUCTION_BYTES);
    let bytes = read_range(file, "code", offset, left_bytes, INSTRUCTION_BYTES)?;
    let treated = arch::treated(rules, note.address, &bytes);
    let (kind, reason) = treated.ok_or_else(|| refused("the kernel refuses a probe on its instruction".into()))?;
    let wanted = arguments_of(&note.name).unwrap_or(0);
    let mut operands = [Operand::default(); 3];
    let mut descriptors = note.arguments.split_ascii_whitespace();
    for operand in operands.iter_mut().take(wanted) {
        let why = || format!("it has fewer arguments than {wanted}: {:?}", note.arguments);
        let descriptor = descriptors.next().ok_or_else(|| refused(why()))?;
        *operand = operand_of(descriptor).map_err(|why| refused(format!("its argument {descriptor:?} {why}")))?;
    }
    Ok(PlannedSite {
        function: format!("{PROVIDER}:{}", note.name),
        site: Site {
            offset,
            function: if matches!(&*note.name, "mmap" | "munmap") { ANNOUNCED_MMAP } else { ANNOUNCED },
            operands: operands.map(|operand| operand.0),
            ..Arguments::NONE.site()
        },
        kind,
        reason,
        return_needed: end_of(&note.name).is_some(),
        return_probe: ReturnProbe::Harmless,
        return_sites: Vec::new(),
        announces: Some(semaphore),
    })
}

/// Where an argument is, from its descriptor: `8@%rdi`, `-4@16(%rsp)`, `8@$5`.
///
/// # Errors
/// Why it cannot be read, in words that follow the descriptor.
fn operand_of(descriptor: &str) -> Result<Operand, &'static str> {
    let (size, place) = descriptor.split_once('@').ok_or("does not state its size")?;
    let (size, is_signed) = size.strip_prefix('-').map_or((size, false), |size| (size, true));
    let log2 = ["1", "2", "4", "8"].iter().position(|known| *known == size);
    let bytes = 1_u8 << log2.ok_or("is not an integer of 1, 2, 4 or 8 bytes")?;
    if let Some(constant) = place.strip_prefix('$') {
        let value = number(constant).ok_or("is a constant that heapbpf cannot read")?;
        return Ok(Operand::constant(i32::try_from(value).map_err(|_| "is a constant of more than 32 bits")?));
    }
    if place.starts_with('%') {
        let register = register(place).ok_or("is in a register that heapbpf does not read")?;
        return Ok(Operand::register(register, bytes, is_signed));
    }
    let unsupported = "is at an address that heapbpf cannot compute: it supports a register with a displacement";
    let (displacement, inner) = place.strip_suffix(')').and_then(|rest| rest.split_once('(')).ok_or(unsupported)?;
    let displacement = if displacement.is_empty() { Some(0) } else { number(displacement) };
    let displacement = displacement.and_then(|it| i32::try_from(it).ok()).ok_or(unsupported)?;
    let base = register(inner).filter(|_| is_whole(inner)).ok_or(unsupported)?;
    Ok(Operand::memory(base, displacement, bytes, is_signed))
}

fn number(text: &str) -> Option<i64> {
    let (digits, negative) = text.strip_prefix('-').map_or((text, false), |digits| (digits, true));
    let value = match digits.strip_prefix("0x") {
        Some(hexadecimal) => i64::from_str_radix(hexadecimal, 16).ok()?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.checked_neg()? } else { value })
}

/// Names of the registers, and of their parts, by number in the instruction set.
const REGISTERS: [[&str; 4]; 16] = [
    ["rax", "eax", "ax", "al"],
    ["rcx", "ecx", "cx", "cl"],
    ["rdx", "edx", "dx", "dl"],
    ["rbx", "ebx", "bx", "bl"],
    ["rsp", "esp", "sp", "spl"],
    ["rbp", "ebp", "bp", "bpl"],
    ["rsi", "esi", "si", "sil"],
    ["rdi", "edi", "di", "dil"],
    ["r8", "r8d", "r8w", "r8b"],
    ["r9", "r9d", "r9w", "r9b"],
    ["r10", "r10d", "r10w", "r10b"],
    ["r11", "r11d", "r11w", "r11b"],
    ["r12", "r12d", "r12w", "r12b"],
    ["r13", "r13d", "r13w", "r13b"],
    ["r14", "r14d", "r14w", "r14b"],
    ["r15", "r15d", "r15w", "r15b"],
];

/// The number of a register, by name (`%eax`). The second byte of a register (`%ah`) is not supported.
fn register(name: &str) -> Option<u8> {
    let name = name.strip_prefix('%')?;
    let number = REGISTERS.iter().position(|names| names.contains(&name))?;
    u8::try_from(number).ok()
}

/// Whether a register's name means all of it.
fn is_whole(name: &str) -> bool {
    REGISTERS.iter().any(|names| name.strip_prefix('%') == Some(names[0]))
}

#[cfg(test)]
#[path = "usdt_tests.rs"]
mod tests;
