//! The call frame information of one module: its sections, held in memory, and the rule for an address.
//!
//! Sections are found through the section headers, or through the program header of `.eh_frame_hdr` if there are none.

use gimli::{BaseAddresses, CfaRule, DebugFrame, EhFrame, EhFrameHdr, EndianSlice, LittleEndian};
use gimli::{FrameDescriptionEntry, RegisterRule, UnwindSection};

use crate::arch;
use crate::image::Image;
use crate::rule::{FoundRule, PlainRule, Rule, Saved, Section};
use heapbpf_elf::{Elf, ElfError, PT_GNU_EH_FRAME, read_range};

/// Section contents as `gimli` reads them.
pub(crate) type Bytes<'a> = EndianSlice<'a, LittleEndian>;
/// A frame description entry.
pub(crate) type Entry<'a> = FrameDescriptionEntry<Bytes<'a>>;
/// Reusable memory for evaluating rows.
pub type Context = gimli::UnwindContext<usize>;

/// Largest section that is read, bytes.
const MAX_SECTION_BYTES: u64 = 64 << 20;
/// Maximum number of entries that are indexed in a section without a search table.
const MAX_INDEXED: usize = 2_000_000;
/// Largest entry whose instructions are evaluated, bytes. (The largest one in Debian's libLLVM has 9 KiB.)
const MAX_ENTRY_BYTES: usize = 256 << 10;
/// How many bytes of a section are read in the time in which one byte of its entries is indexed, roughly.
const INDEXED: usize = 8;
/// Size of the code at the entry point, bytes: `_start`, in the dynamic loader together with `_dl_start_user`.
const ENTRY_POINT_BYTES: u64 = 64;

/// The call frame information of one module, shared by all processes that map it.
pub struct ModuleCfi {
    elf: Elf,
    bases: BaseAddresses,
    eh_frame: Vec<u8>,
    eh_frame_header: Vec<u8>,
    eh_frame_index: Option<Index>,
    debug_frame: Vec<u8>,
    debug_frame_index: Option<Index>,
}

/// Entries of a section, ordered by the first address that each covers.
struct Index {
    starts: Vec<u64>,
    offsets: Vec<u32>,
}

/// The remaining work allowed for one stack: bytes of call frame instructions to evaluate.
#[derive(Clone, Copy, Debug)]
pub struct Budget(pub usize);

impl Budget {
    /// The budget for one stack: a thousand times the largest entry that real modules have.
    pub fn of_one_stack() -> Self {
        Self(8 << 20)
    }

    /// Whether the budget is used up.
    pub fn is_spent(self) -> bool {
        self.0 == 0
    }

    fn spend(&mut self, bytes: usize) -> Option<()> {
        if bytes > MAX_ENTRY_BYTES {
            return None;
        }
        match self.0.checked_sub(bytes) {
            Some(rest) => self.0 = rest,
            None => self.0 = 0,
        }
        (self.0 > 0).then_some(())
    }
}

impl ModuleCfi {
    /// Reads the unwind sections.
    ///
    /// # Errors
    /// [`ElfError`] if the file cannot be read or is not an ELF file. A file without unwind sections is not an error.
    pub fn read(image: &dyn Image) -> Result<Self, ElfError> {
        let elf = Elf::read(image)?;
        let section = |name: &str| {
            elf.section(name).and_then(|section| section.read(image, MAX_SECTION_BYTES).ok()).unwrap_or_default()
        };
        let address = |name: &str| elf.section(name).map_or(0, |section| section.address);
        let mut bases = BaseAddresses::default()
            .set_eh_frame(address(".eh_frame"))
            .set_eh_frame_hdr(address(".eh_frame_hdr"))
            .set_text(address(".text"))
            .set_got(address(".got"));
        let (mut eh_frame, mut eh_frame_header) = (section(".eh_frame"), section(".eh_frame_hdr"));
        if eh_frame.is_empty()
            && let Some(found) = from_segments(&elf, image)
        {
            (eh_frame, eh_frame_header, bases) = found;
        }
        let debug_frame = section(".debug_frame");
        let mut module =
            Self { bases, eh_frame, eh_frame_header, eh_frame_index: None, debug_frame, debug_frame_index: None, elf };
        if !module.has_search_table() {
            module.eh_frame_header = Vec::new();
            module.eh_frame_index = Index::build(&module.eh_frame_section(), &module.bases);
        }
        module.debug_frame_index = Index::build(&module.debug_frame_section(), &module.bases);
        Ok(module)
    }

    /// Memory used by the sections and their indexes, bytes.
    pub fn size_bytes(&self) -> usize {
        let index = |index: &Option<Index>| index.as_ref().map_or(0, |index| index.starts.len() * 12);
        self.eh_frame.len()
            + self.eh_frame_header.len()
            + self.debug_frame.len()
            + index(&self.eh_frame_index)
            + index(&self.debug_frame_index)
            + self.elf.sections.len() * size_of::<heapbpf_elf::Section>()
    }

    /// What reading the module took, in bytes that could have been read in that time. Without a search table, each
    /// entry of a section is read.
    pub(crate) fn cost_bytes(&self) -> usize {
        let eh_frame = if self.eh_frame_header.is_empty() { self.eh_frame.len() } else { 0 };
        let indexed = eh_frame.saturating_add(self.debug_frame.len());
        self.size_bytes().saturating_add(indexed.saturating_mul(INDEXED))
    }

    fn eh_frame_section(&self) -> EhFrame<Bytes<'_>> {
        let mut section = EhFrame::new(&self.eh_frame, LittleEndian);
        section.set_address_size(8);
        section.set_vendor(arch::VENDOR);
        section
    }

    fn debug_frame_section(&self) -> DebugFrame<Bytes<'_>> {
        let mut section = DebugFrame::new(&self.debug_frame, LittleEndian);
        section.set_address_size(8);
        section.set_vendor(arch::VENDOR);
        section
    }

    fn has_search_table(&self) -> bool {
        let header = EhFrameHdr::new(&self.eh_frame_header, LittleEndian).parse(&self.bases, 8);
        let Ok(header) = header else { return false };
        // A table that claims more entries than the section has bytes is malformed.
        let counts =
            header.table().is_some_and(|table| table.iter(&self.bases).size_hint().0 <= self.eh_frame_header.len());
        counts && header.eh_frame_ptr().direct().ok() == self.bases.eh_frame.section
    }

    /// Returns the rule for the code at `file_offset` of the file.
    ///
    /// `is_return`: the offset is that of a return address minus one. `code` reads bytes of the file at an offset into
    /// a buffer, and returns whether it succeeded. Evaluation is charged to `budget`.
    pub fn rule(
        &self,
        context: &mut Context,
        file_offset: u64,
        is_return: bool,
        code: &mut dyn FnMut(u64, &mut [u8]) -> bool,
        budget: &mut Budget,
    ) -> FoundRule {
        let plain = |rule| FoundRule { rule, synthetic: false };
        let Some(address) = self.elf.address_of_offset(file_offset) else { return plain(Rule::Uncovered) };
        let rule = self.rule_at(context, address, budget);
        if rule != Rule::Uncovered {
            return plain(rule);
        }
        if is_return && let Some(rule) = self.rule_of_synthetic_return(context, address.wrapping_add(1), budget) {
            return FoundRule { rule, synthetic: true };
        }
        if self.elf.entry != 0 && address.wrapping_sub(self.elf.entry) < ENTRY_POINT_BYTES {
            return plain(Rule::EntryPoint);
        }
        let mut bytes = [0; arch::SIGNAL_TRAMPOLINE.len()];
        if code(file_offset + u64::from(is_return), &mut bytes) && bytes == arch::SIGNAL_TRAMPOLINE {
            return FoundRule { rule: Rule::SignalTrampoline, synthetic: is_return };
        }
        plain(Rule::Uncovered)
    }

    fn rule_of_synthetic_return(&self, context: &mut Context, address: u64, budget: &mut Budget) -> Option<Rule> {
        let starts = self.eh_entry(address).is_some_and(|(entry, _)| entry.initial_address() == address);
        starts.then(|| self.rule_at(context, address, budget)).filter(|rule| *rule != Rule::Uncovered)
    }

    fn rule_at(&self, context: &mut Context, address: u64, budget: &mut Budget) -> Rule {
        if let Some((entry, offset)) = self.eh_entry(address) {
            let section = self.eh_frame_section();
            let general = Rule::Entry { section: Section::EhFrame, offset };
            return row_rule(&section, &self.bases, &entry, context, address, general, budget);
        }
        if let Some(index) = &self.debug_frame_index {
            let section = self.debug_frame_section();
            if let Some((entry, offset)) = index.entry(&section, &self.bases, address) {
                let general = Rule::Entry { section: Section::DebugFrame, offset };
                return row_rule(&section, &self.bases, &entry, context, address, general, budget);
            }
        }
        Rule::Uncovered
    }

    /// Returns where the function at `address` begins, by the range of its entry; `None` if no entry covers the
    /// address. Both addresses are as in the ELF headers. A part of a function that the compiler moved elsewhere
    /// (`.cold`) has an entry of its own.
    pub fn function_start(&self, address: u64) -> Option<u64> {
        if let Some((entry, _)) = self.eh_entry(address) {
            return Some(entry.initial_address());
        }
        let index = self.debug_frame_index.as_ref()?;
        index.entry(&self.debug_frame_section(), &self.bases, address).map(|(entry, _)| entry.initial_address())
    }

    fn eh_entry(&self, address: u64) -> Option<(Entry<'_>, u32)> {
        let section = self.eh_frame_section();
        if let Some(index) = &self.eh_frame_index {
            return index.entry(&section, &self.bases, address);
        }
        let header = EhFrameHdr::new(&self.eh_frame_header, LittleEndian).parse(&self.bases, 8).ok()?;
        let found = header.table()?.lookup(address, &self.bases).ok()?.direct().ok()?;
        let offset = u32::try_from(found.checked_sub(self.bases.eh_frame.section?)?).ok()?;
        let entry = section.fde_from_offset(&self.bases, (offset as usize).into(), EhFrame::cie_from_offset).ok()?;
        entry.contains(address).then_some((entry, offset))
    }

    /// Calls `visit` with the row for `file_offset` in the entry at `offset` of `section`, and returns its result;
    /// `None` if there is no such row, or `budget` is used up.
    pub(crate) fn with_row<T>(
        &self,
        context: &mut Context,
        file_offset: u64,
        (section, offset): (Section, u32),
        budget: &mut Budget,
        visit: impl FnOnce(Row<'_, '_>) -> T,
    ) -> Option<T> {
        let address = self.elf.address_of_offset(file_offset)?;
        let offset = offset as usize;
        match section {
            Section::EhFrame => {
                let section = self.eh_frame_section();
                let entry = section.fde_from_offset(&self.bases, offset.into(), EhFrame::cie_from_offset).ok()?;
                budget.spend(cost(&entry))?;
                let row = entry.unwind_info_for_address(&section, &self.bases, context, address).ok()?;
                Some(visit(Row { row, section: &self.eh_frame, entry: &entry }))
            }
            Section::DebugFrame => {
                let section = self.debug_frame_section();
                let entry = section.fde_from_offset(&self.bases, offset.into(), DebugFrame::cie_from_offset).ok()?;
                budget.spend(cost(&entry))?;
                let row = entry.unwind_info_for_address(&section, &self.bases, context, address).ok()?;
                Some(visit(Row { row, section: &self.debug_frame, entry: &entry }))
            }
        }
    }
}

/// A row of call frame information, with the data that its expressions need.
pub(crate) struct Row<'a, 'c> {
    /// The row.
    pub row: &'c gimli::UnwindTableRow<usize>,
    /// Contents of its section, which its expressions point into.
    pub section: &'a [u8],
    /// Its entry.
    pub entry: &'c Entry<'a>,
}

/// Finds `.eh_frame` through the program headers alone: (section, header, bases).
fn from_segments(elf: &Elf, image: &dyn Image) -> Option<(Vec<u8>, Vec<u8>, BaseAddresses)> {
    let segment = elf.segments.iter().find(|segment| segment.kind == PT_GNU_EH_FRAME)?;
    let header = read_range(image, "unwind header", segment.offset, segment.file_bytes, MAX_SECTION_BYTES).ok()?;
    let mut bases = BaseAddresses::default().set_eh_frame_hdr(segment.address);
    let start = EhFrameHdr::new(&header, LittleEndian).parse(&bases, 8).ok()?.eh_frame_ptr().direct().ok()?;
    bases = bases.set_eh_frame(start);
    let bytes = elf.segment_end(start)?.checked_sub(start)?;
    let section = read_range(image, "unwind section", elf.offset_of_address(start)?, bytes, MAX_SECTION_BYTES).ok()?;
    Some((section, header, bases))
}

/// Bytes of instructions that evaluating an entry may take.
fn cost(entry: &Entry<'_>) -> usize {
    entry.entry_len().saturating_add(entry.cie().entry_len())
}

/// Converts the row for `address` in `entry` to a rule. Returns `general` if the row must be evaluated each time.
fn row_rule<'a, S: UnwindSection<Bytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    entry: &Entry<'a>,
    context: &mut Context,
    address: u64,
    general: Rule,
    budget: &mut Budget,
) -> Rule {
    if budget.spend(cost(entry)).is_none() {
        return Rule::Bad;
    }
    let Ok(row) = entry.unwind_info_for_address(section, bases, context, address) else { return Rule::Bad };
    if entry.cie().return_address_register().0 != arch::RETURN_ADDRESS {
        return Rule::Bad;
    }
    if entry.is_signal_trampoline() {
        return if arch::SIGNAL_FRAMES_BY_CFI { general } else { Rule::SignalTrampoline };
    }
    match row.register(gimli::Register(arch::RETURN_ADDRESS)) {
        Some(RegisterRule::Undefined) => return Rule::End,
        None if arch::LINK.is_none() => return Rule::End,
        _ => {}
    }
    plain_rule(row).map_or(general, Rule::Plain)
}

fn plain_rule(row: &gimli::UnwindTableRow<usize>) -> Option<PlainRule> {
    let CfaRule::RegisterAndOffset { register, offset } = row.cfa() else { return None };
    let saved = |number| match row.register(gimli::Register(number)) {
        None | Some(RegisterRule::SameValue) => Some(Saved::SAME),
        Some(RegisterRule::Undefined) => Some(Saved::UNDEFINED),
        Some(RegisterRule::Offset(offset)) => Saved::at(offset),
        Some(_) => None,
    };
    let mut preserved = [Saved::SAME; arch::PRESERVED.len()];
    for (rule, number) in preserved.iter_mut().zip(arch::PRESERVED) {
        *rule = saved(number)?;
    }
    // The caller's stack pointer is the CFA, unless the row has a rule for it.
    if row.register(gimli::Register(arch::STACK_POINTER)).is_some() || usize::from(register.0) >= arch::COUNT {
        return None;
    }
    Some(PlainRule {
        cfa_register: u8::try_from(register.0).ok()?,
        cfa_offset: i32::try_from(*offset).ok()?,
        return_address: saved(arch::RETURN_ADDRESS)?,
        preserved,
    })
}

impl Index {
    fn build<'a, S: UnwindSection<Bytes<'a>>>(section: &S, bases: &BaseAddresses) -> Option<Self>
    where
        S::Offset: From<usize>,
    {
        let mut found: Vec<(u64, u32)> = Vec::new();
        let mut entries = section.entries(bases);
        let mut last_cie: Option<gimli::CommonInformationEntry<Bytes<'a>>> = None;
        // Entries before an error are kept. The code after it counts as not covered.
        while let Ok(Some(entry)) = entries.next() {
            let gimli::CieOrFde::Fde(partial) = entry else { continue };
            let parsed = partial.parse(|section, bases, offset| {
                let number = gimli::UnwindOffset::into(offset);
                if let Some(cie) = last_cie.as_ref().filter(|cie| cie.offset() == number) {
                    return Ok(cie.clone());
                }
                let cie = section.cie_from_offset(bases, offset)?;
                last_cie = Some(cie.clone());
                Ok(cie)
            });
            let Ok(entry) = parsed else { continue };
            let Ok(offset) = u32::try_from(entry.offset()) else { break };
            // Linkers leave entries of removed functions behind, with address zero.
            if entry.initial_address() != 0 {
                found.push((entry.initial_address(), offset));
            }
            if found.len() >= MAX_INDEXED {
                break;
            }
        }
        if found.is_empty() {
            return None;
        }
        found.sort_unstable();
        let (starts, offsets) = found.into_iter().unzip();
        Some(Self { starts, offsets })
    }

    fn entry<'a, S: UnwindSection<Bytes<'a>>>(
        &self,
        section: &S,
        bases: &BaseAddresses,
        address: u64,
    ) -> Option<(Entry<'a>, u32)>
    where
        S::Offset: From<usize>,
    {
        let at = self.starts.partition_point(|start| *start <= address).checked_sub(1)?;
        let offset = self.offsets[at];
        let entry = section.fde_from_offset(bases, (offset as usize).into(), S::cie_from_offset).ok()?;
        entry.contains(address).then_some((entry, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: u64 = 0x40_0200;

    /// A file of 4 KiB with one segment, executable at 0x400000, and nothing else.
    fn without_sections() -> Vec<u8> {
        let mut file = vec![0; 4096];
        file[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        // e_type, e_machine, e_version, e_entry, e_phoff, then e_ehsize, e_phentsize, e_phnum.
        put(16, &[2, 0, 62, 0, 1]);
        put(24, &ENTRY.to_le_bytes());
        put(32, &64_u64.to_le_bytes());
        put(52, &[64, 0, 56, 0, 1]);
        // PT_LOAD, readable and executable; p_offset is 0.
        put(64, &[1, 0, 0, 0, 5]);
        for (field, value) in [(16, 0x40_0000_u64), (24, 0x40_0000), (32, 4096), (40, 4096), (48, 4096)] {
            put(64 + field, &value.to_le_bytes());
        }
        file
    }

    fn rule(file_offset: u64, is_return: bool, code: &[u8]) -> FoundRule {
        let module = ModuleCfi::read(&without_sections()).expect("well-formed");
        let mut read = |_, buffer: &mut [u8]| {
            let is_there = buffer.len() <= code.len();
            buffer.iter_mut().zip(code).for_each(|(to, from)| *to = *from);
            is_there
        };
        let mut budget = Budget::of_one_stack();
        module.rule(&mut Context::new(), file_offset, is_return, &mut read, &mut budget)
    }

    #[test]
    fn code_without_information_is_told_by_what_it_is() {
        let plain = |rule| FoundRule { rule, synthetic: false };
        assert_eq!(rule(0x200, false, &[]), plain(Rule::EntryPoint));
        assert_eq!(rule(0x200 + ENTRY_POINT_BYTES - 1, true, &[]), plain(Rule::EntryPoint));
        assert_eq!(rule(0x200 + ENTRY_POINT_BYTES, true, &[]), plain(Rule::Uncovered));
        let trampoline = FoundRule { rule: Rule::SignalTrampoline, synthetic: true };
        assert_eq!(rule(0x100, true, &arch::SIGNAL_TRAMPOLINE), trampoline);
        assert_eq!(rule(0x100, false, &arch::SIGNAL_TRAMPOLINE[1..]), plain(Rule::Uncovered));
        // In no segment.
        assert_eq!(rule(0x4000, false, &arch::SIGNAL_TRAMPOLINE), plain(Rule::Uncovered));
    }

    #[test]
    fn a_row_that_is_evaluated_for_each_frame_is_charged_each_time() {
        let module = ModuleCfi::read(&std::fs::File::open("/proc/self/exe").expect("our own")).expect("well-formed");
        let mut code = (0..4096).map(|at| module.elf.entry + 16 * at);
        let found = code.find_map(|address| Some((address, module.eh_entry(address)?.1)));
        let (address, offset) = found.expect("a function with an entry");
        let file_offset = module.elf.offset_of_address(address).expect("in a segment");
        let evaluate = |budget: &mut Budget| {
            module.with_row(&mut Context::new(), file_offset, (Section::EhFrame, offset), budget, |_| ())
        };
        let mut budget = Budget::of_one_stack();
        let mut left = vec![budget.0];
        for _ in 0..3 {
            assert!(evaluate(&mut budget).is_some());
            left.push(budget.0);
        }
        assert!(left[0] - left[1] > 0 && left[1] - left[2] == left[2] - left[3], "{left:?}");
        assert!(evaluate(&mut Budget(1)).is_none());
    }

    #[test]
    fn a_budget_ends_for_good() {
        let mut budget = Budget::of_one_stack();
        assert_eq!(budget.spend(MAX_ENTRY_BYTES + 1), None, "no single entry may be as large");
        assert!(!budget.is_spent());
        let most = budget.0 / MAX_ENTRY_BYTES;
        let spent = (0..2 * most).filter(|_| budget.spend(MAX_ENTRY_BYTES).is_some()).count();
        assert_eq!(spent, most - 1);
        assert!(budget.is_spent() && budget.spend(1).is_none());
    }
}
