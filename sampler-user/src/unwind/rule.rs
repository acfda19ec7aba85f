//! How to get from a frame to its caller, boiled down from call frame information, and a cache of such rules.

use crate::arch;
use crate::host::mappings::ModuleId;

/// Where a preserved register's value in the caller is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved(i16);

impl Saved {
    /// Unchanged.
    pub const SAME: Self = Self(i16::MIN);
    /// Lost.
    pub const UNDEFINED: Self = Self(i16::MIN + 1);

    /// Saved at `offset` bytes from the canonical frame address; `None` if that does not fit in the short form.
    pub fn at(offset: i64) -> Option<Self> {
        let words = i16::try_from(offset / 8).ok()?;
        (offset % 8 == 0 && words > Self::UNDEFINED.0).then_some(Self(words))
    }

    /// Offset from the canonical frame address in bytes, if it is saved there.
    pub fn offset(self) -> Option<i64> {
        (self.0 > Self::UNDEFINED.0).then(|| i64::from(self.0) * 8)
    }
}

/// The rule of nearly all frames: the canonical frame address (CFA) is a register plus an offset, the rest is saved
/// at offsets from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainRule {
    /// CFA = this register …
    pub cfa_register: u8,
    /// … plus this, bytes.
    pub cfa_offset: i32,
    /// The return address; [`Saved::SAME`] if it is still in the link register of a machine that has one.
    pub return_address: Saved,
    /// In the order of [`arch::PRESERVED`].
    pub preserved: [Saved; arch::PRESERVED.len()],
}

/// How to leave a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The return address is undefined: this is where the thread (or the process) began.
    End,
    /// Offsets.
    Plain(PlainRule),
    /// Anything else (expressions, signal frames): evaluated anew each time from this entry.
    Entry {
        /// Which section.
        section: Section,
        /// Offset of the frame description entry in it.
        offset: u32,
    },
    /// No call frame information covers the address: by frame pointer.
    Uncovered,
    /// The address is at the program's entry point, which has no caller.
    EntryPoint,
    /// A signal trampoline without call frame information; the interrupted registers are at the stack pointer.
    SignalTrampoline,
    /// The information is malformed.
    Bad,
}

/// Section with call frame information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// `.eh_frame`
    EhFrame,
    /// `.debug_frame`
    DebugFrame,
}

/// A [`Rule`] as found for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRule {
    /// The rule.
    pub rule: Rule,
    /// The address before the return address belongs to nobody and the return address is a function's first byte:
    /// nobody called from there, the address was put on the stack by hand (`makecontext`).
    pub planted: bool,
}

const CACHE_SLOTS: usize = 1 << 15;

/// Rules by (module, file offset), direct-mapped. Modules never change their bytes under one id, so one cache serves
/// every process and every change of mappings.
pub struct RuleCache {
    slots: Box<[Option<(ModuleId, u64, FoundRule)>]>,
    /// Look-ups that found their rule.
    pub hits: u64,
    /// Look-ups that did not.
    pub misses: u64,
}

impl Default for RuleCache {
    fn default() -> Self {
        Self { slots: vec![None; CACHE_SLOTS].into_boxed_slice(), hits: 0, misses: 0 }
    }
}

impl RuleCache {
    fn slot(module: ModuleId, offset: u64) -> usize {
        let mixed = (offset ^ u64::from(module.0).rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 49) as usize % CACHE_SLOTS
    }

    /// The rule kept for this address.
    pub fn get(&mut self, module: ModuleId, offset: u64) -> Option<FoundRule> {
        match &self.slots[Self::slot(module, offset)] {
            Some((kept_module, kept_offset, rule)) if *kept_module == module && *kept_offset == offset => {
                self.hits += 1;
                Some(*rule)
            }
            _ => {
                self.misses += 1;
                None
            }
        }
    }

    /// Keeps a rule in place of whatever was in its slot.
    pub fn put(&mut self, module: ModuleId, offset: u64, rule: FoundRule) {
        self.slots[Self::slot(module, offset)] = Some((module, offset, rule));
    }
}
