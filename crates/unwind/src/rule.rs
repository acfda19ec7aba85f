//! Rules that lead from a frame to its caller: a compact form of call frame information.

use crate::arch;

/// Where a function keeps its caller's value of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved(i16);

impl Saved {
    /// Still in the register.
    pub const SAME: Self = Self(i16::MIN);
    /// Nowhere: the value is lost.
    pub const UNDEFINED: Self = Self(i16::MIN + 1);

    /// On the stack, `offset` bytes from the canonical frame address; `None` if that does not fit into the compact
    /// form.
    pub fn at(offset: i64) -> Option<Self> {
        let words = i16::try_from(offset / 8).ok()?;
        (offset % 8 == 0 && words > Self::UNDEFINED.0).then_some(Self(words))
    }

    /// Offset from the canonical frame address, bytes, if it is on the stack.
    pub fn offset(self) -> Option<i64> {
        (self.0 > Self::UNDEFINED.0).then(|| i64::from(self.0) * 8)
    }
}

/// The rule for nearly all frames: the canonical frame address (CFA) is a register plus an offset, and registers are
/// saved at offsets from the CFA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainRule {
    /// Register that the CFA is relative to, by DWARF number.
    pub cfa_register: u8,
    /// Distance of the CFA from that register, bytes.
    pub cfa_offset: i32,
    /// The return address; [`Saved::SAME`] if it is still in the link register, on machines that have one.
    pub return_address: Saved,
    /// Registers that calls preserve, in the order of the architecture's table.
    pub preserved: [Saved; arch::PRESERVED.len()],
}

/// How to get from a frame to its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// The return address is undefined: the thread or the process began here.
    End,
    /// By offsets from the canonical frame address.
    Plain(PlainRule),
    /// Anything else (expressions, signal frames): this entry is evaluated each time.
    Entry {
        /// Section that the entry is in.
        section: Section,
        /// Offset of the frame description entry in the section, bytes.
        offset: u32,
    },
    /// No call frame information covers the address.
    Uncovered,
    /// The address is at the program's entry point, which has no caller.
    EntryPoint,
    /// A signal trampoline: the interrupted registers are at fixed distances from the stack pointer.
    SignalTrampoline,
    /// The information is malformed.
    Bad,
}

/// A section with call frame information.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    /// `.eh_frame`
    EhFrame,
    /// `.debug_frame`
    DebugFrame,
}

/// A [`Rule`] for an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRule {
    /// The rule.
    pub rule: Rule,
    /// Whether the return address is synthetic: it was not pushed by a call, but written to the stack by code
    /// (`makecontext`). It is the first byte of a function, and no function contains the byte before it.
    pub synthetic: bool,
}
