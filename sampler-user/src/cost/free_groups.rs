//! Whose frees are given up for the budget: the group's whose frees show least first, and no more than it takes. Pure.

use super::budget::{ProbeCosts, Tracking, Use, fits};

/// Probes on functions that free which go together, what they cost and what is known because of them. A group is a process
/// with links of its own, or all processes of a file whose links serve all; files that one process maps together are one.
#[derive(Clone, Debug, PartialEq)]
pub struct FreeGroup<L> {
    /// Of a process or a file, for the eye.
    pub name: String,
    /// Its links.
    pub links: Vec<L>,
    /// Calls of functions that free since the last look, counted.
    pub frees: f64,
    /// Bytes known to be in use in its processes, estimated.
    pub inuse_bytes: f64,
}

impl<L> FreeGroup<L> {
    /// What a free shows: bytes known to be in use per call of a function that frees. Infinite without calls, which cost
    /// nothing.
    pub fn shown_bytes(&self) -> f64 {
        if self.frees > 0.0 { self.inuse_bytes.max(0.0) / self.frees } else { f64::INFINITY }
    }
}

/// The groups to give up, by their indices and in their order: the one first that shows least, of equal ones the one with
/// the most calls; as many as it takes for the rest to be inside the budget (all, if that is not enough).
pub fn to_give_up<L>(
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
        let given_up = to_give_up(groups, &second(groups), ALL, &COSTS, budget);
        given_up.into_iter().map(|index| groups[index].name.as_str()).collect()
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
    fn all_go_where_the_rest_is_too_much_by_itself() {
        let groups = [group("a", 1_000.0, 0.0), group("idle", 0.0, 0.0)];
        // Frees of processes that belong to no group.
        let used = Use { frees: 1e6, ..second(&groups) };
        assert_eq!(to_give_up(&groups, &used, ALL, &COSTS, 0.01).len(), 2);
        assert!(to_give_up::<()>(&[], &used, ALL, &COSTS, 0.01).is_empty());
    }
}
