//! The text report of a profile, as `heapbpf report` prints it.

mod answer;
mod brief;
mod by;
pub mod chain;
pub mod data;
mod figure;
mod figures;
mod figures_of_stacks;
mod functions;
mod glibc;
mod hooking;
mod next_step;
mod processes;
mod remarks;
mod resident;
mod size;
mod source;
mod stacks;
mod summary;
mod suspects;
pub mod text;
mod tree;

pub use self::answer::{Growing, growing};
pub use self::by::By;
pub use self::chain::FrameView;
pub use self::figure::{FigureText, change_text, rate_text};
pub use self::figures_of_stacks::{StackFigures, figures_of_stacks};
pub use self::resident::{ResidentText, resident_texts};
pub use self::source::{Source, source_candidates, source_lines};
use self::text::{Style, clip, width, wrap};
pub use self::tree::Tree;
use super::units;
use crate::escape::escaped;
use crate::estimates::{Pool, exact, intervals_used};
use crate::group::{GroupBy, process_name};
use crate::model::{Criterion, Profile};
use crate::value::Value;

/// Options of a report.
#[derive(Clone, Debug)]
pub struct ReportOptions {
    /// Width in columns.
    pub width: usize,
    /// Whether to use colours.
    pub color: bool,
    /// The value to sort by; `None`: bytes in use, or bytes allocated if nothing is in use or frees were not followed.
    pub sort: Option<Value>,
    /// What the rows of the main table are.
    pub by: By,
    /// A tree of calls instead of the main table.
    pub tree: Option<Tree>,
    /// The one-screen report, without the main table and what follows it.
    pub brief: bool,
    /// Leak suspects instead of the main table.
    pub suspects: bool,
    /// Maximum number of rows in the main table.
    pub top: usize,
    /// Maximum number of functions in the function table; 0: no such table.
    pub functions: usize,
    /// The grouping of stacks; `None`: by program if there are several processes.
    pub group_by: Option<GroupBy>,
    /// Which frames of stacks are shown, and under which names.
    pub frames: FrameView,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// Files that were written, each with the command that opens it.
    pub files: Vec<(String, String)>,
    /// The file that the profile was read from, for use in suggested commands; `None`: one of `files`.
    pub source: Option<String>,
    /// Snapshots written during the recording: their number and the file of the last one.
    pub snapshots: Option<(u64, String)>,
    /// A note of the profile that the user has already been told.
    pub said: Option<String>,
}

impl Default for ReportOptions {
    fn default() -> Self {
        Self {
            width: 100,
            color: false,
            sort: None,
            by: By::Stack,
            tree: None,
            brief: false,
            suspects: false,
            top: 10,
            functions: 0,
            group_by: None,
            frames: FrameView::default(),
            confidence: 0.95,
            files: Vec::new(),
            source: None,
            snapshots: None,
            said: None,
        }
    }
}

/// The three lines that a service prints when it ends: what was recorded, in use, and allocated. Losses are reported
/// too.
pub fn totals(profile: &Profile, options: &ReportOptions) -> String {
    let context = Context::new(profile, options);
    let lost = remarks::of_losses(&context).flat_map(|it| context.marked(&clip(&it.text, context.width - 4)));
    let lines = context.title().into_iter().take(1).chain(context.totals().into_iter().take(2)).chain(lost);
    with_files(&context, lines.collect())
}

/// If at least this share of the memory in use is in memory, the two are not shown separately.
const MOSTLY: f64 = 0.9;

/// Width of a line's title, in columns.
const TITLE: usize = 13;

/// Minimum width; on narrower terminals, lines are too long.
const LEAST_WIDTH: usize = 40;

/// Renders the report of a profile.
pub fn report(profile: &Profile, options: &ReportOptions) -> String {
    let context = Context::new(profile, options);
    if options.brief {
        return with_files(&context, brief::lines(&context));
    }
    let sort = context.sort;
    let held = (profile.has_at_exit() && !sort.is_at_exit() && !options.suspects)
        .then(|| context.sorted_by(Value::AtExitSpace));
    let mut lines = context.title();
    lines.extend(context.totals());
    let answer = if profile.number_of_targets() > 1 { summary::lines(&context) } else { answer::lines(&context) };
    lines.extend(answer);
    // For a host, the first question is which processes use its memory.
    let (mut first, mut later) = (processes::section(&context), Vec::new());
    if !profile.header.ended_apart && profile.idle.is_empty() {
        std::mem::swap(&mut first, &mut later);
    }
    for section in [
        first,
        main_table(&context),
        held.as_ref().map(main_table).unwrap_or_default(),
        if is_plain(options) { suspects::brief(&context) } else { Vec::new() },
        by::section(&context, By::Function, options.functions),
        later,
        hooking::section(&context),
        resident::section(&context),
        remarks::section(&context),
    ] {
        if !section.is_empty() {
            lines.push(String::new());
            lines.extend(section);
        }
    }
    with_files(&context, lines)
}

/// The text of a report, followed by the list of written files.
fn with_files(context: &Context, mut lines: Vec<String>) -> String {
    if !context.options.files.is_empty() || context.options.snapshots.is_some() {
        lines.push(String::new());
        lines.extend(context.files());
    }
    lines.push(String::new());
    lines.join("\n")
}

/// Remarks that must accompany the figures: losses, coverage, incomplete stacks, notes. One line each.
pub fn remarks(profile: &Profile, options: &ReportOptions) -> Vec<String> {
    remarks::all(&Context::new(profile, options))
}

/// The requested table or tree; by default the table of the top stacks.
fn main_table(context: &Context) -> Vec<String> {
    let top = context.options.top;
    match (&context.options.tree, context.options.by) {
        _ if context.options.suspects => suspects::section(context),
        (Some(tree), _) => tree::section(context, tree, top),
        (None, By::Stack) => stacks::section(context),
        (None, by) => by::section(context, by, top),
    }
}

/// Whether the main table shows stacks, so that suspects belong below it.
fn is_plain(options: &ReportOptions) -> bool {
    !options.suspects && options.tree.is_none() && options.by == By::Stack
}

/// The default value of the profile; bytes allocated if nothing is in use.
fn default_sort(profile: &Profile, whole: &Pool) -> Value {
    let value = Value::default_of(profile);
    if value == Value::InuseSpace && whole.total(value) <= 0.0 { Value::AllocSpace } else { value }
}

/// Whether a profile has figures for this value. Those in use and at exit need frees.
fn has(profile: &Profile, value: Value) -> bool {
    profile.header.live || !value.needs_frees()
}

/// Data that all sections share.
struct Context<'a> {
    profile: &'a Profile,
    options: &'a ReportOptions,
    width: usize,
    sort: Value,
    group_by: GroupBy,
    whole: Pool,
    /// Sampling intervals that were in force. Each bounds what it did not sample.
    intervals: Vec<u64>,
}

impl<'a> Context<'a> {
    fn new(profile: &'a Profile, options: &'a ReportOptions) -> Self {
        let whole = Pool::whole(profile);
        let sort = options.sort.filter(|sort| has(profile, *sort)).unwrap_or_else(|| default_sort(profile, &whole));
        let intervals = intervals_used(profile);
        let group_by = options.group_by.unwrap_or_else(|| GroupBy::default_of(profile));
        Self { profile, options, width: options.width.max(LEAST_WIDTH), sort, group_by, whole, intervals }
    }
}

impl Context<'_> {
    /// A copy that sorts by another value.
    fn sorted_by(&self, sort: Value) -> Self {
        Self { sort, whole: self.whole.clone(), intervals: self.intervals.clone(), ..*self }
    }

    fn paint(&self, style: Style, text: &str) -> String {
        style.paint(text, self.options.color)
    }

    fn figure(&self, pool: &Pool, value: Value) -> FigureText {
        FigureText::new(self.profile, pool, value, self.options.confidence)
    }

    fn title(&self) -> Vec<String> {
        let mut facts = facts(self.profile);
        if self.profile.header.samples_known {
            facts.push(plural(self.whole.samples(Value::AllocSpace), "sample"));
        }
        let who = clip(&who(self.profile), self.width / 2);
        let mut lines = vec![self.paint(Style::Bold, &who)];
        let mut used = width(&who);
        for fact in facts {
            let fact = clip(&fact, self.width - 5);
            if used + 3 + width(&fact) > self.width {
                lines.push(" ".to_owned());
                used = 1;
            }
            used += 3 + width(&fact);
            if let Some(line) = lines.last_mut() {
                line.push_str(&self.paint(Style::Dim, &format!(" · {fact}")));
            }
        }
        lines
    }

    fn totals(&self) -> Vec<String> {
        let exact = |value| exact(self.profile, None, value).map(|exact| exact as f64);
        // With time windows, the count of several processes does not cover what the estimate stands for, because others
        // may have come and gone between windows. For a single process, the count is the true value if it is known.
        let windows = self.profile.header.time_windows;
        let counted = exact(Value::AllocSpace).zip(exact(Value::AllocObjects));
        let counted = counted.filter(|_| !windows || self.profile.number_of_processes() == 1);
        let instead = counted.filter(|_| windows);
        let tail = counted.map_or_else(String::new, |(bytes, objects)| match instead {
            Some(_) => "counted exactly".to_owned(),
            None => format!("counted exactly: {} in {}", units::bytes(bytes), units::count(objects)),
        });
        let mut lines = Vec::new();
        if self.profile.header.live {
            let lacking = match (self.profile.without_inuse() as u64, self.profile.inuse_since()) {
                (0, None) => String::new(),
                (0, Some((number, last))) if number == self.profile.number_of_processes() => {
                    format!("only blocks since {}", units::time_of_day(last))
                }
                (0, Some((number, _))) => format!("without older blocks of {}", plural(number, "process")),
                (number, _) => format!("without {} whose frees were not tracked", plural(number, "process")),
            };
            let lacking = [lacking, self.in_memory(), self.address_space()];
            let lacking = lacking.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("; ");
            lines.extend(self.total("in use", [Value::InuseSpace, Value::InuseObjects], "blocks", &lacking));
        }
        if self.profile.has_at_exit() {
            let held = "held by processes when they ended, not in use";
            lines.extend(self.total("at exit", [Value::AtExitSpace, Value::AtExitObjects], "blocks", held));
        }
        if let Some((bytes, objects)) = instead {
            let figures = [(bytes, Value::AllocSpace), (objects, Value::AllocObjects)];
            let figures = figures.map(|(exact, value)| FigureText::exactly(exact as u64, value));
            lines.extend(self.total_line("allocated", &figures, "calls", &tail));
        } else {
            lines.extend(self.total("allocated", [Value::AllocSpace, Value::AllocObjects], "calls", &tail));
        }
        lines
    }

    /// Whether a significant part of the memory in use is known not to be in memory.
    fn is_partly_in_memory(&self) -> bool {
        let knows = self.whole.knows(self.profile, Value::ResidentSpace);
        knows && self.whole.total(Value::ResidentSpace) < MOSTLY * self.whole.total(Value::InuseSpace)
    }

    /// How much of the memory in use is in memory, unless it is nearly all.
    fn in_memory(&self) -> String {
        if !self.is_partly_in_memory() {
            return String::new();
        }
        let text = |value, what| format!("{} {what}", self.figure(&self.whole, value).text());
        let swapped = self.whole.total(Value::SwappedSpace) > 0.0;
        let swapped = if swapped { format!(", {}", text(Value::SwappedSpace, "swapped out")) } else { String::new() };
        format!("{}{swapped}", text(Value::ResidentSpace, "of it in memory"))
    }

    /// How much address space mappings take, beside what is in use of them.
    fn address_space(&self) -> String {
        let space = self.whole.address_space(self.profile, self.options.confidence);
        let space = space.map(|(space, _)| units::bytes(space.estimate));
        space.map_or_else(String::new, |bytes| format!("mappings take {bytes} of addresses"))
    }

    /// A title and a text on at most `most` lines.
    fn titled(&self, title: &str, text: &str, style: Style, most: usize) -> Vec<String> {
        let mut lines = wrap(text, self.width - TITLE);
        if lines.len() > most {
            lines.truncate(most);
            lines.iter_mut().rev().take(1).for_each(|last| *last = clip(&format!("{last} …"), self.width - TITLE));
        }
        let begin = |k: usize| if k == 0 { format!("  {title:<0$} ", TITLE - 3) } else { " ".repeat(TITLE) };
        lines.iter().enumerate().map(|(k, line)| begin(k) + &self.paint(style, line)).collect()
    }

    fn total(&self, name: &str, values: [Value; 2], noun: &str, tail: &str) -> Vec<String> {
        self.total_line(name, &values.map(|value| self.figure(&self.whole, value)), noun, tail)
    }

    /// A total of bytes and objects. Parts that do not fit go on a separate line.
    fn total_line(&self, name: &str, [bytes, objects]: &[FigureText; 2], noun: &str, tail: &str) -> Vec<String> {
        let figure = format!("{:>9}", bytes.figure);
        let bounds = format!("{:<18} in ", bytes.bounds);
        let end = format!("{} {noun}", objects.bounds);
        let end = end.trim_start();
        let used = 14 + width(&figure) + width(&bounds) + width(&objects.figure) + 1 + width(end);
        let mut line = format!(
            "  {name:<10} {} {}{} {}",
            self.paint(Style::Bold, &figure),
            self.paint(Style::Dim, &bounds),
            objects.figure,
            self.paint(Style::Dim, end)
        );
        let is_summarized = self.profile.number_of_processes() > 1;
        if tail.is_empty() || is_summarized && used + 3 + width(tail) > self.width {
            return vec![line];
        }
        if used + 3 + width(tail) <= self.width {
            line.push_str(&self.paint(Style::Dim, &format!(" · {tail}")));
            return vec![line];
        }
        let rest = wrap(tail, self.width - TITLE).into_iter();
        let rest = rest.map(|rest| format!("{:TITLE$}{}", "", self.paint(Style::Dim, &rest)));
        std::iter::once(line).chain(rest).collect()
    }

    fn files(&self) -> Vec<String> {
        let line = |(file, command): &(String, String)| {
            let (file, command) = (escaped(file), self.paint(Style::Bold, &escaped(command)));
            format!("{} {file} · open it with {command}", self.paint(Style::Dim, "wrote"))
        };
        let snapshots = self.options.snapshots.iter().map(|(count, last)| {
            let (wrote, of) = (self.paint(Style::Dim, "wrote"), plural(*count, "snapshot"));
            format!("{wrote} {of}, the last to {}", escaped(last))
        });
        snapshots.chain(self.options.files.iter().map(line)).collect()
    }

    fn heading(&self, text: &str) -> String {
        self.paint(Style::Bold, text)
    }

    /// A heading, and as much of what is said about it as fits into the line.
    fn headed(&self, title: &str, about: &str) -> String {
        self.heading(title) + &self.paint(Style::Dim, &clip(about, self.width.saturating_sub(width(title))))
    }

    /// Lines of a remark behind a mark.
    fn marked(&self, remark: &str) -> Vec<String> {
        let mark = self.paint(Style::Warning, "!");
        let begin = |k: usize| if k == 0 { format!("  {mark} ") } else { "    ".to_owned() };
        wrap(remark, self.width - 4).iter().enumerate().map(|(k, line)| begin(k) + line).collect()
    }
}

fn who(profile: &Profile) -> String {
    match profile.processes.as_slice() {
        _ if !profile.idle.is_empty() => {
            let counted = units::count(profile.number_of_processes() as f64);
            format!("{} ({counted} counted)", plural(profile.number_of_targets(), "process"))
        }
        [] => "no process was counted".into(),
        [process] => process_name(process),
        _ => plural(profile.number_of_processes(), "process"),
    }
}

/// The header: host, duration and sampling.
fn facts(profile: &Profile) -> Vec<String> {
    let mut facts = Vec::new();
    if !profile.header.host.is_empty() {
        facts.push(format!("on {}", escaped(&profile.header.host)));
    }
    if !profile.header.duration.is_zero() {
        facts.push(units::duration(profile.header.duration));
    }
    facts.push(interval(profile));
    facts
}

/// One line that describes the recording: `server (4242) · on host1 · 30 s · one sample per 512 KiB`.
pub fn subject(profile: &Profile) -> String {
    escaped(&format!("{} · {}", who(profile), facts(profile).join(" · "))).into_owned()
}

fn interval(profile: &Profile) -> String {
    let bytes = units::bytes(profile.header.interval as f64);
    match (profile.header.criterion, profile.header.interval) {
        (_, 0) if !profile.header.samples_known => "sampling interval unknown".into(),
        (_, 0) => "no samples (interval 0)".into(),
        (_, 1) => "every allocation sampled".into(),
        (Criterion::Bytes, _) => format!("one sample per {bytes}"),
        (Criterion::SizeClass, _) => "sampled by size class".into(),
        (_, interval) => format!("one sample in {} allocations", units::count(interval as f64)),
    }
}

fn plural(number: u64, noun: &str) -> String {
    let end = match number {
        1 => "",
        _ if noun.ends_with('s') => "es",
        _ => "s",
    };
    format!("{} {noun}{end}", units::count(number as f64))
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod tests;
