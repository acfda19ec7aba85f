//! Figures with their intervals.

use heapbpf_statistics::estimate::{Estimate, NO_OFFSETS};
use heapbpf_statistics::interval::Interval;
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use crate::estimates::{NOT_COUNTED, NOT_FOLLOWED, Pool, SOME_NOT_FOLLOWED, exact, of_row};
use crate::model::{Profile, Row};
use crate::value::Value;

/// An estimate with its variance, which sums over profiles need.
#[derive(Default, Serialize)]
struct Figure {
    estimate: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
    exact: Option<u64>,
    variance: Option<f64>,
    /// What calibration or time windows added to the unbiased estimate. The interval belongs to the unbiased estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    correction: Option<f64>,
    /// For bytes, the interval whose coverage is guaranteed for every mix of sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    guaranteed: Option<Interval>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl Figure {
    fn new(
        profile: &Profile,
        estimate: Estimate,
        variance: f64,
        correction: f64,
        guaranteed: Result<Interval, &'static str>,
    ) -> Self {
        Self {
            estimate: Some(estimate.estimate),
            low: estimate.low,
            high: estimate.high,
            exact: estimate.exact,
            variance: profile.header.samples_known.then_some(variance),
            correction: Some(correction).filter(|correction| *correction != 0.0),
            guaranteed: guaranteed.ok(),
            reason: estimate.reason,
        }
    }

    /// A figure of which nothing is known, with the reason.
    fn unknown(reason: &'static str) -> Self {
        Self { reason: Some(reason), ..Self::default() }
    }
}

/// The figures of a stack, of a process or of the profile, by name.
pub(super) struct Figures(Vec<(&'static str, Figure)>);

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, figure)| (name, figure)))
    }
}

impl Figures {
    fn new(known: impl Fn(Value) -> bool, figure: impl Fn(Value) -> Figure) -> Self {
        let shown = Value::ALL.into_iter().filter(|value| known(*value) || !value.is_in_memory());
        let figure = |value: Value| if known(value) { figure(value) } else { Figure::unknown(NOT_FOLLOWED) };
        Self(shown.map(|value| (value.json_name(), figure(value))).collect())
    }

    /// The same with the address space of the mappings in a pool.
    fn with_address_space(mut self, profile: &Profile, confidence: f64, pool: &Pool) -> Self {
        let space = pool.address_space(profile, confidence);
        let figure = |(estimate, variance)| Figure::new(profile, estimate, variance, 0.0, Err(NO_OFFSETS));
        // Of mappings.
        self.0.extend(space.map(|space| ("address_space_bytes", figure(space))));
        self
    }

    /// Figures of a process in which nothing was counted. It adds nothing to sums, and how much it allocated is not
    /// known.
    pub(super) fn of_idle() -> Self {
        let none = |value: Value| Some(0.0).filter(|_| !value.needs_frees());
        Self::new(
            |value| !value.is_in_memory(),
            |value| Figure { estimate: none(value), ..Figure::unknown(NOT_COUNTED) },
        )
    }

    /// Figures of a process, given by its index, or of the whole profile.
    pub(super) fn of_pool(profile: &Profile, confidence: f64, pool: &Pool, process: Option<usize>) -> Self {
        let known = |value: Value| {
            pool.knows(profile, value) && process.is_none_or(|it| !value.needs_frees() || profile.knows_inuse(it))
        };
        let lacks = |value: Value| process.is_none() && value.needs_frees() && profile.without_inuse() > 0;
        Self::new(known, |value| {
            let mut estimate = pool.estimate(profile, value, confidence);
            estimate.exact = exact(profile, process, value).or(estimate.exact);
            estimate.reason = if lacks(value) { Some(SOME_NOT_FOLLOWED) } else { estimate.reason };
            let correction = pool.total(value) - pool.raw_total(value);
            let guaranteed = pool.guaranteed(profile, value, confidence);
            Figure::new(profile, estimate, pool.variance(value), correction, guaranteed)
        })
        .with_address_space(profile, confidence, pool)
    }

    pub(super) fn of_row(profile: &Profile, confidence: f64, row: &Row) -> Self {
        let pool = Pool::of([row]);
        let figures = Self::new(
            |value| {
                let is_read = row.in_memory.is_some() || !value.is_in_memory();
                is_read && (!value.needs_frees() || profile.knows_inuse(row.key.process))
            },
            |value| {
                let sums = value.sums(row);
                let variance = if value.is_bytes() { sums.bytes_variance } else { sums.objects_variance };
                let correction = if value.is_bytes() { sums.bytes_correction } else { sums.objects_correction };
                let estimate = of_row(profile, row, value, confidence);
                let guaranteed = pool.guaranteed(profile, value, confidence);
                Figure::new(profile, estimate, variance, correction, guaranteed)
            },
        );
        // Few rows are mappings.
        if row.is_of_mappings() { figures.with_address_space(profile, confidence, &pool) } else { figures }
    }

    /// Writes the figures as fields of the object that they belong to.
    pub(super) fn fields<S: Serializer>(&self, fields: &mut S::SerializeStruct) -> Result<(), S::Error> {
        self.0.iter().try_for_each(|(name, figure)| fields.serialize_field(name, figure))
    }
}
