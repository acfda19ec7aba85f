//! Reader of heapbpf's Parquet tables, which contain what a comparison needs, but no locations of frames.

mod pages;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};

use self::pages::{Cell, Column};
use super::strings::Strings;
use super::{ContentError, LARGEST_DECOMPRESSED, MOST_FRAMES, newer};
use crate::formats::parquet::{CREATED_BY, columns};
use crate::model::{
    Criterion, Frame, GO_RUNTIME, Header, LossBound, Losses, Placement, Process, Profile, Row, RowKey, SharedFrames,
    Stack,
};
use heapbpf_audit::Hook;
use heapbpf_statistics::sums::SampleSums;

/// Maximum number of columns that are checked for unknown names.
const MOST_COLUMNS: usize = 1_000;

fn damaged(reason: impl ToString) -> ContentError {
    ContentError::Damaged { format: "heapbpf's Parquet", reason: reason.to_string() }
}

fn too_many() -> ContentError {
    ContentError::TooLarge(format!("more than {MOST_FRAMES} frames"))
}

/// Reads the profile, and adds a note about parts from a newer version. Rows of several hosts become one profile under
/// the name of the first host.
pub(super) fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    let file = SerializedFileReader::new(Bytes::copy_from_slice(bytes)).map_err(damaged)?;
    let version = file.metadata().file_metadata().created_by().and_then(|by| by.strip_prefix(CREATED_BY));
    let version = version.unwrap_or_default().to_owned();
    let of_newer = |error| match error {
        ContentError::Damaged { format, reason } => {
            ContentError::Damaged { format, reason: reason + &newer::hint_of(&version) }
        }
        other => other,
    };
    let known = columns();
    let fields = names(file.metadata());
    let unknown = fields
        .filter(|name| !known.iter().any(|known| known == name))
        .map(|name| format!("the column {}", newer::shown(name)));
    let unknown: BTreeSet<String> = unknown.take(MOST_COLUMNS).collect();
    let mut profile = table(&file, &known).map_err(of_newer)?;
    profile.notes.extend(newer::note_of(&version, &unknown));
    Ok(profile)
}

/// Names of the file's columns.
fn names(file: &ParquetMetaData) -> impl Iterator<Item = &str> {
    file.file_metadata().schema().get_fields().iter().map(|field| field.name())
}

/// Reads the table.
fn table(file: &SerializedFileReader<Bytes>, known: &[String]) -> Result<Profile, ContentError> {
    let groups = file.metadata().row_groups();
    // The library panics on such values.
    let columns = groups.iter().flat_map(|group| group.columns());
    if columns
        .map(|column| {
            [column.dictionary_page_offset().unwrap_or(0), column.data_page_offset(), column.compressed_size()]
        })
        .any(|places| places.iter().any(|place| *place < 0))
    {
        return Err(damaged("a column begins before the file"));
    }
    let size: u64 = groups.iter().map(|group| group.total_byte_size().unsigned_abs()).fold(0, u64::saturating_add);
    if size > LARGEST_DECOMPRESSED {
        return Err(ContentError::TooLarge(format!("{size} bytes when decompressed")));
    }
    let mut table = Table {
        profile: Profile::new(Header { live: false, ..Header::new(0, Criterion::Bytes) }),
        strings: Strings::default(),
        process_ids: HashMap::new(),
        losses: HashSet::new(),
        frames: 0,
        shared_frames: SharedFrames::default(),
    };
    for (at, group) in groups.iter().enumerate() {
        let reader = file.get_row_group(at).map_err(damaged)?;
        let mut columns = Columns::open(file.metadata(), &*reader, known)?;
        for _ in 0..group.num_rows() {
            columns.next_row()?;
            table.add(&mut columns)?;
        }
    }
    let Profile { processes, rows, header, .. } = &mut table.profile;
    processes.iter_mut().for_each(|process| process.inuse_unknown &= header.live);
    for row in rows.iter_mut().filter(|row| processes[row.key.process].inuse_unknown) {
        (row.inuse, row.at_exit) = Default::default();
    }
    Ok(table.profile)
}

/// Process id, name, and index in the recording's profile if known.
type ProcessId = (u32, String, Option<u64>);

struct Table {
    profile: Profile,
    strings: Strings,
    process_ids: HashMap<ProcessId, usize>,
    /// The distinct losses that rows state for each process.
    losses: HashSet<(usize, String, Losses)>,
    /// Number of frames in all stacks.
    frames: usize,
    shared_frames: SharedFrames,
}

impl Table {
    /// Adds a row.
    fn add(&mut self, columns: &mut Columns) -> Result<(), ContentError> {
        let criterion = columns.text("criterion")?;
        let interval = columns.whole("interval_bytes")?;
        if self.profile.rows.is_empty() {
            self.profile.header.criterion = Criterion::from_name(criterion)
                .ok_or_else(|| damaged(format!("{criterion:?} is not a sampling criterion")))?;
            self.profile.header.interval = interval;
            self.profile.header.host = columns.text("host")?.into();
            self.profile.header.duration =
                Duration::try_from_secs_f64(columns.real("duration_seconds")?.unwrap_or(0.0)).map_err(damaged)?;
            let time = UNIX_EPOCH + columns.time("time")?.unwrap_or_default();
            (self.profile.header.started, self.profile.header.time) = if columns.has("started") {
                (UNIX_EPOCH + columns.time("started")?.unwrap_or_default(), time)
            } else {
                // Older versions wrote only the start of the recording.
                (time, time.checked_add(self.profile.header.duration).unwrap_or(time))
            };
        }
        self.profile.header.offsets_known &= columns.has("offset_sum");
        let first = self.profile.header.criterion.name();
        if criterion != first {
            return Err(damaged(format!("some rows were sampled by `{criterion}`, others by `{first}`")));
        }
        let process = self.process(columns)?;
        let alloc = columns.sums("", "alloc")?.unwrap_or_default();
        let inuse = columns.sums("inuse_", "inuse")?;
        self.profile.header.live |= inuse.is_some();
        self.profile.processes[process].inuse_unknown |= inuse.is_none();
        // In older versions, memory that ended processes held counted as in use.
        let at_exit = if columns.has("at_exit_bytes") { columns.sums("at_exit_", "at_exit")? } else { None };
        self.profile.header.ended_apart |= columns.flag("ended_apart").unwrap_or(false);
        self.profile.header.time_windows |= columns.flag("time_windows").unwrap_or(false);
        self.losses(process, columns)?;
        let names = columns.frames(MOST_FRAMES - self.frames)?;
        self.frames += names.len().max(1);
        let is_empty = alloc.samples == 0 && inuse.is_none_or(|inuse| inuse.samples == 0);
        if names.is_empty() && is_empty {
            // A process that has losses but no samples.
            return Ok(());
        }
        let frame = |name: &Cell| {
            let function = if let Cell::Text(name) = name { self.strings.share_some(Some(name)) } else { None };
            self.shared_frames.share(Frame { function, ..Frame::default() })
        };
        let frames = names.iter().map(frame).collect();
        let complete = columns.flag("complete").unwrap_or(true);
        let cut = if complete { None } else { Some(self.strings.share("unknown reason")) };
        // Older versions did not write this column.
        let is_of_go = columns.text("source").is_ok_and(|source| source == GO_RUNTIME);
        let unwinder = if is_of_go { GO_RUNTIME } else { "" };
        self.profile.rows.push(Row {
            alloc,
            inuse: inuse.unwrap_or_default(),
            at_exit: at_exit.unwrap_or_default(),
            ..Row::new(RowKey {
                process,
                thread: self.strings.share(""),
                function: self.strings.share(""),
                interval,
                stack: Arc::new(Stack { frames, unwinder, cut }),
            })
        });
        Ok(())
    }

    fn process(&mut self, columns: &Columns) -> Result<usize, ContentError> {
        let pid = u32::try_from(columns.whole("pid")?).unwrap_or(0);
        let number = columns.some_whole("process").ok().flatten();
        let key = (pid, columns.text("comm")?.to_owned(), number);
        if let Some(&known) = self.process_ids.get(&key) {
            return Ok(known);
        }
        // Older versions did not write these columns.
        let text = |name: &str| columns.text(name).unwrap_or_default().to_owned();
        let placement = Placement { container: text("container"), pod: text("pod"), unit: text("unit") };
        self.profile.processes.push(Process {
            placement,
            pid,
            comm: key.1.clone(),
            exe: columns.text("exe")?.into(),
            cgroup: columns.text("cgroup")?.into(),
            coverage: 1.0,
            ended: columns.flag("ended").unwrap_or(false),
            // Older versions did not write this column, and NULL reads as empty text.
            hook: columns.text("hook").ok().and_then(Hook::from_name),
            inuse_since: columns.time("inuse_since").ok().flatten().and_then(|since| UNIX_EPOCH.checked_add(since)),
            ..Process::default()
        });
        let index = self.profile.processes.len() - 1;
        self.process_ids.insert(key, index);
        Ok(index)
    }

    /// Adds the losses that a row states for its process. Files with several recordings have several for one process.
    fn losses(&mut self, process: usize, columns: &Columns) -> Result<(), ContentError> {
        // Older versions did not write these columns.
        let whole = |name: &str| columns.some_whole(name).ok().flatten().unwrap_or(0);
        let bound = |name: &str| LossBound {
            samples: whole(&format!("{name}_samples")),
            sampled_bytes: whole(&format!("{name}_sampled_bytes")),
        };
        let losses = Losses {
            alloc: bound("lost"),
            inuse_missing: bound("inuse_missing"),
            inuse_stale: bound("inuse_stale"),
            interval: whole("lost_interval_bytes"),
            peak_unknown: false,
            inuse_unbounded: columns.flag("inuse_losses_unbounded").unwrap_or(false),
            unbounded: columns.flag("losses_unbounded").unwrap_or(false),
            weights_unproven: columns.flag("weights_unproven").unwrap_or(false),
        };
        if !losses.is_none() && self.losses.insert((process, columns.text("host")?.to_owned(), losses)) {
            self.profile.processes[process].losses.add(&losses);
        }
        Ok(())
    }
}

/// The columns that are understood, with the values of the current row and type checks.
struct Columns<'a> {
    file: &'a ParquetMetaData,
    cells: HashMap<&'a str, (Column, Cell)>,
}

impl<'a> Columns<'a> {
    fn open(file: &'a ParquetMetaData, group: &dyn RowGroupReader, known: &[String]) -> Result<Self, ContentError> {
        let mut cells = HashMap::new();
        for (at, column) in file.file_metadata().schema_descr().columns().iter().enumerate() {
            let [name, inner @ ..] = column.path().parts() else { continue };
            // A list is a group that contains a group of its elements.
            let deepest = if name == "frames" { 2 } else { 0 };
            if known.contains(name) && inner.len() <= deepest && !cells.contains_key(name.as_str()) {
                let pages = group.get_column_page_reader(at).map_err(damaged)?;
                cells.insert(name.as_str(), (Column::new(column, pages), Cell::Other));
            }
        }
        Ok(Self { file, cells })
    }

    fn next_row(&mut self) -> Result<(), ContentError> {
        self.cells.values_mut().try_for_each(|(column, cell)| {
            *cell = column.value()?;
            Ok(())
        })
    }

    fn has(&self, name: &str) -> bool {
        self.cells.contains_key(name)
    }

    fn missing(&self, name: &str) -> ContentError {
        let columns = names(self.file).take(8).collect::<Vec<_>>().join(", ");
        ContentError::Foreign(format!("Parquet, but not of heapbpf: no column {name} ({columns})"))
    }

    fn get(&self, name: &str) -> Result<&Cell, ContentError> {
        self.cells.get(name).map(|(_, cell)| cell).ok_or_else(|| self.missing(name))
    }

    /// Function names of a stack, with at most `most` levels.
    fn frames(&mut self, most: usize) -> Result<Vec<Cell>, ContentError> {
        match self.cells.get_mut("frames") {
            Some((column, _)) => column.texts(most),
            None => Err(self.missing("frames")),
        }
    }

    fn text(&self, name: &str) -> Result<&str, ContentError> {
        match self.get(name)? {
            Cell::Text(text) => Ok(text),
            Cell::Null => Ok(""),
            _ => Err(damaged(format!("{name} is not text"))),
        }
    }

    fn whole(&self, name: &str) -> Result<u64, ContentError> {
        Ok(self.some_whole(name)?.unwrap_or(0))
    }

    fn some_whole(&self, name: &str) -> Result<Option<u64>, ContentError> {
        match self.get(name)? {
            Cell::Whole(number) => Ok(Some(u64::try_from(*number).unwrap_or(0))),
            Cell::Null => Ok(None),
            _ => Err(damaged(format!("{name} is not a whole number"))),
        }
    }

    fn real(&self, name: &str) -> Result<Option<f64>, ContentError> {
        match self.get(name)? {
            Cell::Real(number) => Ok(Some(*number)),
            Cell::Null => Ok(None),
            _ => Err(damaged(format!("{name} is not a number"))),
        }
    }

    /// A time since 1970.
    fn time(&self, name: &str) -> Result<Option<Duration>, ContentError> {
        match self.get(name)? {
            Cell::Time(micros) => Ok(Some(Duration::from_micros(u64::try_from(*micros).unwrap_or(0)))),
            Cell::Null => Ok(None),
            _ => Err(damaged(format!("{name} is not a time in microseconds"))),
        }
    }

    /// The value of a column that older versions did not write.
    fn flag(&self, name: &str) -> Option<bool> {
        match self.cells.get(name)?.1 {
            Cell::Flag(flag) => Some(flag),
            Cell::Null => Some(false),
            _ => None,
        }
    }

    /// Sums of allocation or in use; `None` if the table has NULL.
    fn sums(&self, samples: &str, estimates: &str) -> Result<Option<SampleSums>, ContentError> {
        let Some(bytes) = self.real(&format!("{estimates}_bytes"))? else { return Ok(None) };
        let real = |name: &str| Ok::<_, ContentError>(self.real(&format!("{estimates}_{name}"))?.unwrap_or(0.0));
        let whole = |name: &str| self.some_whole(&format!("{samples}{name}"));
        let number = whole("samples")?.unwrap_or(0);
        Ok(Some(SampleSums {
            samples: number,
            zero_byte_samples: whole("zero_byte_samples").ok().flatten().unwrap_or(0),
            sampled_bytes: whole("sampled_bytes")?.unwrap_or(0),
            offset_sum: SampleSums::offset_sum_of(number, whole("offset_sum").ok().flatten()),
            bytes,
            bytes_variance: real("bytes_var")?,
            objects: real("objects")?,
            objects_variance: real("objects_var")?,
            // Unknown sizes are assumed to differ, so that no interval is claimed for a count.
            smallest_bytes: whole("smallest_bytes").ok().flatten().unwrap_or(0),
            largest_bytes: whole("largest_bytes").ok().flatten().unwrap_or(u64::MAX),
            ..SampleSums::default()
        }))
    }
}
