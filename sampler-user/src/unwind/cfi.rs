//! A module's call frame information: its sections in memory, and the rule for an address.

use gimli::{BaseAddresses, CfaRule, DebugFrame, EhFrame, EhFrameHdr, EndianSlice, LittleEndian};
use gimli::{FrameDescriptionEntry, RegisterRule, UnwindSection};

use super::elf::{Elf, ElfError, PT_GNU_EH_FRAME, read_range};
use super::image::Image;
use super::rule::{FoundRule, PlainRule, Rule, Saved, Section};
use crate::arch;

/// Bytes as gimli reads them.
pub type Bytes<'a> = EndianSlice<'a, LittleEndian>;
/// A frame description entry.
pub type Entry<'a> = FrameDescriptionEntry<Bytes<'a>>;
/// Scratch of row evaluation.
pub type Context = gimli::UnwindContext<usize>;

/// Largest section that is read, bytes.
const MAX_SECTION_BYTES: u64 = 64 << 20;
/// Most entries that are indexed where a file has no search table.
const MAX_INDEXED: usize = 2_000_000;
/// Largest entry whose instructions are evaluated, bytes. (The largest one in Debian's libLLVM has 9 KiB.)
const MAX_ENTRY_BYTES: usize = 256 << 10;
/// Code of the entry point, bytes: `_start`, in the dynamic loader together with `_dl_start_user`.
const ENTRY_POINT_BYTES: u64 = 64;

/// Unwind information of one module, shared by all processes that map it.
pub struct ModuleCfi {
    elf: Elf,
    bases: BaseAddresses,
    eh_frame: Vec<u8>,
    eh_frame_header: Vec<u8>,
    eh_frame_index: Option<Index>,
    debug_frame: Vec<u8>,
    debug_frame_index: Option<Index>,
}

/// Entries of a section by the first address each covers.
struct Index {
    starts: Vec<u64>,
    offsets: Vec<u32>,
}

/// What evaluating a stack's rules may still cost, bytes of call frame instructions.
#[derive(Clone, Copy, Debug)]
pub struct Budget(pub usize);

impl Budget {
    /// For one stack: a thousand of the largest entries that real modules have.
    pub fn of_one_stack() -> Self {
        Self(8 << 20)
    }

    /// Whether nothing is left.
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
    /// [`ElfError`] if the file is unreadable or no ELF file. A file without unwind information is no error.
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

    /// Bytes held.
    pub fn size_bytes(&self) -> usize {
        let index = |index: &Option<Index>| index.as_ref().map_or(0, |index| index.starts.len() * 12);
        self.eh_frame.len()
            + self.eh_frame_header.len()
            + self.debug_frame.len()
            + index(&self.eh_frame_index)
            + index(&self.debug_frame_index)
            + self.elf.sections.len() * size_of::<super::elf::Section>()
    }

    /// Whether there is any unwind information.
    pub fn is_empty(&self) -> bool {
        self.eh_frame.is_empty() && self.debug_frame.is_empty()
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
        // A table that claims more entries than there are bytes is none.
        let counts =
            header.table().is_some_and(|table| table.iter(&self.bases).size_hint().0 <= self.eh_frame_header.len());
        counts && header.eh_frame_ptr().direct().ok() == self.bases.eh_frame.section
    }

    /// The rule for the code at `file_offset` of this module. If `is_return` is set, the address is a return address
    /// minus one. `code` reads bytes of the file, if they can be had.
    pub fn rule(
        &self,
        context: &mut Context,
        file_offset: u64,
        is_return: bool,
        code: &mut dyn FnMut(u64, &mut [u8]) -> bool,
        budget: &mut Budget,
    ) -> FoundRule {
        let plain = |rule| FoundRule { rule, planted: false };
        let Some(address) = self.elf.address_of_offset(file_offset) else { return plain(Rule::Uncovered) };
        let rule = self.rule_at(context, address, budget);
        if rule != Rule::Uncovered {
            return plain(rule);
        }
        if is_return && let Some(rule) = self.rule_of_planted(context, address.wrapping_add(1), budget) {
            return FoundRule { rule, planted: true };
        }
        if self.elf.entry != 0 && address.wrapping_sub(self.elf.entry) < ENTRY_POINT_BYTES {
            return plain(Rule::EntryPoint);
        }
        let mut bytes = [0; arch::SIGNAL_TRAMPOLINE.len()];
        if code(file_offset + u64::from(is_return), &mut bytes) && bytes == arch::SIGNAL_TRAMPOLINE {
            return FoundRule { rule: Rule::SignalTrampoline, planted: is_return };
        }
        plain(Rule::Uncovered)
    }

    fn rule_of_planted(&self, context: &mut Context, address: u64, budget: &mut Budget) -> Option<Rule> {
        let starts = self.eh_entry(address).is_some_and(|(entry, _)| entry.initial_address() == address);
        starts.then(|| self.rule_at(context, address, budget)).filter(|rule| *rule != Rule::Uncovered)
    }

    fn rule_at(&self, context: &mut Context, address: u64, budget: &mut Budget) -> Rule {
        if let Some((entry, offset)) = self.eh_entry(address) {
            let section = self.eh_frame_section();
            return row_rule(&section, &self.bases, &entry, context, address, Section::EhFrame, offset, budget);
        }
        if let Some(index) = &self.debug_frame_index {
            let section = self.debug_frame_section();
            if let Some((entry, offset)) = index.entry(&section, &self.bases, address) {
                return row_rule(&section, &self.bases, &entry, context, address, Section::DebugFrame, offset, budget);
            }
        }
        Rule::Uncovered
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

    /// Hands the row for `file_offset` in the entry at `offset` of `section` to `visit`, with what is needed to
    /// evaluate its expressions.
    pub fn with_row<T>(
        &self,
        context: &mut Context,
        file_offset: u64,
        section: Section,
        offset: u32,
        visit: impl FnOnce(Row<'_, '_>) -> T,
    ) -> Option<T> {
        let address = self.elf.address_of_offset(file_offset)?;
        let offset = offset as usize;
        match section {
            Section::EhFrame => {
                let section = self.eh_frame_section();
                let entry = section.fde_from_offset(&self.bases, offset.into(), EhFrame::cie_from_offset).ok()?;
                let row = entry.unwind_info_for_address(&section, &self.bases, context, address).ok()?;
                Some(visit(Row { row, section: &self.eh_frame, entry: &entry }))
            }
            Section::DebugFrame => {
                let section = self.debug_frame_section();
                let entry = section.fde_from_offset(&self.bases, offset.into(), DebugFrame::cie_from_offset).ok()?;
                let row = entry.unwind_info_for_address(&section, &self.bases, context, address).ok()?;
                Some(visit(Row { row, section: &self.debug_frame, entry: &entry }))
            }
        }
    }
}

/// One evaluated row of call frame information.
pub struct Row<'a, 'c> {
    /// The row.
    pub row: &'c gimli::UnwindTableRow<usize>,
    /// Bytes of the section it came from, which its expressions point into.
    pub section: &'a [u8],
    /// The entry it came from.
    pub entry: &'c Entry<'a>,
}

/// `.eh_frame` by the program header alone: (section, header, bases).
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

#[expect(clippy::too_many_arguments, reason = "two kinds of section share it")]
fn row_rule<'a, S: UnwindSection<Bytes<'a>>>(
    section: &S,
    bases: &BaseAddresses,
    entry: &Entry<'a>,
    context: &mut Context,
    address: u64,
    kind: Section,
    offset: u32,
    budget: &mut Budget,
) -> Rule {
    let cost = entry.entry_len().saturating_add(entry.cie().entry_len());
    if budget.spend(cost).is_none() {
        return Rule::Bad;
    }
    let Ok(row) = entry.unwind_info_for_address(section, bases, context, address) else { return Rule::Bad };
    if entry.cie().return_address_register().0 != arch::RETURN_ADDRESS {
        return Rule::Bad;
    }
    let general = Rule::Entry { section: kind, offset };
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
    // A row that says where the caller's stack pointer is, other than at the CFA, is a special one.
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
        // What was read before an error is kept: the rest is then uncovered.
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
            // A linker leaves entries of dropped functions behind, with address zero.
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
