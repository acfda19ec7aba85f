//! Identities that persist from one profile to the next: programs, functions, stacks, and leaves. A leaf is one stack
//! of one program; everything that the view shows is a sum over leaves.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use foldhash::fast::RandomState;
use heapbpf_profile::group::Groups;
use heapbpf_profile::model::{ByAddress, Resident};
use heapbpf_profile::naming::FunctionKey;
use heapbpf_profile::report::FrameView;
use heapbpf_profile::report::chain::{Call, KnownOrigins, fold_recursion};
use heapbpf_profile::{GroupBy, Profile, Row, Stack};
use indexmap::IndexSet;

/// Name of a stack without frames.
const NO_STACK: &str = "[no stack]";
/// Number of known stacks up to which none is dropped from the address map.
const MOST_KNOWN: usize = 4096;

/// A stack as numbers.
#[derive(Debug)]
pub(crate) struct StackIds {
    /// Calls, innermost first, each with a flag that says whether repetitions were folded into it.
    pub(crate) calls: Vec<(u32, bool)>,
    /// Functions, innermost first, without immediate repetitions.
    pub(crate) path: Vec<u32>,
    /// Functions, each once, ascending.
    pub(crate) through: Vec<u32>,
    /// Why the stack is incomplete.
    pub(crate) cut: Option<Arc<str>>,
}

/// A stack's calls, and why the stack was cut.
type StackKey = (Arc<[(u32, bool)]>, Option<Arc<str>>);

/// Items, numbered in order of first appearance.
type Numbered<T> = IndexSet<T, RandomState>;

/// The identities.
#[derive(Debug, Default)]
pub(crate) struct Leaves {
    /// Which frames of stacks are shown.
    pub(crate) frames: FrameView,
    /// Whether each process counts as a program of its own.
    pub(crate) apart: bool,
    /// Programs, by a name that stays the same in other recordings.
    programs: Numbered<String>,
    /// Names of programs for display, from the last profile.
    program_names: Vec<String>,
    calls: Numbered<(u32, Call)>,
    functions: Numbered<FunctionKey<'static>>,
    /// Names under which functions are shown.
    function_names: Vec<String>,
    /// How many functions have a short name or a full name, and the first of them.
    short: HashMap<String, (usize, usize), RandomState>,
    full: HashMap<String, (usize, usize), RandomState>,
    stack_keys: Numbered<StackKey>,
    stacks: Vec<StackIds>,
    /// Program and stack.
    leaves: Numbered<(u32, u32)>,
    /// Stacks by address. An address is not reused as long as its stack is in this map.
    known: HashMap<ByAddress<Stack>, u32, RandomState>,
    /// The programs of the last profile's processes, followed by those of its idle processes.
    last_programs: Vec<u32>,
}

impl Leaves {
    /// An empty set; `frames` says how stacks are shown, `apart` whether each process counts as a program of its own.
    pub(crate) fn new(frames: FrameView, apart: bool) -> Self {
        Self { frames, apart, ..Self::default() }
    }

    /// What rows are grouped by.
    pub(crate) const fn by(&self) -> GroupBy {
        if self.apart { GroupBy::Process } else { GroupBy::Program }
    }

    /// The leaf of each row of a profile.
    pub(crate) fn of_rows(&mut self, profile: &Profile) -> Vec<u32> {
        self.last_programs = self.of_processes(profile);
        let leaf = |row: &Row| {
            let stack = self.number_of(profile, &row.key.stack);
            let program = self.last_programs.get(row.key.process).copied().unwrap_or(0);
            self.leaves.insert_full((program, stack)).0 as u32
        };
        let leaves = profile.rows.iter().map(leaf).collect();
        if self.known.len() > MOST_KNOWN.max(2 * profile.rows.len()) {
            let used: HashSet<*const Stack> = profile.rows.iter().map(|row| Arc::as_ptr(&row.key.stack)).collect();
            self.known.retain(|stack, _| used.contains(&Arc::as_ptr(stack)));
        }
        leaves
    }

    fn number_of(&mut self, profile: &Profile, stack: &Arc<Stack>) -> u32 {
        let key = ByAddress(Arc::clone(stack));
        if let Some(&number) = self.known.get(&key) {
            return number;
        }
        let number = self.stack(profile, &key);
        self.known.insert(key, number);
        number
    }

    /// The program of each process. Also updates the programs' names for display.
    fn of_processes(&mut self, profile: &Profile) -> Vec<u32> {
        let stable = Groups::comparable(profile, self.by());
        let shown = Groups::new(profile, self.by());
        let counted = profile.processes.len();
        let name_in = |groups: &Groups, index: usize| match index.checked_sub(counted) {
            None => groups.of_process(index).into_owned(),
            Some(idle) => groups.of_idle(idle).into_owned(),
        };
        let program = |index| {
            let (program, is_new) = self.programs.insert_full(name_in(&stable, index));
            let name = name_in(&shown, index);
            if is_new {
                self.program_names.push(name);
            } else {
                self.program_names[program] = name;
            }
            program as u32
        };
        (0..counted + profile.idle.len()).map(program).collect()
    }

    /// Resident memory of each program, for the last profile that was taken; `None` where it was not measured.
    pub(crate) fn resident_of_programs(&self, profile: &Profile) -> Vec<Option<Resident>> {
        let mut all: Vec<Option<Resident>> = vec![None; self.programs.len()];
        for (process, program) in profile.processes.iter().chain(&profile.idle).zip(&self.last_programs) {
            let is_now = |resident: &Resident| resident.total_bytes() > 0 && !resident.is_before_end;
            let Some(resident) = process.resident.filter(is_now) else { continue };
            match &mut all[*program as usize] {
                Some(sum) => sum.add(&resident),
                none => *none = Some(resident),
            }
        }
        all
    }

    /// Whether a program of the last profile that was taken only idles. A process with a row of its own may idle.
    pub(crate) fn has_idle_program(&self, profile: &Profile) -> bool {
        let counted = profile.processes.len().min(self.last_programs.len());
        let (counted, idle) = self.last_programs.split_at(counted);
        let mut running = idle.iter().zip(&profile.idle).filter(|(_, process)| !process.ended);
        !self.apart && running.any(|(program, _)| !counted.contains(program))
    }

    fn stack(&mut self, profile: &Profile, stack: &Stack) -> u32 {
        let shown = self.frames.shown_of(profile, stack, &mut KnownOrigins::default());
        let functions = shown.frames.iter().map(|at| FunctionKey::of(profile, &stack.frames[*at]));
        let calls = functions.zip(self.frames.calls(profile, stack, &shown));
        let mut calls: Vec<u32> = calls.map(|(function, call)| self.call(function, call)).collect();
        if calls.is_empty() {
            calls.push(self.call(FunctionKey::named(NO_STACK), Call { name: NO_STACK.into(), ..Call::default() }));
        }
        let calls = fold_recursion(calls);
        let (id, is_new) = self.stack_keys.insert_full((calls.as_slice().into(), stack.cut.clone()));
        if is_new {
            let functions = calls.iter().map(|(call, _)| self.calls[*call as usize].0);
            let path: Vec<u32> = fold_recursion(functions).into_iter().map(|(function, _)| function).collect();
            let mut through = path.clone();
            through.sort_unstable();
            through.dedup();
            self.stacks.push(StackIds { calls, path, through, cut: stack.cut.clone() });
        }
        id as u32
    }

    fn call(&mut self, function: FunctionKey<'_>, call: Call) -> u32 {
        let function = self.function(function, &call.name);
        self.calls.insert_full((function, call)).0 as u32
    }

    fn function(&mut self, function: FunctionKey<'_>, name: &str) -> u32 {
        let (id, is_new) = self.functions.insert_full(function.into_owned());
        if is_new {
            self.function_names.push(String::new());
            let add = |all: &mut HashMap<String, (usize, usize), RandomState>, name: &str| {
                let (number, first) = all.entry(name.to_owned()).or_insert((0, id));
                *number += 1;
                (*number, *first)
            };
            let alike = [add(&mut self.short, name), add(&mut self.full, &self.functions[id].name)];
            // The second function of a name renames the first, too.
            let renamed = alike.iter().filter(|(number, _)| *number == 2).map(|(_, first)| *first);
            for it in renamed.chain([id]) {
                let function = &self.functions[it];
                self.function_names[it] = function.shown(name, alike[0].0 > 1, self.full[&*function.name].0 > 1);
            }
        }
        id as u32
    }

    /// Number of leaves so far.
    pub(crate) fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Number of programs so far.
    pub(crate) fn programs(&self) -> usize {
        self.programs.len()
    }

    /// Number of functions so far.
    pub(crate) fn functions(&self) -> usize {
        self.functions.len()
    }

    /// The program of a leaf.
    pub(crate) fn program(&self, leaf: u32) -> u32 {
        self.leaves[leaf as usize].0
    }

    /// The stack of a leaf.
    pub(crate) fn stack_of(&self, leaf: u32) -> &StackIds {
        &self.stacks[self.leaves[leaf as usize].1 as usize]
    }

    /// Name of a program.
    pub(crate) fn program_name(&self, program: u32) -> &str {
        self.program_names.get(program as usize).map_or("", String::as_str)
    }

    /// Name of a function.
    pub(crate) fn function_name(&self, function: u32) -> &str {
        &self.function_names[function as usize]
    }

    /// For each function, whether its name or one of its places contains a lower-case text.
    pub(crate) fn functions_with(&self, text: &str) -> Vec<bool> {
        let mut with = vec![false; self.functions.len()];
        for (function, Call { place, .. }) in &self.calls {
            with[*function as usize] |= place.to_lowercase().contains(text);
        }
        for (with, name) in with.iter_mut().zip(&self.function_names) {
            *with |= name.to_lowercase().contains(text);
        }
        with
    }

    /// A call.
    pub(crate) fn get_call(&self, call: u32) -> &Call {
        &self.calls[call as usize].1
    }

    /// Source lines of the calls made by a function.
    pub(crate) fn places(&self, function: u32) -> Vec<&str> {
        let of_function = self.calls.iter().filter(|(of, _)| *of == function);
        let places = of_function.map(|(_, call)| call.place.as_str()).filter(|place| !place.is_empty());
        // Calls may differ only in the allocation function that they call.
        let mut known = HashSet::new();
        places.filter(|place| known.insert(*place)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use heapbpf_profile::testing;

    #[test]
    fn identities_last_even_if_stacks_are_made_anew() {
        let mut leaves = Leaves::default();
        let profile = testing::small();
        let first = leaves.of_rows(&profile);
        assert_eq!(first, leaves.of_rows(&profile), "the same stacks");
        assert_eq!(first, leaves.of_rows(&testing::small()), "equal stacks");
        assert_eq!(first[0], first[1], "the allocator function and the interval make no other leaf");
        assert_ne!(first[0], first[4], "another program");
        assert_eq!((leaves.programs(), leaves.program_name(leaves.program(first[0]))), (2, "server (4242)"));
        let names = |leaf: u32| -> Vec<&str> {
            leaves.stack_of(leaf).path.iter().map(|function| leaves.function_name(*function)).collect()
        };
        assert_eq!(names(first[0]), ["grow", "parse_value", "handle", "main"], "recursion is folded");
        assert_eq!(leaves.stack_of(first[5]).cut.as_deref(), Some("stack copy too small"));
        let place = &leaves.get_call(leaves.stack_of(first[0]).calls[0].0).place;
        assert_eq!(place, "json.c:31");
    }

    #[test]
    fn functions_whose_short_names_are_equal_are_two() {
        let mut leaves = Leaves::default();
        let profile = testing::with_overload(testing::small(), "grow", ["grow(int)", "grow(long)"]);
        let rows = leaves.of_rows(&profile);
        let name = |leaf: u32| leaves.function_name(leaves.stack_of(leaf).path[0]);
        assert_eq!([rows[0], rows[rows.len() - 1]].map(name), ["grow(int)", "grow(long)"]);
        // An inlined one in another row of the small profile keeps its own name, which is short.
        assert_eq!(name(rows[1]), "grow");
        // More of them leave the names alone; one of another module has its name, too.
        let mut more = testing::with_overload(testing::small(), "grow", ["grow(char)", "grow(long)"]);
        more.modules[1].path = "/srv/lib/libother.so".into();
        leaves.of_rows(&more);
        assert_eq!(
            leaves.function_names.iter().filter(|name| name.starts_with("grow(")).collect::<Vec<_>>(),
            ["grow(int)", "grow(long) (libjson.so)", "grow(char)", "grow(long) (libother.so)"]
        );
    }

    #[test]
    fn a_stack_without_frames_has_a_name() {
        let mut leaves = Leaves::default();
        let mut profile = testing::small();
        profile.rows.truncate(1);
        profile.rows[0].key.stack = Arc::default();
        let leaf = leaves.of_rows(&profile)[0];
        assert_eq!(leaves.function_name(leaves.stack_of(leaf).path[0]), NO_STACK);
    }
}
