//! Reader of heapbpf's JSON, which contains all sums.

mod processes;
mod schema;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::strings::Strings;
use super::{ContentError, MOST_FRAMES, newer};
use crate::formats::FrameJson;
use crate::model::{Criterion, Frame, GO_RUNTIME, Header, Module, Profile, Row, RowKey, Stack, Unread};
use crate::units;
use heapbpf_audit::FileAudit;
use heapbpf_statistics::sums::SampleSums;

use self::processes::Processes;
use self::schema::{RowJson, Top};

/// Reads the profile.
pub(super) fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    let damaged =
        |reason: String| ContentError::Damaged { format: "heapbpf's JSON", reason: reason + &newer::hint(bytes) };
    let mut top: Top = serde_json::from_slice(bytes).map_err(|error| match foreign_json(bytes) {
        Some(what) => ContentError::Foreign(what.into()),
        None => damaged(error.to_string()),
    })?;
    top.notes.extend(newer::note(&top.version, bytes));
    let frames = top.stacks.iter().map(|row| row.frames.len()).sum::<usize>();
    if frames > MOST_FRAMES {
        return Err(ContentError::TooLarge(format!("{frames} frames, and at most {MOST_FRAMES} can be read")));
    }
    let wall_clock = |name: &str, text: &str| {
        let time = humantime::parse_rfc3339(text).map_err(|error| damaged(format!("{name}: {error}")))?;
        Ok::<_, ContentError>(time.max(UNIX_EPOCH))
    };
    let started = wall_clock("started", &top.started)?;
    let duration = Duration::try_from_secs_f64(top.duration_seconds).map_err(|error| damaged(error.to_string()))?;
    let growth_over = top.growth_seconds.map(Duration::try_from_secs_f64).transpose();
    let growth_over = growth_over.map_err(|error| damaged(error.to_string()))?;
    // Older versions did not write the time; it was the end of the recording.
    let time = match &top.time {
        Some(time) => wall_clock("time", time)?,
        None => started.checked_add(duration).unwrap_or(started),
    };
    let criterion = Criterion::from_name(&top.criterion)
        .ok_or_else(|| damaged(format!("{:?} is not a sampling criterion", top.criterion)))?;
    let mut reader = Reader::default();
    reader.modules(top.modules);
    let audit: Vec<Arc<FileAudit>> = top.audit.into_iter().map(Arc::new).collect();
    let processes = Processes::of(top.processes, &audit, top.live);
    // A mapping that was unmapped in part has no offset in use; all samples of another profiler have none.
    let offsets_known = top.stacks.iter().all(|row| row.offset_sum.is_some());
    let mut rows = Vec::with_capacity(top.stacks.len());
    for row in top.stacks {
        rows.push(reader.row(row, &processes, top.live).map_err(damaged)?);
    }
    Ok(Profile {
        header: Header {
            version: top.version,
            interval: top.interval_bytes,
            earlier_intervals: top.earlier_intervals_bytes,
            criterion,
            unwind: top.unwind,
            started,
            time,
            unread: top.unread.map(|Unread { records, of }| Unread { records: records.min(of), of }),
            duration,
            growth_over,
            live: top.live,
            samples_known: top.samples_known,
            offsets_known,
            ended_apart: top.ended_apart,
            recordings: top.recordings.max(1),
            time_windows: top.time_windows,
            host: top.host,
        },
        processes: processes.entries,
        idle: processes.idle,
        rows,
        modules: reader.modules,
        counters: top.counters,
        notes: top.notes,
    })
}

/// Identifies JSON from other programs.
fn foreign_json(bytes: &[u8]) -> Option<&'static str> {
    #[derive(Deserialize)]
    struct Keys {
        #[serde(default, rename = "$schema")]
        schema: String,
        interval_bytes: Option<serde::de::IgnoredAny>,
        stacks: Option<serde::de::IgnoredAny>,
    }
    let keys: Keys = serde_json::from_slice(bytes).ok()?;
    if keys.schema.contains("speedscope") {
        return Some("a profile for speedscope");
    }
    (keys.interval_bytes.is_none() && keys.stacks.is_none()).then_some("JSON, but not a profile of heapbpf")
}

#[derive(Default)]
struct Reader<'a> {
    strings: Strings,
    modules: Vec<Module>,
    module_ids: HashMap<(Arc<str>, Option<Vec<u8>>), usize>,
    frames: HashMap<&'a str, Arc<Frame>>,
    /// System names of frames. A frame has its system name only where it first occurs.
    system_names: HashMap<FrameJson, Arc<str>>,
}

impl<'a> Reader<'a> {
    fn modules(&mut self, modules: Vec<Module>) {
        for module in modules {
            let key = (Arc::clone(&module.path), module.build_id.clone());
            self.module_ids.entry(key).or_insert(self.modules.len());
            self.modules.push(module);
        }
    }

    fn row(&mut self, json: RowJson<'a>, processes: &Processes, live: bool) -> Result<Row, String> {
        let (alloc, inuse, at_exit) = (json.alloc(), json.inuse(), json.at_exit());
        let owner = processes.owner(json.program, json.process, json.pid);
        let (process, member) = owner.ok_or("a stack of a process that is not listed")?;
        let frames = json.frames.iter().map(|frame| self.frame(frame)).collect::<Result<_, _>>()?;
        let cut = match (json.complete, json.cut) {
            (true, _) => None,
            (false, cut) => Some(self.strings.share(cut.as_deref().unwrap_or("unknown reason"))),
        };
        let unwinder =
            ["dwarf", "fp", "caller", GO_RUNTIME].into_iter().find(|known| *known == json.unwinder).unwrap_or("");
        let known = live && !processes.entries[process].inuse_unknown;
        Ok(Row {
            key: RowKey {
                process,
                thread: self.strings.share(&json.thread),
                function: self.strings.share(&json.function),
                interval: json.interval,
                stack: Arc::new(Stack { frames, unwinder, cut }),
            },
            alloc,
            inuse: if known { inuse } else { SampleSums::default() },
            in_memory: json.in_memory.filter(|_| known),
            at_exit: if known { at_exit } else { SampleSums::default() },
            peak: json.peak,
            growth: json.growth.filter(|_| known),
            lifetimes: json.lifetimes,
            member,
        })
    }

    fn frame(&mut self, text: &&'a RawValue) -> Result<Arc<Frame>, String> {
        let text = text.get();
        if let Some(known) = self.frames.get(text) {
            return Ok(known.clone());
        }
        let mut json: FrameJson = serde_json::from_str(text).map_err(|error| format!("a frame: {error}"))?;
        let given = json.system_name.take();
        let system_name = match self.strings.share_some(given.as_deref()) {
            Some(name) => {
                self.system_names.insert(json.clone(), Arc::clone(&name));
                Some(name)
            }
            None => self.system_names.get(&json).map(Arc::clone),
        };
        let frame = Arc::new(Frame {
            // The display name of an unnamed function is derived again from its start.
            function: self.strings.share_some(json.function.as_deref().filter(|_| json.function_start.is_none())),
            function_start: json.function_start,
            system_name,
            file: self.strings.share_some(json.file.as_deref()),
            line: json.line,
            inlined: json.inlined,
            reason: self.strings.share_some(json.reason.as_deref()),
            module: json.module.as_deref().map(|path| self.module(path, json.build_id.as_deref())),
            address: json.address,
            file_offset: json.file_offset,
        });
        self.frames.insert(text, Arc::clone(&frame));
        Ok(frame)
    }

    fn module(&mut self, path: &str, build_id: Option<&str>) -> usize {
        let key = (self.strings.share(path), build_id.and_then(units::parse_hex));
        *self.module_ids.entry(key).or_insert_with_key(|(path, build_id)| {
            self.modules.push(Module { path: Arc::clone(path), build_id: build_id.clone(), ..Module::default() });
            self.modules.len() - 1
        })
    }
}
