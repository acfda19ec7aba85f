//! Text of a stack: a short chain of calls, innermost first.

use std::sync::Arc;

use crate::model::{Frame, Profile, Stack};
use crate::naming::{base_name, frame_name, is_allocator_function, short_function};
use crate::report::text::{Style, clip, width};

/// A call in a chain.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Call {
    /// Shortened function name, or the address in its module.
    pub name: String,
    /// `file:line`, or the module.
    pub place: String,
    /// Whether the place is the module.
    pub is_module: bool,
}

/// A chain of calls, innermost first, each with whether repetitions were folded into it.
pub type Chain = Vec<(Call, bool)>;

/// The name that is shown: short, if it is a function's. A module's name in it stays whole.
fn shown_name(profile: &Profile, frame: &Frame) -> String {
    let name = frame_name(profile, frame);
    if frame.function.is_none() && frame.function_start.is_some() {
        return name.into_owned();
    }
    short_function(&name).into_owned()
}

/// A frame as a call.
pub fn call(profile: &Profile, frame: &Frame) -> Call {
    let name = shown_name(profile, frame);
    let module = frame.module.and_then(|index| profile.modules.get(index)).map_or("", |module| base_name(&module.path));
    let place = match (&frame.file, frame.line) {
        (Some(file), Some(line)) => format!("{}:{line}", base_name(file)),
        (Some(file), None) => base_name(file).into(),
        // The name holds the location already.
        _ if frame.function.is_none() => String::new(),
        _ => module.into(),
    };
    let is_module = frame.file.is_none() && !place.is_empty();
    Call { name, place, is_module }
}

/// Number of innermost frames that belong to an allocator rather than the program; 0 if all do.
pub fn allocator_frames(stack: &Stack) -> usize {
    let of_allocator = |frame: &&Arc<Frame>| frame.function.as_deref().is_some_and(is_allocator_function);
    let count = stack.frames.iter().take_while(of_allocator).count();
    if count == stack.frames.len() { 0 } else { count }
}

/// Longest cycle of calls that is recognised as recursion.
const LONGEST_CYCLE: usize = 8;

/// Removes immediate repetitions of an item, or of a cycle of up to eight items. Each remaining item comes
/// with whether it was repeated.
pub fn fold_recursion<T: Clone + PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<(T, bool)> {
    let mut folded: Vec<(T, bool)> = Vec::new();
    for item in items {
        folded.push((item, false));
        let length = folded.len();
        let repeats = |&cycle: &usize| {
            let (earlier, later) = (&folded[length - 2 * cycle..length - cycle], &folded[length - cycle..]);
            earlier.iter().zip(later).all(|(a, b)| a.0 == b.0)
        };
        if let Some(cycle) = (1..=LONGEST_CYCLE.min(length / 2)).find(repeats) {
            folded.truncate(length - cycle);
            folded[length - 2 * cycle..].iter_mut().for_each(|(_, repeated)| *repeated = true);
        }
    }
    folded
}

/// Renders the chain in at most `limit` lines of at most `columns`, and the number of calls that do not fit. `lead` (a
/// process name) precedes it; `cut` is the reason why the stack is incomplete.
pub fn lines(chain: &Chain, lead: &str, cut: Option<&str>, columns: usize, limit: usize, color: bool) -> Vec<String> {
    let mut lines = Lines { done: Vec::new(), line: String::new(), used: 0, columns, color };
    if !lead.is_empty() {
        lines.push(&[(Style::Bold, clip(lead, columns.saturating_sub(1)) + ":")]);
    }
    for (index, (call, repeated)) in chain.iter().enumerate() {
        let arrow = if index == 0 { "" } else { "← " };
        // A module is named where it begins.
        let is_known = call.is_module && index > 0 && chain[index - 1].0.place == call.place;
        let place = if call.place.is_empty() || is_known {
            String::new()
        } else {
            format!(" {}", clip(&call.place, columns / 2))
        };
        let name = clip(&call.name, columns.saturating_sub(width(&place) + 6).max(8));
        let again = if *repeated { " ↻" } else { "" };
        let piece = [(Style::Dim, arrow.to_owned()), (Style::Name, name), (Style::Dim, format!("{place}{again}"))];
        // The last line has room for the number of remaining calls.
        let room = if lines.done.len() + 1 >= limit { 14 } else { 0 };
        let last = index + 1 == chain.len();
        if lines.done.len() + 1 >= limit && !lines.fits(&piece, if last { 0 } else { room }) {
            let rest = chain.len() - index;
            lines.push(&[(Style::Dim, format!("← {rest} more"))]);
            break;
        }
        lines.push(&piece);
    }
    if chain.is_empty() && cut.is_none() {
        lines.push(&[(Style::Dim, "[no stack]".into())]);
    }
    if let Some(cut) = cut {
        lines.push(&[(Style::Warning, clip(&format!("… incomplete: {cut}"), columns))]);
    }
    lines.finish()
}

struct Lines {
    done: Vec<String>,
    line: String,
    used: usize,
    columns: usize,
    color: bool,
}

impl Lines {
    fn fits(&self, piece: &[(Style, String)], room: usize) -> bool {
        let length: usize = piece.iter().map(|(_, text)| width(text)).sum();
        self.used + usize::from(self.used > 0) + length + room <= self.columns
    }

    fn push(&mut self, piece: &[(Style, String)]) {
        if self.used > 0 && !self.fits(piece, 0) {
            self.break_line();
        }
        if self.used > 0 {
            self.used += 1;
            self.line.push(' ');
        }
        for (style, text) in piece {
            self.used += width(text);
            self.line.push_str(&style.paint(text, self.color));
        }
    }

    fn break_line(&mut self) {
        self.done.push(std::mem::take(&mut self.line));
        self.used = 0;
    }

    fn finish(mut self) -> Vec<String> {
        if self.used > 0 {
            self.break_line();
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str, place: &str, is_module: bool) -> Call {
        Call { name: name.into(), place: place.into(), is_module }
    }

    #[test]
    fn a_module_is_named_where_it_begins() {
        let of = |name, module| (named(name, module, true), false);
        let chain = vec![of("f", "a.so"), of("g", "a.so"), of("h", "b.so"), of("i", "a.so"), of("j", "a.so")];
        assert_eq!(lines(&chain, "", None, 80, 3, false), ["f a.so ← g ← h b.so ← i a.so ← j"]);
    }

    fn folded(text: &str) -> String {
        let show = |(item, repeated): (char, bool)| if repeated { item.to_ascii_uppercase() } else { item };
        fold_recursion(text.chars()).into_iter().map(show).collect()
    }

    #[test]
    fn recursion_folds_direct_and_mutual() {
        for (stack, expected) in
            [("abc", "abc"), ("aaab", "Ab"), ("abababc", "ABc"), ("xabcabcabcy", "xABCy"), ("abba", "aBa"), ("", "")]
        {
            assert_eq!(folded(stack), expected, "{stack}");
        }
    }

    #[test]
    fn deeper_recursion_folds_to_the_same_chain() {
        let deep: Vec<char> = "xab".chars().chain("cd".repeat(100).chars()).chain("main".chars()).collect();
        let deeper: Vec<char> = "xab".chars().chain("cd".repeat(101).chars()).chain("main".chars()).collect();
        assert_eq!(fold_recursion(deep), fold_recursion(deeper));
    }

    #[test]
    fn chains_wrap_and_count_the_rest() {
        let call = |index: usize| (named(&format!("function_{index}"), &format!("file.c:{index}"), false), false);
        let chain: Chain = (0..20).map(call).collect();
        let lines = lines(&chain, "", None, 60, 2, false);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("function_0 file.c:0 ← function_1"));
        assert!(lines[1].ends_with(" more"), "{lines:?}");
        assert!(lines.iter().all(|line| width(line) <= 60));
    }

    #[test]
    fn a_cut_stack_says_why() {
        let chain = vec![(named("f", "", false), true)];
        let lines = lines(&chain, "server (1)", Some("stack copy too small"), 80, 3, false);
        assert_eq!(lines, ["server (1): f ↻ … incomplete: stack copy too small"]);
    }
}
