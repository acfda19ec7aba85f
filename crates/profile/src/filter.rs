//! Filters: keep the part of a profile whose stacks match. The options have the same names and meaning as pprof's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use regex::Regex;

use super::estimates::Pool;
use super::model::{Frame, Profile, Row, Stack};
use super::naming::{frame_name, short_function};
use super::units;
use super::value::Value;

/// What to keep of a profile. An expression matches a frame if it matches anywhere in the function name, the source
/// file or the module path.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Keep only stacks with a matching frame.
    pub focus: Option<Regex>,
    /// Drop stacks with a matching frame.
    pub ignore: Option<Regex>,
    /// Remove matching frames from stacks.
    pub hide: Option<Regex>,
    /// Remove frames that do not match.
    pub show: Option<Regex>,
}

impl Filter {
    /// Whether the filter keeps everything.
    pub fn is_none(&self) -> bool {
        [&self.focus, &self.ignore, &self.hide, &self.show].iter().all(|expression| expression.is_none())
    }

    /// Drops stacks and frames, and adds a note that says which part of the whole is left.
    ///
    /// Estimates and their intervals are those of the rest. Exact counts apply to whole processes, so they are removed
    /// if stacks were dropped. Bounds on lost samples stay, because any stack may have lost them.
    pub fn apply(&self, profile: &mut Profile) {
        if self.is_none() {
            return;
        }
        if self.focus.is_some() || self.ignore.is_some() {
            let whole = profile.rows.len();
            let before = Pool::of(&profile.rows);
            let mut known: HashMap<*const Stack, bool> = HashMap::new();
            let mut rows = std::mem::take(&mut profile.rows);
            rows.retain(|row: &Row| {
                let stack = &row.key.stack;
                *known.entry(Arc::as_ptr(stack)).or_insert_with(|| self.keeps(profile, stack))
            });
            profile.rows = rows;
            let note = self.note(profile, whole, &before);
            forget_counts(profile);
            profile.notes.push(note);
        }
        if self.hide.is_some() || self.show.is_some() {
            self.drop_frames(profile);
        }
    }

    fn keeps(&self, profile: &Profile, stack: &Stack) -> bool {
        let through = |expression: &Regex| stack.frames.iter().any(|frame| matches(expression, profile, frame));
        self.focus.as_ref().is_none_or(through) && !self.ignore.as_ref().is_some_and(through)
    }

    fn drop_frames(&self, profile: &mut Profile) {
        let mut known: HashMap<*const Stack, Arc<Stack>> = HashMap::new();
        // Replaced stacks stay alive until the end, because their addresses are the keys.
        let mut replaced = Vec::new();
        let mut rows = std::mem::take(&mut profile.rows);
        for row in &mut rows {
            let stack = known.entry(Arc::as_ptr(&row.key.stack)).or_insert_with(|| {
                let hidden = |frame: &Frame| {
                    self.hide.as_ref().is_some_and(|expression| matches(expression, profile, frame))
                        || !self.show.as_ref().is_none_or(|expression| matches(expression, profile, frame))
                };
                let frames = row.key.stack.frames.iter().filter(|frame| !hidden(frame)).cloned().collect();
                replaced.push(row.key.stack.clone());
                Arc::new(Stack { frames, ..(*row.key.stack).clone() })
            });
            row.key.stack = stack.clone();
        }
        profile.rows = rows;
        let described =
            |name, expression: &Option<Regex>| expression.as_ref().map(|expression| format!("{name} /{expression}/"));
        let parts = [described("without frames of", &self.hide), described("only frames of", &self.show)];
        profile.notes.push(format!("stacks are shown {}", parts.into_iter().flatten().collect::<Vec<_>>().join(", ")));
    }

    fn note(&self, profile: &Profile, whole: usize, before: &Pool) -> String {
        let through = self.focus.iter().map(|expression| format!("through /{expression}/"));
        let not_through = self.ignore.iter().map(|expression| format!("not through /{expression}/"));
        let which: Vec<String> = through.chain(not_through).collect();
        let left = Pool::of(&profile.rows);
        let shares: Vec<String> = [Value::InuseSpace, Value::AllocSpace]
            .into_iter()
            .filter(|value| before.total(*value) > 0.0)
            .map(|value| {
                format!("{} of the {}", units::percent(left.total(value) / before.total(value)), value.title())
            })
            .collect();
        let shares = if shares.is_empty() { String::new() } else { format!(", {}", shares.join(" and ")) };
        format!("a part of the recording: stacks {} ({} of {whole}{shares})", which.join(" and "), profile.rows.len())
    }
}

/// A profile with inverted stacks: they start with the innermost matching function and continue with its callers, so a
/// flame graph shows who calls these functions. Stacks without a match are dropped.
pub fn callers(profile: &Profile, expression: &Regex) -> Profile {
    let mut known: HashMap<*const Stack, Option<Arc<Stack>>> = HashMap::new();
    let mut turned = profile.clone();
    let turn = |stack: &Arc<Stack>| {
        let first = stack.frames.iter().position(|frame| matches(expression, profile, frame))?;
        let frames = stack.frames[first..].iter().rev().cloned().collect();
        Some(Arc::new(Stack { frames, cut: None, ..(**stack).clone() }))
    };
    turned.rows.retain_mut(|row| {
        let stack = known.entry(Arc::as_ptr(&row.key.stack)).or_insert_with(|| turn(&row.key.stack));
        stack.as_ref().is_some_and(|stack| {
            row.key.stack = Arc::clone(stack);
            true
        })
    });
    turned
}

/// Whether an expression matches a frame. Users know functions by the short names that reports show, too.
pub(crate) fn matches(expression: &Regex, profile: &Profile, frame: &Frame) -> bool {
    let (name, module) = (frame_name(profile, frame), profile.module_of(frame));
    expression.is_match(&name)
        || frame.function.is_some() && expression.is_match(&short_function(&name))
        || frame.file.as_deref().is_some_and(|file| expression.is_match(file))
        || module.is_some_and(|module| expression.is_match(&module.path))
}

/// Removes what is known only of whole processes, and processes of which nothing is left.
fn forget_counts(profile: &mut Profile) {
    profile.idle.clear();
    for process in &mut profile.processes {
        process.exact_alloc_bytes = None;
        process.exact_alloc_objects = None;
        process.members.clear();
    }
    let with_rows: HashSet<usize> = profile.rows.iter().map(|row| row.key.process).collect();
    let mut places = vec![0; profile.processes.len()];
    for (index, process) in std::mem::take(&mut profile.processes).into_iter().enumerate() {
        places[index] = profile.processes.len();
        // A process may have lost samples of the stacks that are left.
        if with_rows.contains(&index) || !process.losses.is_none() {
            profile.processes.push(process);
        }
    }
    for row in &mut profile.rows {
        row.key.process = places[row.key.process];
        row.member = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn expression(text: &str) -> Option<Regex> {
        Some(Regex::new(text).expect("an expression"))
    }

    fn total(profile: &Profile) -> f64 {
        profile.rows.iter().map(|row| row.alloc.bytes).sum()
    }

    #[test]
    fn what_is_in_focus_and_what_is_ignored_add_up_to_the_whole() {
        let whole = testing::small();
        for text in ["parse", "main.c", "libjson", "^main$", "nothing of the kind", ""] {
            let (mut with, mut without) = (whole.clone(), whole.clone());
            Filter { focus: expression(text), ..Filter::default() }.apply(&mut with);
            Filter { ignore: expression(text), ..Filter::default() }.apply(&mut without);
            assert!((total(&with) + total(&without) - total(&whole)).abs() < 1e-6, "{text}");
            assert_eq!(with.rows.len() + without.rows.len(), whole.rows.len(), "{text}");
            let through = |row: &Row| {
                row.key
                    .stack
                    .frames
                    .iter()
                    .any(|frame| matches(&Regex::new(text).expect("an expression"), &whole, frame))
            };
            assert!(with.rows.iter().all(through) && !without.rows.iter().any(through), "{text}");
        }
    }

    #[test]
    fn rows_keep_their_process_and_whole_counts_go() {
        let mut profile = testing::small();
        let pids = |profile: &Profile, row: &Row| profile.processes[row.key.process].pid;
        let before: Vec<_> = profile.rows.iter().map(|row| (pids(&profile, row), row.alloc)).collect();
        Filter { focus: expression("parse"), ..Filter::default() }.apply(&mut profile);
        assert!(!profile.rows.is_empty() && profile.rows.len() < before.len());
        for row in &profile.rows {
            assert!(before.contains(&(pids(&profile, row), row.alloc)));
        }
        assert!(profile.processes.iter().all(|process| process.exact_alloc_bytes.is_none()));
        let note = profile.notes.last().expect("a note");
        assert!(
            note.starts_with("a part of the recording: stacks through /parse/ (") && note.contains("% of"),
            "{note}"
        );
    }

    #[test]
    fn hidden_frames_leave_their_stacks_and_no_bytes() {
        let whole = testing::small();
        let mut profile = whole.clone();
        Filter { hide: expression("parse_value"), ..Filter::default() }.apply(&mut profile);
        assert_eq!((profile.rows.len(), total(&profile)), (whole.rows.len(), total(&whole)));
        let names = |profile: &Profile| -> Vec<String> {
            let frames = profile.rows.iter().flat_map(|row| &row.key.stack.frames);
            frames.map(|frame| frame_name(profile, frame).into_owned()).collect()
        };
        assert!(names(&whole).iter().any(|name| name == "parse_value"));
        assert!(names(&profile).iter().all(|name| name != "parse_value"));
        assert!(profile.processes.iter().any(|process| process.exact_alloc_bytes.is_some()), "nothing was dropped");
        let mut only = whole.clone();
        Filter { show: expression("parse_value"), ..Filter::default() }.apply(&mut only);
        assert!(names(&only).iter().all(|name| name == "parse_value") && total(&only) == total(&whole));
    }

    #[test]
    fn callers_are_stacks_upside_down() {
        let profile = crate::testing::small();
        let turned = callers(&profile, &Regex::new("^parse_value$").expect("an expression"));
        assert!(!turned.rows.is_empty() && turned.rows.len() < profile.rows.len());
        for row in &turned.rows {
            let names: Vec<_> = row.key.stack.frames.iter().rev().map(|frame| frame_name(&turned, frame)).collect();
            assert_eq!(names.first().map(AsRef::as_ref), Some("parse_value"), "outermost first: {names:?}");
            assert_eq!(names.last().map(AsRef::as_ref), Some("main"), "{names:?}");
        }
    }

    /// The name that a report shows finds the function.
    #[test]
    fn functions_are_found_by_their_full_and_by_their_short_names() {
        let profile = testing::small();
        let name = "shop::Pool<int>::get(unsigned long)";
        let frame = Frame { function: Some(name.into()), ..Frame::default() };
        for (expression, is_found) in [("^shop::Pool::get$", true), ("Pool<int>", true), ("Pool::put", false)] {
            let expression = Regex::new(expression).expect("an expression");
            assert_eq!(matches(&expression, &profile, &frame), is_found, "{expression}");
        }
    }
}
