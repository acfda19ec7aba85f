//! Finds instructions in a target that let us make system calls there. Pure.

use memchr::memmem;

use crate::interrupted::SYSCALL_BYTES;

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
