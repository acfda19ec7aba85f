//! Reader of heapbpf's Parquet tables, which hold what a comparison needs, but no locations of frames.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int64Type, TimestampMicrosecondType};
use arrow_array::{Array, RecordBatch};
use bytes::Bytes;
use parquet::arrow::arrow_reader::{ArrowReaderOptions, ParquetRecordBatchReaderBuilder};

use super::strings::Strings;
use super::{ContentError, LARGEST_DECOMPRESSED, MOST_FRAMES, newer};
use crate::formats::parquet::{CREATED_BY, columns};
use crate::model::{
    Criterion, Frame, GO_RUNTIME, Header, LossBound, Losses, Placement, Process, Profile, Row, RowKey, SharedFrames,
    Stack,
};
use heapbpf_audit::Hook;
use heapbpf_statistics::sums::SampleSums;

/// Most columns that are looked at for what is not understood.
const MOST_COLUMNS: usize = 1_000;

/// Number of rows that are decoded at a time.
const ROWS_AT_A_TIME: usize = 4096;

fn damaged(reason: impl ToString) -> ContentError {
    ContentError::Damaged { format: "heapbpf's Parquet", reason: reason.to_string() }
}

/// Reads the profile, and says what a newer version may have meant. Rows of several hosts become one profile under the name of the first host.
pub(super) fn parse(bytes: &[u8]) -> Result<Profile, ContentError> {
    // The Arrow schema in the file is not needed, and not trusted.
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let builder = ParquetRecordBatchReaderBuilder::try_new_with_options(Bytes::copy_from_slice(bytes), options)
        .map_err(damaged)?;
    let version = builder.metadata().file_metadata().created_by().and_then(|by| by.strip_prefix(CREATED_BY));
    let version = version.unwrap_or_default().to_owned();
    let of_newer = |error| match error {
        ContentError::Damaged { format, reason } => {
            ContentError::Damaged { format, reason: reason + &newer::hint_of(&version) }
        }
        other => other,
    };
    let known = columns();
    let fields = builder.schema().fields().iter().map(|field| field.name());
    let unknown = fields.filter(|name| !known.contains(name)).map(|name| format!("the column {}", newer::shown(name)));
    let unknown: BTreeSet<String> = unknown.take(MOST_COLUMNS).collect();
    let mut profile = table(builder).map_err(of_newer)?;
    profile.notes.extend(newer::note_of(&version, &unknown));
    Ok(profile)
}

/// Reads the table.
fn table(builder: ParquetRecordBatchReaderBuilder<Bytes>) -> Result<Profile, ContentError> {
    // The library panics on these.
    let columns = builder.metadata().row_groups().iter().flat_map(|group| group.columns());
    if columns
        .map(|column| {
            [column.dictionary_page_offset().unwrap_or(0), column.data_page_offset(), column.compressed_size()]
        })
        .any(|places| places.iter().any(|place| *place < 0))
    {
        return Err(damaged("a column begins before the file"));
    }
    let size: u64 = builder.metadata().row_groups().iter().map(|group| group.total_byte_size().unsigned_abs()).sum();
    if size > LARGEST_DECOMPRESSED {
        return Err(ContentError::TooLarge(format!("{size} bytes when decompressed")));
    }
    let reader = builder.with_batch_size(ROWS_AT_A_TIME).build().map_err(damaged)?;
    let mut table = Table::default();
    for batch in reader {
        table.add(&batch.map_err(damaged)?)?;
    }
    let Profile { processes, rows, header, .. } = &mut table.profile;
    processes.iter_mut().for_each(|process| process.inuse_unknown &= header.live);
    for row in rows.iter_mut().filter(|row| processes[row.key.process].inuse_unknown) {
        (row.inuse, row.at_exit) = Default::default();
    }
    Ok(table.profile)
}

/// Process id, name, and index in the profile of the recording if known.
type ProcessId = (u32, String, Option<u64>);

struct Table {
    profile: Profile,
    strings: Strings,
    process_ids: HashMap<ProcessId, usize>,
    /// The distinct losses that the rows of each process state.
    losses: HashSet<(usize, String, Losses)>,
    /// Number of the stacks' frames.
    frames: usize,
    shared_frames: SharedFrames,
}

impl Default for Table {
    fn default() -> Self {
        let profile = Profile::new(Header { live: false, ..Header::new(0, Criterion::Bytes) });
        Self {
            profile,
            strings: Strings::default(),
            process_ids: HashMap::new(),
            losses: HashSet::new(),
            frames: 0,
            shared_frames: SharedFrames::default(),
        }
    }
}

impl Table {
    fn add(&mut self, batch: &RecordBatch) -> Result<(), ContentError> {
        let columns = Columns(batch);
        let frames = columns.get("frames")?.as_list_opt::<i32>().ok_or_else(|| damaged("frames is no list"))?;
        for row in 0..batch.num_rows() {
            let criterion = columns.text("criterion", row)?;
            let interval = columns.whole("interval_bytes", row)?;
            if self.profile.rows.is_empty() {
                self.profile.header.criterion = Criterion::from_name(criterion)
                    .ok_or_else(|| damaged(format!("{criterion:?} is no sampling criterion")))?;
                self.profile.header.interval = interval;
                self.profile.header.host = columns.text("host", row)?.into();
                self.profile.header.duration =
                    Duration::try_from_secs_f64(columns.real("duration_seconds", row)?.unwrap_or(0.0))
                        .map_err(damaged)?;
                let time = UNIX_EPOCH + Duration::from_micros(columns.time("time", row)?);
                (self.profile.header.started, self.profile.header.time) = if columns.has("started") {
                    (UNIX_EPOCH + Duration::from_micros(columns.time("started", row)?), time)
                } else {
                    // Older versions wrote the start of the recording only.
                    (time, time.checked_add(self.profile.header.duration).unwrap_or(time))
                };
            }
            self.profile.header.offsets_known &= columns.has("offset_sum");
            let first = self.profile.header.criterion.name();
            if criterion != first {
                return Err(damaged(format!("rows sampled by `{criterion}` and by `{first}`: their trials differ")));
            }
            let process = self.process(&columns, row)?;
            let alloc = columns.sums("", "alloc", row)?.unwrap_or_default();
            let inuse = columns.sums("inuse_", "inuse", row)?;
            self.profile.header.live |= inuse.is_some();
            self.profile.processes[process].inuse_unknown |= inuse.is_none();
            // In older versions, what ended processes held counted as in use.
            let at_exit = if columns.has("at_exit_bytes") { columns.sums("at_exit_", "at_exit", row)? } else { None };
            self.profile.header.ended_apart |= columns.flag("ended_apart", row).unwrap_or(false);
            self.profile.header.time_windows |= columns.flag("time_windows", row).unwrap_or(false);
            self.losses(process, &columns, row)?;
            let names = frames.value(row);
            let names = names.as_string_opt::<i32>().ok_or_else(|| damaged("frames are no text"))?;
            self.frames += names.len();
            if self.frames > MOST_FRAMES {
                return Err(ContentError::TooLarge(format!("more than {MOST_FRAMES} frames")));
            }
            let is_empty = alloc.samples == 0 && inuse.is_none_or(|inuse| inuse.samples == 0);
            if names.is_empty() && is_empty {
                // A process that has losses but no samples.
                continue;
            }
            let frame = |name: Option<&str>| {
                let function = self.strings.share_some(name);
                self.shared_frames.share(Frame { function, ..Frame::default() })
            };
            let frames = names.iter().map(frame).collect();
            let complete = columns.flag("complete", row).unwrap_or(true);
            let cut = if complete { None } else { Some(self.strings.share("unknown reason")) };
            // Older versions did not write this column.
            let is_of_go = columns.text("source", row).is_ok_and(|source| source == GO_RUNTIME);
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
        }
        Ok(())
    }

    fn process(&mut self, columns: &Columns, row: usize) -> Result<usize, ContentError> {
        let pid = u32::try_from(columns.whole("pid", row)?).unwrap_or(0);
        let number = columns.some_whole("process", row).ok().flatten();
        let key = (pid, columns.text("comm", row)?.to_owned(), number);
        if let Some(&known) = self.process_ids.get(&key) {
            return Ok(known);
        }
        // Older versions did not write these.
        let text = |name: &str| columns.text(name, row).unwrap_or_default().to_owned();
        let placement = Placement { container: text("container"), pod: text("pod"), unit: text("unit") };
        self.profile.processes.push(Process {
            placement,
            pid,
            comm: key.1.clone(),
            exe: columns.text("exe", row)?.into(),
            cgroup: columns.text("cgroup", row)?.into(),
            coverage: 1.0,
            ended: columns.flag("ended", row).unwrap_or(false),
            // Older versions did not write this column, and a text that is NULL reads as empty.
            hook: columns.text("hook", row).ok().and_then(Hook::from_name),
            inuse_since: columns.some_time("inuse_since", row).and_then(|us| UNIX_EPOCH.checked_add(us)),
            ..Process::default()
        });
        let index = self.profile.processes.len() - 1;
        self.process_ids.insert(key, index);
        Ok(index)
    }
}

impl Table {
    /// Adds the losses that a row states for its process. Files of several recordings state several of one process.
    fn losses(&mut self, process: usize, columns: &Columns, row: usize) -> Result<(), ContentError> {
        // Older versions did not write these columns.
        let whole = |name: &str| columns.some_whole(name, row).ok().flatten().unwrap_or(0);
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
            inuse_unbounded: columns.flag("inuse_losses_unbounded", row).unwrap_or(false),
            unbounded: columns.flag("losses_unbounded", row).unwrap_or(false),
            weights_unproven: columns.flag("weights_unproven", row).unwrap_or(false),
        };
        if !losses.is_none() && self.losses.insert((process, columns.text("host", row)?.to_owned(), losses)) {
            self.profile.processes[process].losses.add(&losses);
        }
        Ok(())
    }
}

/// Access to columns by name, with type checks.
struct Columns<'a>(&'a RecordBatch);

impl<'a> Columns<'a> {
    fn has(&self, name: &str) -> bool {
        self.0.column_by_name(name).is_some()
    }

    fn get(&self, name: &str) -> Result<&'a dyn Array, ContentError> {
        self.0.column_by_name(name).map(AsRef::as_ref).ok_or_else(|| {
            let columns = self.0.schema_ref().fields().iter().take(8).map(|field| field.name().as_str());
            let columns = columns.collect::<Vec<_>>().join(", ");
            ContentError::Foreign(format!("Parquet, but not of heapbpf: no column {name} ({columns})"))
        })
    }

    fn text(&self, name: &str, row: usize) -> Result<&'a str, ContentError> {
        let column = self.get(name)?.as_string_opt::<i32>().ok_or_else(|| damaged(format!("{name} is no text")))?;
        Ok(if column.is_null(row) { "" } else { column.value(row) })
    }

    fn whole(&self, name: &str, row: usize) -> Result<u64, ContentError> {
        Ok(self.some_whole(name, row)?.unwrap_or(0))
    }

    fn some_whole(&self, name: &str, row: usize) -> Result<Option<u64>, ContentError> {
        let column = self.get(name)?.as_primitive_opt::<Int64Type>();
        let column = column.ok_or_else(|| damaged(format!("{name} is no whole number")))?;
        Ok(column.is_valid(row).then(|| u64::try_from(column.value(row)).unwrap_or(0)))
    }

    fn real(&self, name: &str, row: usize) -> Result<Option<f64>, ContentError> {
        let column = self.get(name)?.as_primitive_opt::<Float64Type>();
        let column = column.ok_or_else(|| damaged(format!("{name} is no number")))?;
        Ok(column.is_valid(row).then(|| column.value(row)))
    }

    fn time(&self, name: &str, row: usize) -> Result<u64, ContentError> {
        let column = self.get(name)?.as_primitive_opt::<TimestampMicrosecondType>();
        let column = column.ok_or_else(|| damaged(format!("{name} is no time in microseconds")))?;
        Ok(u64::try_from(column.value(row)).unwrap_or(0))
    }

    /// A time since 1970 in a column that older versions did not write, and that may be NULL.
    fn some_time(&self, name: &str, row: usize) -> Option<Duration> {
        let column = self.0.column_by_name(name)?.as_primitive_opt::<TimestampMicrosecondType>()?;
        let micros = column.is_valid(row).then(|| u64::try_from(column.value(row)).unwrap_or(0));
        micros.map(Duration::from_micros)
    }

    /// A column that older versions did not write.
    fn flag(&self, name: &str, row: usize) -> Option<bool> {
        self.0.column_by_name(name)?.as_boolean_opt().map(|column| column.value(row))
    }

    /// Sums of allocation or in use; `None` if the table has NULL.
    fn sums(&self, samples: &str, estimates: &str, row: usize) -> Result<Option<SampleSums>, ContentError> {
        let Some(bytes) = self.real(&format!("{estimates}_bytes"), row)? else { return Ok(None) };
        let real = |name: &str| Ok::<_, ContentError>(self.real(&format!("{estimates}_{name}"), row)?.unwrap_or(0.0));
        let whole = |name: &str| self.some_whole(&format!("{samples}{name}"), row);
        Ok(Some(SampleSums {
            samples: whole("samples")?.unwrap_or(0),
            zero_byte_samples: whole("zero_byte_samples").ok().flatten().unwrap_or(0),
            sampled_bytes: whole("sampled_bytes")?.unwrap_or(0),
            offset_sum: whole("offset_sum").ok().flatten().unwrap_or(0),
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
