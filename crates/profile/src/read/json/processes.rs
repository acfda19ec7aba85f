//! Processes, and the process that each stack belongs to.

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_audit::{FileAudit, Hook, Missing};

use super::schema::ProcessJson;
use crate::formats::TotalJson;
use crate::model::{GO_RUNTIME, Member, Placement, Process, Row, RowKey, Stack};
use crate::programs;
use crate::units;

/// The processes of a profile. Processes whose stacks are merged form one entry.
pub(super) struct Processes {
    pub(super) entries: Vec<Process>,
    /// Processes in which nothing was counted.
    pub(super) idle: Vec<Process>,
    /// For each process in the file, its entry, and its member index in the entry if there is one.
    places: Vec<Option<(usize, Option<usize>)>>,
    /// The entry of each program.
    programs: HashMap<usize, usize>,
}

impl Processes {
    pub(super) fn of(files: Vec<ProcessJson>, audit: &[Arc<FileAudit>], live: bool) -> Self {
        let mut processes =
            Self { entries: Vec::new(), idle: Vec::new(), places: Vec::new(), programs: HashMap::new() };
        for mut json in files {
            let (program, totals, is_idle) = (json.program, std::mem::take(&mut json.sums), json.idle);
            let process = process(json, audit, live);
            if is_idle {
                processes.places.push(None);
                processes.idle.push(Process { inuse_unknown: false, ..process });
                continue;
            }
            let Some(program) = program else {
                processes.places.push(Some((processes.entries.len(), None)));
                processes.entries.push(process);
                continue;
            };
            let entry = *processes.programs.entry(program).or_insert_with(|| {
                processes.entries.push(programs::entry_without_members(&process));
                processes.entries.len() - 1
            });
            let members = &mut processes.entries[entry];
            processes.places.push(Some((entry, Some(members.members.len()))));
            programs::add_member(members, Member { process, totals: totals.into_iter().map(total).collect() });
        }
        processes
    }

    /// The entry that a stack belongs to, and the member if the stack belongs to just one.
    pub(super) fn owner(
        &self,
        program: Option<usize>,
        process: Option<usize>,
        pid: Option<u32>,
    ) -> Option<(usize, Option<usize>)> {
        match (process, program) {
            (Some(index), _) => self.places.get(index).copied().flatten(),
            (None, Some(program)) => self.programs.get(&program).map(|&entry| (entry, None)),
            (None, None) => self.entries.iter().position(|process| Some(process.pid) == pid).map(|entry| (entry, None)),
        }
    }
}

fn total(json: TotalJson) -> Row {
    let TotalJson { interval, alloc, inuse, at_exit, peak, in_memory, source } = json;
    let unwinder = if source.as_deref() == Some(GO_RUNTIME) { GO_RUNTIME } else { "" };
    let stack = Arc::new(Stack { unwinder, ..Stack::default() });
    Row { alloc, inuse, at_exit, peak, in_memory, ..Row::new(RowKey::total(0, interval, stack)) }
}

fn process(json: ProcessJson, audit: &[Arc<FileAudit>], live: bool) -> Process {
    let audit: Vec<Arc<FileAudit>> = json.audit.iter().filter_map(|&number| audit.get(number).cloned()).collect();
    // Those are also listed with the process's files.
    let of_files = |missing: &Missing| audit.iter().any(|file| file.missing.contains(missing));
    let missing = json.missing.into_iter().filter(|missing| !of_files(missing)).collect();
    Process {
        pid: json.pid,
        namespace_pid: json.namespace_pid,
        comm: json.comm,
        exe: json.exe,
        cgroup: json.cgroup,
        placement: Placement { container: json.container, pod: json.pod, unit: json.unit },
        allocators: json.allocators,
        hook: json.hook.as_deref().and_then(Hook::from_name),
        not_inline: json.not_inline,
        own_links: json.own_links,
        audit,
        missing,
        coverage: json.coverage,
        cpu_coverage: json.cpu_coverage,
        ended: json.ended,
        inuse_unknown: live && !json.live,
        inuse_since: json.inuse_since.as_deref().and_then(units::parse_rfc3339),
        exact_alloc_bytes: json.alloc_bytes.exact,
        exact_alloc_objects: json.alloc_objects.exact,
        losses: json.losses,
        slack: json.slack,
        resident: json.resident,
        stands_for: json.stands_for,
        members: Vec::new(),
    }
}
