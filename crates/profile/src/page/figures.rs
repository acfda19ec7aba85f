//! Figures of a page, as columns of integers.

use serde::Serialize;

use crate::estimates::Pool;
use crate::model::Profile;
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;

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
