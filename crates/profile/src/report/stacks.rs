//! The table of top stacks.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use indexmap::{IndexMap, IndexSet};

use super::Context;
use super::chain::{self, Call, Chain, FrameView};
use super::figures::FigureTable;
use super::functions::Named;
use crate::estimates::Pool;
use crate::group::Groups;
use crate::intern::{Interned, NO_STACK};
use crate::model::{Lifetimes, Row};
use crate::naming::FunctionKey;
use crate::origin::{Origin, Shown};
use crate::report::text::Style;
use crate::units;
use crate::value::Value;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival;

/// Lines of the section; empty if there are no stacks.
pub(super) fn section(context: &Context) -> Vec<String> {
    let groups = groups(context);
    if groups.is_empty() {
        return Vec::new();
    }
    let shown = &groups[..groups.len().min(context.options.top)];
    let of = if shown.len() < groups.len() {
        format!("top {} of {} stacks", shown.len(), units::count(groups.len() as f64))
    } else if groups.len() == 1 {
        "the only stack".into()
    } else {
        format!("all {} stacks", groups.len())
    };
    let title = format!("By {}", context.sort.title());
    let mut table = FigureTable::new(context, true, &[]);
    shown.iter().for_each(|group| table.row(context, &group.pool, Vec::new()));
    let about = format!(" · {of}{}", table.about_intervals(context));
    let (header, rows) = table.lines(context);
    let mut lines = vec![context.headed(&title, &about), header];
    let chains = chains_apart(context, shown.iter());
    for ((row, group), chain) in rows.into_iter().zip(shown).zip(&chains) {
        lines.push(row);
        lines.extend(group.calls(context, chain, STACK_LINES));
        let lives = lifetimes(group).map(|text| context.paint(Style::Dim, &text));
        lines.extend(lives.map(|line| format!("{:INDENT$}{line}", "")));
    }
    lines.extend(table.notes(context));
    lines
}

/// Maximum number of lines for the calls of a stack.
const STACK_LINES: usize = 3;
/// Maximum number of lines for the program's own calls, where they need more.
const OWN_LINES: usize = 12;
/// Indentation of the calls of a stack, in columns.
pub(super) const INDENT: usize = 6;

/// Text of the lifetimes of a stack's blocks.
fn lifetimes(group: &Group) -> Option<String> {
    let Lifetimes { median_seconds, temporary, .. } = survival::pooled(&group.lifetimes)?;
    let half = median_seconds.map_or_else(
        || "more than half are not freed".to_owned(),
        |seconds| format!("half are freed within {}", units::seconds(seconds)),
    );
    Some(if temporary > 0.0 { format!("{half} · {} temporary", units::percent(temporary)) } else { half })
}

/// Rows that are shown as one stack.
pub(super) struct Group<'a> {
    pub(super) name: Cow<'a, str>,
    pub(super) cut: Option<Cow<'a, str>>,
    pub(super) pool: Pool,
    /// Sums of allocations over all sampling intervals.
    pub(super) alloc: SampleSums,
    /// The first row.
    pub(super) row: &'a Row,
    /// Which frames of its stack are shown.
    pub(super) shown: Shown,
    /// All rows.
    pub(super) rows: Vec<&'a Row>,
    /// Lifetimes of each row, with its estimated number of allocations.
    pub(super) lifetimes: Vec<(&'a Lifetimes, f64)>,
}

impl Group<'_> {
    /// Calls, mostly its own, on at most `limit` lines, indented.
    pub(super) fn calls(&self, context: &Context, chain: &Chain, limit: usize) -> Vec<String> {
        let (lead, cut, columns) = (self.name.as_ref(), self.cut.as_deref(), context.width - INDENT);
        let lines = chain::lines(chain, lead, cut, columns, (limit, OWN_LINES), context.options.color);
        lines.into_iter().map(|line| format!("{:INDENT$}{line}", "")).collect()
    }

    pub(super) fn chain(&self, context: &Context) -> Chain {
        self.chain_in(context, context.options.frames, &self.shown)
    }

    /// Its calls with other frames than those that the report shows.
    pub(super) fn chain_in(&self, context: &Context, view: FrameView, shown: &Shown) -> Chain {
        let (profile, stack) = (context.profile, &self.row.key.stack);
        let functions = shown.frames.iter().map(|at| FunctionKey::of(profile, &stack.frames[*at]));
        // Recursion is detected by function; the first location is shown.
        let calls = functions.zip(view.calls(profile, stack, shown)).map(|(function, call)| Site { function, call });
        chain::fold_recursion(calls).into_iter().map(|(site, repeated)| (site.call, repeated)).collect()
    }
}

impl<'a> Group<'a> {
    /// The function that titles it.
    pub(super) fn function(&self, context: &Context<'a>) -> FunctionKey<'a> {
        let first = self.shown.frames.first().map(|at| &self.row.key.stack.frames[*at]);
        first.map_or_else(|| FunctionKey::named(NO_STACK), |frame| FunctionKey::of(context.profile, frame))
    }
}

/// The calls of groups that stand in one list. Those that would look alike have full names.
pub(super) fn chains_apart<'a>(context: &Context, groups: impl Iterator<Item = &'a Group<'a>> + Clone) -> Vec<Chain> {
    let looks: Vec<_> = groups.clone().map(|group| (&group.name, &group.cut, group.chain(context))).collect();
    let mut alike: HashMap<_, usize> = HashMap::new();
    looks.iter().for_each(|look| *alike.entry(look).or_default() += 1);
    let full = FrameView { full_names: true, ..context.options.frames };
    let shown = groups.zip(&looks);
    shown
        .map(
            |(group, look)| if alike[look] == 1 { look.2.clone() } else { group.chain_in(context, full, &group.shown) },
        )
        .collect()
}

/// A call that equals all others of its function.
#[derive(Clone)]
struct Site<'a> {
    function: FunctionKey<'a>,
    call: Call,
}

impl PartialEq for Site<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.function == other.function
    }
}

/// Group name, calls, and the reason why the stack was cut.
type GroupKey<'a, 'b> = (Cow<'a, str>, &'b [u32], Option<&'a str>);

/// What distinguishes stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StackKeyKind {
    /// Their calls with recursion folded, including source lines. Lines of functions that recurse anywhere in the
    /// profile do not count, because a recursion may end at any of these lines.
    Calls,
    /// Functions, with recursion folded.
    Functions,
}

/// Groups of rows according to the options, largest first.
pub(super) fn groups<'a>(context: &'a Context) -> Vec<Group<'a>> {
    groups_by(context, StackKeyKind::Calls, context.options.frames)
}

/// Groups of rows by all their frames, including hidden ones, so that one leaking stack is not averaged away among
/// others.
pub(super) fn judged_groups<'a>(context: &'a Context) -> Vec<Group<'a>> {
    groups_by(context, StackKeyKind::Calls, FrameView { all_frames: true, ..context.options.frames })
}

/// The key of each stack of the profile. Stacks with equal keys are merged.
fn stack_keys(context: &Context, interned: &Interned, kind: StackKeyKind, shown: &[Vec<u32>]) -> Vec<Box<[u32]>> {
    let (_, functions) = Named::of_frames(interned, |frame| FunctionKey::of(context.profile, frame), |_| String::new());
    let frames = |stack: u32| shown[stack as usize].iter().map(|&frame| frame as usize);
    let stacks = 0..interned.stacks.len() as u32;
    let mut recursive: HashSet<usize> = HashSet::new();
    if kind == StackKeyKind::Calls {
        let folded = stacks.clone().flat_map(|stack| chain::fold_recursion(frames(stack).map(|at| functions[at])));
        recursive.extend(folded.filter(|(_, repeated)| *repeated).map(|(function, _)| function));
    }
    let mut ids: IndexSet<(usize, String)> = IndexSet::new();
    let id_of_frame: Vec<u32> = functions
        .iter()
        .zip(&interned.frames)
        .map(|(function, frame)| {
            let has_place = kind == StackKeyKind::Calls && !recursive.contains(function);
            let place = if has_place { chain::place(context.profile, frame) } else { String::new() };
            ids.insert_full((*function, place)).0 as u32
        })
        .collect();
    let key = |stack| {
        let ids = frames(stack).map(|at| id_of_frame[at]);
        chain::fold_recursion(ids).into_iter().map(|(id, _)| id).collect()
    };
    stacks.map(key).collect()
}

/// For each stack, the indices of the frames that are shown.
fn shown_places(context: &Context, interned: &Interned, view: FrameView) -> Vec<Shown> {
    let origins: Vec<Origin> = interned.frames.iter().map(|frame| view.rules.origin(context.profile, frame)).collect();
    let of_stack = |stack: u32| {
        let ids = interned.frame_ids(stack);
        let origins: Vec<Origin> = ids.iter().map(|frame| origins[*frame as usize]).collect();
        let stack = interned.stacks[stack as usize].stack;
        // An empty stack has one placeholder frame for viewers.
        let has_frames = stack.frames.len() == ids.len();
        if has_frames { view.shown(stack, &origins) } else { Shown::new((0..ids.len()).collect(), &origins, None) }
    };
    (0..interned.stacks.len() as u32).map(of_stack).collect()
}

/// For each stack, the ids of the frames that are shown, innermost first.
pub(super) fn shown_frames(context: &Context, interned: &Interned, view: FrameView) -> Vec<Vec<u32>> {
    numbers(interned, &shown_places(context, interned, view))
}

fn numbers(interned: &Interned, places: &[Shown]) -> Vec<Vec<u32>> {
    let of_stack = |(stack, shown): (u32, &Shown)| {
        let ids = interned.frame_ids(stack);
        shown.frames.iter().map(|at| ids[*at]).collect()
    };
    (0..).zip(places).map(of_stack).collect()
}

/// Groups of rows, with stacks distinguished by `kind`, largest first.
pub(super) fn groups_by<'a>(context: &'a Context, kind: StackKeyKind, view: FrameView) -> Vec<Group<'a>> {
    let profile = context.profile;
    let groups_of = Groups::new(profile, context.group_by);
    let interned = Interned::new(profile);
    let shown = shown_places(context, &interned, context.options.frames);
    let judged = if view.all_frames == context.options.frames.all_frames {
        numbers(&interned, &shown)
    } else {
        shown_frames(context, &interned, view)
    };
    let key_of_stack = stack_keys(context, &interned, kind, &judged);
    let mut groups: IndexMap<GroupKey<'a, '_>, Group<'a>> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let name = groups_of.name(row);
        let cut = row.key.stack.cut.as_deref();
        let group = groups.entry((name.clone(), &key_of_stack[stack as usize], cut)).or_insert_with(|| {
            let (pool, alloc, lifetimes, rows) = Default::default();
            let shown = shown[stack as usize].clone();
            Group { name, cut: cut.map(Cow::Borrowed), pool, alloc, row, shown, rows, lifetimes }
        });
        group.pool.add(row);
        group.rows.push(row);
        group.alloc.add(&row.alloc);
        group.lifetimes.extend(row.lifetimes.as_ref().map(|lifetimes| (lifetimes, row.alloc.objects)));
    }
    let mut groups: Vec<Group<'a>> = groups.into_values().collect();
    if context.sort.is_at_exit() {
        groups.retain(|group| group.pool.total(context.sort) > 0.0);
    }
    groups.iter_mut().for_each(|group| group.pool.allow_for(&context.intervals));
    // Stacks that are equal in the chosen value (for example nothing in use) are sorted by bytes allocated.
    let order = |group: &Group| (group.pool.total(context.sort), group.pool.total(Value::AllocSpace));
    groups.sort_by(|a, b| {
        let (a, b) = (order(a), order(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    groups
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::model::{Profile, Stack};
    use crate::report::{By, ReportOptions, report};
    use crate::testing;

    /// The small profile with one more row, whose stack differs from another only in the line of one function.
    fn with_other_lines(from: usize, function: &str, line: u32) -> Profile {
        let mut profile = testing::small().only_process(0);
        let mut row = profile.rows[from].clone();
        let mut stack = Stack::clone(&row.key.stack);
        let found = stack.frames.iter_mut().rfind(|frame| frame.function.as_deref() == Some(function));
        Arc::make_mut(found.expect("it is in the stack")).line = Some(line);
        row.key.stack = stack.into();
        profile.rows.push(row);
        profile
    }

    /// Overloads without source lines are two functions, whose stacks do not look alike.
    #[test]
    fn functions_whose_short_names_are_equal_have_stacks_of_their_own() {
        let mut profile = testing::with_overload(testing::small().only_process(0), "grow", ["grow(int)", "grow(long)"]);
        let overload = profile.rows.pop().expect("a row");
        let mut profile = Profile { rows: vec![profile.rows[0].clone(), overload], ..profile };
        let stacks =
            |profile: &Profile, by| report(profile, &ReportOptions { by, width: 120, ..ReportOptions::default() });
        let text = stacks(&profile, By::Stack);
        assert!(
            text.contains("all 2 stacks") && text.contains(" grow(int) ") && text.contains(" grow(long) "),
            "{text}"
        );
        // One of them alone is short.
        profile.rows.pop();
        let text = stacks(&profile, By::Stack);
        assert!(text.contains("the only stack") && text.contains(" grow libjson.so"), "{text}");
    }

    #[test]
    fn call_sites_are_apart_unless_their_function_recurses() {
        let stacks = |profile: &Profile| {
            let text = report(profile, &ReportOptions::default());
            let heading = text.lines().find(|line| line.starts_with("By bytes")).expect("a table").to_owned();
            heading.split(" · ").nth(1).expect("how many").to_owned()
        };
        let profile = testing::small().only_process(0);
        assert_eq!(stacks(&profile), "all 2 stacks");
        for function in ["main", "grow"] {
            let sites = with_other_lines(0, function, 44);
            assert_eq!(stacks(&sites), "all 3 stacks", "{function}");
        }
        let deeper = with_other_lines(0, "parse_value", 44);
        assert_eq!(stacks(&deeper), "all 2 stacks");
    }
}
