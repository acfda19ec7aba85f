//! The signal frame under which a thread makes our system calls, and the instructions in a target that make them. Pure.
//!
//! If the injector dies at any moment, the thread finishes the call and returns into the C library's restorer, or code
//! that serves as one. rt_sigreturn(2) then restores its registers, signal mask and vector state.

use std::arch::x86_64::__cpuid_count;

use memchr::memmem;

use crate::interrupted::SYSCALL_BYTES;
use crate::sys::Registers;

/// Code segment of 64-bit programs.
pub(crate) const CODE_SEGMENT: u64 = 0x33;
/// The word behind rip and eflags in a signal frame: cs, gs, fs, ss of a 64-bit program.
pub(crate) const SEGMENTS: u64 = 0x002b_0000_0000_0033;
/// Bytes below the stack pointer that belong to the running function.
const RED_ZONE: u64 = 128;
/// Space for a string above the frame, bytes.
pub(crate) const SCRATCH_BYTES: u64 = 256;
/// Bytes of `struct rt_sigframe`: return address, ucontext, siginfo.
const FRAME_BYTES: u64 = 440;
/// Offset of rip in it.
const RIP: u64 = 176;
/// UC_FP_XSTATE, UC_SIGCONTEXT_SS, UC_STRICT_RESTORE_SS.
const CONTEXT_FLAGS: u64 = 7;
/// Deliberately invalid `ss_flags`: rt_sigreturn then leaves the alternate stack as it is.
const NO_ALTERNATE_STACK: u64 = 0x7f;
/// The trap and direction flags, which must be clear when the thread makes a call.
const TRAP_AND_DIRECTION: u64 = 0x500;

/// `FP_XSTATE_MAGIC1` and `FP_XSTATE_MAGIC2`.
const MAGIC: [u32; 2] = [0x4650_5853, 0x4650_5845];
/// Offset of the bytes that XSAVE's legacy area leaves to software: the kernel's description of what follows.
const SOFTWARE_BYTES: usize = 464;
/// Legacy area and header of XSAVE, bytes.
const MINIMUM_STATE: usize = 576;
/// Offset of the header word that says which features are not in their initial state.
const IN_USE: usize = 512;
/// Tile configuration and data, which a process only has if it asked for them.
const TILES: u64 = 3 << 17;
/// The feature that says what each protection key forbids: from bit 0 on, all access and writing, for key 0 first.
const KEYS: u32 = 9;

/// A frame and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// Its address, which is the stack pointer for a call.
    pub(crate) address: u64,
    /// Address of `struct rt_sigframe` in it.
    context: u64,
    /// The content, up to the red zone.
    pub(crate) bytes: Vec<u8>,
    /// Address of [`SCRATCH_BYTES`] free bytes in it.
    pub(crate) scratch: u64,
}

impl Frame {
    /// A frame below the stack of a thread, from which it goes on with `registers` and this signal mask. `state` is
    /// what ptrace returns of its vector registers. `None` if the numbers make no sense.
    pub(crate) fn new(registers: &Registers, mask: u64, state: &[u8], gadgets: &Gadgets) -> Option<Self> {
        let state = signal_form(state, layout)?;
        let end = registers.rsp.checked_sub(RED_ZONE)?;
        let scratch = end.checked_sub(SCRATCH_BYTES)?;
        let state_at = scratch.checked_sub(state.len() as u64)? & !63;
        let context = state_at.checked_sub(FRAME_BYTES + 16)? & !15;
        let mut way_out = gadgets.way_out();
        let first = way_out.pop()?;
        let address = context.checked_sub(8 * way_out.len() as u64)?;
        let mut bytes = vec![0; (end - address) as usize];
        let words = words(registers, mask, state_at, first);
        for (place, word) in bytes.chunks_exact_mut(8).zip(way_out.into_iter().chain(words)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        let at = (state_at - address) as usize;
        bytes.get_mut(at..at + state.len())?.copy_from_slice(&state);
        Some(Self { address, context, bytes, scratch })
    }

    /// Address of the word that holds where the thread goes on.
    pub(crate) fn resume_address_at(&self) -> u64 {
        self.context + RIP
    }

    /// Registers with which the thread leaves the frame at once.
    pub(crate) fn leaving(&self, registers: &Registers, gadgets: &Gadgets) -> Registers {
        // As if the `ret` behind the call had run.
        Registers { rip: gadgets.restorer, rsp: self.address + 8, ..self.neutral(registers) }
    }

    /// Registers with which the thread makes a call and then leaves the frame.
    pub(crate) fn calling(
        &self,
        registers: &Registers,
        gadgets: &Gadgets,
        number: u64,
        arguments: [u64; 6],
    ) -> Registers {
        let [rdi, rsi, rdx, r10, r8, r9] = arguments;
        let (rip, rsp, rax) = (gadgets.system_call, self.address, number);
        Registers { rip, rsp, rax, rdi, rsi, rdx, r10, r8, r9, ..self.neutral(registers) }
    }

    /// Registers for which the kernel restarts nothing.
    fn neutral(&self, registers: &Registers) -> Registers {
        Registers { orig_rax: u64::MAX, eflags: registers.eflags & !TRAP_AND_DIRECTION, ..*registers }
    }
}

/// `struct rt_sigframe` up to the signal mask, in words.
fn words(registers: &Registers, mask: u64, state_at: u64, first: u64) -> [u64; 39] {
    let r = registers;
    let mut words = [0; 39];
    words[0] = first;
    words[1] = CONTEXT_FLAGS;
    words[4] = NO_ALTERNATE_STACK;
    let general = [
        r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15, r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp,
        r.rip, r.eflags,
    ];
    words[6..24].copy_from_slice(&general);
    words[24] = (r.cs & 0xffff) | (r.ss & 0xffff) << 48;
    words[29] = state_at;
    words[38] = mask;
    words
}

/// Offset and length of a feature in XSAVE's format; length 0 if the processor does not have it.
fn layout(feature: u32) -> (usize, usize) {
    let leaf = __cpuid_count(0xd, feature);
    (leaf.ebx as usize, leaf.eax as usize)
}

/// Where ptrace's form of a thread's vector registers says what protection keys forbid; `None` if the processor has no
/// keys.
pub(crate) fn place_of_keys() -> Option<usize> {
    let (offset, bytes) = layout(KEYS);
    (bytes > 0).then_some(offset)
}

/// Whether a thread with these vector registers may not use memory with protection key 0, which all memory has unless a
/// program chose another one.
pub(crate) fn is_denied_memory(state: &[u8], place_of_keys: usize) -> bool {
    state.get(place_of_keys).is_some_and(|keys| keys & 3 != 0)
}

/// The vector state as rt_sigreturn(2) wants it: ptrace's may be longer than what the process may have. `layout`
/// returns the offset and length of a feature in XSAVE's format.
fn signal_form(state: &[u8], layout: impl Fn(u32) -> (usize, usize)) -> Option<Vec<u8>> {
    let word = |at: usize| Some(u64::from_le_bytes(state.get(at..at + 8)?.try_into().ok()?));
    let mut features = word(SOFTWARE_BYTES)?;
    if word(IN_USE)? & TILES == 0 {
        features &= !TILES;
    }
    let bytes = (2..63)
        .filter(|feature| features & 1 << feature != 0)
        .map(layout)
        .map(|(offset, bytes)| offset.saturating_add(bytes))
        .fold(MINIMUM_STATE, usize::max);
    let mut form = state.get(..bytes)?.to_vec();
    let length = u32::try_from(bytes).ok()?;
    let mut description = Vec::with_capacity(48);
    description.extend(MAGIC[0].to_le_bytes());
    description.extend((length + 4).to_le_bytes());
    description.extend(features.to_le_bytes());
    description.extend(length.to_le_bytes());
    description.resize(48, 0);
    form[SOFTWARE_BYTES..MINIMUM_STATE - 64].copy_from_slice(&description);
    form.extend(MAGIC[1].to_le_bytes());
    Some(form)
}

/// `syscall; ret`.
pub(crate) const SYSTEM_CALL: &[u8] = &[0x0f, 0x05, 0xc3];
/// How C libraries return from a signal handler: `mov $15, %rax; syscall`, in both encodings.
pub(crate) const RESTORERS: [&[u8]; 2] =
    [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];

/// `pop %rax; ret`. With the number of rt_sigreturn(2) and the address of [`SYSTEM_CALL`] on the stack, this also
/// leaves a handler. A program without signal handlers that is linked with musl has no other such code, but has this in
/// its `_init`.
pub(crate) const POP_NUMBER: &[u8] = &[0x58, 0xc3];
const RT_SIGRETURN: u64 = libc::SYS_rt_sigreturn.cast_unsigned();

/// Code that lets us make system calls in a target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gadgets {
    /// Address of [`SYSTEM_CALL`].
    pub(crate) system_call: u64,
    /// Address of one of [`RESTORERS`], or of [`POP_NUMBER`].
    pub(crate) restorer: u64,
    /// Which of these codes it is.
    pub(crate) restorer_code: &'static [u8],
}

impl Gadgets {
    /// Rebuilds gadgets that another process found; `None` if `code` is not known.
    pub(crate) fn again(system_call: u64, restorer: u64, code: &[u8]) -> Option<Self> {
        let restorer_code = RESTORERS.into_iter().chain([POP_NUMBER]).find(|known| *known == code)?;
        Some(Self { system_call, restorer, restorer_code })
    }

    fn pops_number(&self) -> bool {
        self.restorer_code == POP_NUMBER
    }

    /// Words that lead from a `ret` to rt_sigreturn(2), beginning at the stack pointer. The last one is the signal
    /// frame's first.
    pub(crate) fn way_out(&self) -> Vec<u64> {
        if self.pops_number() { vec![self.restorer, RT_SIGRETURN, self.system_call] } else { vec![self.restorer] }
    }

    /// Address behind the `syscall` that makes rt_sigreturn(2).
    pub(crate) fn behind_the_way_out(&self) -> u64 {
        if self.pops_number() {
            self.system_call + SYSCALL_BYTES
        } else {
            self.restorer + self.restorer_code.len() as u64
        }
    }
}

/// The gadgets found so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Search {
    system_call: Option<u64>,
    restorer: Option<(u64, &'static [u8])>,
    pop_number: Option<u64>,
}

impl Search {
    /// Searches code that is at `address`.
    pub(crate) fn look(&mut self, address: u64, code: &[u8]) {
        let find = |what: &[u8]| memmem::find(code, what);
        let at = |position: usize| address + position as u64;
        self.system_call = self.system_call.or_else(|| find(SYSTEM_CALL).map(at));
        let restorer = || RESTORERS.iter().find_map(|code| Some((at(find(code)?), *code)));
        self.restorer = self.restorer.or_else(restorer);
        self.pop_number = self.pop_number.or_else(|| find(POP_NUMBER).map(at));
    }

    /// The gadgets, once both are found in the form that C libraries use.
    pub(crate) fn found(&self) -> Option<Gadgets> {
        let (restorer, restorer_code) = self.restorer?;
        Some(Gadgets { system_call: self.system_call?, restorer, restorer_code })
    }

    /// The gadgets after all code has been searched.
    pub(crate) fn found_at_last(&self) -> Option<Gadgets> {
        let popped =
            || Some(Gadgets { system_call: self.system_call?, restorer: self.pop_number?, restorer_code: POP_NUMBER });
        self.found().or_else(popped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GADGETS: Gadgets = Gadgets { system_call: 0x1111, restorer: 0x2222, restorer_code: RESTORERS[0] };

    fn registers() -> Registers {
        // SAFETY: a struct of integers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        (registers.rsp, registers.rip, registers.cs, registers.ss) = (0x7000_0000, 0x4444, CODE_SEGMENT, 0x2b);
        (registers.orig_rax, registers.eflags) = (7, 0x746);
        registers
    }

    fn state(features: u64, in_use: u64, bytes: usize) -> Vec<u8> {
        let mut state = vec![0xaa; bytes];
        state[SOFTWARE_BYTES..SOFTWARE_BYTES + 8].copy_from_slice(&features.to_le_bytes());
        state[IN_USE..IN_USE + 8].copy_from_slice(&in_use.to_le_bytes());
        state
    }

    #[test]
    fn the_frame_lies_below_the_red_zone_and_holds_the_state() {
        let frame = Frame::new(&registers(), 0x55, &state(3, 3, 4096), &GADGETS).expect("it can be made");
        let word = |at: u64| u64::from_le_bytes(frame.bytes[at as usize..][..8].try_into().expect("eight bytes"));
        assert_eq!(frame.address + frame.bytes.len() as u64, 0x7000_0000 - RED_ZONE);
        assert_eq!((frame.address % 16, word(0), word(RIP), word(304)), (0, 0x2222, 0x4444, 0x55));
        assert_eq!(word(RIP + 16), SEGMENTS);
        let fp = word(232);
        assert_eq!((fp % 64, word(fp - frame.address + SOFTWARE_BYTES as u64) as u32), (0, MAGIC[0]));
        assert!(
            frame.scratch >= fp + MINIMUM_STATE as u64 + 4 && frame.scratch + SCRATCH_BYTES == 0x7000_0000 - RED_ZONE
        );
        assert_eq!(Frame::new(&Registers { rsp: 600, ..registers() }, 0, &state(3, 3, 4096), &GADGETS), None);
    }

    #[test]
    fn without_a_restorer_the_number_and_the_call_are_below_the_frame() {
        let gadgets = Gadgets { restorer_code: POP_NUMBER, ..GADGETS };
        let frame = Frame::new(&registers(), 0x55, &state(3, 3, 4096), &gadgets).expect("it can be made");
        let word = |at: u64| u64::from_le_bytes(frame.bytes[at as usize..][..8].try_into().expect("eight bytes"));
        assert_eq!((frame.address % 16, word(0), word(8), word(16)), (0, 0x2222, 15, 0x1111));
        assert_eq!((word(16 + RIP), frame.resume_address_at()), (0x4444, frame.address + 16 + RIP));
        assert_eq!(frame.address + frame.bytes.len() as u64, 0x7000_0000 - RED_ZONE);
        let leaving = frame.leaving(&registers(), &gadgets);
        assert_eq!((leaving.rip, leaving.rsp), (0x2222, frame.address + 8));
    }

    #[test]
    fn a_call_restarts_nothing_and_does_not_trap() {
        let frame = Frame::new(&registers(), 0, &state(3, 3, 4096), &GADGETS).expect("it can be made");
        let calling = frame.calling(&registers(), &GADGETS, 9, [1, 2, 3, 4, 5, 6]);
        assert_eq!((calling.rip, calling.rsp, calling.rax), (0x1111, frame.address, 9));
        assert_eq!((calling.rdi, calling.rsi, calling.rdx, calling.r10, calling.r8, calling.r9), (1, 2, 3, 4, 5, 6));
        assert_eq!((calling.orig_rax, calling.eflags), (u64::MAX, 0x246));
        let leaving = frame.leaving(&registers(), &GADGETS);
        assert_eq!((leaving.rip, leaving.rsp, leaving.orig_rax), (0x2222, frame.address + 8, u64::MAX));
    }

    #[test]
    fn a_thread_that_may_not_use_memory_without_a_key_is_known() {
        let is_denied = |keys: u32| {
            let mut state = vec![0; 2688 + 8];
            state[2688..2692].copy_from_slice(&keys.to_le_bytes());
            is_denied_memory(&state, 2688)
        };
        // Linux starts programs with the first value.
        assert!(!is_denied(0x5555_5554) && !is_denied(0) && !is_denied(0xffff_fffc));
        assert!(is_denied(1) && is_denied(2) && is_denied(0x5555_5555));
        assert!(!is_denied_memory(&[0xff; 100], 2688), "the kernel does not use them");
    }

    #[test]
    fn only_the_features_that_the_process_may_have_are_in_the_frame() {
        let layout = |feature| if feature == 18 { (2816, 8192) } else { (576 + 100 * feature as usize, 100) };
        let form = |in_use| signal_form(&state(TILES | 7, in_use, 11008), layout).expect("it makes sense");
        assert_eq!(form(7).len(), 576 + 300 + 4);
        assert_eq!(form(7)[SOFTWARE_BYTES + 8], 7);
        assert_eq!(form(TILES).len(), 2816 + 8192 + 4);
        assert_eq!(form(7)[880 - 4..], MAGIC[1].to_le_bytes());
        // Shorter than it says.
        assert_eq!(signal_form(&state(TILES, TILES, 4096), layout), None);
        assert_eq!(signal_form(&[0; 100], layout), None);
    }
}

#[cfg(test)]
mod code_tests {
    use super::*;

    #[test]
    fn the_two_may_be_in_different_places() {
        let mut search = Search::default();
        search.look(0x1000, &[0x90, 0x0f, 0x05, 0xc3, 0x0f]);
        assert_eq!(search.found(), None);
        search.look(0x2000, &[0x05, 0xc3]);
        search.look(0x3000, &[0x0f, 0x05, 0xc3, 0xb8, 15, 0, 0, 0, 0x0f, 0x05]);
        let expected = Gadgets { system_call: 0x1001, restorer: 0x3003, restorer_code: RESTORERS[1] };
        assert_eq!(search.found(), Some(expected));
    }

    #[test]
    fn a_number_that_is_popped_serves_where_nothing_else_is() {
        let mut search = Search::default();
        search.look(0x1000, &[0x50, 0x58, 0xc3]);
        assert_eq!(search.found_at_last(), None);
        search.look(0x2000, &[0x0f, 0x05, 0xc3]);
        let popped = Gadgets { system_call: 0x2000, restorer: 0x1001, restorer_code: POP_NUMBER };
        assert_eq!((search.found(), search.found_at_last()), (None, Some(popped)));
        assert_eq!((popped.way_out(), popped.behind_the_way_out()), (vec![0x1001, 15, 0x2000], 0x2002));
        search.look(0x3000, &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]);
        let restorer = Gadgets { system_call: 0x2000, restorer: 0x3000, restorer_code: RESTORERS[1] };
        assert_eq!((search.found(), search.found_at_last()), (Some(restorer), Some(restorer)));
        assert_eq!((restorer.way_out(), restorer.behind_the_way_out()), (vec![0x3000], 0x3007));
    }
}
