//! Reader of heapbpf's JSON, which holds all sums.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::strings::Strings;
use super::{ContentError, MOST_FRAMES, newer};
use crate::model::{
    Criterion, Frame, GO_RUNTIME, Header, Lifetimes, LossBound, Losses, Member, Module, Octave, Placement, Process,
    Profile, Resident, Row, RowKey, Stack, Unread,
};
use crate::programs;
use crate::units;
use heapbpf_audit::FileAudit;
use heapbpf_audit::Hook;
use heapbpf_audit::Missing;
use heapbpf_statistics::estimators::Estimator;
use heapbpf_statistics::sums::SampleSums;

/// The parts of the schema that a profile is made from. Fields that other versions leave out are optional.
#[derive(Deserialize)]
struct Top<'a> {
    #[serde(default)]
    version: String,
    interval_bytes: u64,
    criterion: String,
    #[serde(default)]
    unwind: String,
    started: String,
    #[serde(default)]
    time: Option<String>,
    #[serde(default)]
    unread: Option<Unread>,
    duration_seconds: f64,
    #[serde(default)]
    host: String,
    #[serde(default = "yes")]
    live: bool,
    #[serde(default)]
    ended_apart: bool,
    #[serde(default = "yes")]
    samples_known: bool,
    #[serde(default)]
    recordings: u32,
    #[serde(default)]
    estimator: Estimator,
    #[serde(default)]
    time_windows: bool,
    processes: Vec<ProcessJson>,
    #[serde(default)]
    audit: Vec<FileAudit>,
    #[serde(default)]
    modules: Vec<ModuleJson>,
    #[serde(borrow)]
    stacks: Vec<RowJson<'a>>,
    #[serde(default)]
    counters: BTreeMap<String, u64>,
    #[serde(default)]
    notes: Vec<String>,
}

fn yes() -> bool {
    true
}

fn unknown_size() -> u64 {
    u64::MAX
}

#[derive(Deserialize)]
struct ProcessJson {
    pid: u32,
    /// Number of the program that its stacks are put together under.
    #[serde(default)]
    program: Option<usize>,
    #[serde(default)]
    sums: Vec<TotalJson>,
    #[serde(default)]
    stands_for: u64,
    #[serde(default)]
    namespace_pid: Option<u32>,
    comm: String,
    #[serde(default)]
    exe: String,
    #[serde(default)]
    cgroup: String,
    #[serde(default)]
    container: String,
    #[serde(default)]
    pod: String,
    #[serde(default)]
    unit: String,
    #[serde(default)]
    allocators: Vec<String>,
    /// A word that this version does not know is no reason to refuse the file.
    #[serde(default)]
    hook: Option<String>,
    #[serde(default)]
    not_inline: Option<String>,
    /// Indices of its files in the audit of the profile.
    #[serde(default)]
    audit: Vec<usize>,
    #[serde(default)]
    missing: Vec<Missing>,
    #[serde(default)]
    coverage: f64,
    #[serde(default)]
    ended: bool,
    #[serde(default = "yes")]
    live: bool,
    #[serde(default)]
    inuse_since: Option<String>,
    #[serde(default)]
    losses: Losses,
    #[serde(default)]
    slack: LossBound,
    #[serde(default)]
    resident: Option<Resident>,
    #[serde(default)]
    alloc_bytes: Figure,
    #[serde(default)]
    alloc_objects: Figure,
}

/// Totals of a process whose rows were put together with those of others.
#[derive(Deserialize)]
struct TotalJson {
    interval: u64,
    alloc: SampleSums,
    #[serde(default)]
    inuse: SampleSums,
    #[serde(default)]
    at_exit: SampleSums,
    #[serde(default)]
    peak: Option<SampleSums>,
    #[serde(default)]
    source: Option<String>,
}

#[derive(Deserialize)]
struct ModuleJson {
    path: String,
    build_id: Option<String>,
    start: u64,
    end: u64,
    file_offset: u64,
    #[serde(default)]
    reason: Option<String>,
}

#[derive(Deserialize, Default)]
struct Figure {
    estimate: Option<f64>,
    #[serde(default)]
    exact: Option<u64>,
    #[serde(default)]
    variance: Option<f64>,
    #[serde(default)]
    correction: f64,
}

#[derive(Deserialize)]
struct RowJson<'a> {
    #[serde(default)]
    process: Option<usize>,
    #[serde(default)]
    pid: Option<u32>,
    #[serde(default)]
    program: Option<usize>,
    thread: String,
    function: String,
    interval: u64,
    samples: u64,
    #[serde(default)]
    zero_byte_samples: u64,
    sampled_bytes: u64,
    #[serde(default)]
    offset_sum: Option<u64>,
    /// Missing sizes are assumed to differ, so that no interval is claimed for a count.
    #[serde(default)]
    smallest_bytes: u64,
    #[serde(default = "unknown_size")]
    largest_bytes: u64,
    #[serde(default)]
    inuse_samples: u64,
    #[serde(default)]
    inuse_zero_byte_samples: u64,
    #[serde(default)]
    inuse_sampled_bytes: u64,
    #[serde(default)]
    inuse_offset_sum: Option<u64>,
    #[serde(default)]
    inuse_smallest_bytes: u64,
    #[serde(default = "unknown_size")]
    inuse_largest_bytes: u64,
    #[serde(default)]
    at_exit_samples: u64,
    #[serde(default)]
    at_exit_zero_byte_samples: u64,
    #[serde(default)]
    at_exit_sampled_bytes: u64,
    #[serde(default)]
    at_exit_offset_sum: Option<u64>,
    #[serde(default)]
    at_exit_smallest_bytes: u64,
    #[serde(default)]
    at_exit_largest_bytes: Option<u64>,
    complete: bool,
    #[serde(default)]
    cut: Option<String>,
    #[serde(default)]
    unwinder: String,
    /// Frames are kept as text at first, so that equal ones are parsed once.
    #[serde(borrow)]
    frames: Vec<&'a RawValue>,
    alloc_bytes: Figure,
    alloc_objects: Figure,
    #[serde(default)]
    inuse_bytes: Figure,
    #[serde(default)]
    inuse_objects: Figure,
    #[serde(default)]
    at_exit_bytes: Figure,
    #[serde(default)]
    at_exit_objects: Figure,
    #[serde(default)]
    peak: Option<SampleSums>,
    #[serde(default)]
    lifetimes: Option<LifetimesJson>,
}

#[derive(Deserialize)]
struct LifetimesJson {
    median_seconds: Option<f64>,
    temporary: f64,
    survival: Vec<(f64, f64)>,
    #[serde(default)]
    ages: Vec<(u32, u64, u64)>,
}

#[derive(Clone, PartialEq, Eq, Hash, Deserialize)]
struct FrameJson {
    function: Option<String>,
    #[serde(default)]
    system_name: Option<String>,
    #[serde(default)]
    file: Option<String>,
    #[serde(default)]
    line: Option<u32>,
    #[serde(default)]
    module: Option<String>,
    #[serde(default)]
    build_id: Option<String>,
    #[serde(default)]
    address: u64,
    #[serde(default)]
    inlined: bool,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    file_offset: Option<u64>,
    #[serde(default)]
    function_start: Option<u64>,
}

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
    // Older versions did not write it; it was the end of the recording.
    let time = match &top.time {
        Some(time) => wall_clock("time", time)?,
        None => started.checked_add(duration).unwrap_or(started),
    };
    let criterion = Criterion::from_name(&top.criterion)
        .ok_or_else(|| damaged(format!("{:?} is no sampling criterion", top.criterion)))?;
    let mut reader = Reader::default();
    reader.modules(top.modules);
    let audit: Vec<Arc<FileAudit>> = top.audit.into_iter().map(Arc::new).collect();
    let processes = Processes::of(top.processes, &audit, top.live);
    let has_offsets = |row: &RowJson| {
        row.offset_sum.is_some()
            && (row.inuse_offset_sum.is_some() || !top.live || row.inuse_samples == 0)
            && (row.at_exit_offset_sum.is_some() || row.at_exit_samples == 0)
    };
    let offsets_known = top.stacks.iter().all(has_offsets);
    let mut rows = Vec::with_capacity(top.stacks.len());
    for row in top.stacks {
        rows.push(reader.row(row, &processes, top.live).map_err(damaged)?);
    }
    Ok(Profile {
        header: Header {
            version: top.version,
            interval: top.interval_bytes,
            criterion,
            unwind: top.unwind,
            started,
            time,
            unread: top.unread.map(|Unread { records, of }| Unread { records: records.min(of), of }),
            duration,
            live: top.live,
            samples_known: top.samples_known,
            offsets_known,
            ended_apart: top.ended_apart,
            recordings: top.recordings.max(1),
            estimator: top.estimator,
            time_windows: top.time_windows,
            host: top.host,
        },
        processes: processes.entries,
        rows,
        modules: reader.modules,
        counters: top.counters,
        notes: top.notes,
    })
}

/// What JSON of another program is.
fn foreign_json(bytes: &[u8]) -> Option<&'static str> {
    #[derive(Deserialize)]
    struct Keys {
        #[serde(default, rename = "$schema")]
        schema: String,
        #[serde(default)]
        interval_bytes: Option<serde::de::IgnoredAny>,
        #[serde(default)]
        stacks: Option<serde::de::IgnoredAny>,
    }
    let keys: Keys = serde_json::from_slice(bytes).ok()?;
    if keys.schema.contains("speedscope") {
        return Some("a profile for speedscope");
    }
    (keys.interval_bytes.is_none() && keys.stacks.is_none()).then_some("JSON, but not a profile of heapbpf")
}

/// The processes of a profile; those whose stacks are put together are one entry.
struct Processes {
    entries: Vec<Process>,
    /// For each process of the file its entry, and which member of it it is.
    places: Vec<(usize, Option<usize>)>,
    /// The entry of each program.
    programs: HashMap<usize, usize>,
}

impl Processes {
    fn of(files: Vec<ProcessJson>, audit: &[Arc<FileAudit>], live: bool) -> Self {
        let mut processes = Self { entries: Vec::new(), places: Vec::new(), programs: HashMap::new() };
        for mut json in files {
            let (program, totals) = (json.program, std::mem::take(&mut json.sums));
            let process = process(json, audit, live);
            let Some(program) = program else {
                processes.places.push((processes.entries.len(), None));
                processes.entries.push(process);
                continue;
            };
            let entry = *processes.programs.entry(program).or_insert_with(|| {
                processes.entries.push(programs::entry_without_members(&process));
                processes.entries.len() - 1
            });
            let members = &mut processes.entries[entry];
            processes.places.push((entry, Some(members.members.len())));
            programs::add_member(members, Member { process, totals: totals.into_iter().map(total).collect() });
        }
        processes
    }

    /// The entry that a stack belongs to, and the member if it is of one alone.
    fn owner(
        &self,
        program: Option<usize>,
        process: Option<usize>,
        pid: Option<u32>,
    ) -> Option<(usize, Option<usize>)> {
        match (process, program) {
            (Some(index), _) => self.places.get(index).copied(),
            (None, Some(program)) => self.programs.get(&program).map(|&entry| (entry, None)),
            (None, None) => self.entries.iter().position(|process| Some(process.pid) == pid).map(|entry| (entry, None)),
        }
    }
}

fn total(json: TotalJson) -> Row {
    let TotalJson { interval, alloc, inuse, at_exit, peak, source } = json;
    let unwinder = if source.as_deref() == Some(GO_RUNTIME) { GO_RUNTIME } else { "" };
    let stack = Arc::new(Stack { unwinder, ..Stack::default() });
    Row { alloc, inuse, at_exit, peak, ..Row::new(RowKey::total(0, interval, stack)) }
}

fn process(json: ProcessJson, audit: &[Arc<FileAudit>], live: bool) -> Process {
    let audit: Vec<Arc<FileAudit>> = json.audit.iter().filter_map(|&number| audit.get(number).cloned()).collect();
    // These are also listed with its files.
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
        audit,
        missing,
        coverage: json.coverage,
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

impl RowJson<'_> {
    fn alloc(&self) -> SampleSums {
        SampleSums {
            samples: self.samples,
            zero_byte_samples: self.zero_byte_samples,
            sampled_bytes: self.sampled_bytes,
            offset_sum: self.offset_sum.unwrap_or(0),
            smallest_bytes: self.smallest_bytes,
            largest_bytes: self.largest_bytes,
            ..estimates(&self.alloc_bytes, &self.alloc_objects)
        }
    }

    fn inuse(&self) -> SampleSums {
        SampleSums {
            samples: self.inuse_samples,
            zero_byte_samples: self.inuse_zero_byte_samples,
            sampled_bytes: self.inuse_sampled_bytes,
            offset_sum: self.inuse_offset_sum.unwrap_or(0),
            smallest_bytes: self.inuse_smallest_bytes,
            largest_bytes: self.inuse_largest_bytes,
            ..estimates(&self.inuse_bytes, &self.inuse_objects)
        }
    }

    fn at_exit(&self) -> SampleSums {
        let largest_if_missing = if self.at_exit_samples > 0 { unknown_size() } else { 0 };
        SampleSums {
            samples: self.at_exit_samples,
            zero_byte_samples: self.at_exit_zero_byte_samples,
            sampled_bytes: self.at_exit_sampled_bytes,
            offset_sum: self.at_exit_offset_sum.unwrap_or(0),
            smallest_bytes: self.at_exit_smallest_bytes,
            largest_bytes: self.at_exit_largest_bytes.unwrap_or(largest_if_missing),
            ..estimates(&self.at_exit_bytes, &self.at_exit_objects)
        }
    }
}

/// The estimates of sums; their whole numbers are separate fields.
fn estimates(bytes: &Figure, objects: &Figure) -> SampleSums {
    SampleSums {
        bytes: bytes.estimate.unwrap_or(0.0) - bytes.correction,
        bytes_variance: bytes.variance.unwrap_or(0.0),
        objects: objects.estimate.unwrap_or(0.0) - objects.correction,
        objects_variance: objects.variance.unwrap_or(0.0),
        bytes_correction: bytes.correction,
        objects_correction: objects.correction,
        ..SampleSums::default()
    }
}

#[derive(Default)]
struct Reader<'a> {
    strings: Strings,
    modules: Vec<Module>,
    module_ids: HashMap<(String, Option<String>), usize>,
    frames: HashMap<&'a str, Arc<Frame>>,
    /// System names of frames. A frame has its system name where it occurs first.
    system_names: HashMap<FrameJson, Arc<str>>,
}

impl<'a> Reader<'a> {
    fn modules(&mut self, modules: Vec<ModuleJson>) {
        for json in modules {
            self.module_ids.entry((json.path.clone(), json.build_id.clone())).or_insert(self.modules.len());
            self.modules.push(Module {
                path: self.strings.share(&json.path),
                build_id: json.build_id.as_deref().and_then(units::parse_hex),
                start: json.start,
                end: json.end,
                file_offset: json.file_offset,
                reason: self.strings.share_some(json.reason.as_deref()),
            });
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
            at_exit: if known { at_exit } else { SampleSums::default() },
            peak: json.peak,
            lifetimes: json.lifetimes.map(|lifetimes| Lifetimes {
                median_seconds: lifetimes.median_seconds,
                temporary: lifetimes.temporary,
                survival: lifetimes.survival,
                ages: lifetimes
                    .ages
                    .into_iter()
                    .map(|(exponent, freed, left)| Octave { exponent, freed, left })
                    .collect(),
            }),
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
            // What a function without a name is called is made anew from its start.
            function: self.strings.share_some(json.function.as_deref().filter(|_| json.function_start.is_none())),
            function_start: json.function_start,
            system_name,
            file: self.strings.share_some(json.file.as_deref()),
            line: json.line,
            inlined: json.inlined,
            reason: self.strings.share_some(json.reason.as_deref()),
            module: json.module.map(|path| self.module(path, json.build_id)),
            address: json.address,
            file_offset: json.file_offset,
        });
        self.frames.insert(text, Arc::clone(&frame));
        Ok(frame)
    }

    fn module(&mut self, path: String, build_id: Option<String>) -> usize {
        let key = (path, build_id);
        if let Some(&known) = self.module_ids.get(&key) {
            return known;
        }
        let build_id = key.1.as_deref().and_then(units::parse_hex);
        self.modules.push(Module { path: self.strings.share(&key.0), build_id, ..Module::default() });
        self.module_ids.insert(key, self.modules.len() - 1);
        self.modules.len() - 1
    }
}
