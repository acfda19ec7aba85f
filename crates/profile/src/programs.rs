//! Merges the rows of all processes of a program, and splits a profile up again as far as possible.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use indexmap::{IndexMap, IndexSet};

use super::intern::Interned;
use super::model::{
    Frame, GO_RUNTIME, Glibc, Lifetimes, Member, Process, Profile, PythonArenas, Resident, Row, RowKey, Stack,
};
use heapbpf_statistics::survival;

/// Name, executable, cgroup if requested, whether it ended, whether its memory in use is unknown, and since when it is
/// known. Figures of processes can be added if these are equal.
type Program<'a> = (&'a str, &'a str, &'a str, bool, bool, Option<SystemTime>);

/// Merges the rows of all processes of a program. Each process stays a member of its program, with its totals. With
/// `by_cgroup`, programs in different cgroups stay separate.
pub fn put_together(profile: &Profile, by_cgroup: bool) -> Profile {
    let mut members: IndexMap<Program, Vec<usize>> = IndexMap::new();
    let mut group_of = Vec::with_capacity(profile.processes.len());
    for (index, process) in profile.processes.iter().enumerate() {
        let cgroup = if by_cgroup { &*process.cgroup } else { "" };
        let Process { comm, exe, ended, inuse_unknown, inuse_since, .. } = process;
        let program = (&**comm, &**exe, cgroup, *ended, *inuse_unknown, *inuse_since);
        let group = members.entry(program);
        group_of.push(group.index());
        group.or_default().push(index);
    }
    let members: Vec<Vec<usize>> = members.into_values().collect();
    if members.len() == profile.processes.len() {
        return profile.clone();
    }
    let totals = totals(profile);
    let groups: Vec<(Process, Vec<usize>)> = members.iter().map(|members| group(profile, members, &totals)).collect();
    // Position of each process's first member in its group.
    let mut first_member = vec![0; profile.processes.len()];
    for (members, (_, starts)) in members.iter().zip(&groups) {
        members.iter().zip(starts).for_each(|(&process, &start)| first_member[process] = start);
    }
    let processes = groups.into_iter().map(|(process, _)| process).collect();
    let rows = rows(profile, &group_of, &first_member, &members);
    Profile { processes, idle: profile.idle.clone(), rows, ..profile.without_processes() }
}

/// Totals of each process: rows without a stack, one per sampling interval and kind.
fn totals(profile: &Profile) -> Vec<Vec<Row>> {
    let mut totals: Vec<Vec<Row>> = vec![Vec::new(); profile.processes.len()];
    let stack: Arc<Stack> = Arc::default();
    let go_runtime = Arc::new(Stack { unwinder: GO_RUNTIME, ..Stack::default() });
    for row in &profile.rows {
        let Some(totals) = totals.get_mut(row.key.process) else { continue };
        // Estimates for lost samples are not mixed with samples.
        let interval = row.key.interval;
        let kind =
            |row: &Row| (row.key.interval, row.is_of_lost_samples(), row.is_of_go_runtime(), row.is_of_mappings());
        let is_same = |total: &&mut Row| kind(total) == kind(row);
        if let Some(total) = totals.iter_mut().find(is_same) {
            add(total, row);
        } else {
            let stack = if row.is_of_go_runtime() { &go_runtime } else { &stack };
            let key = RowKey::total(0, interval, Arc::clone(stack));
            totals.push(Row {
                alloc: row.alloc,
                inuse: row.inuse,
                in_memory: row.in_memory.clone(),
                at_exit: row.at_exit,
                peak: row.peak,
                ..Row::new(key)
            });
        }
    }
    totals
}

fn add(sum: &mut Row, row: &Row) {
    sum.alloc.add(&row.alloc);
    sum.add_inuse(row);
    sum.at_exit.add(&row.at_exit);
    if let Some(peak) = &row.peak {
        sum.peak.get_or_insert_default().add(peak);
    }
    if let Some(growth) = &row.growth {
        sum.growth.get_or_insert_default().add(growth);
    }
}

/// The entry of a program, and the index of the first member of each of its processes.
fn group(profile: &Profile, processes: &[usize], totals: &[Vec<Row>]) -> (Process, Vec<usize>) {
    let first = &profile.processes[processes[0]];
    if processes.len() == 1 {
        return (first.clone(), vec![0]);
    }
    let mut all = entry_without_members(first);
    let mut starts = Vec::new();
    for &index in processes {
        let process = &profile.processes[index];
        starts.push(all.members.len());
        if process.members.is_empty() {
            add_member(&mut all, Member { process: process.clone(), totals: totals[index].clone() });
        } else {
            process.members.iter().for_each(|member| add_member(&mut all, member.clone()));
        }
    }
    (all, starts)
}

/// The entry of a program without members; `first` will be its first member.
pub(crate) fn entry_without_members(first: &Process) -> Process {
    Process {
        comm: first.comm.clone(),
        exe: first.exe.clone(),
        cgroup: first.cgroup.clone(),
        placement: first.placement.clone(),
        ended: first.ended,
        inuse_unknown: first.inuse_unknown,
        inuse_since: first.inuse_since,
        hook: first.hook,
        exact_alloc_bytes: Some(0),
        exact_alloc_objects: Some(0),
        resident: Some(Resident {
            at_attach_bytes: Some(0),
            growth_per_minute: Some(0),
            glibc: Some(Glibc::nothing()),
            python: Some(PythonArenas::default()),
            ..Resident::default()
        }),
        ..Process::default()
    }
}

/// Adds a process to the entry of its program.
pub(crate) fn add_member(all: &mut Process, member: Member) {
    let process = &member.process;
    let weights = [all.stands_for, process.count()].map(|count| count as f64);
    all.coverage = (all.coverage * weights[0] + process.coverage * weights[1]) / (weights[0] + weights[1]);
    all.stands_for = all.stands_for.saturating_add(process.count());
    all.losses.add(&process.losses);
    all.slack.add(&process.slack);
    let sum = |sum: Option<u64>, more: Option<u64>| sum?.checked_add(more?);
    all.exact_alloc_bytes = sum(all.exact_alloc_bytes, process.exact_alloc_bytes);
    all.exact_alloc_objects = sum(all.exact_alloc_objects, process.exact_alloc_objects);
    if let Some(resident) = &process.resident {
        all.resident.iter_mut().for_each(|all| all.add(resident));
    } else if !process.ended {
        all.resident = None;
    }
    add_new(&mut all.allocators, &process.allocators);
    add_new(&mut all.audit, &process.audit);
    add_new(&mut all.missing, &process.missing);
    if process.hook != all.hook {
        all.hook = None;
    }
    if process.cgroup != all.cgroup {
        all.cgroup.clear();
    }
    all.placement.keep_common(&process.placement);
    all.members.push(member);
}

fn add_new<T: Clone + PartialEq>(all: &mut Vec<T>, more: &[T]) {
    for one in more {
        if !all.contains(one) {
            all.push(one.clone());
        }
    }
}

/// A row's key with the number of its group and of its code.
type GroupKey = RowKey<usize, Arc<str>, u32>;

/// Frame numbers, the reason why the stack was cut, and the unwinder.
type CodeKey = (Vec<u32>, Option<Arc<str>>, &'static str);

/// Rows with equal key and code, merged.
struct Sum<'a> {
    row: Row,
    lifetimes: Vec<(&'a Lifetimes, f64)>,
    is_of_several: bool,
}

fn rows(profile: &Profile, group_of: &[usize], first_member: &[usize], members: &[Vec<usize>]) -> Vec<Row> {
    let interned = Interned::new(profile);
    let code = Code::new(profile, &interned);
    let mut sums: IndexMap<(GroupKey, bool), Sum> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let Some(&group) = group_of.get(row.key.process) else { continue };
        let is_single = members[group].len() == 1;
        let stack_id = code.id_of_stack[stack as usize];
        let member = row.member.map_or(first_member[row.key.process], |member| first_member[row.key.process] + member);
        let is_of_one = profile.processes[row.key.process].members.is_empty() || row.member.is_some();
        let sum = sums.entry((row.key.with(group, stack_id), row.is_of_lost_samples())).or_insert_with(|| {
            let stack =
                if is_single { Arc::clone(&row.key.stack) } else { Arc::clone(&code.stacks[stack_id as usize]) };
            let member = if is_single { row.member } else { Some(member).filter(|_| is_of_one) };
            let row = Row { member, ..Row::new(row.key.with(group, stack)) };
            Sum { row, lifetimes: Vec::new(), is_of_several: !is_single && !is_of_one }
        });
        sum.is_of_several |= !is_single && sum.row.member != Some(member);
        add(&mut sum.row, row);
        sum.lifetimes.extend(row.lifetimes.as_ref().map(|lifetimes| (lifetimes, row.alloc.objects)));
    }
    let finished = |Sum { row, lifetimes, is_of_several }: Sum| Row {
        lifetimes: survival::pooled(&lifetimes).filter(|_| !lifetimes.is_empty()),
        member: row.member.filter(|_| !is_of_several),
        ..row
    };
    sums.into_values().map(finished).collect()
}

/// Stacks by their code, regardless of where a process has mapped it.
struct Code {
    /// For each distinct stack of the profile, the number of its code.
    id_of_stack: Vec<u32>,
    /// One stack for each code, with the addresses of the first process that mapped its modules.
    stacks: Vec<Arc<Stack>>,
}

impl Code {
    fn new(profile: &Profile, interned: &Interned) -> Self {
        let mut frames: Vec<Arc<Frame>> = Vec::new();
        let mut known: HashMap<Place, Vec<u32>> = HashMap::new();
        let id_of_frame: Vec<u32> = interned
            .frames
            .iter()
            .map(|frame| {
                let frame = Frame { address: profile.address_in_first_process(frame), ..(*frame).clone() };
                let same = known.entry(place(&frame)).or_default();
                let is_same = |id: &&u32| is_same_code(&frames[**id as usize], &frame);
                if let Some(&id) = same.iter().find(is_same) {
                    return id;
                }
                let id = frames.len() as u32;
                same.push(id);
                frames.push(Arc::new(frame));
                id
            })
            .collect();
        let mut distinct: IndexSet<CodeKey> = IndexSet::new();
        let mut id_of_stack = Vec::with_capacity(interned.stacks.len());
        for (stack, interned_stack) in (0..).zip(&interned.stacks) {
            let ids: Vec<u32> = interned.frame_ids(stack).iter().map(|&id| id_of_frame[id as usize]).collect();
            let Stack { cut, unwinder, .. } = interned_stack.stack;
            id_of_stack.push(distinct.insert_full((ids, cut.clone(), unwinder)).0 as u32);
        }
        let stack = |(ids, cut, unwinder): CodeKey| {
            let frames = ids.into_iter().map(|id| Arc::clone(&frames[id as usize])).collect();
            Arc::new(Stack { frames, unwinder, cut })
        };
        Self { id_of_stack, stacks: distinct.into_iter().map(stack).collect() }
    }
}

/// The place of code: module, file offset, line, function.
type Place = (Option<usize>, Option<u64>, Option<u32>, Option<Arc<str>>);

fn place(frame: &Frame) -> Place {
    // Generated code with the same name counts as the same code, wherever it is.
    let offset = if frame.module.is_some() { frame.file_offset } else { None };
    (frame.module, offset, frame.line, frame.function.clone())
}

/// Whether two frames at the same place are equal except for their addresses. Without a name or a module, only the
/// address identifies the code.
fn is_same_code(one: &Frame, other: &Frame) -> bool {
    let is_named = one.function.is_some() || one.module.is_some() && one.file_offset.is_some();
    *one == Frame { address: if is_named { one.address } else { other.address }, ..other.clone() }
}

/// The profile with each process as a separate entry. The rows of merged processes are then their totals, without
/// stacks.
pub fn by_process(profile: &Profile) -> Cow<'_, Profile> {
    if profile.processes.iter().all(|process| process.members.is_empty()) {
        return Cow::Borrowed(profile);
    }
    let mut apart = Profile { idle: profile.idle.clone(), ..profile.without_processes() };
    let mut number_of = Vec::with_capacity(profile.processes.len());
    for process in &profile.processes {
        number_of.push(apart.processes.len());
        if process.members.is_empty() {
            apart.processes.push(process.clone());
            continue;
        }
        for Member { process, totals } in &process.members {
            let number = apart.processes.len();
            apart.rows.extend(totals.iter().map(|row| row.clone().with_process(number)));
            apart.processes.push(process.clone());
        }
    }
    let alone = |row: &&Row| profile.processes.get(row.key.process).is_some_and(|it| it.members.is_empty());
    let rows = profile.rows.iter().filter(alone).map(|row| row.clone().with_process(number_of[row.key.process]));
    apart.rows.extend(rows);
    Cow::Owned(apart)
}

#[cfg(test)]
#[path = "programs_tests.rs"]
mod tests;
