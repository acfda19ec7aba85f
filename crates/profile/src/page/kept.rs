//! Memory allocated between two points in time and in use at the second, for the page.

use serde::Serialize;

use super::calls::{Chain, Frames, Functions, Names, Stacks};
use super::figures::{Column, Figure};
use super::layout::{GroupNames, Pooled, chains, largest, pooled, retain};
use crate::estimates::{Pool, intervals_used};
use crate::group::GroupBy;
use crate::model::Profile;
use crate::report::FrameView;
use crate::units;
use crate::value::Value;

/// Memory allocated after a point in time and in use at a later one, by stack.
#[derive(Serialize)]
pub struct KeptData {
    from_ms: u64,
    to_ms: u64,
    confidence: f64,
    total: Figure,
    /// Bytes that were allocated in that time, kept or not.
    allocated: Option<u64>,
    notes: Vec<String>,
    groups: Vec<String>,
    /// Number of stacks that are left out because there are too many.
    left_out: usize,
    strings: Vec<String>,
    functions: Functions,
    frames: Frames,
    stacks: Stacks,
    column: Column,
}

/// Builds the data. `profile` is the later point in time; its rows in use cover only blocks allocated after `from_ms`.
///
/// The figures are estimated like those in use, from fewer samples. Bounds on losses are those of everything in use, so
/// intervals are never too narrow. `allocated`: bytes allocated after `from_ms`, if they are known.
pub fn kept_data(
    profile: &Profile,
    from_ms: u64,
    allocated: Option<u64>,
    notes: Vec<String>,
    confidence: f64,
    frames: FrameView,
) -> KeptData {
    const VALUE: Value = Value::InuseSpace;
    let mut names = Names::new(frames.rules);
    let mut groups = GroupNames::new(profile, GroupBy::Program);
    let (chains, of_row) = chains(profile, &mut names, &mut groups);
    let stacks = pooled(profile, &of_row, chains.len());
    let some = chains.into_iter().zip(stacks).filter(|(_, stack)| stack.pool.samples(VALUE) > 0);
    let (mut chains, mut stacks): (Vec<Chain>, Vec<Pooled>) = some.unzip();
    let kept = largest(&stacks, VALUE);
    let left_out = kept.iter().filter(|kept| !**kept).count();
    retain(&mut chains, &kept);
    retain(&mut stacks, &kept);
    let (columns, order) = Stacks::new(&names, &chains, &groups.comparable);
    let intervals = intervals_used(profile);
    stacks.iter_mut().for_each(|stack| stack.pool.allow_for(&intervals));
    let pools: Vec<&Pool> = order.iter().map(|&index| &stacks[index].pool).collect();
    KeptData {
        from_ms,
        to_ms: units::unix_ms(profile.header.time),
        confidence,
        total: Figure::of(profile, &Pool::whole(profile), VALUE, confidence, None),
        allocated,
        notes,
        left_out,
        column: Column::of(profile, &pools, VALUE, confidence),
        groups: groups.names.into_iter().collect(),
        strings: names.strings.0.into_iter().collect(),
        functions: names.functions,
        frames: names.frames,
        stacks: columns,
    }
}
