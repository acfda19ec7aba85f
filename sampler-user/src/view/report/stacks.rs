//! The top stacks.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use super::Context;
use super::chain::{self, Call, Chain};
use crate::profile::estimates::Pool;
use crate::profile::group::GroupBy;
use crate::profile::intern::Interned;
use crate::profile::model::{Criterion, Lifetimes, Row};
use crate::profile::value::Value;
use crate::sampling::survival;
use crate::view::figure::FigureText;
use crate::view::text::{Column, Style, Table, clip, wrap};
use crate::view::units;

/// Lines of the section; empty if there is no stack.
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
    let mut heading = context.heading(&title);
    let mut about = format!(" · {of}");
    if context.profile.samples_known {
        about.push_str(&format!(" · [{} confidence intervals]", units::percent(context.options.confidence)));
    }
    heading.push_str(&context.paint(Style::Dim, &clip(&about, context.width.saturating_sub(title.len()))));
    let mut lines = vec![heading];

    let mut reasons = BTreeSet::new();
    let table = table(context, shown, &mut reasons);
    let (header, rows) = table.lines(context.width, context.options.color);
    lines.push(header);
    for (row, group) in rows.into_iter().zip(shown) {
        lines.push(row);
        let chain = group.chain(context);
        let limit = context.options.stack_lines.max(1);
        let (lead, cut) = (group.name.as_ref(), group.cut.as_deref());
        let calls = chain::lines(&chain, lead, cut, context.width - INDENT, limit, context.options.color);
        lines.extend(calls.into_iter().map(|line| format!("{:INDENT$}{line}", "")));
        let lives = lifetimes(group).map(|text| context.paint(Style::Dim, &text));
        lines.extend(lives.map(|line| format!("{:INDENT$}{line}", "")));
    }
    if !reasons.is_empty() {
        let reasons: Vec<&str> = reasons.into_iter().collect();
        let note = format!("~ no error bar: {}", reasons.join("; or: "));
        lines.extend(wrap(&note, context.width).iter().map(|line| context.paint(Style::Dim, line)));
    }
    if context.options.guaranteed && context.profile.criterion == Criterion::Bytes {
        let note = "GUARANTEED: from how far into each block its sample came; coverage holds for every mix of sizes";
        lines.extend(wrap(note, context.width).iter().map(|line| context.paint(Style::Dim, line)));
    }
    lines
}

/// Columns before the calls of a stack.
const INDENT: usize = 6;

fn table(context: &Context, groups: &[Group], reasons: &mut BTreeSet<&'static str>) -> Table {
    let live = context.profile.live;
    let values: &[Value] = if live {
        &[Value::InuseSpace, Value::InuseObjects, Value::AllocSpace, Value::AllocObjects]
    } else {
        &[Value::AllocSpace, Value::AllocObjects]
    };
    let guaranteed = |value: Value| context.options.guaranteed && value.is_bytes();
    let mut columns = vec![Column::right("#", Style::Dim).gap(1), Column::right("SHARE", Style::Bold)];
    for &value in values {
        // Bounds of counts go first, then the counts, then the bounds of bytes.
        let (title, style, rank) = match value {
            Value::InuseSpace => ("IN USE", Style::Bold, 0),
            Value::InuseObjects => ("OBJECTS", Style::Plain, 5),
            Value::AllocSpace if live => ("ALLOCATED", Style::Plain, 1),
            Value::AllocSpace => ("ALLOCATED", Style::Bold, 0),
            Value::AllocObjects => ("CALLS", Style::Plain, 3),
        };
        columns.push(Column::right(title, style).dispensable(rank));
        columns.push(Column::left("", Style::Dim).gap(1).dispensable(rank + 1));
        if guaranteed(value) {
            columns.push(Column::left("GUARANTEED", Style::Dim).dispensable(rank));
        }
    }
    let mut table = Table::new(columns);
    let total = context.whole.total(context.sort);
    for (index, group) in groups.iter().enumerate() {
        let share = if total > 0.0 { units::share(group.pool.total(context.sort) / total) } else { String::new() };
        let mut cells = vec![(index + 1).to_string(), share];
        for &value in values {
            let FigureText { figure, bounds, unbounded } =
                context.figure(&group.pool, value).quiet_if_unseen(&group.pool, value);
            reasons.extend(unbounded);
            cells.extend([figure, bounds]);
            if guaranteed(value) {
                cells.push(context.guaranteed(&group.pool, value));
            }
        }
        table.row(cells);
    }
    table
}

/// How long a stack's blocks live.
fn lifetimes(group: &Group) -> Option<String> {
    let Lifetimes { median_seconds, temporary, .. } = survival::together(&group.lifetimes)?;
    let half = median_seconds.map_or_else(
        || "more than half are not freed".to_owned(),
        |seconds| format!("half are freed within {}", units::seconds(seconds)),
    );
    Some(if temporary > 0.0 { format!("{half} · {} temporary", units::percent(temporary)) } else { half })
}

/// Rows that are one stack to the reader.
struct Group<'a> {
    name: Cow<'a, str>,
    cut: Option<Cow<'a, str>>,
    pool: Pool,
    row: &'a Row,
    /// How long blocks live, by row, with the allocations that the row stands for.
    lifetimes: Vec<(&'a Lifetimes, f64)>,
}

impl Group<'_> {
    fn chain(&self, context: &Context) -> Chain {
        let profile = context.profile;
        let stack = &self.row.stack;
        let frames = &stack.frames[chain::allocator_frames(stack)..];
        let calls: Vec<Call> = frames.iter().map(|frame| chain::call(profile, frame)).collect();
        if !context.options.fold_recursion {
            return calls.into_iter().map(|call| (call, false)).collect();
        }
        // Recursion is of functions; the first place is shown.
        let folded = chain::fold_recursion(ByName::all(&calls));
        folded.into_iter().map(|(item, repeated)| (item.0.clone(), repeated)).collect()
    }
}

#[derive(Clone, Copy)]
struct ByName<'a>(&'a Call);

impl<'a> ByName<'a> {
    fn all(calls: &'a [Call]) -> impl Iterator<Item = Self> {
        calls.iter().map(Self)
    }
}

impl PartialEq for ByName<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0.name == other.0.name
    }
}

/// Name of the group, calls, why the stack was cut.
type GroupKey<'a, 'b> = (Cow<'a, str>, &'b [u32], Option<&'a str>);

/// Groups of rows, largest first.
fn groups<'a>(context: &'a Context) -> Vec<Group<'a>> {
    let profile = context.profile;
    let group_by = context.options.group_by.unwrap_or_else(|| GroupBy::default_of(profile));
    let fold = context.options.fold_recursion;
    let interned = Interned::new(profile);
    // With recursion folded, a stack is its functions; else its calls with their lines.
    let mut call_ids: HashMap<Call, u32> = HashMap::new();
    let id_of_frame: Vec<u32> = interned
        .frames
        .iter()
        .map(|frame| {
            let mut call = chain::call(profile, frame);
            if fold {
                call.place.clear();
            }
            let next = call_ids.len() as u32;
            *call_ids.entry(call).or_insert(next)
        })
        .collect();
    let key_of_stack: Vec<Box<[u32]>> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let skipped = chain::allocator_frames(interned.stacks[stack as usize].stack);
            let ids = interned.frame_ids(stack)[skipped..].iter().map(|&frame| id_of_frame[frame as usize]);
            if fold { chain::fold_recursion(ids).into_iter().map(|(id, _)| id).collect() } else { ids.collect() }
        })
        .collect();
    let mut index_of: HashMap<GroupKey<'a, '_>, usize> = HashMap::new();
    let mut groups: Vec<Group<'a>> = Vec::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let name = group_by.key(profile, row);
        let cut = row.stack.cut.as_deref();
        let index = *index_of.entry((name.clone(), &key_of_stack[stack as usize], cut)).or_insert_with(|| {
            let (pool, lifetimes) = Default::default();
            groups.push(Group { name, cut: cut.map(Cow::Borrowed), pool, row, lifetimes });
            groups.len() - 1
        });
        let group = &mut groups[index];
        group.pool.add(row);
        group.lifetimes.extend(row.lifetimes.as_ref().map(|lifetimes| (lifetimes, row.alloc.objects)));
    }
    groups.iter_mut().for_each(|group| group.pool.allow_for(&context.intervals));
    // What is equal in the chosen value (nothing in use) is in the order of what was allocated.
    let order = |group: &Group| (group.pool.total(context.sort), group.pool.total(Value::AllocSpace));
    groups.sort_by(|a, b| {
        let (a, b) = (order(a), order(b));
        b.0.total_cmp(&a.0).then(b.1.total_cmp(&a.1))
    });
    groups
}
