//! Figures of a page, as columns of integers.

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde::Serialize;

use super::MOST_STACKS;
use super::layout::{Layout, Pooled};
use crate::estimates::{Pool, SharedLosses};
use crate::model::{Lifetimes, Profile};
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;
use heapbpf_statistics::survival;

/// Maximum number of boxes of the graph with an interval.
const MOST_BOXES: usize = 1_000;
/// Smallest share of a value that such a box has: two pixels of a thousand.
const LEAST_SHARE: f64 = 0.002;
/// Maximum number of frames that are looked at for the boxes of a graph. 50,000 stacks of 40 frames have 2 million.
const MOST_FRAMES: usize = 5_000_000;
/// Maximum number of stacks whose lifetimes are pooled for a box.
const MOST_POOLED: usize = 64;
/// Maximum number of lifetime curves that are pooled for a box: a stack has one for each process.
const MOST_CURVES: usize = 512;

/// Bits of a stack's number that identify a set of stacks, as their sum. The page uses as many (`web/src/doc.ts`).
/// JavaScript represents the sum of all stacks exactly.
const ID_BITS: u32 = 36;
const _: () = assert!((MOST_STACKS as u64) << ID_BITS <= 1 << 53);

/// A figure with its interval, in whole bytes or objects.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    estimate: Option<i64>,
    low: Option<i64>,
    high: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    exact: Option<u64>,
}

impl Figure {
    /// The figure of a pool, without numbers if it is unknown.
    pub(super) fn of(profile: &Profile, pool: &Pool, value: Value, confidence: f64, exact: Option<u64>) -> Self {
        if !pool.knows(profile, value) {
            return Self { estimate: None, low: None, high: None, exact: None };
        }
        let Estimate { estimate, low, high, .. } = pool.estimate(profile, value, confidence);
        let whole = |number: f64| number.round() as i64;
        Self { estimate: Some(whole(estimate)), low: low.map(whole), high: high.map(whole), exact }
    }
}

/// One figure for all stacks.
#[derive(Serialize)]
pub(super) struct Column {
    pub(super) estimate: Vec<i64>,
    /// `null` where there is no valid interval.
    pub(super) low: Vec<Option<i64>>,
    pub(super) high: Vec<Option<i64>>,
    pub(super) samples: Vec<u64>,
}

impl Column {
    pub(super) fn of(profile: &Profile, pools: &[&Pool], value: Value, confidence: f64) -> Self {
        let estimates: Vec<Estimate> = pools.iter().map(|pool| pool.estimate(profile, value, confidence)).collect();
        let whole = |end: Option<f64>| end.map(|number| number.round() as i64);
        let sizes: Vec<f64> = estimates.iter().map(|it| it.estimate).collect();
        Self {
            // Rounded so that stacks add up to the total.
            estimate: crate::round::largest_remainder(&sizes),
            low: estimates.iter().map(|it| whole(it.low)).collect(),
            high: estimates.iter().map(|it| whole(it.high)).collect(),
            samples: pools.iter().map(|pool| pool.samples(value)).collect(),
        }
    }
}

/// Intervals and lifetimes of the largest boxes of the graph. A box stands for a set of stacks, which has the same
/// interval in every graph. Boxes of one stack are left out: the page has the figures of stacks.
#[derive(Default, Serialize)]
pub(super) struct Boxes {
    /// Identifies the set: the sum of the low [`ID_BITS`] bits of its stacks' numbers.
    of: Vec<u64>,
    /// One list per value; `null` where there is no valid interval.
    low: Vec<Vec<Option<i64>>>,
    high: Vec<Vec<Option<i64>>>,
    /// Median lifetime in seconds, and the share of temporary blocks.
    lifetimes: Vec<Option<(Option<f64>, f64)>>,
}

impl Boxes {
    /// `stacks`: in stack order, with allowance for the sampling intervals that were used.
    pub(super) fn of(
        profile: &Profile,
        layout: &Layout,
        stacks: &[Pooled],
        values: &[Value],
        confidence: f64,
        losses: &mut SharedLosses,
    ) -> Self {
        let none = || -> Vec<Vec<Option<i64>>> { vec![Vec::new(); values.len()] };
        let mut boxes = Self { low: none(), high: none(), ..Self::default() };
        let sets = large_sets(layout, &shares(stacks, values));
        let mut pools: HashMap<usize, Pool> = HashMap::new();
        for number in largest(&sets) {
            let set = &sets[number];
            let members = || set.stacks.iter().map(move |&stack| &stacks[stack as usize]);
            let (inner, others) = parts(set, &sets, &pools);
            let mut pool = Pool::default();
            inner.iter().for_each(|it| pool.merge(&pools[it]));
            others.iter().for_each(|&stack| pool.merge(&stacks[stack as usize].pool));
            losses.give_to(&mut pool, profile);
            boxes.of.push(set.of);
            for (index, &value) in values.iter().enumerate() {
                let Figure { low, high, .. } = Figure::of(profile, &pool, value, confidence, None);
                boxes.low[index].push(low);
                boxes.high[index].push(high);
            }
            let curves: usize = members().map(|stack| stack.lifetimes.len()).sum();
            let few = members().count() <= MOST_POOLED && curves <= MOST_CURVES;
            let lifetimes: Vec<(&Lifetimes, f64)> =
                members().filter(|_| few).flat_map(|stack| stack.lifetimes.iter().copied()).collect();
            boxes.lifetimes.push(survival::pooled(&lifetimes).map(|it| (it.median_seconds, it.temporary)));
            pools.insert(number, pool);
        }
        boxes
    }
}

/// For each value, the share of each stack.
fn shares(stacks: &[Pooled], values: &[Value]) -> Vec<Vec<f64>> {
    let of_value = |&value: &Value| -> Vec<f64> {
        let sizes: Vec<f64> = stacks.iter().map(|stack| stack.pool.total(value).max(0.0)).collect();
        let all = sizes.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        sizes.into_iter().map(|size| size / all).collect()
    };
    values.iter().map(of_value).collect()
}

/// Several stacks that share a box.
struct Set {
    of: u64,
    /// Their largest share of a value.
    share: f64,
    /// Positions in stack order, ascending.
    stacks: Vec<u32>,
    /// The graph in which it was found first, and the sets of the boxes right below it there.
    graph: usize,
    inner: Vec<usize>,
    /// Whether another set has the same sum.
    is_ambiguous: bool,
}

/// The sets of large boxes. Only what is below a large box is looked at, from the root on.
fn large_sets(layout: &Layout, shares: &[Vec<f64>]) -> Vec<Set> {
    let mut known: HashMap<u64, usize> = HashMap::new();
    let mut sets: Vec<Set> = Vec::new();
    for graph in 0..2 {
        let all: Vec<u32> = (0..layout.paths.len() as u32).collect();
        let mut pending = VecDeque::from([(0_usize, None::<usize>, all)]);
        let mut frames = 0;
        while let Some((depth, outer, above)) = pending.pop_front().filter(|_| frames < MOST_FRAMES) {
            frames += above.len();
            let mut by_call: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
            for stack in above {
                if let Some(&call) = layout.paths[stack as usize][graph].get(depth) {
                    by_call.entry(call).or_default().push(stack);
                }
            }
            for stacks in by_call.into_values().filter(|stacks| stacks.len() > 1) {
                let of_value = |of: &Vec<f64>| stacks.iter().map(|&stack| of[stack as usize]).sum::<f64>();
                let share = shares.iter().map(of_value).fold(0.0, f64::max);
                if share < LEAST_SHARE {
                    continue;
                }
                let id = |stack: &u32| layout.ids[*stack as usize] & ((1 << ID_BITS) - 1);
                let of: u64 = stacks.iter().map(id).sum();
                let number = *known.entry(of).or_insert(sets.len());
                if number == sets.len() {
                    let (stacks, inner, is_ambiguous) = (stacks.clone(), Vec::new(), false);
                    sets.push(Set { of, share, stacks, graph, inner, is_ambiguous });
                } else if sets[number].stacks != stacks {
                    sets[number].is_ambiguous = true;
                    pending.push_back((depth + 1, None, stacks));
                    continue;
                }
                if let Some(outer) = outer.filter(|&outer| outer != number && sets[outer].graph == graph) {
                    sets[outer].inner.push(number);
                }
                pending.push_back((depth + 1, Some(number), stacks));
            }
        }
    }
    sets
}

/// The largest sets that can be told from all others. Those with the fewest stacks come first.
fn largest(sets: &[Set]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sets.len()).filter(|&number| !sets[number].is_ambiguous).collect();
    order.sort_by(|&a, &b| sets[b].share.total_cmp(&sets[a].share).then(sets[a].of.cmp(&sets[b].of)));
    order.truncate(MOST_BOXES);
    order.sort_by_key(|&number| sets[number].stacks.len());
    order
}

/// What a set's pool is merged from: the sets in it that have pools, and the other stacks.
fn parts(set: &Set, sets: &[Set], pools: &HashMap<usize, Pool>) -> (Vec<usize>, Vec<u32>) {
    let inner: Vec<usize> = set.inner.iter().copied().filter(|it| pools.contains_key(it)).collect();
    let mut in_them: Vec<u32> = inner.iter().flat_map(|&it| &sets[it].stacks).copied().collect();
    in_them.sort_unstable();
    let others = set.stacks.iter().copied().filter(|stack| in_them.binary_search(stack).is_err()).collect();
    (inner, others)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimates::intervals_used;
    use crate::group::GroupBy;
    use crate::origin::FrameRules;
    use crate::testing;

    const VALUES: [Value; 2] = [Value::InuseSpace, Value::AllocSpace];

    /// A profile of 20 processes, its layout, and its stacks.
    fn with_stacks(test: impl FnOnce(&Profile, Layout, &[Pooled])) {
        let mut profile = testing::large(600, 20);
        let process = profile.processes[0].clone();
        profile.processes.resize(20, process);
        (0..).zip(&mut profile.rows).for_each(|(at, row)| row.key.process = at % 20);
        let layout = Layout::new(&profile, GroupBy::Program, Value::InuseSpace, FrameRules::standard());
        let mut stacks = layout.pooled(&profile);
        stacks.iter_mut().for_each(|stack| stack.pool.allow_for(&intervals_used(&profile)));
        test(&profile, layout, &stacks);
    }

    #[test]
    fn each_box_has_the_figures_of_its_stacks_although_boxes_in_it_are_merged() {
        with_stacks(|profile, layout, stacks| {
            let sets = large_sets(&layout, &shares(stacks, &VALUES));
            let boxes = Boxes::of(profile, &layout, stacks, &VALUES, 0.95, &mut SharedLosses::default());
            let (mut pools, mut merged) = (HashMap::new(), 0);
            for (at, number) in largest(&sets).into_iter().enumerate() {
                let (inner, others) = parts(&sets[number], &sets, &pools);
                merged += inner.len() + others.len();
                let mut pool = Pool::default();
                sets[number].stacks.iter().for_each(|&stack| pool.merge(&stacks[stack as usize].pool));
                assert_eq!(boxes.of[at], sets[number].of);
                for (index, &value) in VALUES.iter().enumerate() {
                    let Figure { low, high, .. } = Figure::of(profile, &pool, value, 0.95, None);
                    let is_near = |found: Option<i64>, expected: Option<i64>| match (found, expected) {
                        // Sums of floating-point numbers depend on their order.
                        (Some(found), Some(expected)) => found.abs_diff(expected) <= 1,
                        _ => found == expected,
                    };
                    let found = (boxes.low[index][at], boxes.high[index][at]);
                    assert!(is_near(found.0, low) && is_near(found.1, high), "{found:?}, {low:?} to {high:?}");
                }
                pools.insert(number, pool);
            }
            assert!(sets.iter().any(|set| set.inner.len() > 1));
            // In each graph, a stack is merged once, and so is a box.
            assert!(merged <= 2 * stacks.len() + 2 * pools.len(), "{merged} of {} and {}", stacks.len(), pools.len());
        });
    }

    /// The page computes the ids of the boxes that it asks for.
    #[test]
    fn the_page_sums_the_same_bits() {
        let page = include_str!("../../../../web/src/doc.ts");
        assert!(page.contains(&format!("sheet.id[stack] % 2 ** {ID_BITS})")), "web/src/doc.ts");
    }

    #[test]
    fn boxes_with_equal_sums_have_no_interval() {
        with_stacks(|profile, mut layout, stacks| {
            let of =
                |layout: &Layout| Boxes::of(profile, layout, stacks, &VALUES, 0.95, &mut SharedLosses::default()).of;
            assert!(of(&layout).len() > 10);
            layout.ids.fill(0);
            assert!(of(&layout).is_empty());
        });
    }
}
