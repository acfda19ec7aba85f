//! Tables by something other than the stack: function, source file, module, program, size or thread.

use std::str::FromStr;

use indexmap::IndexMap;

use super::Context;
use super::figures::FigureTable;
use super::functions::Named;
use super::size::{self, Sizes};
use super::stacks::shown_frames;
use crate::estimates::Pool;
use crate::group::{GroupBy, Groups};
use crate::intern::Interned;
use crate::model::{Frame, Profile};
use crate::naming::FunctionKey;
use crate::report::figure::FigureText;
use crate::report::text::{Column, Style, clip, clip_middle, clip_start, wrap};
use crate::units;

/// What the rows of a report's main table are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum By {
    /// Call stacks.
    #[default]
    Stack,
    /// Functions on stacks.
    Function,
    /// Source files of functions on stacks.
    File,
    /// Modules (programs and libraries) of functions on stacks.
    Module,
    /// Programs: processes of the same name and executable.
    Program,
    /// Sizes of blocks, in powers of two.
    Size,
    /// Threads, by process and thread name.
    Thread,
}

impl By {
    /// Every choice, in the order in which the command line lists them.
    pub const ALL: [Self; 7] =
        [Self::Stack, Self::Function, Self::File, Self::Module, Self::Program, Self::Size, Self::Thread];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        self.names().0
    }

    /// Its name on the command line, and the title of its column.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Stack => ("stack", "STACK"),
            Self::Function => ("function", "FUNCTION"),
            Self::File => ("file", "FILE"),
            Self::Module => ("module", "MODULE"),
            Self::Program => ("program", "PROGRAM"),
            Self::Size => ("size", "SIZE"),
            Self::Thread => ("thread", "THREAD"),
        }
    }

    /// Whether a stack can belong to several rows, one for each frame.
    pub(super) fn is_of_frames(self) -> bool {
        matches!(self, Self::Function | Self::File | Self::Module)
    }
}

impl FromStr for By {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let choices = "stack, function, file, module, program, size or thread";
        let found = Self::ALL.into_iter().find(|by| by.name() == name);
        found.ok_or_else(|| format!("no table by {name:?}: choose {choices}"))
    }
}

/// Lines of the section with at most `most` rows; empty if there are none.
pub(super) fn section(context: &Context, by: By, most: usize) -> Vec<String> {
    if most == 0 {
        return Vec::new();
    }
    let mut entries = entries(context, by);
    if entries.is_empty() {
        return Vec::new();
    }
    let number = entries.len();
    entries.truncate(most);
    if by == By::Size {
        entries.sort_by_key(|entry| entry.sizes);
    }
    let shown = &entries;
    let mut columns = vec![Column::left(by.names().1, Style::Name)];
    if by.is_of_frames() {
        columns.insert(0, Column::right("SELF", Style::Plain));
    }
    if by == By::Size {
        columns.push(Column::left("", Style::Dim).dispensable(3));
    }
    let mut table = FigureTable::new(context, true, &columns);
    let largest = shown.iter().map(|entry| entry.pool.total(context.sort)).fold(0.0, f64::max);
    for Entry { name, pool, itself, .. } in shown {
        let known = pool.knows(context.profile, context.sort);
        let itself = match context.sort.is_bytes() {
            _ if !known => FigureText::not_known().figure,
            true => units::bytes(*itself),
            false => units::count(*itself),
        };
        // The end of a path is the most informative part.
        let name = match by {
            By::File | By::Module => clip_start(name, context.width / 3),
            By::Function => clip_middle(name, context.width / 3),
            _ => clip(name, context.width / 3),
        };
        let cells = match by {
            By::Size => vec![name, size::bar(pool.total(context.sort), largest)],
            _ if by.is_of_frames() => vec![itself, name],
            _ => vec![name],
        };
        table.row(context, pool, cells);
    }
    let mut about = format!(" · top {} of {}", shown.len(), number);
    if by.is_of_frames() {
        about.push_str(" · stacks through them, each counted once");
    }
    let title = format!("By {}", by.name());
    let (header, rows) = table.lines(context);
    let mut lines = vec![context.headed(&title, &about), header];
    lines.extend(rows);
    lines.extend(table.notes(context));
    if by == By::Size {
        lines.extend(wrap(size::NOTE, context.width).iter().map(|line| context.paint(Style::Dim, line)));
    }
    lines
}

/// All rows of a table, the largest first.
pub(super) fn entries(context: &Context, by: By) -> Vec<Entry> {
    if by.is_of_frames() { of_frames(context, by) } else { of_rows(context, by) }
}

/// A row of the table.
#[derive(Default)]
pub(super) struct Entry {
    /// Name to show.
    pub(super) name: String,
    /// Its function and short name, in tables by frame.
    pub(super) function: (FunctionKey<'static>, String),
    /// All samples that belong to the row.
    pub(super) pool: Pool,
    /// Estimate of what the frame allocates itself, in tables by frame.
    pub(super) itself: f64,
    /// Sizes of the row's blocks, in the table by size.
    sizes: Option<Sizes>,
}

/// The row that a frame counts towards.
fn row_of<'a>(profile: &'a Profile, by: By, frame: &'a Frame) -> FunctionKey<'a> {
    let module = profile.module_of(frame).map(|module| &*module.path);
    match (by, &frame.file) {
        (By::Module, _) => FunctionKey::named(module.unwrap_or("[no module]")),
        (By::File, Some(file)) => FunctionKey::named(&**file),
        (By::File, None) => match module {
            Some(module) => FunctionKey::named(format!("[no file known: {module}]")),
            None => FunctionKey::named("[no file]"),
        },
        _ => FunctionKey::of(profile, frame),
    }
}

/// Entries by frame, sorted by what is allocated through them.
fn of_frames(context: &Context, by: By) -> Vec<Entry> {
    let interned = Interned::new(context.profile);
    let view = context.options.frames;
    let row = |frame| row_of(context.profile, by, frame);
    let name = |frame| match by {
        By::Function => view.name(context.profile, frame),
        _ => row(frame).name.into_owned(),
    };
    let (rows, entry_of_frame) = Named::of_frames(&interned, row, name);
    let names = rows.told_apart(0..rows.0.len());
    let functions = rows.0.into_iter().map(|(key, short)| (key.into_owned(), short));
    let entry = |(name, function)| Entry { name, function, ..Entry::default() };
    let mut entries: Vec<Entry> = names.into_iter().zip(functions).map(entry).collect();
    let of_stack: Vec<(Vec<usize>, Option<usize>)> = shown_frames(context, &interned, view)
        .into_iter()
        .map(|frames| {
            let mut through: Vec<usize> = frames.iter().map(|&frame| entry_of_frame[frame as usize]).collect();
            let innermost = through.first().copied();
            // A recursive function counts once per stack.
            through.sort_unstable();
            through.dedup();
            (through, innermost)
        })
        .collect();
    for (row, &stack) in context.profile.rows.iter().zip(&interned.stack_of_row) {
        let (through, innermost) = &of_stack[stack as usize];
        through.iter().for_each(|&entry| entries[entry].pool.add(row));
        if let Some(entry) = *innermost {
            entries[entry].itself += context.sort.of(row);
        }
    }
    sorted(context, entries)
}

/// Entries of whole rows, the largest first.
fn of_rows(context: &Context, by: By) -> Vec<Entry> {
    let groups = Groups::new(context.profile, if by == By::Thread { GroupBy::Thread } else { GroupBy::Program });
    let mut entries: IndexMap<String, Entry> = IndexMap::new();
    for row in &context.profile.rows {
        let sizes = (by == By::Size).then(|| Sizes::of(row));
        let name = sizes.map_or_else(|| groups.name(row).into_owned(), |sizes| sizes.to_string());
        let entry = entries.entry(name);
        let entry = entry.or_insert_with_key(|name| Entry { name: name.clone(), ..Entry::default() });
        entry.pool.add(row);
        entry.sizes = sizes;
    }
    sorted(context, entries.into_values().collect())
}

fn sorted(context: &Context, mut list: Vec<Entry>) -> Vec<Entry> {
    list.retain(|entry| entry.pool.sums(context.sort).next().is_some());
    list.iter_mut().for_each(|entry| entry.pool.allow_for(&context.intervals));
    let size = |entry: &Entry| entry.pool.total(context.sort);
    list.sort_by(|a, b| size(b).total_cmp(&size(a)).then_with(|| a.name.cmp(&b.name)));
    list
}
