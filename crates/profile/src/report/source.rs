//! Source lines of functions, with the bytes in use and allocated through each line. Reads no file itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use indexmap::IndexMap;

use super::Context;
use super::stacks::shown_frames;
use super::text::{Style, clip, width};
use super::{FigureText, ReportOptions};
use crate::estimates::Pool;
use crate::intern::Interned;
use crate::model::{Frame, Profile};
use crate::naming::{FunctionKey, told_apart};
use crate::value::Value;

/// Maximum number of functions that are shown, and so of source files that are asked for.
const MOST_FUNCTIONS: usize = 100;
/// Maximum number of lines with figures that are shown of a function: the largest.
const MOST_LINES: usize = 20;
/// Lines shown before and after each of them.
const AROUND: usize = 2;
/// Maximum number of directories in the path of a source file.
const MOST_PARTS: usize = 64;
/// Spaces that a tab stands for.
const TAB: &str = "    ";

/// A source file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Where it was found.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// Paths at which a source file may be found in a directory with the sources: the recorded path, and the same without
/// its first one, two, … directories. They are relative, and have neither `.` nor `..`. Empty if there are too many
/// directories.
#[must_use]
pub fn source_candidates(recorded: &str) -> Vec<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in recorded.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if parts.len() > MOST_PARTS || recorded.contains('\0') {
        return Vec::new();
    }
    (0..parts.len()).map(|from| parts[from..].join("/")).collect()
}

/// Renders the source lines of the functions with the largest value (by default bytes in use), at most
/// [`ReportOptions::top`] functions and never more than 100. `find` returns the source file with a recorded path, or
/// says why there is none; it is called once for each file that is needed.
pub fn source_lines(
    profile: &Profile,
    options: &ReportOptions,
    mut find: impl FnMut(&str) -> Result<Source, String>,
) -> String {
    let context = Context::new(profile, options);
    let mut lines = context.title();
    lines.extend(context.totals());
    let mut functions = functions(&context);
    if functions.is_empty() {
        lines.push(String::new());
        lines.push("  no function has source lines; --symbolize looks for debug information".into());
    }
    let mut found: HashMap<&str, Result<Source, String>> = HashMap::new();
    for function in functions.iter_mut().take(options.top.min(MOST_FUNCTIONS)) {
        function.pool.allow_for(&context.intervals);
        function.lines.values_mut().for_each(|pool| pool.allow_for(&context.intervals));
        let source = found.entry(function.file).or_insert_with(|| find(function.file));
        lines.push(String::new());
        lines.extend(section(&context, function, source));
    }
    lines.push(String::new());
    lines.join("\n")
}

/// A function in a source file.
#[derive(Default)]
struct Function<'a> {
    name: String,
    file: &'a str,
    pool: Pool,
    lines: BTreeMap<u32, Pool>,
}

/// Functions with source lines, the largest first. Their pools do not allow for other sampling intervals yet.
fn functions<'a>(context: &Context<'a>) -> Vec<Function<'a>> {
    let (profile, view) = (context.profile, context.options.frames);
    let interned = Interned::new(profile);
    let mut functions: IndexMap<(FunctionKey, &str), Function> = IndexMap::new();
    let place = |&frame: &&'a Frame| -> Option<(usize, u32)> {
        let (file, line) = (frame.file.as_deref()?, frame.line.filter(|line| *line > 0)?);
        let function = functions.entry((FunctionKey::of(profile, frame), file));
        let number = function.index();
        function.or_insert_with(|| Function { name: view.name(profile, frame), file, ..Function::default() });
        Some((number, line))
    };
    let place_of_frame: Vec<Option<(usize, u32)>> = interned.frames.iter().map(place).collect();
    let places = |frames: Vec<u32>| -> BTreeSet<(usize, u32)> {
        frames.into_iter().filter_map(|frame| place_of_frame[frame as usize]).collect()
    };
    let of_stack: Vec<_> = shown_frames(context, &interned, view).into_iter().map(places).collect();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let mut last = None;
        for &(number, line) in &of_stack[stack as usize] {
            let function = &mut functions[number];
            // A recursive function counts once per stack, and so does each of its lines.
            if last.replace(number) != Some(number) {
                function.pool.add(row);
            }
            function.lines.entry(line).or_default().add(row);
        }
    }
    let names: Vec<_> = functions.iter().map(|((key, file), it)| (key, it.name.as_str(), file)).collect();
    let names = told_apart(&names).into_iter();
    let functions = names.zip(functions.into_values()).map(|(name, function)| Function { name, ..function });
    let size = |function: &Function| function.pool.total(context.sort);
    let mut functions: Vec<Function> = functions.filter(|function| size(function) > 0.0).collect();
    functions.sort_by(|a, b| size(b).total_cmp(&size(a)).then_with(|| (&a.name, a.file).cmp(&(&b.name, b.file))));
    functions
}

/// A function's title and its lines.
fn section(context: &Context, function: &Function, source: &Result<Source, String>) -> Vec<String> {
    let text = |value| context.figure(&function.pool, value).text();
    let path = source.as_ref().map_or(function.file, |source| source.path.as_str());
    let name = clip(&function.name, context.width / 2);
    let figures = format!("in use {}, allocated {}", text(Value::InuseSpace), text(Value::AllocSpace));
    let place = clip(path, context.width.saturating_sub(width(&name) + 3));
    let mut lines = vec![
        format!("{} {}", context.heading(&name), context.paint(Style::Dim, &format!("· {place}"))),
        context.paint(Style::Dim, &format!("  {}", clip(&figures, context.width - 2))),
    ];
    match source.as_ref().map_err(Clone::clone).and_then(|source| annotated(context, function, &source.text)) {
        Ok(more) => lines.extend(more),
        Err(reason) => lines.push(format!("  {}", clip(&reason, context.width - 2))),
    }
    lines
}

/// The largest lines of a function with their figures, and the lines around them.
fn annotated(context: &Context, function: &Function, text: &str) -> Result<Vec<String>, String> {
    let source: Vec<&str> = text.lines().collect();
    let last = function.lines.keys().next_back().map_or(0, |line| *line as usize);
    if last > source.len() {
        return Err(format!("this file has no line {last}: it is not the one that was compiled"));
    }
    let mut largest: Vec<(&u32, &Pool)> = function.lines.iter().collect();
    largest.sort_by(|a, b| b.1.total(context.sort).total_cmp(&a.1.total(context.sort)));
    let left_out = largest.len().saturating_sub(MOST_LINES);
    largest.truncate(MOST_LINES);
    let around = |line: usize| line.saturating_sub(AROUND).max(1)..=(line + AROUND).min(source.len());
    let shown: BTreeSet<usize> = largest.iter().flat_map(|(line, _)| around(**line as usize)).collect();
    let heading = format!("  {:>10} {:<18} {:>10} {:>6}", "IN USE", "", "ALLOCATED", "LINE");
    let mut lines = vec![context.paint(Style::Dim, &heading)];
    let mut before: Option<usize> = None;
    for number in shown {
        if before.is_some_and(|before| before + 1 != number) {
            lines.push(context.paint(Style::Dim, &format!("  {:>48}", "⋮")));
        }
        before = Some(number);
        let pool = u32::try_from(number).ok().and_then(|line| function.lines.get(&line));
        let figure = |value| pool.map_or_else(FigureText::default, |pool| context.figure(pool, value));
        let (inuse, alloc) = (figure(Value::InuseSpace), figure(Value::AllocSpace));
        let figures = format!("  {:>10} {:<18} {:>10} {number:>6}  ", inuse.figure, inuse.bounds, alloc.figure);
        let available = context.width.saturating_sub(width(&figures));
        let style = if pool.is_some() { Style::Plain } else { Style::Dim };
        let code = clip(&source[number - 1].trim_end().replace('\t', TAB), available);
        lines.push(context.paint(style, format!("{figures}{code}").trim_end()));
    }
    if left_out > 0 {
        lines.push(context.paint(Style::Dim, &format!("  {left_out} smaller lines of this function are left out")));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_recorded_path_never_leads_out_of_the_dir() {
        assert_eq!(source_candidates("/home/me/src/a.c"), ["home/me/src/a.c", "me/src/a.c", "src/a.c", "a.c"]);
        assert_eq!(source_candidates("../../lib/./x/../a.c"), ["lib/a.c", "a.c"]);
        for hostile in ["../../../../etc/passwd", "/../../etc/passwd", "a/../../../etc//passwd", "./../etc/passwd/."] {
            assert_eq!(source_candidates(hostile), ["etc/passwd", "passwd"], "{hostile}");
        }
        for hostile in ["", "/", "..", "../..", "a\0b", &"d/".repeat(65)] {
            assert!(source_candidates(hostile).is_empty(), "{hostile}");
        }
    }

    fn listing(top: usize, text: &str) -> (String, Vec<String>) {
        let profile = testing::small();
        let options = ReportOptions { top, width: 120, ..ReportOptions::default() };
        let mut asked = Vec::new();
        let shown = source_lines(&profile, &options, |file| {
            asked.push(file.to_owned());
            if file != "/src/server.cc" {
                return Err("nothing there".into());
            }
            Ok(Source { path: "server.cc".into(), text: text.into() })
        });
        (shown, asked)
    }

    #[test]
    fn lines_have_the_figures_of_the_samples_through_them() {
        let text: String = (1..=40).map(|line| format!("\tcode {line}\u{1b}[31m\n")).collect();
        let (shown, asked) = listing(10, &text);
        let line = shown.lines().find(|line| line.contains("code 20")).expect("handle calls in line 20");
        assert!(line.contains("MiB [") && line.ends_with("20      code 20\\u{1b}[31m"), "{line}");
        for (around, is_shown) in [(17, false), (18, true), (22, true), (23, false)] {
            assert_eq!(shown.contains(&format!("code {around}\\")), is_shown, "{shown}");
        }
        assert!(shown.contains("nothing there"), "{shown}");
        // Each file is asked for once.
        assert_eq!(asked.len(), asked.iter().collect::<BTreeSet<_>>().len());
        assert!(shown.lines().all(|line| width(line) <= 120), "{shown}");
    }

    #[test]
    fn a_file_that_is_too_short_is_another_one() {
        let (shown, _) = listing(10, "one line\n");
        assert!(shown.contains("this file has no line 20") && !shown.contains("one line"), "{shown}");
        assert_eq!(listing(1, "").1.len(), 1);
    }
}
