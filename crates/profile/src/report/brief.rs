//! The default report, which fits on one screen: totals with error bars, what grows, what was missed, the next step,
//! the largest processes and the program's largest functions. `--details` shows the rest.

use indexmap::IndexMap;

use super::figures::FigureTable;
use super::stacks::{Group, groups};
use super::{Context, answer, next_step, plural, processes, remarks, resident};
use crate::estimates::Pool;
use crate::intern::NO_STACK;
use crate::naming::{FunctionKey, base_name, told_apart};
use crate::report::text::{Column, Style, clip, clip_start, width};
use crate::units;

/// Height of the screen, in lines.
const SCREEN: usize = 25;
/// Maximum and minimum number of rows in either table.
const ROWS: usize = 5;
const FEWEST_ROWS: usize = 3;

/// Lines of the report.
pub(super) fn lines(context: &Context) -> Vec<String> {
    let has_many = context.profile.number_of_targets() > 1;
    let groups = groups(context);
    let mut lines = context.title();
    // Two tables must fit on the screen.
    lines.truncate(if has_many { 1 } else { usize::MAX });
    lines.extend(context.totals());
    lines.extend(if has_many { resident::of_all(context) } else { resident::brief(context) });
    lines.extend(answer::without_places(context, &groups));
    let files = context.options.files.len() + usize::from(context.options.snapshots.is_some());
    // Lines reserved for remarks, including the empty line before them, and for the table of processes.
    let (for_remarks, for_processes) = if has_many { (2, 3 + FEWEST_ROWS) } else { (3, 0) };
    // Each section starts with an empty line, and the table has two lines above its rows.
    let used = lines.len() + for_processes + 3 + for_remarks + 1 + files.max(1);
    let (functions, notes) = functions(context, &groups, SCREEN.saturating_sub(used).clamp(FEWEST_ROWS, ROWS));
    let mut free = SCREEN.saturating_sub(lines.len() + 1 + functions.len() + 1 + files.max(1));
    if has_many {
        let rows = free.saturating_sub(for_remarks + 3).clamp(FEWEST_ROWS, ROWS);
        let processes = processes::brief(context, rows);
        free = free.saturating_sub(processes.len() + 1);
        lines.extend(section(processes));
    }
    lines.extend(section(functions));
    if notes.len() + 3 <= free {
        free -= notes.len();
        lines.extend(notes);
    }
    lines.extend(section(fitting_remarks(context, free.max(for_remarks) - 1)));
    lines
}

/// Puts an empty line before a section that is not empty.
fn section(lines: Vec<String>) -> Vec<String> {
    if lines.is_empty() { lines } else { std::iter::once(String::new()).chain(lines).collect() }
}

/// All stacks that a function titles.
struct Function<'a> {
    key: FunctionKey<'a>,
    /// Program of the stacks, if they are grouped.
    program: String,
    /// The function, and the suffix after its name.
    title: (String, String),
    pool: Pool,
}

/// Groups the stacks by the functions that title them, largest first.
fn by_title<'a>(context: &Context<'a>, groups: &[Group<'a>]) -> Vec<Function<'a>> {
    let mut functions: IndexMap<(String, FunctionKey), Function> = IndexMap::new();
    for group in groups {
        let (program, key) = (group.name.clone().into_owned(), group.function(context));
        let function = functions.entry((program.clone(), key.clone())).or_insert_with(|| {
            let title = title(context, group);
            Function { key, program, title, pool: Pool::default() }
        });
        group.rows.iter().for_each(|row| function.pool.add(row));
    }
    let mut functions: Vec<Function> = functions.into_values().collect();
    functions.iter_mut().for_each(|function| function.pool.allow_for(&context.intervals));
    functions.sort_by(|a, b| b.pool.total(context.sort).total_cmp(&a.pool.total(context.sort)));
    functions
}

/// Fits the program and the function into the column. A long function name loses its beginning, which is the least
/// informative part.
fn fitted(context: &Context, program: &str, function: &str, about: &str) -> String {
    let columns = context.width * 2 / 5;
    let lead = if program.is_empty() { String::new() } else { clip(program, columns / 2) + ": " };
    let about = clip(about, columns / 2);
    let function = clip_start(function, columns.saturating_sub(width(&lead) + width(&about)).max(columns / 3));
    clip(&format!("{lead}{function}{about}"), columns)
}

/// The title of a stack: the function, and a suffix with its place and with what it called to allocate.
fn title(context: &Context, group: &Group) -> (String, String) {
    let Some((call, _)) = group.chain(context).into_iter().next() else { return (NO_STACK.into(), String::new()) };
    let processes = &context.profile.processes;
    let exe = processes.get(group.row.key.process).map_or("", |process| base_name(&process.exe));
    // The name of the executable would add nothing.
    let is_known = call.place.is_empty() || call.is_module && call.place == exe;
    let place = if is_known { String::new() } else { format!(" {}", call.place) };
    let via = if call.via.is_empty() { String::new() } else { format!(" (via {})", call.via) };
    (call.name, place + &via)
}

/// The table of functions, and the notes about its error bars.
fn functions<'a>(context: &Context<'a>, groups: &[Group<'a>], most: usize) -> (Vec<String>, Vec<String>) {
    let all = by_title(context, groups);
    if all.is_empty() {
        return Default::default();
    }
    let shown = &all[..all.len().min(most)];
    let mut table = FigureTable::new(context, true, &[Column::left("FUNCTION", Style::Name)]);
    let program = &shown[0].program;
    // If all rows belong to one program, the heading names it.
    let is_common = shown.iter().all(|function| function.program == *program);
    let names: Vec<_> = shown.iter().map(|it| (&it.key, it.title.0.as_str(), (&it.program, &it.title.1))).collect();
    for (Function { program, title, pool, .. }, name) in shown.iter().zip(told_apart(&names)) {
        table.row(context, pool, vec![fitted(context, if is_common { "" } else { program }, &name, &title.1)]);
    }
    let (header, rows) = table.lines(context);
    let of = if is_common && !program.is_empty() {
        format!(" · {}", clip(program, context.width / 3))
    } else {
        String::new()
    };
    let title = format!("By function{of} · {}", context.sort.title());
    let mut about = if shown.len() < all.len() {
        format!(" · top {} of {}", shown.len(), units::count(all.len() as f64))
    } else {
        String::new()
    };
    about += &table.about_intervals(context);
    ([context.headed(&title, &about), header].into_iter().chain(rows).collect(), table.notes(context))
}

/// As many remarks as fit into `free` lines, and the number of remaining ones.
fn fitting_remarks(context: &Context, free: usize) -> Vec<String> {
    let (all, left_out) = remarks::with_refusals(context);
    if let ([first, others @ ..], 0..2) = (all.as_slice(), free)
        && others.len() + left_out > 0
    {
        let how = format!(" · and {} more (--details)", others.len() + left_out);
        return context.marked(&(clip(first, context.width.saturating_sub(4 + width(&how))) + &how));
    }
    let mut lines = Vec::new();
    let mut shown = 0;
    for remark in &all {
        let whole = context.marked(remark);
        let more = usize::from(shown + 1 < all.len() + left_out);
        let fits = lines.len() + whole.len() + more <= free;
        if shown > 0 && !fits {
            break;
        }
        // The first remark is always shown, shortened if necessary.
        lines.extend(if fits { whole } else { context.marked(&clip(remark, context.width - 4)) });
        shown += 1;
    }
    let more = all.len() - shown + left_out;
    if more > 0 {
        let file = next_step::readable_file(context);
        let how = format!("  … and {} (heapbpf report --details {file})", plural(more as u64, "more remark"));
        lines.push(context.paint(Style::Dim, &clip(&how, context.width)));
    }
    lines
}
