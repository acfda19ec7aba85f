//! Warnings about processes that should be hooked inline and are not: one per reason. The report counts those that come
//! later. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of reported reasons, and of processes that a warning names.
const MOST_REASONS: usize = 64;
const MOST_NAMED: usize = 3;

/// Processes that are not hooked inline.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    /// By reason; `None` once it has been reported.
    unreported: BTreeMap<String, Option<BTreeSet<u32>>>,
}

impl Refusals {
    /// Notes why a process is not hooked inline.
    pub(super) fn note(&mut self, pid: u32, why: &str) {
        if let Some(unreported) = self.unreported.get_mut(why) {
            unreported.iter_mut().for_each(|pids| {
                pids.insert(pid);
            });
        } else if self.unreported.len() < MOST_REASONS {
            self.unreported.insert(why.to_owned(), Some(BTreeSet::from([pid])));
        }
    }

    /// The warnings that are due: one per reason that has not been reported yet.
    pub(super) fn take(&mut self) -> Vec<String> {
        let line = |(why, pids): (&String, &mut Option<BTreeSet<u32>>)| {
            let pids = pids.take()?;
            let named: Vec<String> = pids.iter().take(MOST_NAMED).map(u32::to_string).collect();
            let (named, more) = (named.join(", "), if pids.len() > MOST_NAMED { ", …" } else { "" });
            let who = match pids.len() {
                1 => format!("process {named} uses"),
                number => format!("{number} processes ({named}{more}) use"),
            };
            Some(format!("{who} probes: {why}"))
        };
        self.unreported.iter_mut().filter_map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_is_told_once_with_the_number_of_processes() {
        let mut refusals = Refusals::default();
        assert_eq!(refusals.take(), [""; 0]);
        for pid in [4, 3, 2, 1, 1] {
            refusals.note(pid, "it is traced");
        }
        refusals.note(7, "it is busy");
        assert_eq!(
            refusals.take(),
            ["process 7 uses probes: it is busy", "4 processes (1, 2, 3, …) use probes: it is traced"]
        );
        refusals.note(9, "it is traced");
        assert_eq!(refusals.take(), [""; 0]);
        (0..1000).for_each(|pid| refusals.note(pid, &format!("reason {pid}")));
        assert_eq!(refusals.take().len(), MOST_REASONS - 2);
    }
}
