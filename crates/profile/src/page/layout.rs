//! What a page shows of stacks apart from their figures: names, frames, groups, and their order. During a recording,
//! most refreshes have the same stacks as the previous one, so the layout can be reused.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use foldhash::fast::RandomState;
use indexmap::IndexSet;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::MOST_STACKS;
use super::calls::{Chain, Names, Stacks};
use crate::estimates::Pool;
use crate::group::{GroupBy, Groups};
use crate::intern::Interned;
use crate::model::{Lifetimes, Module, Profile, Row, Stack};
use crate::origin::FrameRules;
use crate::value::Value;

/// Rows with equal group and frames.
#[derive(Default)]
pub(super) struct Pooled<'a> {
    pub(super) pool: Pool,
    pub(super) lifetimes: Vec<(&'a Lifetimes, f64)>,
}

/// What a page shows of stacks apart from their figures.
#[derive(Debug, Serialize)]
pub struct Layout {
    /// Number of stacks that are left out because there are too many.
    left_out: usize,
    /// Names, functions, frames and stacks as JSON, encoded only once.
    strings: Box<RawValue>,
    functions: Box<RawValue>,
    frames: Box<RawValue>,
    stacks: Box<RawValue>,
    #[serde(skip)]
    made_from: MadeFrom,
    #[serde(skip)]
    pub(super) groups: Vec<String>,
    /// For each row, the number of its group.
    #[serde(skip)]
    group_of_row: Vec<u32>,
    /// For each row, the position of its stack in the order; `None` if it is left out.
    #[serde(skip)]
    place_of_row: Vec<Option<u32>>,
    /// For each stack, in stack order, its path in either graph.
    #[serde(skip)]
    pub(super) paths: Vec<[Box<[u32]>; 2]>,
    /// For each stack, in stack order, its number.
    #[serde(skip)]
    pub(super) ids: Vec<u64>,
}

/// The inputs that determine a layout.
#[derive(Debug)]
struct MadeFrom {
    by: GroupBy,
    /// Stack and process of each row. The stacks are kept alive, so that no other stack can get the same address.
    rows: Vec<(Arc<Stack>, usize)>,
    /// Names of the processes' groups, for display and for comparison.
    processes: Vec<(String, String)>,
    modules: Vec<Module>,
}

impl Layout {
    /// Lays out the stacks of a profile. Beyond [`MOST_STACKS`], those with the smallest `shown` are left out.
    pub(super) fn new(profile: &Profile, by: GroupBy, shown: Value, rules: &'static FrameRules) -> Self {
        let mut names = Names::new(rules);
        let mut groups = GroupNames::new(profile, by);
        let (mut chains, of_row) = chains(profile, &mut names, &mut groups);
        let group_of_row = of_row.iter().map(|&chain| chains[chain as usize].group).collect();
        let kept = match chains.len() > MOST_STACKS {
            true => largest(&pooled(profile, &of_row, chains.len()), shown),
            false => vec![true; chains.len()],
        };
        let left_out = kept.iter().filter(|kept| !**kept).count();
        let numbers: Vec<usize> = (0..chains.len()).filter(|&chain| kept[chain]).collect();
        retain(&mut chains, &kept);
        let (stacks, order) = Stacks::new(&names, &chains, &groups.comparable);
        let mut place_of = vec![None; kept.len()];
        (0..).zip(&order).for_each(|(place, &chain)| place_of[numbers[chain]] = Some(place));
        Self {
            left_out,
            strings: raw(&names.strings.0.iter().collect::<Vec<_>>()),
            functions: raw(&names.functions),
            frames: raw(&names.frames),
            stacks: raw(&stacks),
            made_from: MadeFrom {
                by,
                rows: profile.rows.iter().map(|row| (Arc::clone(&row.key.stack), row.key.process)).collect(),
                processes: group_names(profile, by),
                modules: profile.modules.clone(),
            },
            groups: groups.names.into_iter().collect(),
            group_of_row,
            place_of_row: of_row.iter().map(|&chain| place_of[chain as usize]).collect(),
            paths: order.iter().map(|&chain| names.paths(&chains[chain])).collect(),
            ids: stacks.id,
        }
    }

    /// Whether a profile would get the same layout.
    pub(super) fn fits(&self, profile: &Profile, by: GroupBy) -> bool {
        let MadeFrom { by: own, rows, processes, modules } = &self.made_from;
        let is_same = |(row, (stack, process)): (&Row, &(Arc<Stack>, usize))| {
            Arc::ptr_eq(&row.key.stack, stack) && row.key.process == *process
        };
        // Groups by thread depend on names in the rows, and the set of largest stacks changes.
        by != GroupBy::Thread
            && *own == by
            && self.left_out == 0
            && rows.len() == profile.rows.len()
            && profile.rows.iter().zip(rows).all(is_same)
            && *modules == profile.modules
            && *processes == group_names(profile, by)
    }

    /// The rows of each stack, in stack order.
    pub(super) fn pooled<'a>(&self, profile: &'a Profile) -> Vec<Pooled<'a>> {
        let mut stacks: Vec<Pooled> = Vec::new();
        stacks.resize_with(self.ids.len(), Pooled::default);
        for (row, place) in profile.rows.iter().zip(&self.place_of_row) {
            place.iter().for_each(|place| stacks[*place as usize].add(row));
        }
        stacks
    }

    /// The rows of each group, with its processes.
    pub(super) fn pooled_groups(&self, profile: &Profile) -> Vec<(Pool, BTreeSet<usize>)> {
        let mut groups = vec![(Pool::default(), BTreeSet::new()); self.groups.len()];
        let mut last = None;
        for (row, &group) in profile.rows.iter().zip(&self.group_of_row) {
            let (pool, processes) = &mut groups[group as usize];
            pool.add(row);
            // The rows of a process are mostly adjacent.
            if last.replace((group, row.key.process)) != Some((group, row.key.process)) {
                processes.insert(row.key.process);
            }
        }
        groups
    }
}

impl<'a> Pooled<'a> {
    fn add(&mut self, row: &'a Row) {
        self.pool.add(row);
        self.lifetimes.extend(row.lifetimes.as_ref().map(|it| (it, row.alloc.objects)));
    }
}

/// Plain data as JSON, which cannot fail.
fn raw(value: &impl Serialize) -> Box<RawValue> {
    to_raw_value(value).unwrap_or_default()
}

fn group_names(profile: &Profile, by: GroupBy) -> Vec<(String, String)> {
    let (shown, same) = (Groups::new(profile, by), Groups::comparable(profile, by));
    (0..profile.processes.len())
        .map(|process| (shown.of_process(process).into_owned(), same.of_process(process).into_owned()))
        .collect()
}

/// Names of groups, in the order in which their stacks appear.
pub(super) struct GroupNames<'a> {
    by: GroupBy,
    shown: Groups<'a>,
    same: Groups<'a>,
    pub(super) names: IndexSet<String>,
    /// Names that stay the same in other recordings.
    pub(super) comparable: Vec<String>,
    /// The previous process, and the number of its group.
    last: Option<(usize, u32)>,
}

impl<'a> GroupNames<'a> {
    pub(super) fn new(profile: &'a Profile, by: GroupBy) -> Self {
        let (names, comparable, last) = Default::default();
        let (shown, same) = (Groups::new(profile, by), Groups::comparable(profile, by));
        Self { by, shown, same, names, comparable, last }
    }

    /// The number of a row's group.
    fn of(&mut self, row: &'a Row) -> u32 {
        if let Some((_, id)) =
            self.last.filter(|(process, _)| *process == row.key.process && self.by != GroupBy::Thread)
        {
            return id;
        }
        let (id, is_new) = self.names.insert_full(self.shown.name(row).into_owned());
        if is_new {
            self.comparable.push(self.same.name(row).into_owned());
        }
        self.last = Some((row.key.process, id as u32));
        id as u32
    }
}

/// The distinct combinations of group and frames, and the one that each row has.
pub(super) fn chains<'a>(
    profile: &'a Profile,
    names: &mut Names,
    groups: &mut GroupNames<'a>,
) -> (Vec<Chain>, Vec<u32>) {
    let interned = Interned::for_viewers(profile);
    let ids: Vec<u32> = interned.frames.iter().map(|frame| names.frame(profile, frame)).collect();
    // Frames that differ only in their address are the same call, so stacks may become equal here.
    let mut numbers: HashMap<Arc<[u32]>, u32, RandomState> = HashMap::default();
    let stacks: Vec<(u32, Arc<[u32]>)> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let frames: Arc<[u32]> = interned.frame_ids(stack).iter().rev().map(|&frame| ids[frame as usize]).collect();
            let next = numbers.len() as u32;
            (*numbers.entry(Arc::clone(&frames)).or_insert(next), frames)
        })
        .collect();
    let mut known: HashMap<(u32, u32, u32), u32, RandomState> = HashMap::default();
    let mut chains: Vec<Chain> = Vec::new();
    let of_row = profile.rows.iter().zip(&interned.stack_of_row).map(|(row, &stack)| {
        let cut = row.key.stack.cut.as_deref().map_or(0, |reason| names.strings.id(reason));
        let (number, frames) = &stacks[stack as usize];
        let group = groups.of(row);
        *known.entry((group, cut, *number)).or_insert_with(|| {
            chains.push(Chain { group, cut, frames: Arc::clone(frames) });
            chains.len() as u32 - 1
        })
    });
    let of_row = of_row.collect();
    (chains, of_row)
}

/// The rows of each chain.
pub(super) fn pooled<'a>(profile: &'a Profile, chain_of_row: &[u32], chains: usize) -> Vec<Pooled<'a>> {
    let mut stacks: Vec<Pooled> = Vec::new();
    stacks.resize_with(chains, Pooled::default);
    profile.rows.iter().zip(chain_of_row).for_each(|(row, &chain)| stacks[chain as usize].add(row));
    stacks
}

/// Keeps the items that are marked.
pub(super) fn retain<T>(items: &mut Vec<T>, kept: &[bool]) {
    let mut kept = kept.iter();
    items.retain(|_| kept.next() == Some(&true));
}

/// Which stacks are among the [`MOST_STACKS`] largest.
pub(super) fn largest(stacks: &[Pooled], by: Value) -> Vec<bool> {
    if stacks.len() <= MOST_STACKS {
        return vec![true; stacks.len()];
    }
    let size = |stack: &Pooled| (stack.pool.total(by), stack.pool.total(Value::AllocSpace));
    let mut order: Vec<usize> = (0..stacks.len()).collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (size(&stacks[a]), size(&stacks[b]));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    let mut kept = vec![false; stacks.len()];
    order[..MOST_STACKS].iter().for_each(|&index| kept[index] = true);
    kept
}
