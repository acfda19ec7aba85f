//! Processes and what is known about each.

use std::borrow::Cow;

use heapbpf_audit::{FileAudit, Hook, Missing};
use heapbpf_statistics::sums::SampleSums;
use indexmap::IndexSet;
use serde::ser::SerializeStruct as _;
use serde::{Deserialize, Serialize, Serializer};

use super::figures::Figures;
use super::known;
use crate::model::{Before, InMemory, Process, Profile, Row};
use crate::process_pools::pools_of_processes;
use crate::units;

/// One entry for each single process.
pub(super) fn processes<'a>(
    profile: &'a Profile,
    confidence: f64,
    audits: &IndexSet<&FileAudit>,
    programs: &Programs,
) -> Vec<ProcessJson<'a>> {
    let audit = |process: &Process| process.audit.iter().filter_map(|it| audits.get_index_of(&**it)).collect();
    let idle = profile.idle.iter().map(|process| ProcessJson {
        process,
        is_idle: true,
        program: None,
        totals: Vec::new(),
        audit: audit(process),
        live: false,
        inuse_before: None,
        figures: Figures::of_idle(),
    });
    let processes = profile.processes.iter().zip(pools_of_processes(profile)).enumerate();
    processes
        .map(|(index, (process, pool))| ProcessJson {
            process,
            is_idle: false,
            program: programs.of_process[index],
            totals: programs.of_process[index].map(|_| TotalJson::all(profile, index)).unwrap_or_default(),
            audit: audit(process),
            live: profile.knows_inuse(index),
            inuse_before: process
                .resident
                .and_then(|resident| resident.glibc)
                .filter(|_| profile.knows_inuse(index) && process.is_followed_in_glibc())
                .and_then(|glibc| Some(glibc.before(&pool.recorded(profile, confidence)?))),
            figures: Figures::of_pool(profile, confidence, &pool, Some(index)),
        })
        // Stacks refer to processes by their index in the list, so idle ones come last.
        .chain(idle)
        .collect()
}

/// Programs whose processes' rows were merged, with their numbers.
pub(super) struct Programs {
    /// For each single process, the program that it belongs to.
    of_process: Vec<Option<usize>>,
    /// For each entry of the profile, its number as a program and the index of its first process.
    pub(super) of_entry: Vec<(Option<usize>, usize)>,
}

impl Programs {
    pub(super) fn of(profile: &Profile) -> Self {
        let mut programs = Self { of_process: Vec::new(), of_entry: Vec::new() };
        let mut number = 0;
        for process in &profile.processes {
            let first = programs.of_process.len();
            if process.members.is_empty() {
                programs.of_process.push(None);
                programs.of_entry.push((None, first));
            } else {
                programs.of_process.extend(process.members.iter().map(|_| Some(number)));
                programs.of_entry.push((Some(number), first));
                number += 1;
            }
        }
        programs
    }
}

/// Totals of a process whose rows were merged with those of others, for readers.
#[derive(Serialize, Deserialize)]
pub(crate) struct TotalJson {
    pub(crate) interval: u64,
    pub(crate) alloc: SampleSums,
    #[serde(default)]
    pub(crate) inuse: SampleSums,
    #[serde(default)]
    pub(crate) at_exit: SampleSums,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peak: Option<SampleSums>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) in_memory: Option<Box<InMemory>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) source: Option<Cow<'static, str>>,
}

impl TotalJson {
    fn all(profile: &Profile, process: usize) -> Vec<Self> {
        let rows = profile.rows.iter().filter(|row| row.key.process == process);
        let total = |row: &Row| Self {
            interval: row.key.interval,
            alloc: row.alloc,
            inuse: row.inuse,
            at_exit: row.at_exit,
            peak: row.peak,
            in_memory: row.in_memory.clone(),
            source: row.key.stack.source().map(Cow::Borrowed),
        };
        rows.map(total).collect()
    }
}

pub(super) struct ProcessJson<'a> {
    process: &'a Process,
    /// Whether nothing was counted in the process.
    is_idle: bool,
    /// The program under which its stacks are merged.
    program: Option<usize>,
    totals: Vec<TotalJson>,
    /// Indices of its files in `audit`.
    audit: Vec<usize>,
    /// Whether its frees were followed.
    live: bool,
    /// What it had in use before the recording, if glibc's arenas tell.
    inuse_before: Option<Before>,
    figures: Figures,
}

impl Serialize for ProcessJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let process = self.process;
        let mut fields = serializer.serialize_struct("Process", 32)?;
        fields.serialize_field("pid", &process.pid)?;
        fields.serialize_field("namespace_pid", &process.namespace_pid)?;
        known(&mut fields, "program", self.program)?;
        known(&mut fields, "sums", self.program.map(|_| &self.totals))?;
        known(&mut fields, "stands_for", Some(process.stands_for).filter(|number| *number > 1))?;
        fields.serialize_field("comm", &process.comm)?;
        fields.serialize_field("exe", &process.exe)?;
        fields.serialize_field("cgroup", &process.cgroup)?;
        for (name, value) in process.placement.known() {
            fields.serialize_field(name, value)?;
        }
        fields.serialize_field("allocators", &process.allocators)?;
        known(&mut fields, "hook", process.hook.map(Hook::name))?;
        known(&mut fields, "not_inline", process.not_inline.as_ref())?;
        known(&mut fields, "own_links", process.own_links)?;
        fields.serialize_field("audit", &self.audit)?;
        let missing: Vec<&Missing> =
            process.audit.iter().flat_map(|file| &file.missing).chain(&process.missing).collect();
        fields.serialize_field("missing", &missing)?;
        fields.serialize_field("coverage", &process.coverage)?;
        known(&mut fields, "cpu_coverage", process.cpu_coverage)?;
        known(&mut fields, "memory_coverage", process.memory_coverage())?;
        known(&mut fields, "idle", self.is_idle.then_some(true))?;
        fields.serialize_field("ended", &process.ended)?;
        fields.serialize_field("live", &self.live)?;
        known(&mut fields, "inuse_since", process.inuse_since.filter(|_| self.live).map(units::rfc3339))?;
        known(&mut fields, "losses", Some(&process.losses).filter(|losses| !losses.is_none()))?;
        known(&mut fields, "slack", Some(&process.slack).filter(|slack| !slack.is_none()))?;
        let resident = process.resident.filter(|resident| resident.total_bytes() > 0);
        known(&mut fields, "resident", resident)?;
        known(&mut fields, "inuse_before", self.inuse_before.filter(|_| resident.is_some()))?;
        self.figures.fields::<S>(&mut fields)?;
        fields.end()
    }
}
