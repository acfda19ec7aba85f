//! Names for a saved profile, from files that belong to its build IDs: what `--no-symbolize` left out.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::by_build_id::ByBuildId;
use super::finish;
use super::symbolizer::{Options, Symbol, Symbolizer};
use crate::host::mappings::ModuleId;
use crate::profile::model::{Frame, Profile, Stack};
use crate::unwind::image::ModuleFiles;

/// Most frames of all distinct stacks together once inlined calls are among them: more than files may have, so that
/// only a profile made to become large meets it.
const MOST_FRAMES: usize = 16_000_000;

/// What became of the addresses of a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Places (module, file offset) that had no function, or none with its file and line.
    pub asked: usize,
    /// Those that a function was found for.
    pub named: usize,
    /// Of those without a function: how many, by the reason why.
    pub unnamed: BTreeMap<Arc<str>, usize>,
    /// What else the user should know.
    pub notes: Vec<String>,
}

/// Names every frame that lacks a function, or its file and line.
pub fn symbolize(profile: &mut Profile, options: Options) -> Summary {
    let directories = options.debug_directories.clone();
    let mut files = ByBuildId::new(&profile.modules, &directories);
    let mut symbolizer = Symbolizer::new(options);
    let mut stacks: HashMap<*const Stack, Arc<Stack>> = HashMap::new();
    for row in &profile.rows {
        stacks.entry(Arc::as_ptr(&row.stack)).or_insert_with(|| Arc::clone(&row.stack));
    }
    let wanted = stacks.values().flat_map(|stack| calls(&stack.frames)).filter_map(wanted_place);
    let wanted: Vec<Place> = wanted.filter(|(module, _)| !files.is_anonymous(*module)).collect();
    symbolizer.symbolize(&mut files, wanted.iter().copied());

    let mut summary = Summary::default();
    let mut places = wanted;
    places.sort_unstable();
    places.dedup();
    summary.asked = places.len();
    for (module, offset) in places {
        match reason(&symbolizer.get(module, offset)) {
            None => summary.named += 1,
            Some(reason) => *summary.unnamed.entry(reason).or_default() += 1,
        }
    }
    summary.notes = symbolizer.notes().map(str::to_owned).collect();

    let mut frames = 0;
    let mut finished: HashMap<*const Stack, Arc<Stack>> = HashMap::with_capacity(stacks.len());
    for (key, stack) in stacks {
        let named = with_names(&stack, &symbolizer);
        frames += named.frames.len();
        finished.insert(key, if frames <= MOST_FRAMES { Arc::new(named) } else { stack });
    }
    if frames > MOST_FRAMES {
        summary.notes.push(format!("more than {MOST_FRAMES} frames: the rest is left as it was"));
    }
    for row in &mut profile.rows {
        if let Some(stack) = finished.get(&Arc::as_ptr(&row.stack)) {
            row.stack = Arc::clone(stack);
        }
    }
    summary
}

type Place = (ModuleId, u64);

/// The frames of one address each: inlined functions, and the one that they are inlined into.
fn calls(frames: &[Frame]) -> impl Iterator<Item = &[Frame]> {
    frames.chunk_by(|frame, _| frame.inlined)
}

/// Where a call is, if it could do with a better name.
fn wanted_place(call: &[Frame]) -> Option<Place> {
    let frame = call.last()?;
    let is_whole = frame.function.is_some() && call.iter().any(|frame| frame.file.is_some());
    let module = ModuleId(u32::try_from(frame.module?).ok()?);
    (!is_whole).then_some((module, frame.file_offset?))
}

/// Why there is no function; `None` if there is one.
fn reason(symbols: &[Symbol]) -> Option<Arc<str>> {
    match symbols {
        [] => Some("not looked for".into()),
        [.., symbol] if symbol.function.is_some() => None,
        [.., symbol] => Some(symbol.reason.clone().unwrap_or_default()),
    }
}

fn with_names(stack: &Stack, symbolizer: &Symbolizer) -> Stack {
    let mut frames = Vec::with_capacity(stack.frames.len());
    for call in calls(&stack.frames) {
        let symbols = wanted_place(call).map(|(module, offset)| symbolizer.get(module, offset)).unwrap_or_default();
        let Some(frame) = call.last().filter(|_| !symbols.is_empty()) else {
            frames.extend_from_slice(call);
            continue;
        };
        let adds_lines = symbols.iter().any(|symbol| symbol.file.is_some());
        if frame.function.is_none() || (adds_lines && reason(&symbols).is_none()) {
            frames.extend(symbols.iter().map(|symbol| finish::with_symbol(frame, symbol)));
        } else {
            frames.extend_from_slice(call);
        }
    }
    // A walk that could not know that it was whole is told so by the name of its last function, as in a recording.
    let cut = stack.cut.clone().filter(|_| !frames.last().is_some_and(finish::is_entry));
    Stack { frames, unwinder: stack.unwinder, cut }
}

#[cfg(test)]
#[path = "offline_tests.rs"]
mod tests;
