//! Which groups of processes the overhead controller stops tracking frees of: the least informative first, and no more
//! than the budget requires. Pure.

use super::budget::{ProbeCosts, Tracking, Use, fits, has_room};

/// Probes on freeing functions that can only be removed together, with their cost and what they reveal. A group is one
/// process with links of its own, or all processes that map a file whose links serve everyone; files that share a process
/// belong to one group.
#[derive(Clone, Debug, PartialEq)]
pub struct FreeGroup<L> {
    /// Name of the process or file, for messages.
    pub name: String,
    /// The links to remove.
    pub links: Vec<L>,
    /// Calls of freeing functions since the last look: counted exactly, or expected where they are not tracked.
    pub frees: f64,
    /// Estimated bytes in use in its processes.
    pub inuse_bytes: f64,
}

impl<L> FreeGroup<L> {
    /// What one probed free reveals: bytes known to be in use per call. Infinite without calls, which cost nothing.
    pub fn shown_bytes(&self) -> f64 {
        if self.frees > 0.0 { self.inuse_bytes.max(0.0) / self.frees } else { f64::INFINITY }
    }
}

/// Indices of the groups to stop tracking, in order: those that reveal least per call first; among equals, those with the
/// most calls. As many as it takes to bring the rest within the budget, all if that is not enough.
pub fn groups_to_stop<L>(
    groups: &[FreeGroup<L>],
    used: &Use,
    tracking: Tracking,
    costs: &ProbeCosts,
    budget: f64,
) -> Vec<usize> {
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&groups[a], &groups[b]);
        let shown = a.shown_bytes().total_cmp(&b.shown_bytes());
        shown.then(b.frees.total_cmp(&a.frees)).then_with(|| a.name.cmp(&b.name))
    });
    let mut left = Use { ..*used };
    let mut taken = 0;
    while taken < order.len() && !fits(used, &left, tracking, costs, budget) {
        left.frees = (left.frees - groups[order[taken]].frees).max(0.0);
        taken += 1;
    }
    order.truncate(taken);
    order
}

/// Indices of the groups whose frees need not stay given up: those with the fewest calls first, as many as leave room in
/// the budget. Their `frees` are those that are expected.
pub fn groups_to_give_back<L>(
    groups: &[FreeGroup<L>],
    used: &Use,
    tracking: Tracking,
    costs: &ProbeCosts,
    budget: f64,
) -> Vec<usize> {
    let mut order: Vec<usize> = (0..groups.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (&groups[a], &groups[b]);
        a.frees.total_cmp(&b.frees).then_with(|| a.name.cmp(&b.name))
    });
    let mut with = Use { ..*used };
    order
        .into_iter()
        .take_while(|&index| {
            with.frees += groups[index].frees;
            has_room(used, &with, tracking, costs, budget)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: ProbeCosts = ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 };
    const ALL: Tracking = Tracking { interval: 0, frees: true, time: 1.0 };

    fn group(name: &str, frees: f64, inuse_bytes: f64) -> FreeGroup<()> {
        FreeGroup { name: name.into(), links: Vec::new(), frees, inuse_bytes }
    }

    /// A second of targets that do nothing but free, and work of their own for a second.
    fn second(groups: &[FreeGroup<()>]) -> Use {
        let frees: f64 = groups.iter().map(|group| group.frees).sum();
        Use { seconds: 1.0, frees, cpu_seconds: 1.0 + 500e-9 * frees, ..Use::default() }
    }

    fn names(groups: &[FreeGroup<()>], budget: f64) -> Vec<&str> {
        let stopped = groups_to_stop(groups, &second(groups), ALL, &COSTS, budget);
        stopped.into_iter().map(|index| groups[index].name.as_str()).collect()
    }

    #[test]
    fn who_shows_least_per_call_goes_first_and_no_more_than_it_takes() {
        let groups = [
            group("much in use", 400_000.0, 400e6),
            group("nothing in use", 400_000.0, 0.0),
            group("little in use", 400_000.0, 4e6),
            group("idle", 0.0, 0.0),
        ];
        // Together 0.6 s of 1.6 s; each alone 0.2 s of 1.2 s, two of them 0.4 s of 1.4 s.
        assert!(names(&groups, 0.5).is_empty());
        assert_eq!(names(&groups, 0.33), ["nothing in use"]);
        assert_eq!(names(&groups, 0.2), ["nothing in use", "little in use"]);
        assert_eq!(names(&groups, 0.1), ["nothing in use", "little in use", "much in use"]);
    }

    #[test]
    fn fewer_calls_that_show_as_much_in_all_show_more_each() {
        let groups = [group("calm", 1_000.0, 1e6), group("hot", 1_000_000.0, 1e6)];
        assert_eq!(names(&groups, 0.05), ["hot"]);
    }

    #[test]
    fn of_equal_ones_the_most_calls_go_first_then_the_name_decides() {
        let groups = [group("b", 10_000.0, 0.0), group("a", 10_000.0, 0.0), group("c", 20_000.0, 0.0)];
        assert_eq!(names(&groups, 0.012), ["c"]);
        assert_eq!(names(&groups, 0.006), ["c", "a"]);
    }

    #[test]
    fn those_with_the_fewest_calls_come_back_while_there_is_room() {
        let groups = [group("hot", 400_000.0, 0.0), group("calm", 10_000.0, 0.0), group("idle", 0.0, 0.0)];
        // A second of work, and of allocations that cost 50 ms.
        let used = Use { seconds: 1.0, allocations: 100_000.0, cpu_seconds: 1.05, ..Use::default() };
        let names = |budget: f64| -> Vec<&str> {
            let back = groups_to_give_back(&groups, &used, ALL, &COSTS, budget);
            back.into_iter().map(|index| groups[index].name.as_str()).collect()
        };
        assert_eq!(names(0.5), ["idle", "calm", "hot"]);
        assert_eq!(names(0.15), ["idle", "calm"]);
        // Allocations alone take more than half of it.
        assert!(names(0.06).is_empty());
    }

    #[test]
    fn all_go_where_the_rest_is_too_much_by_itself() {
        let groups = [group("a", 1_000.0, 0.0), group("idle", 0.0, 0.0)];
        // Frees of processes that belong to no group.
        let used = Use { frees: 1e6, ..second(&groups) };
        assert_eq!(groups_to_stop(&groups, &used, ALL, &COSTS, 0.01).len(), 2);
        assert!(groups_to_stop::<()>(&[], &used, ALL, &COSTS, 0.01).is_empty());
    }
}
