//! Matching the stacks of two profiles.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use indexmap::IndexMap;
use serde::Serialize;

use crate::estimates::{Pool, intervals_used};
use crate::formats::FrameJson;
use crate::group::{GroupBy, Groups};
use crate::intern::Strings;
use crate::loss_bounds::LostOf;
use crate::model::{Frame, Profile, Stack};
use crate::naming::{FunctionKey, frame_name, lasting_name};
use crate::report::FrameView;
use crate::report::chain::{Call, KnownOrigins};

/// A stack with its samples in both profiles.
pub(super) struct Matched {
    pub(super) group: String,
    pub(super) function: String,
    pub(super) before: Pool,
    pub(super) after: Pool,
    /// The stack as first found, and whether it was found in the profile before.
    stack: (Arc<Stack>, bool),
}

impl Matched {
    /// Title of the stack.
    pub(super) fn title<'a>(
        &'a self,
        before: &'a Profile,
        after: &'a Profile,
        view: FrameView,
        known: &mut KnownOrigins,
    ) -> Title<'a> {
        let (stack, seen_before) = &self.stack;
        let profile = if *seen_before { before } else { after };
        let Some(frame) = title(profile, stack, view, known) else {
            let function = FunctionKey::named(&self.function);
            return Title { function, name: self.function.clone(), place: String::new() };
        };
        let Call { name, place, .. } = view.call(profile, frame);
        Title { function: FunctionKey::named(FunctionKey::of(profile, frame).name), name, place }
    }

    pub(super) fn frames(
        &self,
        before: &Profile,
        after: &Profile,
        view: FrameView,
        known: &mut KnownOrigins,
    ) -> Vec<DiffFrame> {
        let (stack, seen_before) = &self.stack;
        let profile = if *seen_before { before } else { after };
        let mut frames: Vec<DiffFrame> =
            stack.frames.iter().map(|frame| DiffFrame::new(profile, frame, view)).collect();
        view.shown_of(profile, stack, known).frames.iter().for_each(|at| frames[*at].is_shown = true);
        frames
    }
}

/// A frame in a comparison, with the same keys as in `.json`. It does not refer to its profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiffFrame {
    /// The frame, as far as a comparison has it.
    #[serde(flatten)]
    pub frame: FrameJson,
    /// Name to show: the function's name, or the location if the function is unknown.
    #[serde(skip)]
    pub name: String,
    /// Whether tables show the frame.
    #[serde(skip)]
    pub is_shown: bool,
}

impl DiffFrame {
    fn new(profile: &Profile, frame: &Frame, view: FrameView) -> Self {
        let whole = FrameJson::new(profile, frame);
        let frame_json = FrameJson { file_offset: None, system_name: None, function_start: None, ..whole };
        Self { frame: frame_json, name: view.name(profile, frame), is_shown: false }
    }
}

/// The pool of all samples of a profile.
pub(super) fn total(profile: &Profile) -> Pool {
    let mut pool = Pool::whole(profile);
    pool.allow_for_others(&intervals_used(profile));
    pool
}

/// The title of a stack.
pub(super) struct Title<'a> {
    /// The full name of the function. Modules do not tell functions of two profiles apart, because their names change
    /// from version to version.
    pub(super) function: FunctionKey<'a>,
    /// The short name.
    pub(super) name: String,
    /// Its file and line, or its module.
    pub(super) place: String,
}

/// The number of a function.
fn id(names: &mut Strings, profile: &Profile, frame: &Frame) -> u32 {
    names.id(lasting_name(&frame_name(profile, frame)))
}

/// The frame that titles a stack. `None` if it has no frames.
fn title<'a>(profile: &Profile, stack: &'a Stack, view: FrameView, known: &mut KnownOrigins) -> Option<&'a Arc<Frame>> {
    view.shown_of(profile, stack, known).frames.first().map(|first| &stack.frames[*first])
}

/// The only group of a profile; `None` if there are none or several.
fn only_group(profile: &Profile, groups: &Groups) -> Option<String> {
    let names: BTreeSet<String> = profile.rows.iter().map(|row| groups.name(row).into_owned()).collect();
    if names.len() == 1 { names.into_iter().next() } else { None }
}

/// The stacks of both profiles, matched by their frames, or by their titles if `titles` is given. In the order in which
/// they are found.
pub(super) fn matched(
    before: &Profile,
    after: &Profile,
    group_by: GroupBy,
    mut titles: Option<(FrameView, &mut KnownOrigins)>,
) -> Vec<Matched> {
    // If each side has a single program, it is treated as the same program even under another name.
    let only = |profile| only_group(profile, &Groups::comparable(profile, group_by));
    let renamed = only(before).zip(only(after)).filter(|(was, is)| was != is);
    let mut stacks: IndexMap<Key, Matched> = IndexMap::new();
    let mut names = Strings::default();
    // Parquet and pprof do not keep the allocator function; stacks are then matched without it.
    let by_function = [before, after].iter().all(|profile| profile.rows.iter().any(|row| !row.key.function.is_empty()));
    for (profile, is_before) in [(before, true), (after, false)] {
        let mut chains: HashMap<*const Stack, Arc<[u32]>> = HashMap::new();
        let groups = Groups::comparable(profile, group_by);
        for row in &profile.rows {
            let group = match &renamed {
                Some((was, is)) => format!("{was} → {is}"),
                None => groups.name(row).into_owned(),
            };
            let chain = chains.entry(Arc::as_ptr(&row.key.stack)).or_insert_with(|| match &mut titles {
                Some((view, known)) => {
                    let title = title(profile, &row.key.stack, *view, known);
                    title.map(|frame| id(&mut names, profile, frame)).into_iter().collect()
                }
                None => row.key.stack.frames.iter().map(|frame| id(&mut names, profile, frame)).collect(),
            });
            let function = if by_function && titles.is_none() { &*row.key.function } else { "" };
            let key = (names.id(&group), names.id(function), Arc::clone(chain));
            let stack = stacks.entry(key).or_insert_with(|| Matched {
                group,
                function: row.key.function.to_string(),
                before: Pool::default(),
                after: Pool::default(),
                stack: (Arc::clone(&row.key.stack), is_before),
            });
            if is_before { &mut stack.before } else { &mut stack.after }.add(row);
        }
    }
    let mut stacks: Vec<Matched> = stacks.into_values().collect();
    // All rows of a stack may have been lost.
    let (mut lost_before, mut lost_after) = (LostRows::new(before, group_by), LostRows::new(after, group_by));
    for stack in &mut stacks {
        let (was, is) = renamed.as_ref().map_or((&stack.group, &stack.group), |(was, is)| (was, is));
        let (was, is) = (lost_before.of(was), lost_after.of(is));
        stack.before.set_lost(was);
        stack.after.set_lost(is);
    }
    // A stack may have no sample under any one of the sampling intervals.
    let (used_before, used_after) = (intervals_used(before), intervals_used(after));
    for stack in &mut stacks {
        stack.before.allow_for(&used_before);
        stack.after.allow_for(&used_after);
    }
    stacks
}

/// Lost samples by group. Any stack of a group may have lost everything that the group's processes lost.
struct LostRows<'a> {
    profile: &'a Profile,
    /// Processes with losses, by the groups of their rows.
    processes: HashMap<String, BTreeSet<usize>>,
    /// Processes with losses but without rows, which may belong to any group.
    unseen: Arc<LostOf>,
    /// Cache of computed losses.
    known: HashMap<String, Arc<LostOf>>,
    largest: u64,
}

impl<'a> LostRows<'a> {
    fn new(profile: &'a Profile, group_by: GroupBy) -> Self {
        let groups = Groups::comparable(profile, group_by);
        let lossy = |index: &usize| profile.processes.get(*index).is_some_and(|process| !process.losses.is_none());
        let mut unseen: BTreeSet<usize> = (0..profile.processes.len()).filter(lossy).collect();
        let mut processes: HashMap<String, BTreeSet<usize>> = HashMap::new();
        for row in profile.rows.iter().filter(|row| lossy(&row.key.process)) {
            unseen.remove(&row.key.process);
            processes.entry(groups.name(row).into_owned()).or_default().insert(row.key.process);
        }
        let largest = intervals_used(profile).last().copied().unwrap_or(0);
        let unseen = Arc::new(LostOf::new(profile, unseen.iter().copied(), largest));
        Self { profile, processes, unseen, known: HashMap::new(), largest }
    }

    fn of(&mut self, group: &str) -> Arc<LostOf> {
        let Some(processes) = self.processes.get(group) else { return Arc::clone(&self.unseen) };
        if let Some(known) = self.known.get(group) {
            return Arc::clone(known);
        }
        let all = Arc::new(LostOf::new(self.profile, processes.iter().copied(), self.largest).with(&self.unseen));
        self.known.insert(group.to_owned(), Arc::clone(&all));
        all
    }
}

/// Group, allocator function and frames, as name ids.
type Key = (u32, u32, Arc<[u32]>);
