//! Figures of a page, as columns of integers.

use std::collections::{BTreeMap, HashSet, VecDeque};

use serde::Serialize;

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
#[derive(Default, Serialize)]
pub(super) struct Column {
    pub(super) estimate: Vec<i64>,
    /// `null` where there is no valid interval.
    pub(super) low: Vec<Option<i64>>,
    pub(super) high: Vec<Option<i64>>,
    pub(super) samples: Vec<u64>,
}

impl Column {
    pub(super) fn of(profile: &Profile, pools: &[&Pool], value: Value, confidence: f64) -> Self {
        let (low, high, samples) =
            (Vec::with_capacity(pools.len()), Vec::with_capacity(pools.len()), Vec::with_capacity(pools.len()));
        let mut column = Self { low, high, samples, ..Self::default() };
        let mut estimates = Vec::with_capacity(pools.len());
        for pool in pools {
            let Estimate { estimate, low, high, .. } = pool.estimate(profile, value, confidence);
            let whole = |number: f64| number.round() as i64;
            estimates.push(estimate);
            column.low.push(low.map(whole));
            column.high.push(high.map(whole));
            column.samples.push(pool.samples(value));
        }
        // Rounded so that stacks add up to the total.
        column.estimate = crate::round::largest_remainder(&estimates);
        column
    }
}

/// Intervals and lifetimes of the largest boxes of the graph. A box stands for a set of stacks, which has the same
/// interval in every graph. Boxes of one stack are left out: the page has the figures of stacks.
#[derive(Default, Serialize)]
pub(super) struct Boxes {
    /// Identifies the set: the sum of the low 32 bits of its stacks' numbers.
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
        for Set { of, stacks: members, .. } in largest_sets(layout, &shares(stacks, values)) {
            let members = || members.iter().map(move |&stack| &stacks[stack as usize]);
            let mut pool = Pool::default();
            members().for_each(|stack| pool.merge(&stack.pool));
            losses.give_to(&mut pool, profile);
            boxes.of.push(of);
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
    /// Positions in stack order.
    stacks: Vec<u32>,
}

/// The sets of the largest boxes, the largest first. Only what is below a large box is looked at, from the root on.
fn largest_sets(layout: &Layout, shares: &[Vec<f64>]) -> Vec<Set> {
    let mut known = HashSet::new();
    let mut sets = Vec::new();
    for graph in 0..2 {
        let all: Vec<u32> = (0..layout.paths.len() as u32).collect();
        let mut pending = VecDeque::from([(0_usize, all)]);
        let mut frames = 0;
        while let Some((depth, above)) = pending.pop_front().filter(|_| frames < MOST_FRAMES) {
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
                let of: u64 = stacks.iter().map(|&stack| layout.ids[stack as usize] & u64::from(u32::MAX)).sum();
                if known.insert(of) {
                    sets.push(Set { of, share, stacks: stacks.clone() });
                }
                pending.push_back((depth + 1, stacks));
            }
        }
    }
    sets.sort_by(|a, b| b.share.total_cmp(&a.share).then(a.of.cmp(&b.of)));
    sets.truncate(MOST_BOXES);
    sets
}
