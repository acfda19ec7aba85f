//! Decides whether inline hooks made a process die, or the process did that itself. Pure.

use std::ops::Range;

use iced_x86::{Code, Decoder, DecoderOptions};

/// SIGILL.
pub const SIGILL: u32 = 4;
/// SIGTRAP.
pub const SIGTRAP: u32 = 5;
/// SIGBUS.
pub const SIGBUS: u32 = 7;
/// SIGSEGV.
pub const SIGSEGV: u32 = 11;

/// Most bytes of an instruction.
const LONGEST: usize = 15;
/// The instruction with which programs end themselves by a SIGTRAP.
const INT3: u8 = 0xcc;

/// Where our mappings are in a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// All addresses of the blob.
    pub mapped: Range<u64>,
    /// Copies of the functions' own instructions in it.
    pub originals: Vec<Range<u64>>,
    /// Pages of the allocator that were replaced.
    pub pages: Vec<Range<u64>>,
}

/// A place of ours at which a process died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Code of ours, so far from its beginning.
    Code(u64),
    /// An address in a replaced page.
    Page(u64),
}

impl Layout {
    /// Returns the place at which hooks made a process die by a signal, with its instruction pointer at `ip`; `None` if
    /// the process did that itself. `read` reads the allocator file's content at an address.
    ///
    /// A fault in a copy of the program's own instructions is the program's: they use its memory, which may be
    /// corrupted. In replaced pages, the same goes for memory faults, and for instructions that the file contains in
    /// order to end the process.
    #[must_use]
    pub fn blamed(&self, signal: u32, ip: u64, read: &dyn Fn(u64, &mut [u8]) -> bool) -> Option<Place> {
        // After a breakpoint, the instruction pointer is one byte behind it.
        let at = if signal == SIGTRAP { ip.wrapping_sub(1) } else { ip };
        let is_in = |ranges: &[Range<u64>], address: u64| ranges.iter().any(|range| range.contains(&address));
        let is_fault_of_memory = match signal {
            SIGILL | SIGTRAP => false,
            SIGBUS | SIGSEGV => true,
            _ => return None,
        };
        if let Some(address) = [at, ip].into_iter().find(|address| self.mapped.contains(address)) {
            let is_own = !is_in(&self.originals, address);
            return is_own.then_some(Place::Code(address - self.mapped.start));
        }
        let page = [at, ip].into_iter().find(|address| is_in(&self.pages, *address))?;
        (!is_fault_of_memory && !ends_itself(signal, ip, read)).then_some(Place::Page(page))
    }
}

/// Whether the file's own instruction ended a process by this signal.
fn ends_itself(signal: u32, ip: u64, read: &dyn Fn(u64, &mut [u8]) -> bool) -> bool {
    if signal == SIGTRAP {
        let mut before = [0];
        return read(ip.wrapping_sub(1), &mut before) && before == [INT3];
    }
    let mut bytes = [0; LONGEST];
    let undefined = [Code::INVALID, Code::Ud2, Code::Ud0, Code::Ud0_r64_rm64, Code::Ud1_r32_rm32, Code::Ud1_r64_rm64];
    read(ip, &mut bytes) && undefined.contains(&Decoder::new(64, &bytes, DecoderOptions::NONE).decode().code())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x10_0000;
    const PAGE: u64 = 0x7000;

    fn layout() -> Layout {
        Layout {
            mapped: BASE..BASE + 0x20_0000,
            originals: std::iter::once(BASE + 0x5020..BASE + 0x5040).collect(),
            pages: std::iter::once(PAGE..PAGE + 0x2000).collect(),
        }
    }

    /// The file has `mov eax, eax` everywhere, except for a `ud2` and an `int3` at the beginning of the second page.
    fn file(address: u64, bytes: &mut [u8]) -> bool {
        let own = [0x0f, 0x0b, INT3];
        let at = |address: u64| match address.checked_sub(PAGE + 0x1000) {
            Some(at @ 0..3) => own[at as usize],
            _ if address.is_multiple_of(2) => 0x89,
            _ => 0xc0,
        };
        bytes.iter_mut().zip(address..).for_each(|(byte, address)| *byte = at(address));
        true
    }

    fn blamed(signal: u32, ip: u64) -> Option<Place> {
        layout().blamed(signal, ip, &file)
    }

    #[test]
    fn what_happens_in_code_of_ours_is_ours() {
        for signal in [SIGILL, SIGTRAP, SIGBUS, SIGSEGV] {
            assert!(blamed(signal, BASE + 0x3123).is_some(), "{signal}");
            assert_eq!(blamed(signal, BASE - 0x100), None, "{signal}");
        }
        assert_eq!(blamed(SIGSEGV, BASE + 0x3123), Some(Place::Code(0x3123)));
        assert_eq!(blamed(SIGTRAP, BASE + 0x3123), Some(Place::Code(0x3122)), "where the breakpoint was");
        assert_eq!(blamed(SIGSEGV, BASE + 0x5040), Some(Place::Code(0x5040)), "behind the copies");
        assert_eq!(blamed(SIGILL, BASE + 0x1f_0000), Some(Place::Code(0x1f_0000)), "what is no code was ours, too");
    }

    #[test]
    fn what_happens_in_copies_of_the_programs_instructions_is_its_own() {
        for signal in [SIGILL, SIGBUS, SIGSEGV] {
            assert_eq!(blamed(signal, BASE + 0x5020), None, "{signal}");
            assert_eq!(blamed(signal, BASE + 0x503f), None, "{signal}");
        }
        assert_eq!(blamed(SIGTRAP, BASE + 0x5030), None);
    }

    #[test]
    fn in_replaced_pages_only_instructions_that_the_file_does_not_have_are_ours() {
        assert_eq!(blamed(SIGILL, PAGE + 0x10), Some(Place::Page(PAGE + 0x10)));
        assert_eq!(blamed(SIGTRAP, PAGE + 0x11), Some(Place::Page(PAGE + 0x10)), "behind a breakpoint");
        assert_eq!(blamed(SIGTRAP, PAGE), Some(Place::Page(PAGE)), "before one");
        assert_eq!(blamed(SIGTRAP, PAGE + 0x2000), Some(Place::Page(PAGE + 0x1fff)), "behind the last byte");
        for signal in [SIGBUS, SIGSEGV] {
            assert_eq!(blamed(signal, PAGE + 0x10), None, "heaps are corrupted by programs");
        }
        assert_eq!(blamed(SIGILL, PAGE + 0x1000), None, "the allocator ends the program");
        assert_eq!(blamed(SIGTRAP, PAGE + 0x1003), None, "the same");
    }

    #[test]
    fn other_signals_and_other_places_are_not_ours() {
        for signal in [0, 6, 9, 15, u32::MAX] {
            assert_eq!((blamed(signal, BASE + 0x3000), blamed(signal, PAGE)), (None, None), "{signal}");
        }
        for ip in [0, 1, PAGE - 1, u64::MAX] {
            assert_eq!((blamed(SIGSEGV, ip), blamed(SIGTRAP, ip)), (None, None), "{ip:#x}");
        }
        assert_eq!(Layout::default().blamed(SIGTRAP, 0, &file), None);
    }
}
