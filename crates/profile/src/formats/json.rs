//! JSON: the whole profile, with confidence intervals. [`read`](crate::read) reads it back without loss, but for which process
//! of a program a stack is of, unless stacks are grouped by process.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;

use serde::ser::{SerializeSeq as _, SerializeStruct as _};
use serde::{Serialize, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use super::{Format, FormatError, WriteOptions};
use crate::escape::JsonText;
use crate::estimates::{NOT_FOLLOWED, Pool, SOME_NOT_FOLLOWED, exact, guaranteed_of_row, intervals_used, of_row};
use crate::group::GroupBy;
use crate::intern::Interned;
use crate::model::{Frame, Lifetimes, Process, Profile, Row, Unread};
use crate::naming::function_name;
use crate::programs;
use crate::units;
use crate::value::Value;
use heapbpf_audit::FileAudit;
use heapbpf_audit::Hook;
use heapbpf_audit::Missing;
use heapbpf_statistics::estimate::Estimate;
use heapbpf_statistics::interval::Interval;
use heapbpf_statistics::sums::SampleSums;

pub(super) struct Json;

impl Format for Json {
    fn name(&self) -> &'static str {
        "json"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &[".json"]
    }

    fn write(&self, profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
        let group_by = options.group_of(profile);
        if group_by.separates_processes() {
            return write(profile, options, out);
        }
        write(&programs::put_together(profile, group_by == GroupBy::Cgroup), options, out)
    }

    fn how_to_open(&self, file: &str) -> String {
        format!("heapbpf report {file}")
    }
}

/// The same, compressed.
#[cfg(feature = "pprof")]
pub(super) struct JsonGz;

#[cfg(feature = "pprof")]
impl Format for JsonGz {
    fn name(&self) -> &'static str {
        "json.gz"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &[".json.gz"]
    }

    fn write(&self, profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
        super::gzipped(out, |gzip| Json.write(profile, options, gzip))
    }

    fn how_to_open(&self, file: &str) -> String {
        Json.how_to_open(file)
    }
}

fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let interned = Interned::new(profile);
    let frames = interned.frames.iter().map(|frame| EncodedFrame::of(profile, frame)).collect::<Result<Vec<_>, _>>()?;
    let writer = Writer { profile, confidence: options.confidence, interned: &interned, frames: &frames };
    serde_json::to_writer(JsonText(&mut *out), &writer)?;
    out.write_all(b"\n")?;
    Ok(())
}

struct Writer<'a> {
    profile: &'a Profile,
    confidence: f64,
    interned: &'a Interned<'a>,
    /// Distinct frames, encoded once, as most frames are in many stacks.
    frames: &'a [EncodedFrame],
}

impl Serialize for Writer<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let profile = self.profile;
        let mut top = serializer.serialize_struct("Profile", 23)?;
        top.serialize_field("version", &profile.header.version)?;
        top.serialize_field("interval_bytes", &profile.header.interval)?;
        top.serialize_field("criterion", profile.header.criterion.name())?;
        top.serialize_field("unwind", &profile.header.unwind)?;
        top.serialize_field("started", &units::rfc3339(profile.header.started))?;
        top.serialize_field("time", &units::rfc3339(profile.header.time))?;
        if let Some(unread) = profile.header.unread {
            top.serialize_field("unread", &UnreadJson::of(unread))?;
        }
        top.serialize_field("duration_seconds", &profile.header.duration.as_secs_f64())?;
        top.serialize_field("recordings", &profile.header.recordings)?;
        top.serialize_field("host", &profile.header.host)?;
        top.serialize_field("live", &profile.header.live)?;
        top.serialize_field("ended_apart", &profile.header.ended_apart)?;
        top.serialize_field("samples_known", &profile.header.samples_known)?;
        top.serialize_field("estimator", profile.header.estimator.name())?;
        top.serialize_field("time_windows", &profile.header.time_windows)?;
        top.serialize_field("confidence", &self.confidence)?;
        top.serialize_field("totals", &Figures::of_pool(self, &Pool::whole(profile), None))?;
        let apart = programs::by_process(profile);
        let audit = Audits::of(&apart);
        top.serialize_field(
            "processes",
            &Writer { profile: &apart, ..*self }.processes(&audit, &Programs::of(profile)),
        )?;
        top.serialize_field("audit", &audit.files)?;
        top.serialize_field("modules", &self.modules())?;
        top.serialize_field("stacks", &Stacks(self))?;
        top.serialize_field("counters", &profile.counters)?;
        top.serialize_field("notes", &profile.notes)?;
        top.end()
    }
}

impl<'a> Writer<'a> {
    /// One entry for each process by itself.
    fn processes(&self, audits: &Audits<'a>, programs: &Programs) -> Vec<ProcessJson<'a>> {
        let mut pools: Vec<Pool> = (0..self.profile.processes.len()).map(Pool::of_process).collect();
        for row in &self.profile.rows {
            if let Some(pool) = pools.get_mut(row.key.process) {
                pool.add(row);
            }
        }
        let intervals = intervals_used(self.profile);
        for (index, pool) in pools.iter_mut().enumerate() {
            // Nothing is hooked in a program that is Go's alone.
            if self.profile.processes[index].hook != Some(Hook::GoRuntime) {
                pool.allow_for_others(&intervals);
            }
            pool.cover([index]);
        }
        let processes = self.profile.processes.iter().zip(pools).enumerate();
        processes
            .map(|(index, (process, pool))| ProcessJson {
                process,
                program: programs.of_process[index],
                totals: programs.of_process[index].map(|_| TotalJson::all(self.profile, index)).unwrap_or_default(),
                audit: process.audit.iter().filter_map(|file| audits.numbers.get(&**file).copied()).collect(),
                live: self.profile.knows_inuse(index),
                figures: Figures::of_pool(self, &pool, Some(index)),
            })
            .collect()
    }

    fn modules(&self) -> Vec<ModuleJson<'a>> {
        let module = |module: &'a crate::model::Module| ModuleJson {
            path: &module.path,
            build_id: module.build_id.as_deref().map(units::hex),
            start: module.start,
            end: module.end,
            file_offset: module.file_offset,
            reason: module.reason.as_deref(),
        };
        self.profile.modules.iter().map(module).collect()
    }
}

/// Records that were not read in time.
#[derive(Serialize)]
struct UnreadJson {
    records: u64,
    of: u64,
    share: f64,
}

impl UnreadJson {
    fn of(unread: Unread) -> Self {
        Self { records: unread.records, of: unread.of, share: unread.share() }
    }
}

#[derive(Serialize)]
struct ModuleJson<'a> {
    path: &'a str,
    build_id: Option<String>,
    start: u64,
    end: u64,
    file_offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// The audit of each file, once for all processes that map it.
#[derive(Default)]
struct Audits<'a> {
    files: Vec<&'a FileAudit>,
    numbers: HashMap<&'a FileAudit, usize>,
}

impl<'a> Audits<'a> {
    fn of(profile: &'a Profile) -> Self {
        let mut audits = Self::default();
        for file in profile.processes.iter().flat_map(|process| &process.audit) {
            audits.numbers.entry(&**file).or_insert_with(|| {
                audits.files.push(&**file);
                audits.files.len() - 1
            });
        }
        audits
    }
}

/// Programs whose processes' rows were put together, numbered.
struct Programs {
    /// For each process by itself the program that it is a member of.
    of_process: Vec<Option<usize>>,
    /// For each entry of the profile its number as a program, and that of its first process.
    of_entry: Vec<(Option<usize>, usize)>,
}

impl Programs {
    fn of(profile: &Profile) -> Self {
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

/// Totals of a process whose rows were put together with those of others, for readers.
#[derive(Serialize)]
struct TotalJson {
    interval: u64,
    alloc: SampleSums,
    inuse: SampleSums,
    at_exit: SampleSums,
    #[serde(skip_serializing_if = "Option::is_none")]
    peak: Option<SampleSums>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'static str>,
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
            source: row.key.stack.source(),
        };
        rows.map(total).collect()
    }
}

struct ProcessJson<'a> {
    process: &'a Process,
    /// The program that its stacks are put together under.
    program: Option<usize>,
    totals: Vec<TotalJson>,
    /// Indices of its files in `audit`.
    audit: Vec<usize>,
    /// Whether its frees were followed.
    live: bool,
    figures: Figures,
}

impl Serialize for ProcessJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let process = self.process;
        let mut fields = serializer.serialize_struct("Process", 27)?;
        fields.serialize_field("pid", &process.pid)?;
        fields.serialize_field("namespace_pid", &process.namespace_pid)?;
        if let Some(program) = self.program {
            fields.serialize_field("program", &program)?;
            fields.serialize_field("sums", &self.totals)?;
        }
        if process.stands_for > 1 {
            fields.serialize_field("stands_for", &process.stands_for)?;
        }
        fields.serialize_field("comm", &process.comm)?;
        fields.serialize_field("exe", &process.exe)?;
        fields.serialize_field("cgroup", &process.cgroup)?;
        for (name, value) in process.placement.known() {
            fields.serialize_field(name, value)?;
        }
        fields.serialize_field("allocators", &process.allocators)?;
        if let Some(hook) = process.hook {
            fields.serialize_field("hook", hook.name())?;
        }
        if let Some(why) = &process.not_inline {
            fields.serialize_field("not_inline", why)?;
        }
        fields.serialize_field("audit", &self.audit)?;
        let missing: Vec<&Missing> =
            process.audit.iter().flat_map(|file| &file.missing).chain(&process.missing).collect();
        fields.serialize_field("missing", &missing)?;
        fields.serialize_field("coverage", &process.coverage)?;
        fields.serialize_field("ended", &process.ended)?;
        fields.serialize_field("live", &self.live)?;
        if let Some(since) = process.inuse_since.filter(|_| self.live) {
            fields.serialize_field("inuse_since", &units::rfc3339(since))?;
        }
        if !process.losses.is_none() {
            fields.serialize_field("losses", &process.losses)?;
        }
        if !process.slack.is_none() {
            fields.serialize_field("slack", &process.slack)?;
        }
        if let Some(resident) = process.resident.filter(|resident| resident.total_bytes() > 0) {
            fields.serialize_field("resident", &resident)?;
        }
        self.figures.fields::<S>(&mut fields)?;
        fields.end()
    }
}

/// An estimate, with the variance that sums over profiles need.
#[derive(Serialize)]
struct Figure {
    estimate: Option<f64>,
    low: Option<f64>,
    high: Option<f64>,
    exact: Option<u64>,
    variance: Option<f64>,
    /// What calibration, another estimator or time windows added to the unbiased estimate. The interval belongs to the
    /// latter.
    #[serde(skip_serializing_if = "Option::is_none")]
    correction: Option<f64>,
    /// For bytes, the interval whose coverage is guaranteed for every mix of sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    guaranteed: Option<Interval>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl Figure {
    fn new(
        profile: &Profile,
        estimate: Estimate,
        variance: f64,
        correction: f64,
        guaranteed: Result<Interval, &'static str>,
    ) -> Self {
        Self {
            estimate: Some(estimate.estimate),
            low: estimate.low,
            high: estimate.high,
            exact: estimate.exact,
            variance: profile.header.samples_known.then_some(variance),
            correction: Some(correction).filter(|correction| *correction != 0.0),
            guaranteed: guaranteed.ok(),
            reason: estimate.reason,
        }
    }

    const NOT_LIVE: Self = Self {
        estimate: None,
        low: None,
        high: None,
        exact: None,
        variance: None,
        correction: None,
        guaranteed: None,
        reason: Some(NOT_FOLLOWED),
    };
}

/// The figures of a stack, of a process or of the profile.
#[derive(Serialize)]
struct Figures {
    alloc_bytes: Figure,
    alloc_objects: Figure,
    inuse_bytes: Figure,
    inuse_objects: Figure,
    at_exit_bytes: Figure,
    at_exit_objects: Figure,
}

impl Figures {
    fn new(known: impl Fn(Value) -> bool, figure: impl Fn(Value) -> Figure) -> Self {
        let figure = |value: Value| if known(value) { figure(value) } else { Figure::NOT_LIVE };
        Self {
            alloc_bytes: figure(Value::AllocSpace),
            alloc_objects: figure(Value::AllocObjects),
            inuse_bytes: figure(Value::InuseSpace),
            inuse_objects: figure(Value::InuseObjects),
            at_exit_bytes: figure(Value::AtExitSpace),
            at_exit_objects: figure(Value::AtExitObjects),
        }
    }

    fn of_pool(writer: &Writer, pool: &Pool, process: Option<usize>) -> Self {
        let profile = writer.profile;
        let known = |value: Value| {
            pool.knows(profile, value) && process.is_none_or(|it| !value.needs_frees() || profile.knows_inuse(it))
        };
        let lacks = |value: Value| process.is_none() && value.needs_frees() && profile.without_inuse() > 0;
        Self::new(known, |value| {
            let mut estimate = pool.estimate(profile, value, writer.confidence);
            estimate.exact = exact(profile, process, value).or(estimate.exact);
            estimate.reason = if lacks(value) { Some(SOME_NOT_FOLLOWED) } else { estimate.reason };
            let correction = pool.total(value) - pool.raw_total(value);
            let guaranteed = pool.guaranteed(profile, value, writer.confidence);
            Figure::new(profile, estimate, pool.variance(value), correction, guaranteed)
        })
    }

    fn of_row(writer: &Writer, row: &Row) -> Self {
        let profile = writer.profile;
        Self::new(
            |value| !value.needs_frees() || profile.knows_inuse(row.key.process),
            |value| {
                let sums = value.sums(row);
                let variance = if value.is_bytes() { sums.bytes_variance } else { sums.objects_variance };
                let correction = if value.is_bytes() { sums.bytes_correction } else { sums.objects_correction };
                let estimate = of_row(profile, row, value, writer.confidence);
                let guaranteed = guaranteed_of_row(profile, row, value, writer.confidence);
                Figure::new(profile, estimate, variance, correction, guaranteed)
            },
        )
    }

    fn fields<S: Serializer>(&self, fields: &mut S::SerializeStruct) -> Result<(), S::Error> {
        fields.serialize_field("alloc_bytes", &self.alloc_bytes)?;
        fields.serialize_field("alloc_objects", &self.alloc_objects)?;
        fields.serialize_field("inuse_bytes", &self.inuse_bytes)?;
        fields.serialize_field("inuse_objects", &self.inuse_objects)?;
        fields.serialize_field("at_exit_bytes", &self.at_exit_bytes)?;
        fields.serialize_field("at_exit_objects", &self.at_exit_objects)
    }
}

struct Stacks<'a>(&'a Writer<'a>);

impl Serialize for Stacks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = &self.0.profile.rows;
        let programs = Programs::of(self.0.profile);
        let mut sequence = serializer.serialize_seq(Some(rows.len()))?;
        for (row, &stack) in rows.iter().zip(&self.0.interned.stack_of_row) {
            sequence.serialize_element(&RowJson { writer: self.0, row, stack, programs: &programs })?;
        }
        sequence.end()
    }
}

struct RowJson<'a> {
    writer: &'a Writer<'a>,
    row: &'a Row,
    stack: u32,
    programs: &'a Programs,
}

impl RowJson<'_> {
    /// The program that the row is of, and its process, if it is of one alone: index and pid.
    fn owner(&self) -> (Option<usize>, Option<(usize, u32)>) {
        let Some(process) = self.writer.profile.processes.get(self.row.key.process) else { return (None, None) };
        let (program, first) = self.programs.of_entry[self.row.key.process];
        let only = match (process.members.is_empty(), self.row.member) {
            (true, _) => Some((first, process.pid)),
            (false, Some(member)) => process.members.get(member).map(|it| (first + member, it.process.pid)),
            (false, None) => None,
        };
        (program, only)
    }
}

impl Serialize for RowJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (row, profile) = (self.row, self.writer.profile);
        let mut fields = serializer.serialize_struct("Row", 38)?;
        let (program, only) = self.owner();
        // The index tells apart processes that had the same pid one after the other.
        fields.serialize_field("process", &only.map(|(index, _)| index))?;
        fields.serialize_field("pid", &only.map(|(_, pid)| pid))?;
        if let Some(program) = program {
            fields.serialize_field("program", &program)?;
        }
        fields.serialize_field("thread", &*row.key.thread)?;
        fields.serialize_field("function", &*row.key.function)?;
        if let Some(source) = row.key.stack.source() {
            fields.serialize_field("source", source)?;
        }
        fields.serialize_field("interval", &row.key.interval)?;
        fields.serialize_field("samples", &row.alloc.samples)?;
        fields.serialize_field("zero_byte_samples", &row.alloc.zero_byte_samples)?;
        fields.serialize_field("sampled_bytes", &row.alloc.sampled_bytes)?;
        let offsets = |sums: &SampleSums| profile.header.offsets_known.then_some(sums.offset_sum);
        fields.serialize_field("offset_sum", &offsets(&row.alloc))?;
        fields.serialize_field("smallest_bytes", &row.alloc.smallest_bytes)?;
        fields.serialize_field("largest_bytes", &row.alloc.largest_bytes)?;
        if profile.knows_inuse(row.key.process) {
            fields.serialize_field("inuse_samples", &row.inuse.samples)?;
            fields.serialize_field("inuse_zero_byte_samples", &row.inuse.zero_byte_samples)?;
            fields.serialize_field("inuse_sampled_bytes", &row.inuse.sampled_bytes)?;
            fields.serialize_field("inuse_offset_sum", &offsets(&row.inuse))?;
            fields.serialize_field("inuse_smallest_bytes", &row.inuse.smallest_bytes)?;
            fields.serialize_field("inuse_largest_bytes", &row.inuse.largest_bytes)?;
        }
        // Most stacks hold nothing at exit.
        if profile.knows_inuse(row.key.process) && row.at_exit.samples > 0 {
            fields.serialize_field("at_exit_samples", &row.at_exit.samples)?;
            fields.serialize_field("at_exit_zero_byte_samples", &row.at_exit.zero_byte_samples)?;
            fields.serialize_field("at_exit_sampled_bytes", &row.at_exit.sampled_bytes)?;
            fields.serialize_field("at_exit_offset_sum", &offsets(&row.at_exit))?;
            fields.serialize_field("at_exit_smallest_bytes", &row.at_exit.smallest_bytes)?;
            fields.serialize_field("at_exit_largest_bytes", &row.at_exit.largest_bytes)?;
        }
        fields.serialize_field("complete", &row.key.stack.cut.is_none())?;
        fields.serialize_field("cut", &row.key.stack.cut.as_deref())?;
        fields.serialize_field("unwinder", row.key.stack.unwinder)?;
        fields.serialize_field("frames", &Frames { writer: self.writer, stack: self.stack })?;
        Figures::of_row(self.writer, row).fields::<S>(&mut fields)?;
        if let Some(peak) = &row.peak {
            fields.serialize_field("peak", peak)?;
        }
        if let Some(lifetimes) = &row.lifetimes {
            fields.serialize_field("lifetimes", &LifetimesJson(lifetimes))?;
        }
        fields.end()
    }
}

struct LifetimesJson<'a>(&'a Lifetimes);

impl Serialize for LifetimesJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Lifetimes", 4)?;
        fields.serialize_field("median_seconds", &self.0.median_seconds)?;
        fields.serialize_field("temporary", &self.0.temporary)?;
        fields.serialize_field("survival", &self.0.survival)?;
        if !self.0.ages.is_empty() {
            let ages: Vec<_> = self.0.ages.iter().map(|age| (age.exponent, age.freed, age.left)).collect();
            fields.serialize_field("ages", &ages)?;
        }
        fields.end()
    }
}

struct Frames<'a> {
    writer: &'a Writer<'a>,
    stack: u32,
}

impl Serialize for Frames<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ids = self.writer.interned.frame_ids(self.stack);
        serializer.collect_seq(ids.iter().map(|&id| self.writer.frames[id as usize].next()))
    }
}

/// An encoded frame.
struct EncodedFrame {
    full: Box<RawValue>,
    /// Without its system name, which may be as long as all the rest: a reader has it from the first one.
    again: Option<Box<RawValue>>,
    written: Cell<bool>,
}

impl EncodedFrame {
    fn of(profile: &Profile, frame: &Frame) -> serde_json::Result<Self> {
        let again = Frame { system_name: None, ..frame.clone() };
        Ok(Self {
            full: frame_json(profile, frame)?,
            again: frame.system_name.is_some().then(|| frame_json(profile, &again)).transpose()?,
            written: Cell::new(false),
        })
    }

    /// What is written in its next place.
    fn next(&self) -> &RawValue {
        let again = self.again.as_deref().filter(|_| self.written.replace(true));
        again.unwrap_or(&self.full)
    }
}

fn frame_json(profile: &Profile, frame: &Frame) -> serde_json::Result<Box<RawValue>> {
    #[derive(Serialize)]
    struct FrameJson<'a> {
        function: Option<&'a str>,
        file: Option<&'a str>,
        line: Option<u32>,
        module: Option<&'a str>,
        build_id: Option<String>,
        address: u64,
        inlined: bool,
        reason: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        file_offset: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        system_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        function_start: Option<u64>,
    }
    let module = frame.module.and_then(|index| profile.modules.get(index));
    let function = function_name(profile, frame);
    to_raw_value(&FrameJson {
        function: function.as_deref(),
        file: frame.file.as_deref(),
        line: frame.line,
        module: module.map(|module| &*module.path),
        build_id: module.and_then(|module| module.build_id.as_deref()).map(units::hex),
        address: frame.address,
        inlined: frame.inlined,
        reason: frame.reason.as_deref(),
        file_offset: frame.file_offset,
        system_name: frame.system_name.as_deref(),
        function_start: frame.function_start,
    })
}

#[cfg(test)]
#[path = "json_tests.rs"]
mod tests;
