//! Stacks of a page, encoded compactly: each text and each frame once, and of each stack only the part that differs
//! from the previous stack.

use std::collections::HashMap;
use std::sync::Arc;

use indexmap::IndexSet;
use serde::Serialize;

use crate::intern::Strings;
use crate::model::{Frame, Profile};
use crate::naming::{base_name, frame_name, home, is_allocator_function, lasting_name, short_function};
use crate::origin::{FrameRules, Origin};

/// A call as the page shows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Call {
    function: u32,
    file: u32,
    line: u32,
    module: u32,
    inlined: bool,
}

/// The place of a call.
pub(super) struct Place<'a> {
    pub(super) file: &'a str,
    pub(super) line: u32,
    pub(super) module: &'a str,
    pub(super) inlined: bool,
}

/// Functions, as columns. All texts are indices into `strings`.
#[derive(Default, Serialize)]
pub(super) struct Functions {
    name: Vec<u32>,
    /// The module of a function if another one has the same name; otherwise 0.
    home: Vec<u32>,
    short: Vec<u32>,
    /// 1 for an allocator's function.
    allocator: Vec<u8>,
}

/// Frames, as columns. 0 means no text or no line.
#[derive(Default, Serialize)]
pub(super) struct Frames {
    function: Vec<u32>,
    file: Vec<u32>,
    line: Vec<u32>,
    module: Vec<u32>,
    inlined: Vec<u8>,
    /// [`Origin::rank`](crate::origin::Origin::rank).
    rank: Vec<u8>,
    /// 1 for a function of an interpreter or a virtual machine.
    runtime: Vec<u8>,
}

/// Texts, functions and frames of a page, each once.
pub(super) struct Names {
    rules: &'static FrameRules,
    pub(super) strings: Strings,
    pub(super) functions: Functions,
    pub(super) frames: Frames,
    /// Names and modules of functions, as numbers of texts.
    named: IndexSet<(u32, u32)>,
    /// The first function of each name.
    first: HashMap<u32, usize>,
    calls: IndexSet<Call>,
    /// A hash of each function that is the same in other recordings.
    hashes: Vec<u64>,
}

impl Names {
    /// No names; `rules` classify frames.
    pub(super) fn new(rules: &'static FrameRules) -> Self {
        let (strings, functions, frames, named, first, calls, hashes) = Default::default();
        Self { rules, strings, functions, frames, named, first, calls, hashes }
    }

    fn function(&mut self, name: &str, is_named: bool, home: &str) -> u32 {
        let (text, lasting, of) = (self.strings.id(name), self.strings.id(lasting_name(name)), self.strings.id(home));
        let (id, is_new) = self.named.insert_full((lasting, of));
        if is_new {
            let short = if is_named { self.strings.id(&short_function(name)) } else { text };
            let first = *self.first.entry(lasting).or_insert(id);
            self.functions.home.push(if first == id { 0 } else { of });
            self.functions.home[first] = if first == id { 0 } else { self.named[first].1 };
            self.functions.name.push(text);
            self.functions.short.push(short);
            self.functions.allocator.push(u8::from(is_named && is_allocator_function(name)));
            self.hashes.push(hash(&[lasting_name(name), home].concat().into_bytes()));
        }
        id as u32
    }

    /// The number of a call.
    pub(super) fn call(&mut self, name: &str, is_named: bool, place: &Place<'_>) -> u32 {
        let call = Call {
            function: self.function(name, is_named, home(place.module, place.file)),
            file: self.strings.id(place.file),
            line: place.line,
            module: self.strings.id(base_name(place.module)),
            inlined: place.inlined,
        };
        let (id, is_new) = self.calls.insert_full(call);
        if is_new {
            self.frames.function.push(call.function);
            self.frames.file.push(call.file);
            self.frames.line.push(call.line);
            self.frames.module.push(call.module);
            self.frames.inlined.push(u8::from(call.inlined));
            let function = if is_named { name } else { "" };
            let origin = self.rules.origin_of(function, place.module, place.file);
            self.frames.rank.push(origin.rank());
            self.frames.runtime.push(u8::from(origin == Origin::Runtime));
        }
        id as u32
    }

    /// The number of a frame of a profile.
    pub(super) fn frame(&mut self, profile: &Profile, frame: &Frame) -> u32 {
        let module = profile.module_of(frame);
        let place = Place {
            file: frame.file.as_deref().unwrap_or(""),
            line: frame.line.unwrap_or(0),
            module: module.map_or("", |module| &*module.path),
            inlined: frame.inlined,
        };
        self.call(&frame_name(profile, frame), frame.function.is_some(), &place)
    }

    /// The path of a stack in the page's graph without frames of libraries, and in that with them: its group, whether
    /// it is incomplete, and its functions, outermost first. The page selects frames by the same rules.
    pub(super) fn paths(&self, chain: &Chain) -> [Box<[u32]>; 2] {
        let rank = |frame: &u32| self.frames.rank[*frame as usize];
        let best = chain.frames.iter().map(rank).min().unwrap_or(0);
        let innermost = chain.frames.iter().rposition(|frame| rank(frame) == best);
        let of_program = |frame: &&u32| match best {
            0 => matches!(rank(frame), 0 | 2),
            1 | 2 => rank(frame) <= 2,
            _ => true,
        };
        let of_libraries = |frame: &&u32| best > 2 || rank(frame) <= 3;
        let start = [chain.group, u32::from(chain.cut != 0)];
        let function = |frame: &u32| self.function_of(*frame);
        let own = chain.frames[..innermost.map_or(0, |at| at + 1)].iter().filter(of_program).map(function);
        let all = chain.frames.iter().filter(of_libraries).map(function);
        [start.into_iter().chain(own).collect(), start.into_iter().chain(all).collect()]
    }

    fn function_of(&self, frame: u32) -> u32 {
        self.frames.function[frame as usize]
    }
}

/// FNV-1a, because the hash must be the same in every run.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Bits of an integer that JavaScript represents exactly.
const EXACT_BITS: u32 = 53;

/// A stack: its group, why it was cut, and its frames, outermost first.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) struct Chain {
    pub(super) group: u32,
    pub(super) cut: u32,
    pub(super) frames: Arc<[u32]>,
}

/// Stacks, as columns, sorted by their functions. The page builds its tree by comparing neighbours.
#[derive(Default, Serialize)]
pub(super) struct Stacks {
    /// A number that identifies the stack in other recordings of the same program.
    pub(super) id: Vec<u64>,
    /// Number of the group.
    group: Vec<u32>,
    /// Text that says why the stack was cut; 0 if it is complete.
    cut: Vec<u32>,
    /// Number of outermost frames that it shares with the previous stack.
    shared: Vec<u32>,
    /// Number of further frames.
    own: Vec<u32>,
    /// The further frames of all stacks, outermost first.
    calls: Vec<u32>,
}

impl Stacks {
    /// The sorted stacks, and their order. `group_names` must be the same in other recordings.
    pub(super) fn new(names: &Names, chains: &[Chain], group_names: &[String]) -> (Self, Vec<usize>) {
        let mut order: Vec<usize> = (0..chains.len()).collect();
        let functions = |index: usize| chains[index].frames.iter().map(|frame| names.function_of(*frame));
        order.sort_by(|&a, &b| {
            let by_group = (chains[a].group, chains[a].cut == 0).cmp(&(chains[b].group, chains[b].cut == 0));
            by_group.then_with(|| functions(a).cmp(functions(b))).then_with(|| chains[a].frames.cmp(&chains[b].frames))
        });
        let mut stacks = Self::default();
        let mut last: &[u32] = &[];
        for &index in &order {
            let Chain { group, cut, frames } = &chains[index];
            let shared = last.iter().zip(frames.iter()).take_while(|(a, b)| a == b).count();
            let start = hash(group_names.get(*group as usize).map_or(b"", |name| name.as_bytes()));
            let id = functions(index).fold(start, |sum, function| {
                (sum.rotate_left(5) ^ names.hashes[function as usize]).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            });
            stacks.id.push(id >> (u64::BITS - EXACT_BITS));
            stacks.group.push(*group);
            stacks.cut.push(*cut);
            stacks.shared.push(shared as u32);
            stacks.own.push((frames.len() - shared) as u32);
            stacks.calls.extend_from_slice(&frames[shared..]);
            last = frames;
        }
        (stacks, order)
    }
}
