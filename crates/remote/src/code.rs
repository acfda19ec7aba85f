//! Finds instructions in a target from which it can be made to make system calls. Pure.

use memchr::memmem;

/// `syscall; ret`.
pub(crate) const SYSTEM_CALL: &[u8] = &[0x0f, 0x05, 0xc3];
/// What leaves a signal's handler, as C libraries have it: `mov $15, %rax; syscall`, in its two lengths.
pub(crate) const RESTORERS: [&[u8]; 2] =
    [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];

/// Where a target can be made to make system calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gadgets {
    /// Address of [`SYSTEM_CALL`].
    pub(crate) system_call: u64,
    /// Address of one of [`RESTORERS`].
    pub(crate) restorer: u64,
    /// Which.
    pub(crate) restorer_code: &'static [u8],
}

/// The gadgets, while they are looked for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Search {
    system_call: Option<u64>,
    restorer: Option<(u64, &'static [u8])>,
}

impl Search {
    /// Looks through code that is at `address`.
    pub(crate) fn look(&mut self, address: u64, code: &[u8]) {
        let find = |what: &[u8]| memmem::find(code, what);
        let at = |position: usize| address + position as u64;
        self.system_call = self.system_call.or_else(|| find(SYSTEM_CALL).map(at));
        let restorer = || RESTORERS.iter().find_map(|code| Some((at(find(code)?), *code)));
        self.restorer = self.restorer.or_else(restorer);
    }

    /// Both, once they are found.
    pub(crate) fn found(&self) -> Option<Gadgets> {
        let (restorer, restorer_code) = self.restorer?;
        Some(Gadgets { system_call: self.system_call?, restorer, restorer_code })
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
}
