//! pprof, for `go tool pprof`, Pyroscope, Parca and speedscope.

use std::collections::HashMap;
use std::io;
use std::time::UNIX_EPOCH;

use indexmap::IndexSet;
use prost::Message as _;

use super::{FormatError, WriteOptions};
use crate::escape::escaped;
use crate::estimates::{INUSE_SINCE, INUSE_UNKNOWN, exact};
use crate::group::process_name;
use crate::intern::{Interned, Strings};
use crate::loss_comment;
use crate::model::{Criterion, Frame, LossBound, Losses, Module, Process, Profile, Row, Unread};
use crate::naming;
use crate::proto::pprof as proto;
use crate::round::largest_remainder;
use crate::units;
use crate::unnamed;
use crate::value::Value;
use heapbpf_audit::FileAudit;
use heapbpf_audit::Hook;
use heapbpf_audit::Missing;

/// Maximum number of hooked files whose probes are listed.
const MOST_FILES: usize = 4;
/// Maximum number of modules without names that are listed.
const MOST_UNNAMED: usize = 8;
/// Maximum number of processes with comments of their own, because pprof prints all comments above its tables.
const MOST_PROCESSES: usize = 3;

pub(super) fn write(profile: &Profile, _: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    super::gzipped(out, |gzip| Ok(gzip.write_all(&encode(profile).encode_to_vec())?))
}

/// Encodes a profile as a pprof message, with one sample per process, thread name and stack.
pub fn encode(profile: &Profile) -> proto::Profile {
    encode_with_processes(profile).message
}

/// A pprof message with the process index of each of its samples.
pub(super) struct Encoded {
    pub(super) message: proto::Profile,
    pub(super) process_of_sample: Vec<usize>,
    /// Sample types of what ended processes held at exit, each with one value per sample; empty if they held nothing.
    pub(super) at_exit: Vec<(proto::ValueType, Vec<i64>)>,
    /// The values of the sample types, followed by those at exit.
    pub(super) values: Vec<Value>,
}

pub(super) fn encode_with_processes(profile: &Profile) -> Encoded {
    let interned = Interned::for_viewers(profile);
    let mut strings = Strings::default();
    let mut locations = Locations::new(profile, &mut strings);
    let (held, columns_of): (Vec<Value>, Vec<Value>) = Value::shown_of(profile).iter().partition(|it| it.is_at_exit());
    let values = [columns_of.as_slice(), &held].concat();

    let mut samples: Vec<proto::Sample> = Vec::new();
    let mut process_of_sample = Vec::new();
    let mut columns: Vec<Vec<f64>> = vec![Vec::new(); values.len()];
    let mut sample_of: HashMap<(usize, &str, u32), usize> = HashMap::new();
    let mut stacks: Vec<Option<Vec<u64>>> = vec![None; interned.stacks.len()];
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let index = *sample_of.entry((row.key.process, &row.key.thread, stack)).or_insert_with(|| {
            let location_id = stacks[stack as usize]
                .get_or_insert_with(|| locations.of_stack(&interned, stack, &mut strings))
                .clone();
            samples.push(proto::Sample { location_id, value: Vec::new(), label: labels(profile, row, &mut strings) });
            process_of_sample.push(row.key.process);
            columns.iter_mut().for_each(|column| column.push(0.0));
            samples.len() - 1
        });
        columns.iter_mut().zip(&values).for_each(|(column, value)| column[index] += value.of(row));
    }
    let mut value_type = |kind: &str, unit: &str| proto::ValueType { r#type: strings.id(kind), unit: strings.id(unit) };
    let (columns, at_exit_columns) = columns.split_at(columns_of.len());
    for column in columns {
        samples.iter_mut().zip(largest_remainder(column)).for_each(|(sample, value)| sample.value.push(value));
    }
    // pprof's tools expect four values, so these are labels.
    let mut at_exit = Vec::new();
    for ((value, label), column) in held.iter().zip(AT_EXIT).zip(at_exit_columns) {
        let (column, kind) = (largest_remainder(column), value_type(label, value.unit()));
        for (sample, &num) in samples.iter_mut().zip(&column).filter(|(_, num)| **num != 0) {
            sample.label.push(proto::Label { key: kind.r#type, num, num_unit: kind.unit, str: 0 });
        }
        at_exit.push((value_type(value.name(), value.unit()), column));
    }
    let sample_type = columns_of.iter().map(|value| value_type(value.name(), value.unit())).collect();
    let period_type = match profile.header.criterion {
        Criterion::Bytes => value_type("space", "bytes"),
        Criterion::Allocations | Criterion::SizeClass => value_type("objects", "count"),
    };
    locations.keep_used_mappings();
    let function =
        |(id, (name, system_name, filename))| proto::Function { id, name, system_name, filename, start_line: 0 };
    let since_epoch = profile.header.started.duration_since(UNIX_EPOCH).unwrap_or_default();
    let message = proto::Profile {
        sample_type,
        sample: samples,
        drop_frames: strings.id(&naming::drop_frames()),
        time_nanos: clamp(since_epoch.as_nanos()),
        duration_nanos: clamp(profile.header.duration.as_nanos()),
        period_type: Some(period_type),
        period: clamp(profile.header.interval.into()),
        comment: comments(profile).iter().map(|comment| strings.id(comment)).collect(),
        default_sample_type: strings.id(Value::default_of(profile).name()),
        mapping: locations.mappings,
        location: locations.locations,
        function: (1..).zip(locations.functions).map(function).collect(),
        // `go tool pprof` prints names as they are.
        string_table: strings.0.iter().map(|text| escaped(text).into_owned()).collect(),
        keep_frames: 0,
    };
    Encoded { message, process_of_sample, at_exit, values }
}

/// Labels of what ended processes held at exit, in the order of [`Value::ALL`].
pub(crate) const AT_EXIT: [&str; 2] = ["at_exit_objects", "at_exit_bytes"];

fn clamp(value: u128) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn labels(profile: &Profile, row: &Row, strings: &mut Strings) -> Vec<proto::Label> {
    let mut labels = Vec::with_capacity(8);
    let mut text = |key: &str, value: &str| {
        if !value.is_empty() {
            labels.push(proto::Label { key: strings.id(key), str: strings.id(value), ..Default::default() });
        }
    };
    let process = profile.processes.get(row.key.process);
    text("comm", process.map_or("", |process| &process.comm));
    text("thread", &row.key.thread);
    text("source", row.key.stack.source().unwrap_or(if row.is_mapped() { "mmap" } else { "" }));
    text("inuse", if profile.header.live && !profile.knows_inuse(row.key.process) { "unknown" } else { "" });
    text("incomplete", row.key.stack.cut.as_deref().unwrap_or(""));
    process.iter().flat_map(|process| process.placement.known()).for_each(|(key, value)| text(key, value));
    if let Some(process) = process {
        let num = process.pid.into();
        labels.push(proto::Label { key: strings.id("pid"), num, num_unit: strings.id("count"), str: 0 });
    }
    labels
}

/// The comment that marks a profile in which memory held by ended processes is separate from memory in use.
pub(crate) const ENDED_APART: &str = "ended=apart";

/// Remarks for the reader, one per comment; `key=value` comments are read back.
fn comments(profile: &Profile) -> Vec<String> {
    let mut comments = vec![
        format!("heapbpf {} on {}: values are unbiased estimates", profile.header.version, profile.header.host),
        format!("interval={}", profile.header.interval),
        format!("criterion={}", profile.header.criterion.name()),
        format!("unwind={}", profile.header.unwind),
        format!("time={}", units::rfc3339(profile.header.time)),
    ];
    if profile.header.ended_apart {
        comments.push(ENDED_APART.to_owned());
    }
    if let Some(Unread { records, of }) = profile.header.unread {
        comments.push(format!("unread={records}/{of}"));
    }
    let has_few = profile.number_of_processes() <= MOST_PROCESSES as u64;
    if !has_few {
        comments.push(total(profile));
    }
    for process in profile.processes.iter().filter(|_| has_few) {
        let mut comment = format!("process {}: coverage {}", process_name(process), units::percent(process.coverage));
        if let Some(hook) = process.hook {
            comment.push_str(&format!("{HOOK}{hook}"));
        }
        if let (Some(bytes), Some(objects)) = (process.exact_alloc_bytes, process.exact_alloc_objects) {
            comment.push_str(&format!(", counted exactly: {bytes} bytes in {objects} allocations"));
        }
        if profile.header.live && process.inuse_unknown {
            comment.push_str(&format!(", {INUSE_UNKNOWN}"));
        } else if let Some(since) = process.inuse_since {
            comment.push_str(&format!(", {INUSE_SINCE}{}", units::rfc3339(since)));
        }
        if !process.allocators.is_empty() {
            comment.push_str(&format!(", allocators {}", process.allocators.join(", ")));
        }
        let missing = process.audit.iter().flat_map(|file| &file.missing).chain(&process.missing);
        for Missing { what, why } in missing {
            comment.push_str(&format!("; not hooked: {what} ({why})"));
        }
        if let Some(why) = &process.not_inline {
            comment.push_str(&format!("{NOT_INLINE}{why}"));
        }
        comments.push(comment);
    }
    comments.extend(losses(profile, has_few));
    let mut files: Vec<&FileAudit> = Vec::new();
    for file in profile.processes.iter().filter(|_| has_few).flat_map(|process| &process.audit) {
        if files.len() < MOST_FILES && !files.contains(&&**file) {
            files.push(file);
        }
    }
    comments.extend(files.into_iter().filter_map(FileAudit::summary));
    comments.extend(unnamed(profile));
    comments.extend(profile.notes.iter().cloned());
    comments
}

/// Separator before the hooking method in a process's comment; it follows the coverage.
pub(crate) const HOOK: &str = ", hook ";
/// Separator before the reason for not hooking inline, which ends the comment.
pub(crate) const NOT_INLINE: &str = "; not hooked inline: ";

/// Prefix of comments on modules without function names; path and reason follow.
pub(crate) const NO_NAMES: &str = "no names in ";

/// One comment for each module without function names.
fn unnamed(profile: &Profile) -> impl Iterator<Item = String> {
    let modules = unnamed::modules(profile).into_iter().take(MOST_UNNAMED);
    modules.filter_map(|(module, _)| Some(format!("{NO_NAMES}{}: {}", module.path, module.reason.as_deref()?)))
}

/// Prefix of the comment about all processes together.
pub(crate) const ALL_PROCESSES: &str = "all processes: ";

/// The comment about all processes together.
fn total(profile: &Profile) -> String {
    let mut comment = format!("{ALL_PROCESSES}{}", profile.number_of_processes());
    if let (Some(bytes), Some(objects)) =
        (exact(profile, None, Value::AllocSpace), exact(profile, None, Value::AllocObjects))
    {
        comment.push_str(&format!(", counted exactly: {bytes} bytes in {objects} allocations"));
    }
    let inline = profile.processes.iter().filter(|process| process.hook == Some(Hook::Inline)).map(Process::count);
    match inline.sum::<u64>() {
        0 => {}
        inline => comment.push_str(&format!("; {inline} hooked inline")),
    }
    let late = profile.processes.iter().filter(|process| process.coverage < 0.9995).map(Process::count).sum::<u64>();
    if late > 0 {
        comment.push_str(&format!("; {late} hooked for a part of their time only"));
    }
    match profile.without_inuse() {
        0 => {}
        processes => comment.push_str(&format!("; {processes} with {INUSE_UNKNOWN}")),
    }
    if let Some((processes, last)) = profile.inuse_since() {
        comment.push_str(&format!(
            "; {processes} with figures in use of blocks since {} at the latest",
            units::rfc3339(last)
        ));
    }
    comment
}

/// Losses: one comment per process if there are few, otherwise one for all.
fn losses(profile: &Profile, has_few: bool) -> Vec<String> {
    let line = |process: &Process| loss_comment::written(&process_name(process), &process.losses, &process.slack);
    let mut lossy = profile.processes.iter().filter(|process| !process.losses.is_none() || !process.slack.is_none());
    let mut lines: Vec<String> =
        lossy.by_ref().take(if has_few { MOST_PROCESSES } else { 0 }).filter_map(line).collect();
    let (mut losses, mut slack) = (Losses::default(), LossBound::default());
    lossy.for_each(|process| {
        losses.add(&process.losses);
        slack.add(&process.slack);
    });
    lines.extend(loss_comment::written("of other processes", &losses, &slack));
    lines
}

/// Mappings, functions and locations, in the order of their first use.
struct Locations<'a> {
    profile: &'a Profile,
    mappings: Vec<proto::Mapping>,
    /// Name, name in the symbol table, and file of each function.
    functions: IndexSet<(i64, i64, i64)>,
    locations: Vec<proto::Location>,
    /// Locations by their frames (ids of distinct frames, inlined ones first).
    by_frames: HashMap<Vec<u32>, u64>,
    /// Locations by content, because another process may have mapped the same file elsewhere.
    by_content: HashMap<Content, u64>,
}

/// Mapping, address, and the functions at the address with their lines.
type Content = (u64, u64, Vec<(u64, i64)>);

impl<'a> Locations<'a> {
    fn new(profile: &'a Profile, strings: &mut Strings) -> Self {
        let mappings = profile.modules.iter().zip(1..).map(|(module, id)| mapping(module, id, strings)).collect();
        Self {
            profile,
            mappings,
            functions: IndexSet::new(),
            locations: Vec::new(),
            by_frames: HashMap::new(),
            by_content: HashMap::new(),
        }
    }

    /// Locations of a stack, innermost first: one per physical frame, with the functions inlined into it.
    fn of_stack(&mut self, interned: &Interned, stack: u32, strings: &mut Strings) -> Vec<u64> {
        let ids = interned.frame_ids(stack);
        let is_inlined = |&id: &u32| interned.frames[id as usize].inlined;
        let mut locations = Vec::with_capacity(ids.len());
        let mut rest = ids;
        while !rest.is_empty() {
            let inlined = rest.iter().take_while(|id| is_inlined(id)).count();
            let (frames, tail) = rest.split_at((inlined + 1).min(rest.len()));
            rest = tail;
            let location = match self.by_frames.get(frames) {
                Some(&location) => location,
                None => {
                    let location = self.location(interned, frames, strings);
                    self.by_frames.insert(frames.to_vec(), location);
                    location
                }
            };
            locations.push(location);
        }
        locations
    }

    fn location(&mut self, interned: &Interned, ids: &[u32], strings: &mut Strings) -> u64 {
        let frames = ids.iter().map(|&id| interned.frames[id as usize]);
        let real = interned.frames[ids[ids.len() - 1] as usize];
        let mapping = real.module.filter(|&module| module < self.mappings.len());
        let address = self.profile.address_in_first_process(real);
        let lines: Vec<proto::Line> = frames.filter_map(|frame| self.line(frame, strings)).collect();
        if let Some(mapping) = mapping {
            let mapping = &mut self.mappings[mapping];
            // If only names are missing, a viewer may look them up itself.
            mapping.has_functions |= ids.iter().any(|&id| interned.frames[id as usize].function.is_some());
            mapping.has_filenames |= ids.iter().any(|&id| interned.frames[id as usize].file.is_some());
            mapping.has_line_numbers |= lines.iter().any(|line| line.line != 0);
            mapping.has_inline_frames |= lines.len() > 1;
        }
        let mapping_id = mapping.map_or(0, |mapping| mapping as u64 + 1);
        let content = (mapping_id, address, lines.iter().map(|line| (line.function_id, line.line)).collect());
        let id = self.locations.len() as u64 + 1;
        let known = *self.by_content.entry(content).or_insert(id);
        if known == id {
            self.locations.push(proto::Location { id, mapping_id, address, line: lines, is_folded: false });
        }
        known
    }

    /// Drops mappings without locations and moves the program's mapping to the front, because pprof names a profile
    /// after the first one.
    fn keep_used_mappings(&mut self) {
        let mut used = vec![false; self.mappings.len() + 1];
        self.locations.iter().for_each(|location| used[location.mapping_id as usize] = true);
        let exe = self.profile.processes.first().map_or("", |process| &process.exe);
        let is_program = |mapping: &proto::Mapping| &*self.profile.modules[mapping.id as usize - 1].path == exe;
        let mut mappings = std::mem::take(&mut self.mappings);
        mappings.retain(|mapping| used[mapping.id as usize]);
        mappings.sort_by_key(|mapping| !is_program(mapping));
        let mut new_ids = vec![0; used.len()];
        for (mapping, id) in mappings.iter_mut().zip(1..) {
            new_ids[mapping.id as usize] = id;
            mapping.id = id;
        }
        self.locations.iter_mut().for_each(|location| location.mapping_id = new_ids[location.mapping_id as usize]);
        self.mappings = mappings;
    }

    fn line(&mut self, frame: &Frame, strings: &mut Strings) -> Option<proto::Line> {
        let name = naming::function_name(self.profile, frame)?;
        let function = (
            // pprof shortens names, but not return types.
            strings.id(naming::without_return_type(&name)),
            strings.id(frame.system_name.as_deref().unwrap_or(&name)),
            strings.id(frame.file.as_deref().unwrap_or("")),
        );
        let function_id = self.functions.insert_full(function).0 as u64 + 1;
        Some(proto::Line { function_id, line: frame.line.unwrap_or(0).into() })
    }
}

fn mapping(module: &Module, id: u64, strings: &mut Strings) -> proto::Mapping {
    proto::Mapping {
        id,
        memory_start: module.start,
        memory_limit: module.end,
        file_offset: module.file_offset,
        filename: strings.id(&module.path),
        build_id: strings.id(&module.build_id.as_deref().map(units::hex).unwrap_or_default()),
        ..Default::default()
    }
}

#[cfg(test)]
#[path = "pprof_tests.rs"]
mod tests;
