//! Text of a stack: a short chain of calls, innermost first.

use std::collections::HashMap;
use std::sync::Arc;

use crate::model::{Frame, Profile, Stack};
use crate::naming::{base_name, frame_name, is_allocator_function, short_function};
use crate::origin::{FrameRules, Origin, Shown, word};
use crate::report::text::{Style, clip, width};

/// A call in a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Call {
    /// Shortened function name, or the address in its module.
    pub name: String,
    /// `file:line`, or the module.
    pub place: String,
    /// Whether the place is the module.
    pub is_module: bool,
    /// Whether it is a call of the program's own code.
    pub is_own: bool,
    /// For the title of a stack: one word for what it called to allocate. Empty if it called the allocator directly.
    pub via: String,
}

/// Frame classes by frame address, because stacks share most frames. Valid as long as the profiles are alive.
pub type KnownOrigins = HashMap<*const Frame, Origin>;

/// How tables show stacks: which frames, and under which names.
#[derive(Clone, Copy, Debug)]
pub struct FrameView {
    /// The rules that classify frames.
    pub rules: &'static FrameRules,
    /// Show all frames except the allocator's own (`--all-frames`).
    pub all_frames: bool,
    /// Show names with template arguments, parameters and return types (`--full-names`).
    pub full_names: bool,
}

impl Default for FrameView {
    fn default() -> Self {
        Self { rules: FrameRules::standard(), all_frames: false, full_names: false }
    }
}

impl FrameView {
    /// The name under which a frame is shown.
    pub fn name(&self, profile: &Profile, frame: &Frame) -> String {
        let name = frame_name(profile, frame);
        // A name that consists of a module and an offset is not shortened.
        let is_whole = self.full_names || frame.function.is_none() && frame.function_start.is_some();
        if is_whole { name.into_owned() } else { short_function(&name).into_owned() }
    }

    /// The frame as an element of a chain.
    pub fn call(&self, profile: &Profile, frame: &Frame) -> Call {
        let place = place(profile, frame);
        let is_module = frame.file.is_none() && !place.is_empty();
        Call { name: self.name(profile, frame), place, is_module, is_own: false, via: String::new() }
    }

    /// Selects the frames to show. `origins` has the class of each frame.
    pub fn shown(&self, stack: &Stack, origins: &[Origin]) -> Shown {
        if self.all_frames {
            return Shown::new((allocator_frames(stack)..stack.frames.len()).collect(), origins, None);
        }
        let shown = Shown::of(origins);
        let is_informative = |at: &usize| match (&stack.frames[*at].function, shown.frames.first()) {
            (Some(function), _) => !is_allocator_function(function),
            // Only the module of this frame is known, which is informative only if it differs from the title's.
            (None, first) => first.is_some_and(|first| stack.frames[*first].module != stack.frames[*at].module),
        };
        Shown { via: shown.via.filter(is_informative), ..shown }
    }

    /// Classifies the frames of a stack and selects those to show.
    pub fn shown_of(&self, profile: &Profile, stack: &Stack, known: &mut KnownOrigins) -> Shown {
        let origin =
            |frame: &Arc<Frame>| *known.entry(Arc::as_ptr(frame)).or_insert_with(|| self.rules.origin(profile, frame));
        let origins: Vec<Origin> = stack.frames.iter().map(origin).collect();
        self.shown(stack, &origins)
    }

    /// The calls of a stack that are shown, innermost first.
    pub fn calls(&self, profile: &Profile, stack: &Stack, shown: &Shown) -> Vec<Call> {
        let Shown { frames, foreign, via } = shown;
        let call = |at: &usize| {
            let is_own = foreign.binary_search(at).is_err();
            Call { is_own, ..self.call(profile, &stack.frames[*at]) }
        };
        let mut calls: Vec<Call> = frames.iter().map(call).collect();
        if let (Some(first), Some(via)) = (calls.first_mut(), via) {
            first.via = word(profile, &stack.frames[*via]);
        }
        calls
    }
}

/// The place of a call: `file:line`, or the module.
pub fn place(profile: &Profile, frame: &Frame) -> String {
    match (&frame.file, frame.line) {
        (Some(file), Some(line)) => format!("{}:{line}", base_name(file)),
        (Some(file), None) => base_name(file).into(),
        // The name already contains the location.
        _ if frame.function.is_none() => String::new(),
        _ => profile.module_of(frame).map_or("", |module| base_name(&module.path)).into(),
    }
}

/// A chain of calls, innermost first, each with a flag that says whether repetitions were folded into it.
pub type Chain = Vec<(Call, bool)>;

/// Number of innermost frames that belong to an allocator rather than the program; 0 if all frames do.
pub fn allocator_frames(stack: &Stack) -> usize {
    let of_allocator = |frame: &&Arc<Frame>| frame.function.as_deref().is_some_and(is_allocator_function);
    let count = stack.frames.iter().take_while(of_allocator).count();
    if count == stack.frames.len() { 0 } else { count }
}

/// Longest cycle of calls that is recognized as recursion.
const LONGEST_CYCLE: usize = 8;

/// Removes immediate repetitions of an item, or of a cycle of up to eight items. Each remaining item has a flag that
/// says whether it was repeated.
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

/// Renders the chain in at most `limit` lines of at most `columns`. If it does not fit, calls of libraries in its middle
/// are left out; the program's own may take `most` lines. Only if they do not fit there, some are left out, too. `lead`
/// (a process name) precedes it; `cut` is the reason why the stack is incomplete.
pub fn lines(
    chain: &Chain,
    lead: &str,
    cut: Option<&str>,
    columns: usize,
    (limit, most): (usize, usize),
    color: bool,
) -> Vec<String> {
    let laid_out = |pieces: &mut dyn Iterator<Item = Piece>| {
        let mut lines = Lines { done: Vec::new(), line: String::new(), used: 0, columns, color };
        if !lead.is_empty() {
            lines.push(&[(Style::Bold, clip(lead, columns.saturating_sub(1)) + ":")]);
        }
        pieces.for_each(|piece| lines.push(&piece));
        lines
    };
    let pieces: Vec<Piece> = (0..chain.len()).map(|index| piece(chain, index, columns)).collect();
    // The calls at both ends stay. The others are left out from the outermost on.
    let last = chain.len().saturating_sub(1);
    let (own, foreign): (Vec<usize>, Vec<usize>) = (1..last).rev().partition(|at| chain[*at].0.is_own);
    let order = [foreign.as_slice(), &own].concat();
    let without = |number: usize| laid_out(&mut with_gaps(chain, &pieces, &order[..number]).into_iter());
    let within = |limit| move |lines: &Lines| lines.number() <= limit;
    let fitting = (0..=foreign.len()).map(without).find(within(limit));
    let fitting = fitting.or_else(|| (foreign.len()..=order.len()).map(without).find(within(limit.max(most))));
    let mut lines = match fitting {
        Some(lines) => lines,
        None if chain.len() < 3 => without(0),
        None => {
            let more = vec![(Style::Dim, format!("← {last} more"))];
            laid_out(&mut pieces[..1].iter().cloned().chain(std::iter::once(more)))
        }
    };
    if chain.is_empty() && cut.is_none() {
        lines.push(&[(Style::Dim, "[no stack]".into())]);
    }
    if let Some(cut) = cut {
        lines.push(&[(Style::Warning, clip(&format!("… incomplete: {cut}"), columns))]);
    }
    lines.finish()
}

/// The pieces of a chain without some of its calls. What is left out is counted, and so are the program's own calls.
fn with_gaps(chain: &Chain, pieces: &[Piece], left_out: &[usize]) -> Vec<Piece> {
    let mut is_left_out = vec![false; chain.len()];
    left_out.iter().for_each(|at| is_left_out[*at] = true);
    let numbers: Vec<usize> = (0..chain.len()).collect();
    let runs = numbers.chunk_by(|a, b| is_left_out[*a] && is_left_out[*b]);
    let piece = |run: &[usize]| {
        if !is_left_out[run[0]] {
            return pieces[run[0]].clone();
        }
        let own = match run.iter().filter(|at| chain[**at].0.is_own).count() {
            0 => String::new(),
            own if own == run.len() => " of the program".to_owned(),
            own => format!(", {own} of the program"),
        };
        vec![(Style::Dim, format!("← … {} more{own} …", run.len()))]
    };
    runs.map(piece).collect()
}

/// Styled text.
type Piece = Vec<(Style, String)>;

/// The text of one call of a chain.
fn piece(chain: &Chain, index: usize, columns: usize) -> Piece {
    let (call, repeated) = &chain[index];
    let arrow = if index == 0 { "" } else { "← " };
    // A module is named only on the first of consecutive calls.
    let is_known = call.is_module && index > 0 && chain[index - 1].0.place == call.place;
    let place =
        if call.place.is_empty() || is_known { String::new() } else { format!(" {}", clip(&call.place, columns / 2)) };
    let via = if call.via.is_empty() { String::new() } else { format!(" (via {})", clip(&call.via, columns / 4)) };
    let taken = width(&place) + width(&via) + 6;
    let name = clip(&call.name, columns.saturating_sub(taken).max(8));
    let again = if *repeated { " ↻" } else { "" };
    vec![(Style::Dim, arrow.to_owned()), (Style::Name, name), (Style::Dim, format!("{place}{via}{again}"))]
}

struct Lines {
    done: Vec<String>,
    line: String,
    used: usize,
    columns: usize,
    color: bool,
}

impl Lines {
    fn fits(&self, piece: &[(Style, String)]) -> bool {
        let length: usize = piece.iter().map(|(_, text)| width(text)).sum();
        self.used + usize::from(self.used > 0) + length <= self.columns
    }

    fn number(&self) -> usize {
        self.done.len() + usize::from(self.used > 0)
    }

    fn push(&mut self, piece: &[(Style, String)]) {
        if self.used > 0 && !self.fits(piece) {
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
        Call { name: name.into(), place: place.into(), is_module, ..Call::default() }
    }

    #[test]
    fn a_module_is_named_where_it_begins() {
        let of = |name, module| (named(name, module, true), false);
        let chain = vec![of("f", "a.so"), of("g", "a.so"), of("h", "b.so"), of("i", "a.so"), of("j", "a.so")];
        assert_eq!(lines(&chain, "", None, 80, (3, 3), false), ["f a.so ← g ← h b.so ← i a.so ← j"]);
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
    fn chains_wrap_and_are_shortened_in_the_middle() {
        let call = |index: usize| (named(&format!("function_{index}"), &format!("file.c:{index}"), false), false);
        let chain: Chain = (0..20).map(call).collect();
        let lines = lines(&chain, "", None, 60, (2, 2), false);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].starts_with("function_0 file.c:0 ← function_1"));
        assert!(lines[1].ends_with("← … 16 more … ← function_19 file.c:19"), "{lines:?}");
        assert!(lines.iter().all(|line| width(line) <= 60));
    }

    #[test]
    fn calls_of_libraries_are_left_out_before_the_programs_own() {
        let call = |index: usize| {
            let is_own = matches!(index, 0 | 5 | 10 | 19);
            let name = format!("{}_{index}", if is_own { "own" } else { "library" });
            (Call { is_own, ..named(&name, "", false) }, false)
        };
        let chain: Chain = (0..20).map(call).collect();
        let short = lines(&chain, "", None, 50, (2, 2), false).join(" ");
        let is_own = |name: &str| name.starts_with("own");
        assert_eq!(short.split(' ').filter(|name| is_own(name)).count(), 4, "{short}");
        assert!(short.contains(" more … ← own_10 ← … 8 more … ← own_19"), "{short}");
        // The program's own calls may take more lines, and are counted where there are too many of them.
        let own: Chain = chain.into_iter().map(|(call, again)| (Call { is_own: true, ..call }, again)).collect();
        let whole = lines(&own, "", None, 50, (2, 12), false);
        assert!(whole.len() > 2 && !whole.concat().contains('…'), "{whole:?}");
        let cut = lines(&own, "", None, 50, (2, 3), false);
        assert!(cut.len() == 3 && cut[2].contains(" more of the program … ← own_19"), "{cut:?}");
    }

    #[test]
    fn a_cut_stack_says_why() {
        let chain = vec![(named("f", "", false), true)];
        let lines = lines(&chain, "server (1)", Some("stack copy too small"), 80, (3, 3), false);
        assert_eq!(lines, ["server (1): f ↻ … incomplete: stack copy too small"]);
    }
}
