//! How often stacks end in the code of a JVM, and which JVMs cannot be read.

use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of refused JVMs that are reported.
const MOST_REFUSED: usize = 8;

/// What could not be shown.
#[derive(Debug, Default)]
pub struct Outcomes {
    stuck: BTreeMap<&'static str, u64>,
    refused: BTreeSet<String>,
}

impl Outcomes {
    /// Counts a stack that ends in a JVM's code.
    pub fn count(&mut self, why: &'static str) {
        *self.stuck.entry(why).or_default() += 1;
    }

    /// Notes a process whose JVM cannot be read.
    pub fn refuse(&mut self, pid: u32, why: &str) {
        if self.refused.len() < MOST_REFUSED {
            self.refused.insert(format!("Java frames of process {pid} are not shown: {why}"));
        }
    }

    /// Notes for the user.
    pub fn notes(&self) -> impl Iterator<Item = String> {
        let reasons: Vec<String> = self.stuck.iter().map(|(why, count)| format!("{why} ({count})")).collect();
        let ends = (!reasons.is_empty())
            .then(|| format!("some sampled stacks of Java programs end in the JVM's code: {}", reasons.join(", ")));
        self.refused.iter().cloned().chain(ends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_shown_is_told_once() {
        let mut outcomes = Outcomes::default();
        assert_eq!(outcomes.notes().count(), 0);
        for pid in [7, 7].into_iter().chain(10..30) {
            outcomes.refuse(pid, "the frames of Java 8 are not known");
        }
        ["gone", "gone", "bad"].into_iter().for_each(|why| outcomes.count(why));
        let notes: Vec<String> = outcomes.notes().collect();
        assert_eq!(notes.len(), MOST_REFUSED + 1);
        assert!(notes.contains(&"Java frames of process 7 are not shown: the frames of Java 8 are not known".into()));
        let last = "some sampled stacks of Java programs end in the JVM's code: bad (1), gone (2)";
        assert_eq!(notes.last().map(String::as_str), Some(last));
    }
}
