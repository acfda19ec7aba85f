//! A tree of calls: from the outermost functions down, or from chosen functions up to their callers.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use regex::Regex;

use super::figures::FigureTable;
use super::functions::Named;
use super::stacks::{INDENT, shown_frames};
use super::{Context, chain};
use crate::estimates::Pool;
use crate::filter::matches;
use crate::group::Groups;
use crate::intern::Interned;
use crate::naming::FunctionKey;
use crate::report::text::{Column, Style, clip, width, wrap};
use crate::value::Value;

/// The tree that a report shows instead of its table of stacks.
#[derive(Clone, Debug)]
pub enum Tree {
    /// From the outermost functions down to the allocations.
    Down,
    /// From the matching functions up to the threads' entry functions.
    Callers(Regex),
}

/// Lines of the section with at most `most` rows. If no stack belongs to the tree, they say so.
pub(super) fn section(context: &Context, tree: &Tree, most: usize) -> Vec<String> {
    let (nodes, _) = build(context, tree);
    let lines = Lines::largest(context, &nodes, most);
    let title = match tree {
        Tree::Down => "Calls from the outermost down".to_owned(),
        Tree::Callers(expression) => format!("Callers of /{expression}/"),
    };
    let title = clip(&title, context.width);
    if lines.shown.is_empty() {
        return vec![context.heading(&title), "  no stack goes through such a function".to_owned()];
    }
    let rows = lines.in_order(&nodes);
    let about = if lines.left_out > 0 { format!(" · the largest {} lines", rows.len()) } else { String::new() };
    let mut table = FigureTable::new(context, false, &[Column::left("FUNCTION", Style::Name)]);
    let available = (context.width / 2).max(24);
    let mut rests = Vec::new();
    for (depth, path) in &rows {
        let Some(&last) = path.last() else { continue };
        let names: Vec<&str> = path.iter().map(|&node| nodes[node].name.as_str()).collect();
        let indent = "  ".repeat((*depth).min(available / 4));
        let (line, rest) = split(&names, available - indent.len());
        table.row(context, &nodes[last].pool, vec![format!("{indent}{line}")]);
        rests.push(rest);
    }
    let (header, lines) = table.lines(context);
    let mut section = vec![context.headed(&title, &about), header];
    for (line, rest) in lines.into_iter().zip(rests) {
        section.push(line);
        if !rest.is_empty() {
            let rest = wrap(&rest, context.width - INDENT).into_iter();
            section.extend(rest.map(|line| format!("{:INDENT$}{}", "", context.paint(Style::Name, &line))));
        }
    }
    section.extend(table.notes(context));
    section
}

/// Lays out calls that share a line: all in one text of at most `columns`, or the first one, and the rest for separate
/// lines.
fn split(names: &[&str], columns: usize) -> (String, String) {
    const ARROW: &str = " → ";
    let whole = names.join(ARROW);
    match names {
        [first, rest @ ..] if !rest.is_empty() && width(&whole) > columns => {
            (clip(first, columns), format!("{}{}", ARROW.trim_start(), rest.join(ARROW)))
        }
        _ => (clip(&whole, columns), String::new()),
    }
}

/// The root of a tree, which is not shown.
pub(super) const ROOT: usize = 0;

/// A call.
#[derive(Default)]
pub(super) struct Node {
    /// Number of its function or group.
    pub(super) label: usize,
    /// Name for display, which differs from those of its siblings.
    pub(super) name: String,
    pub(super) pool: Pool,
    pub(super) children: Vec<usize>,
}

/// The nodes of the tree, each after its parent, and their functions. The first node is the root, which is not shown.
pub(super) fn build<'a>(context: &Context<'a>, tree: &Tree) -> (Vec<Node>, Named<'a>) {
    let profile = context.profile;
    let interned = Interned::for_viewers(profile);
    let groups = Groups::new(profile, context.group_by);
    let view = context.options.frames;
    let (mut named, functions) = Named::functions(profile, &interned, view);
    let shown = shown_frames(context, &interned, view);
    let matching: Vec<bool> = interned
        .frames
        .iter()
        .map(|frame| match tree {
            Tree::Down => true,
            Tree::Callers(expression) => matches(expression, profile, frame),
        })
        .collect();
    // Functions on each stack, starting at the root of the tree; none if the stack does not belong to the tree.
    let path_of = |stack: u32| -> Vec<usize> {
        let function = |frame: &u32| functions[*frame as usize];
        let path: Vec<usize> = match tree {
            Tree::Down => shown[stack as usize].iter().rev().map(function).collect(),
            // The matching function, whatever its origin, followed by its callers that are shown.
            Tree::Callers(_) => {
                let is_shown: HashSet<u32> = shown[stack as usize].iter().copied().collect();
                let skipped = chain::allocator_frames(interned.stacks[stack as usize].stack);
                let mut through =
                    interned.frame_ids(stack)[skipped..].iter().skip_while(|frame| !matching[**frame as usize]);
                let asked_for = through.next();
                asked_for.into_iter().chain(through.filter(|frame| is_shown.contains(frame))).map(function).collect()
            }
        };
        chain::fold_recursion(path).into_iter().map(|(function, _)| function).collect()
    };
    let paths: Vec<Vec<usize>> = (0..interned.stacks.len() as u32).map(path_of).collect();
    let mut nodes = vec![Node::default()];
    let mut known: HashMap<(usize, usize), usize> = HashMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let path = &paths[stack as usize];
        if path.is_empty() {
            continue;
        }
        let group = groups.name(row);
        let lead = (matches!(tree, Tree::Down) && !group.is_empty())
            .then(|| named.number(FunctionKey::named(group.clone()), || group.into_owned()));
        let mut node = ROOT;
        for label in lead.into_iter().chain(path.iter().copied()) {
            node = *known.entry((node, label)).or_insert_with(|| {
                nodes.push(Node { label, ..Node::default() });
                let child = nodes.len() - 1;
                nodes[node].children.push(child);
                child
            });
            nodes[node].pool.add(row);
        }
    }
    nodes.iter_mut().for_each(|node| node.pool.allow_for(&context.intervals));
    for index in 0..nodes.len() {
        let mut children = std::mem::take(&mut nodes[index].children);
        let names = named.told_apart(children.iter().map(|child| nodes[*child].label));
        children.iter().zip(names).for_each(|(child, name)| nodes[*child].name = name);
        let size = |node: &usize| nodes[*node].pool.total(context.sort);
        children.sort_by(|a, b| size(b).total_cmp(&size(a)).then_with(|| nodes[*a].name.cmp(&nodes[*b].name)));
        nodes[index].children = children;
    }
    (nodes, named)
}

/// The lines of the tree that are shown. A call shares a line with its only callee (or caller) if that has all of its
/// samples.
struct Lines {
    /// The calls on each line, by their first call.
    shown: HashMap<usize, Vec<usize>>,
    /// Number of lines left out directly below the shown ones.
    left_out: usize,
}

impl Lines {
    /// The `most` largest lines. A line is at least as large as those below it, so a line is never shown without those
    /// above it.
    fn largest(context: &Context, nodes: &[Node], most: usize) -> Self {
        let mut waiting = BinaryHeap::new();
        // The largest comes first; among equals, the earlier node. Positive numbers have the order of their bits.
        let enter = |waiting: &mut BinaryHeap<(u64, Reverse<usize>)>, parent: usize| {
            for &node in &nodes[parent].children {
                let size = nodes[node].pool.total(context.sort);
                if size > 0.0 {
                    waiting.push((size.to_bits(), Reverse(node)));
                }
            }
        };
        enter(&mut waiting, ROOT);
        let mut shown = HashMap::new();
        while shown.len() < most
            && let Some((_, Reverse(node))) = waiting.pop()
        {
            let mut path = vec![node];
            let mut last = node;
            while let [only] = nodes[last].children[..]
                && is_same(&nodes[only].pool, &nodes[last].pool)
            {
                path.push(only);
                last = only;
            }
            shown.insert(node, path);
            enter(&mut waiting, last);
        }
        Self { shown, left_out: waiting.len() }
    }

    /// The lines from top to bottom, each with depth and calls.
    fn in_order(&self, nodes: &[Node]) -> Vec<(usize, &[usize])> {
        let mut rows = Vec::new();
        let mut open: Vec<(usize, usize)> = nodes[ROOT].children.iter().rev().map(|&child| (0, child)).collect();
        while let Some((depth, node)) = open.pop() {
            let Some(path) = self.shown.get(&node) else { continue };
            rows.push((depth, path.as_slice()));
            let last = path.last().copied().unwrap_or(node);
            open.extend(nodes[last].children.iter().rev().map(|&child| (depth + 1, child)));
        }
        rows
    }
}

/// Whether two pools, one of which includes the other, have the same samples.
fn is_same(part: &Pool, whole: &Pool) -> bool {
    let samples = |pool: &Pool| Value::ALL.map(|value| (pool.samples(value), pool.total(value).to_bits()));
    samples(part) == samples(whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ReportOptions, report};
    use crate::testing;

    fn shown(tree: Tree, width: usize, top: usize) -> String {
        let options = ReportOptions { tree: Some(tree), width, top, ..ReportOptions::default() };
        report(&testing::small(), &options)
    }

    #[test]
    fn the_tree_goes_down_from_programs_to_allocations() {
        let text = shown(Tree::Down, 160, 20);
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("Calls from")).collect();
        let at = |name: &str| {
            let line = lines.iter().position(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"));
            (line, lines[line].find(name).unwrap_or(0))
        };
        let (program, parse) = (at("server (4242)"), at("parse_value"));
        assert!(program.0 < parse.0, "callers stand above: {text}");
        assert!(lines[program.0].contains("server (4242) → "), "an only child shares the line: {text}");
        assert!(program.1 < parse.1, "and what is below is indented: {text}");
    }

    #[test]
    fn callers_begin_with_what_was_asked_for() {
        let callers = |text: &str| Tree::Callers(Regex::new(text).expect("an expression"));
        let text = shown(callers("^handle"), 160, 20);
        assert!(text.contains("Callers of /^handle/") && !text.contains("grow"), "{text}");
        // One stack through it is incomplete, so its caller has fewer samples and gets an indented line of its own.
        let column = |name: &str| text.lines().find(|line| line.ends_with(name)).and_then(|line| line.find(name));
        assert_eq!(column(" main"), column(" handle").map(|at| at + 2), "{text}");
        assert!(shown(callers("^nobody$"), 100, 20).contains("no stack goes through such a function"));
    }

    #[test]
    fn the_largest_lines_come_with_all_above_them() {
        let profile = testing::large(300, 30);
        for top in [1, 2, 5, 50] {
            let options = ReportOptions { tree: Some(Tree::Down), top, width: 120, ..ReportOptions::default() };
            let text = report(&profile, &options);
            let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("Calls from")).skip(2).collect();
            let rows: Vec<&&str> = lines.iter().take_while(|line| line.contains('%')).collect();
            assert!(rows.len() <= top && !rows.is_empty(), "{top}: {text}");
            assert!(text.contains(&format!("the largest {top} lines")) || rows.len() < top, "{text}");
        }
    }

    #[test]
    fn calls_that_do_not_fit_stand_below() {
        let split = |names: &[&str], columns| {
            let (line, rest) = split(names, columns);
            [line, rest]
        };
        assert_eq!(split(&["main", "run", "leaf"], 40), ["main → run → leaf", ""]);
        assert_eq!(split(&["main", "a_long_name", "leaf"], 20), ["main", "→ a_long_name → leaf"]);
        assert_eq!(split(&["only_one"], 5), ["only…", ""]);
    }
}
