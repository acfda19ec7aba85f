//! Symbolizes a saved profile without names (`--no-symbolize`), from files with the build IDs of its modules.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::model::{Frame, Profile, SharedFrames, Stack};
use heapbpf_unwind::image::ModuleFiles;

use super::by_build_id::ByBuildId;
use super::finish;
use super::options::Options;
use super::progress::Progress;
use super::symbolizer::Symbolizer;

/// Maximum number of frames of all distinct stacks together, once inlined calls are added. The limit for profile files
/// is lower, so only a profile that was crafted to become large reaches this.
const MOST_FRAMES: usize = 16_000_000;

/// Result of symbolizing a profile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of addresses (module, file offset) that lacked a function, or its file and line.
    pub asked: usize,
    /// Number of these for which a function was found.
    pub named: usize,
    /// Number of these that still have no function, by reason.
    pub unnamed: BTreeMap<Arc<str>, usize>,
    /// Further remarks for the user.
    pub notes: Vec<String>,
}

/// Symbolizes every frame that lacks a function, or its file and line. Reports its progress to `progress`.
pub fn symbolize(profile: &mut Profile, options: Options, progress: Arc<Progress>) -> Summary {
    let directories = options.debug_directories.clone();
    let mut files = ByBuildId::new(&profile.modules, &directories, options.debuginfod.clone());
    let mut symbolizer = Symbolizer::reporting_to(options, progress);
    let mut stacks: HashMap<*const Stack, Arc<Stack>> = HashMap::new();
    for row in &profile.rows {
        stacks.entry(Arc::as_ptr(&row.key.stack)).or_insert_with(|| Arc::clone(&row.key.stack));
    }
    let wanted = stacks.values().flat_map(|stack| calls(&stack.frames)).filter_map(wanted_address);
    let wanted: Vec<Address> = wanted.filter(|(module, _)| !files.is_anonymous(*module)).collect();
    symbolizer.symbolize(&mut files, wanted.iter().copied());

    let mut summary = Summary::default();
    let mut addresses = wanted;
    addresses.sort_unstable();
    addresses.dedup();
    summary.asked = addresses.len();
    let mut asked = BTreeSet::new();
    for (module, offset) in addresses {
        asked.insert(module);
        match reason(&symbolizer.get(module, offset)) {
            None => summary.named += 1,
            Some(reason) => {
                let reason = symbolizer.reason(module).cloned().unwrap_or(reason);
                *summary.unnamed.entry(reason).or_default() += 1;
            }
        }
    }
    summary.notes = symbolizer.notes().map(str::to_owned).collect();

    for module in asked {
        if let Some(known) = profile.modules.get_mut(module.0 as usize) {
            known.reason = symbolizer.reason(module).cloned();
        }
    }

    let mut frames = 0;
    let mut shared = SharedFrames::default();
    let mut finished: HashMap<*const Stack, Arc<Stack>> = HashMap::with_capacity(stacks.len());
    for (key, stack) in stacks {
        let named = with_names(&stack, &symbolizer, &mut shared);
        frames += named.frames.len();
        finished.insert(key, if frames <= MOST_FRAMES { Arc::new(named) } else { stack });
    }
    if frames > MOST_FRAMES {
        summary.notes.push(format!("more than {MOST_FRAMES} frames: the rest got no names"));
    }
    for row in &mut profile.rows {
        if let Some(stack) = finished.get(&Arc::as_ptr(&row.key.stack)) {
            row.key.stack = Arc::clone(stack);
        }
    }
    summary
}

/// Module and file offset.
type Address = (ModuleId, u64);

/// Splits frames by address. Each piece has the inlined functions at one address and the function they are inlined
/// into.
fn calls(frames: &[Arc<Frame>]) -> impl Iterator<Item = &[Arc<Frame>]> {
    frames.chunk_by(|frame, _| frame.inlined)
}

/// Returns the address of a call whose function, or file and line, is unknown.
fn wanted_address(call: &[Arc<Frame>]) -> Option<Address> {
    let frame = call.last()?;
    let is_whole = frame.function.is_some() && call.iter().any(|frame| frame.file.is_some());
    let module = ModuleId(u32::try_from(frame.module?).ok()?);
    (!is_whole).then_some((module, frame.file_offset?))
}

/// Returns why there is no function. `None` if there is one.
fn reason(symbols: &[Frame]) -> Option<Arc<str>> {
    match symbols {
        [] => Some("not looked for".into()),
        [.., symbol] if symbol.function.is_some() => None,
        [.., symbol] => Some(symbol.reason.clone().unwrap_or_default()),
    }
}

fn with_names(stack: &Stack, symbolizer: &Symbolizer, shared: &mut SharedFrames) -> Stack {
    let mut frames = Vec::with_capacity(stack.frames.len());
    for call in calls(&stack.frames) {
        let symbols = wanted_address(call).map(|(module, offset)| symbolizer.get(module, offset)).unwrap_or_default();
        let Some(frame) = call.last().filter(|_| !symbols.is_empty()) else {
            frames.extend_from_slice(call);
            continue;
        };
        let adds_lines = symbols.iter().any(|symbol| symbol.file.is_some());
        let adds_start = || symbols.iter().any(|symbol| symbol.function.is_some() || symbol.function_start.is_some());
        let replaces = frame.function.is_none() && (frame.function_start.is_none() || adds_start());
        if replaces || (adds_lines && reason(&symbols).is_none()) {
            frames.extend(symbols.iter().map(|symbol| shared.share(finish::with_symbol(frame, symbol))));
        } else {
            frames.extend_from_slice(call);
        }
    }
    // As in a recording, a stack that ends in an outermost function is complete, even if the unwinder could not tell.
    let cut = stack.cut.clone().filter(|_| !frames.last().is_some_and(|frame| finish::is_entry(frame)));
    frames.shrink_to_fit();
    Stack { frames, unwinder: stack.unwinder, cut }
}

#[cfg(test)]
mod tests;
