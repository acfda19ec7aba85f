//! Reader of pprof heap profiles from heapbpf, Go and tcmalloc.
//!
//! All of them contain unbiased estimates, because their writers scale before they write. Go stores the block size of
//! each sample, so the number of samples can be recovered, and there are intervals. For the others, only the estimates
//! are known.

use std::collections::{BTreeSet, HashMap};
use std::mem::take;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use prost::Message;
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};

use super::pprof_comments::{Comments, OUR_COMMENT, text};
use super::{ContentError, MOST_FRAMES, newer};
use crate::formats::AT_EXIT;
use crate::intern::NO_STACK;
use crate::model::{Frame, GO_RUNTIME, Header, Module, Placement, Process, Profile, Row, RowKey, SharedFrames, Stack};
use crate::naming::{base_name, function_start};
use crate::proto::pprof as proto;
use crate::units;
use crate::value::Value;
use heapbpf_statistics::sums::SampleSums;

fn damaged(reason: impl Into<String>) -> ContentError {
    ContentError::Damaged { format: "a pprof profile", reason: reason.into() }
}

/// Reads the profile.
pub(super) fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    let raw = Raw::read(bytes)?;
    let reader = Reader::new(&raw)?;
    reader.profile()
}

/// The message with its samples still encoded, because the samples make a profile large.
#[derive(Default)]
struct Raw<'a> {
    head: proto::Profile,
    samples: Vec<&'a [u8]>,
    /// Number of lines in all locations.
    lines: usize,
    /// Field numbers that did not exist when this was written.
    unknown: BTreeSet<u32>,
}

/// The highest field number of a profile: a link to its documentation.
const LAST_FIELD: u32 = 15;
/// Field numbers.
const SAMPLE: u32 = 2;
const LOCATION: u32 = 4;
const STRING_TABLE: u32 = 6;

/// Maximum number of unknown fields that are recorded.
const MOST_UNKNOWN: usize = 64;

/// Maximum size of a message in bytes; in memory it may take sixteen times as much.
const LARGEST_MESSAGE: usize = 16 << 20;

impl<'a> Raw<'a> {
    fn read(mut rest: &'a [u8]) -> Result<Self, ContentError> {
        let mut raw = Self::default();
        // Decodes one field at a time, because a few bytes can encode many empty messages.
        while !rest.is_empty() {
            let whole = rest;
            let (tag, wire_type) = decode_key(&mut rest).map_err(|_| not_pprof(&raw))?;
            if tag > LAST_FIELD && raw.unknown.len() < MOST_UNKNOWN {
                raw.unknown.insert(tag);
            }
            if wire_type != WireType::LengthDelimited {
                skip_field(wire_type, tag, &mut rest, DecodeContext::default()).map_err(|_| not_pprof(&raw))?;
                let field = &whole[..whole.len() - rest.len()];
                raw.head.merge(field).map_err(|error| damaged(error.to_string()))?;
                continue;
            }
            let length = decode_varint(&mut rest).map_err(|_| not_pprof(&raw))?;
            let length = usize::try_from(length).ok().filter(|&length| length <= rest.len());
            let length = length.ok_or_else(|| not_pprof(&raw))?;
            let (field, tail) = rest.split_at(length);
            rest = tail;
            if tag != STRING_TABLE && length > LARGEST_MESSAGE {
                return Err(ContentError::TooLarge(format!("a part of {length} bytes")));
            }
            if tag == SAMPLE {
                raw.samples.push(field);
            } else {
                let field = &whole[..whole.len() - rest.len()];
                raw.head.merge(field).map_err(|error| damaged(error.to_string()))?;
            }
            if tag == LOCATION {
                raw.lines += raw.head.location.last().map_or(0, |location| location.line.len());
            }
            raw.bounded()?;
        }
        if raw.head.sample_type.is_empty() && raw.head.string_table.is_empty() {
            return Err(ContentError::Foreign("no profile".into()));
        }
        Ok(raw)
    }

    /// Checks for tables far larger than those of real profiles, which small files can encode.
    fn bounded(&self) -> Result<(), ContentError> {
        let head = &self.head;
        let entries = head.location.len()
            + head.function.len()
            + head.mapping.len()
            + head.string_table.len()
            + head.sample_type.len()
            + head.comment.len()
            + self.lines
            + self.samples.len();
        if entries > MOST_FRAMES {
            return Err(ContentError::TooLarge(format!("more than {MOST_FRAMES} entries")));
        }
        Ok(())
    }
}

fn not_pprof(raw: &Raw) -> ContentError {
    if raw.head.string_table.is_empty() && raw.samples.is_empty() {
        ContentError::Foreign("no profile".into())
    } else {
        damaged("it is truncated")
    }
}

/// The program that wrote a pprof profile, as far as that matters for reading.
#[derive(Clone, Copy, PartialEq)]
enum Writer {
    Heapbpf,
    Go,
    Other,
}

struct Reader<'a> {
    raw: &'a Raw<'a>,
    /// The column of each of [`crate::value::Value::COLUMNS`].
    columns: [Option<usize>; 4],
    writer: Writer,
    /// Shared copies of the string table, made on demand and indexed by number, so that each long string is copied
    /// once.
    shared: Vec<Option<Arc<str>>>,
    shared_frames: SharedFrames,
    mapping_index: HashMap<u64, usize>,
    functions: HashMap<u64, &'a proto::Function>,
    locations: HashMap<u64, &'a proto::Location>,
}

impl<'a> Reader<'a> {
    fn new(raw: &'a Raw<'a>) -> Result<Self, ContentError> {
        let head = &raw.head;
        let text = |id: i64| text(head, id);
        let types: Vec<(&str, &str)> =
            head.sample_type.iter().map(|kind| (text(kind.r#type), text(kind.unit))).collect();
        let column = |names: &[&str]| types.iter().position(|(kind, _)| names.contains(kind));
        // tcmalloc's names for the values in use are `objects` and `space`.
        let columns = [
            column(&["alloc_objects"]),
            column(&["alloc_space"]),
            column(&["inuse_objects", "objects"]),
            column(&["inuse_space", "space"]),
        ];
        if columns.iter().all(Option::is_none) {
            let types: Vec<String> = types.iter().take(8).map(|(kind, unit)| format!("{kind}/{unit}")).collect();
            return Err(ContentError::Foreign(format!("a pprof profile, but not of a heap ({})", types.join(", "))));
        }
        let ours = head.comment.iter().any(|&comment| text(comment).starts_with(OUR_COMMENT));
        let writer = match columns {
            _ if ours => Writer::Heapbpf,
            [Some(0), Some(1), Some(2), Some(3)] if head.period > 0 => Writer::Go,
            _ => Writer::Other,
        };
        if head.period <= 0 && writer != Writer::Heapbpf {
            return Err(ContentError::NoInterval);
        }
        Ok(Self {
            raw,
            columns,
            writer,
            shared: vec![None; head.string_table.len()],
            shared_frames: SharedFrames::default(),
            mapping_index: head.mapping.iter().enumerate().map(|(index, mapping)| (mapping.id, index)).collect(),
            functions: head.function.iter().map(|function| (function.id, function)).collect(),
            locations: head.location.iter().map(|location| (location.id, location)).collect(),
        })
    }

    fn profile(mut self) -> Result<Profile, ContentError> {
        let head = &self.raw.head;
        let interval = u64::try_from(head.period).unwrap_or(0);
        let live = self.columns[2].is_some() || self.columns[3].is_some();
        let mut comments = Comments::new(head);
        let modules = head.mapping.iter().map(|mapping| self.module(mapping, &comments)).collect();
        let mut processes: Vec<Process> = Vec::new();
        let mut process_ids: HashMap<(u32, i64), usize> = HashMap::new();
        let mut stacks: HashMap<(Vec<u64>, i64, bool), Arc<Stack>> = HashMap::new();
        let mut rows = Vec::with_capacity(self.raw.samples.len());
        let mut frames = 0;
        let no_name: Arc<str> = "".into();
        let mut samples_known = self.writer == Writer::Go;
        let mut unknown_labels = BTreeSet::new();
        for sample in &self.raw.samples {
            let sample = proto::Sample::decode(*sample).map_err(|error| damaged(error.to_string()))?;
            if sample.value.len() != head.sample_type.len() {
                return Err(damaged(format!("{} values for {} types", sample.value.len(), head.sample_type.len())));
            }
            let labels = Labels::new(head, &sample, &mut unknown_labels);
            let next = processes.len();
            let process = *process_ids.entry((labels.pid, labels.comm)).or_insert(next);
            if process == next {
                processes.push(self.process(&labels));
            }
            let key = (sample.location_id, labels.cut, labels.is_of_go_runtime);
            let stack = match stacks.get(&key) {
                Some(stack) => Arc::clone(stack),
                None => {
                    let stack = self.stack(&key.0, labels.cut, &mut frames)?;
                    let unwinder = if labels.is_of_go_runtime { GO_RUNTIME } else { "" };
                    let stack = Arc::new(Stack { unwinder, ..stack });
                    stacks.insert(key, Arc::clone(&stack));
                    stack
                }
            };
            let figure = |value: usize| self.columns[value].map_or(0.0, |column| sample.value[column] as f64);
            let block = if samples_known { labels.block_bytes } else { None };
            let (alloc, alloc_known) = sums(figure(0), figure(1), block, interval);
            let (inuse, inuse_known) = sums(figure(2), figure(3), block, interval);
            let [objects, bytes] = labels.at_exit.map(|held| held as f64);
            samples_known &= alloc_known && inuse_known;
            // Ended processes that held nothing have no such label.
            processes[process].ended |= objects > 0.0;
            processes[process].inuse_unknown |= labels.inuse_unknown;
            rows.push(Row {
                alloc,
                inuse,
                at_exit: SampleSums { objects, bytes, ..SampleSums::default() },
                ..Row::new(RowKey {
                    process,
                    thread: self.share(labels.thread).unwrap_or_else(|| Arc::clone(&no_name)),
                    function: Arc::clone(&no_name),
                    interval,
                    stack,
                })
            });
        }
        if self.writer != Writer::Heapbpf {
            comments.notes.push(match self.writer {
                Writer::Go if samples_known => "sample counts were derived from Go's estimates".into(),
                _ => "a profile from another profiler: its estimates are used as they are".into(),
            });
        }
        self.note_unknown(&mut comments, &unknown_labels);
        processes.iter_mut().for_each(|process| comments.describe(process));
        // What remains are the losses of processes without a sample.
        let mut others: Vec<String> = comments.losses.drain().map(|(_, (_, _, line))| line).collect();
        others.sort_unstable();
        comments.notes.append(&mut others);
        let header = Header { live, samples_known, ..self.header(&mut comments) };
        Ok(Profile { processes, rows, modules, notes: comments.notes, ..Profile::new(header) })
    }

    /// Adds a note about the parts of our own profile that a newer version may have added.
    fn note_unknown(&self, comments: &mut Comments, labels: &BTreeSet<i64>) {
        if self.writer != Writer::Heapbpf {
            return;
        }
        let head = &self.raw.head;
        let mut parts: BTreeSet<String> =
            take(&mut comments.not_understood).into_iter().map(|comment| format!("the comment {comment}")).collect();
        let types = head.sample_type.iter().map(|kind| text(head, kind.r#type));
        let types = types.filter(|kind| Value::from_name(kind).is_none());
        parts.extend(types.map(|kind| format!("the sample type {}", newer::shown(kind))));
        parts.extend(labels.iter().map(|key| format!("the label {}", newer::shown(text(head, *key)))));
        parts.extend(self.raw.unknown.iter().map(|field| format!("the field {field}")));
        comments.notes.extend(newer::note_of(&comments.version, &parts));
    }

    fn header(&self, comments: &mut Comments) -> Header {
        let head = &self.raw.head;
        let nanoseconds = |count: i64| Duration::from_nanos(u64::try_from(count).unwrap_or(0));
        let (started, duration) = (UNIX_EPOCH + nanoseconds(head.time_nanos), nanoseconds(head.duration_nanos));
        let interval = u64::try_from(head.period).unwrap_or(0);
        Header {
            version: take(&mut comments.version),
            unwind: take(&mut comments.unwind),
            started,
            time: comments.time.unwrap_or(started + duration),
            unread: comments.unread,
            duration,
            offsets_known: false,
            ended_apart: comments.ended_apart,
            host: take(&mut comments.host),
            ..Header::new(interval, comments.criterion)
        }
    }

    fn module(&mut self, mapping: &proto::Mapping, comments: &Comments) -> Module {
        let head = &self.raw.head;
        Module {
            path: self.share(mapping.filename).unwrap_or_default(),
            build_id: units::parse_hex(text(head, mapping.build_id)).filter(|id| !id.is_empty()),
            start: mapping.memory_start,
            end: mapping.memory_limit,
            file_offset: mapping.file_offset,
            reason: comments.unnamed.get(text(head, mapping.filename)).cloned(),
        }
    }

    /// A string of the table; `None` if it is empty or does not exist.
    fn share(&mut self, id: i64) -> Option<Arc<str>> {
        let index = usize::try_from(id).ok()?;
        let text = self.raw.head.string_table.get(index).filter(|text| !text.is_empty())?;
        Some(Arc::clone(self.shared.get_mut(index)?.get_or_insert_with(|| text.as_str().into())))
    }

    fn process(&self, labels: &Labels) -> Process {
        let head = &self.raw.head;
        // By convention, the first mapping is the program.
        let exe = head.mapping.first().map_or("", |mapping| text(head, mapping.filename));
        let comm = Some(text(head, labels.comm)).filter(|comm| !comm.is_empty()).unwrap_or(base_name(exe));
        let exe = if self.writer == Writer::Heapbpf { "" } else { exe };
        let [container, pod, unit] = labels.placement.map(|value| text(head, value).to_owned());
        let placement = Placement { container, pod, unit };
        Process { pid: labels.pid, comm: comm.into(), exe: exe.into(), placement, coverage: 1.0, ..Process::default() }
    }

    fn stack(&mut self, locations: &[u64], cut: i64, total: &mut usize) -> Result<Stack, ContentError> {
        let mut frames = Vec::with_capacity(locations.len());
        for id in locations {
            let location = *self.locations.get(id).ok_or_else(|| damaged(format!("no location {id}")))?;
            self.frames(location, &mut frames);
            if *total + frames.len() > MOST_FRAMES {
                return Err(ContentError::TooLarge(format!("more than {MOST_FRAMES} frames")));
            }
        }
        *total += frames.len();
        if let [only] = &frames[..]
            && only.module.is_none()
            && only.function.as_deref() == Some(NO_STACK)
        {
            frames.clear();
        }
        Ok(Stack { frames, unwinder: "", cut: self.share(cut) })
    }

    fn frames(&mut self, location: &proto::Location, frames: &mut Vec<Arc<Frame>>) {
        let head = &self.raw.head;
        let module = self.mapping_index.get(&location.mapping_id).copied();
        let mapping = module.map(|index| &head.mapping[index]);
        let file_offset = mapping.and_then(|mapping| {
            let past_start = location.address.checked_sub(mapping.memory_start)?;
            (location.address < mapping.memory_limit).then(|| past_start.checked_add(mapping.file_offset))?
        });
        let place = Frame { module, address: location.address, file_offset, ..Frame::default() };
        if location.line.is_empty() {
            frames.push(self.shared_frames.share(Frame { reason: Some("not symbolized".into()), ..place }));
            return;
        }
        for (index, line) in location.line.iter().enumerate() {
            let function = self.functions.get(&line.function_id);
            let Some(&&proto::Function { name, system_name, filename, .. }) = function else {
                let frame = Frame { inlined: index + 1 < location.line.len(), ..place.clone() };
                frames.push(self.shared_frames.share(frame));
                continue;
            };
            let path = mapping.map_or("", |mapping| text(head, mapping.filename));
            let function_start = function_start(text(head, name), path).filter(|_| line.line == 0);
            let frame = Frame {
                function: if function_start.is_some() { None } else { self.share(name) },
                function_start,
                system_name: if system_name == name { None } else { self.share(system_name) },
                file: self.share(filename),
                line: u32::try_from(line.line).ok().filter(|&line| line > 0),
                inlined: index + 1 < location.line.len(),
                ..place.clone()
            };
            frames.push(self.shared_frames.share(frame));
        }
    }
}

#[derive(Default)]
struct Labels {
    pid: u32,
    /// Indices into the string table.
    comm: i64,
    thread: i64,
    /// Container, pod and unit.
    placement: [i64; 3],
    cut: i64,
    /// Whether the process's Go runtime took the sample.
    is_of_go_runtime: bool,
    /// Whether the process's memory in use is unknown.
    inuse_unknown: bool,
    /// Objects and bytes that the process held at exit.
    at_exit: [u64; 2],
    /// Size of each block of the sample in bytes, if the writer states it.
    block_bytes: Option<u64>,
}

impl Labels {
    /// Reads the labels of a sample. Unknown keys are added to `unknown`.
    fn new(head: &proto::Profile, sample: &proto::Sample, unknown: &mut BTreeSet<i64>) -> Self {
        let mut labels = Self::default();
        for label in &sample.label {
            match text(head, label.key) {
                "pid" => labels.pid = u32::try_from(label.num).unwrap_or(0),
                "bytes" => labels.block_bytes = u64::try_from(label.num).ok(),
                "comm" => labels.comm = label.str,
                "thread" => labels.thread = label.str,
                "container" => labels.placement[0] = label.str,
                "pod" => labels.placement[1] = label.str,
                "unit" => labels.placement[2] = label.str,
                "source" => labels.is_of_go_runtime = text(head, label.str) == GO_RUNTIME,
                "incomplete" => labels.cut = label.str,
                "inuse" => labels.inuse_unknown = text(head, label.str) == "unknown",
                key => {
                    if let Some(place) = AT_EXIT.iter().position(|name| *name == key) {
                        labels.at_exit[place] = u64::try_from(label.num).unwrap_or(0);
                    } else if unknown.len() < MOST_UNKNOWN {
                        unknown.insert(label.key);
                    }
                }
            }
        }
        labels
    }
}

/// Sums of a sample from its estimates, and whether the number of samples is known. It follows from the block size,
/// because the estimated number of n-byte blocks is the number of samples times 1/(1 − e^(−n/R)).
fn sums(objects: f64, bytes: f64, block_bytes: Option<u64>, interval: u64) -> (SampleSums, bool) {
    let estimates = SampleSums { bytes, objects, ..SampleSums::default() };
    if objects <= 0.0 {
        return (estimates, objects == 0.0 && bytes == 0.0);
    }
    let Some(size) = block_bytes.filter(|&size| size > 0) else { return (estimates, false) };
    let size_bytes = size as f64;
    let probability = if interval <= 1 { 1.0 } else { -(-size_bytes / interval as f64).exp_m1() };
    let samples = (objects * probability).round().max(1.0);
    let (weight, rest) = (1.0 / probability, 1.0 / probability - 1.0);
    let sums = SampleSums {
        samples: samples as u64,
        sampled_bytes: (samples as u64).saturating_mul(size),
        bytes_variance: samples * size_bytes * size_bytes * weight * rest,
        objects_variance: samples * weight * rest,
        smallest_bytes: size,
        largest_bytes: size,
        ..estimates
    };
    (sums, true)
}
