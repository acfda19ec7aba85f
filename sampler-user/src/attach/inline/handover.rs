//! Hands a process over from probes to inline hooks while it runs: no call is counted twice or not at all, and no sampled
//! block's free goes unseen.
//!
//! Two things decide whether a stopped process can go over. Probes must have counted each call that has passed a function's
//! entry, and nothing may be left for them to do about it. And the mapped code must know all blocks that they have sampled:
//! those that the live map has, read before the stop, and those that came meanwhile, which the programs list.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use heapbpf_probes::PlannedSite;
use heapbpf_remote::Draft;
use sampler_ebpf::abi::{IN_FLIGHT_TAIL, LiveValue, ProcessKey};

use super::plan::Place;
use super::{Refused, SET_LOG2};
use crate::kernel::handover::{Begun, HandoverMap, Seen};
use crate::kernel::live_map::LiveMap;

/// What probes have sampled, and have begun to count.
pub struct FromProbes<'a> {
    /// The live map.
    pub live: &'a mut LiveMap,
    /// Blocks that come meanwhile.
    pub handover: &'a mut HandoverMap,
}

impl FromProbes<'_> {
    /// The sampled blocks of a process. From here on, the programs list further ones.
    pub(super) fn blocks_of(&mut self, process: ProcessKey) -> Result<Vec<u64>, Refused> {
        self.handover.list_blocks_of(process.tgid)?;
        let mut blocks = Vec::new();
        self.live.scan(|entries| {
            let own = entries.filter(|(key, value)| key.space == process && value.sample != LiveValue::FREED);
            blocks.extend(own.map(|(key, _)| key.address));
        })?;
        Ok(blocks)
    }
}

/// Where a call's counting by probes begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Boundary {
    /// Entries of functions.
    entries: HashSet<u64>,
    /// Code behind an entry that comes before the function's probe, or is probed.
    before_probes: Vec<Range<u64>>,
}

impl Boundary {
    /// Of functions, which are at these addresses, with these probes. Fails with the first one whose calls would still be
    /// counted by a probe alone.
    pub(super) fn new(
        functions: &[Range<u64>],
        sites: &[PlannedSite],
        place: &Place,
        draft: &Draft,
    ) -> Result<Self, Refused> {
        let mut boundary = Self::default();
        for site in sites {
            if site.site.flags & sampler_ebpf::abi::SITE_CALLS_OUT != 0 {
                return Err(Refused::CallsOut(site.function.clone()));
            }
            let probe = site.site.offset.wrapping_sub(place.mapping.offset).wrapping_add(place.mapping.range.start);
            let function = functions.iter().find(|function| function.contains(&probe));
            let function = function.ok_or_else(|| Refused::ProbeAlone(site.function.clone()))?;
            if !is_replaced(draft, function.start) {
                // It passes its calls on to another file's allocator, and they count there. Its probe must be gone then.
                if !is_in_replaced_page(draft, probe) {
                    return Err(Refused::ProbeAlone(site.function.clone()));
                }
                continue;
            }
            boundary.entries.insert(function.start);
            if probe > function.start {
                boundary.before_probes.push(function.start + 1..probe + 1);
            }
        }
        Ok(boundary)
    }

    /// Whether each call that has passed an entry has passed its probe, and nothing is left to do when it returns. `positions`:
    /// threads with addresses at which they go on.
    pub(super) fn is_passed(&self, positions: &[(i32, u64)], begun: &[Begun]) -> bool {
        let is_uncounted = |address: &u64| self.before_probes.iter().any(|code| code.contains(address));
        // A function that was counted may have jumped to the entry of another one.
        let has_jumped =
            |tid: &i32| begun.iter().any(|call| call.tid == tid.unsigned_abs() && call.in_flight & IN_FLIGHT_TAIL != 0);
        let is_between =
            |(tid, address): &(i32, u64)| is_uncounted(address) || self.entries.contains(address) && has_jumped(tid);
        begun.iter().all(|call| call.in_flight & !IN_FLIGHT_TAIL == 0) && !positions.iter().any(is_between)
    }
}

/// Whether a jump is written to the beginning of a function.
fn is_replaced(draft: &Draft, function: u64) -> bool {
    const JUMP_BYTES: usize = 5;
    draft.pages.iter().any(|pages| {
        let Some(at) = function.checked_sub(pages.start).and_then(|at| usize::try_from(at).ok()) else { return false };
        let [original, edited] = [&pages.original, &pages.edited].map(|bytes| bytes.get(at..at + JUMP_BYTES));
        original.is_some() && original != edited
    })
}

/// Whether a page is mapped over what is at an address. Probes belong to the file, so there is none in it.
fn is_in_replaced_page(draft: &Draft, address: u64) -> bool {
    let offset = |start| address.checked_sub(start).and_then(|at| usize::try_from(at).ok());
    draft.pages.iter().any(|pages| offset(pages.start).is_some_and(|at| at < pages.original.len()))
}

/// What probes have done of a process's calls. To be asked while the process is stopped.
pub(super) trait Probed {
    /// The calls that they have begun to count.
    fn begun(&self, process: ProcessKey) -> io::Result<Vec<Begun>>;
    /// The blocks that they have sampled since these are listed; `None` if there were more than fit.
    fn blocks(&self) -> Option<Vec<u64>>;
}

impl Probed for Seen {
    fn begun(&self, process: ProcessKey) -> io::Result<Vec<Begun>> {
        Self::begun(self, process)
    }

    fn blocks(&self) -> Option<Vec<u64>> {
        Self::blocks(self)
    }
}

/// Whether a process that is stopped can go over. If so, the mapped code knows all blocks that probes have sampled: after these
/// writes it goes over, or all of it is taken back.
pub(super) fn is_moment(
    process: ProcessKey,
    probed: &impl Probed,
    boundary: &Boundary,
    positions: &[(i32, u64)],
    noted: &mut Noted,
) -> bool {
    probed.begun(process).is_ok_and(|begun| boundary.is_passed(positions, &begun))
        && probed.blocks().is_some_and(|blocks| noted.add(&blocks).is_ok())
}

/// What the mapped code holds of sampled blocks. Some may have been freed since: their free is told once more, and the programs
/// find no block.
pub(super) struct Noted {
    noted: heapbpf_inline::noted::Noted,
    memory: File,
    base: u64,
}

impl Noted {
    /// Nothing so far, in the code that is mapped at `base`. No jump leads to it yet.
    pub(super) fn new(memory: File, base: u64) -> Self {
        Self { noted: heapbpf_inline::noted::Noted::new(SET_LOG2), memory, base }
    }

    /// Has it hold these blocks, too.
    pub(super) fn add(&mut self, blocks: &[u64]) -> Result<(), Refused> {
        let failed = |source| Refused::Read { what: "the target's memory", source };
        let written = self.noted.add(blocks).ok_or(Refused::Blocks)?;
        let mut writes = written.iter().map(|(at, bytes)| self.memory.write_all_at(bytes, self.base + at));
        writes.try_for_each(|written| written).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(tid: u32, in_flight: u32) -> Begun {
        Begun { tid, in_flight }
    }

    #[test]
    fn a_call_between_its_entry_and_its_probe_is_waited_for() {
        let code = 0x1001..0x1004;
        let boundary = Boundary { entries: HashSet::from([0x1000, 0x2000]), before_probes: vec![code] };
        // At the entry it is not counted yet, and will be by the jump; behind the probe it is.
        for (address, is_passed) in [(0x1000, true), (0x1001, false), (0x1003, false), (0x1004, true), (0x9000, true)] {
            assert_eq!(boundary.is_passed(&[(7, 0x5000), (7, address)], &[]), is_passed, "{address:#x}");
        }
    }

    #[test]
    fn a_call_whose_return_is_awaited_is_waited_for() {
        let boundary = Boundary { entries: HashSet::from([0x1000]), before_probes: Vec::new() };
        assert!(!boundary.is_passed(&[(7, 0x5000)], &[begun(7, 1)]));
        assert!(boundary.is_passed(&[(7, 0x5000)], &[begun(7, IN_FLIGHT_TAIL)]));
        // It was counted in the function that jumped here, or in another thread.
        assert!(!boundary.is_passed(&[(7, 0x1000)], &[begun(7, IN_FLIGHT_TAIL)]));
        assert!(boundary.is_passed(&[(7, 0x1000)], &[begun(8, IN_FLIGHT_TAIL)]));
    }

    const PROCESS: ProcessKey = ProcessKey { start_ns: 1, tgid: 7, exec_id: 0 };

    /// What probes are said to have done.
    struct Said {
        begun: Option<Vec<Begun>>,
        blocks: Option<Vec<u64>>,
    }

    impl Probed for Said {
        fn begun(&self, _: ProcessKey) -> io::Result<Vec<Begun>> {
            self.begun.clone().ok_or_else(|| io::ErrorKind::Other.into())
        }

        fn blocks(&self) -> Option<Vec<u64>> {
            self.blocks.clone()
        }
    }

    /// The check with a file in place of the process's memory, and how much was written to it.
    fn check(said: &Said, positions: &[(i32, u64)], held: &[u64]) -> (bool, u64) {
        let file = tempfile::tempfile().unwrap();
        let mut noted = Noted::new(file.try_clone().unwrap(), 0);
        noted.add(held).unwrap();
        file.set_len(0).unwrap();
        let code = 0x1001..0x1004;
        let boundary = Boundary { entries: HashSet::from([0x1000]), before_probes: vec![code] };
        let is_moment = is_moment(PROCESS, said, &boundary, positions, &mut noted);
        (is_moment, file.metadata().unwrap().len())
    }

    /// Each case differs from the first one, in which it is the moment, in one thing alone.
    #[test]
    fn each_check_within_the_stop_is_enough_to_let_the_process_go() {
        let said = |begun, blocks| Said { begun, blocks };
        let (passed, sampled) = (|| Some(Vec::new()), || Some(vec![0x5550_0010, 0x5550_0020]));
        let (is_moment, written) = check(&said(passed(), sampled()), &[(7, 0x1000)], &[]);
        assert!(is_moment && written > 0, "the last blocks are noted before it goes over");

        let full = no_room_for(0x5550_0020);
        let cases = [
            ("calls in progress cannot be read", said(None, sampled()), 0x1000, &[][..]),
            ("a call's return is awaited", said(Some(vec![begun(7, 1)]), sampled()), 0x1000, &[]),
            ("a counted call jumped to an entry", said(Some(vec![begun(7, IN_FLIGHT_TAIL)]), sampled()), 0x1000, &[]),
            ("a call is between entry and probe", said(passed(), sampled()), 0x1002, &[]),
            ("more blocks came than are listed", said(passed(), None), 0x1000, &[]),
            ("the set of blocks is full", said(passed(), sampled()), 0x1000, &full),
        ];
        for (what, said, position, held) in cases {
            assert!(!check(&said, &[(7, position)], held).0, "{what}");
        }
        // And with one block less, it is not.
        assert!(check(&said(passed(), sampled()), &[(7, 0x1000)], &full[1..]).0);
    }

    /// Blocks that take all places which a block may have in the set.
    fn no_room_for(block: u64) -> Vec<u64> {
        let place = |block: u64| heapbpf_inline::noted::Noted::new(SET_LOG2).add(&[block]).unwrap()[0].0;
        let wanted = place(block);
        let mut noted = heapbpf_inline::noted::Noted::new(SET_LOG2);
        let same = (1_u64..).map(|at| at << 4).filter(|at| place(*at) == wanted);
        same.take_while(|at| noted.add(&[*at]).is_some()).collect()
    }
}
