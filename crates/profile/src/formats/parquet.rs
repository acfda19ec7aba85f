//! Parquet: rows for SQL engines. One row per process, stack and interval, with estimates and their variances, so that
//! `sum(alloc_bytes)` and `sqrt(sum(alloc_bytes_var))` over any rows of any hosts are right.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, BooleanArray, DictionaryArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use arrow_schema::{ArrowError, DataType, Field};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;

use super::{Format, FormatError, WriteOptions};
use crate::intern::Interned;
use crate::model::{Criterion, Header, Losses, Process, Profile};
use crate::naming::frame_name;
use heapbpf_audit::Hook;
use heapbpf_statistics::sums::SampleSums;

pub(super) struct Parquet;

/// Size of the dictionary page: large enough for all distinct function names of a profile, so that each is written
/// once.
const DICTIONARY_BYTES: usize = 16 << 20;

/// Prefix of what the file says of its writer: our name, before the version.
pub(crate) const CREATED_BY: &str = "heapbpf ";

impl Format for Parquet {
    fn name(&self) -> &'static str {
        "parquet"
    }

    fn extensions(&self) -> &'static [&'static str] {
        &[".parquet"]
    }

    fn write(&self, profile: &Profile, _: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
        let batch = batch(profile).map_err(|error| unsupported(&error))?;
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_dictionary_page_size_limit(DICTIONARY_BYTES)
            .set_created_by(format!("{CREATED_BY}{}", profile.header.version))
            .build();
        // The writer needs a `Send` destination, which `out` is not.
        let mut file = Vec::new();
        let write = || -> Result<(), ParquetError> {
            let mut writer = ArrowWriter::try_new(&mut file, batch.schema(), Some(properties))?;
            writer.write(&batch)?;
            writer.close().map(|_| ())
        };
        write().map_err(|error| unsupported(&error))?;
        Ok(out.write_all(&file)?)
    }

    fn how_to_open(&self, file: &str) -> String {
        format!("duckdb -c \"SELECT frames[1] AS function, sum(inuse_bytes) FROM '{file}' GROUP BY 1 ORDER BY 2 DESC\"")
    }
}

fn unsupported(error: &dyn std::error::Error) -> FormatError {
    FormatError::Unsupported { format: "parquet", reason: error.to_string() }
}

/// A row of the table: sums over all threads and allocator functions.
struct TableRow {
    process: usize,
    /// `None` for a process that has losses but no samples.
    stack: Option<u32>,
    interval: u64,
    alloc: SampleSums,
    inuse: SampleSums,
    at_exit: SampleSums,
}

fn table_rows(profile: &Profile, interned: &Interned) -> Vec<TableRow> {
    let mut rows: Vec<TableRow> = Vec::new();
    let mut known: HashMap<(usize, u32, u64), usize> = HashMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let index = *known.entry((row.key.process, stack, row.key.interval)).or_insert_with(|| {
            let (alloc, inuse, at_exit) = Default::default();
            let stack = Some(stack);
            rows.push(TableRow { process: row.key.process, stack, interval: row.key.interval, alloc, inuse, at_exit });
            rows.len() - 1
        });
        rows[index].alloc.add(&row.alloc);
        rows[index].inuse.add(&row.inuse);
        rows[index].at_exit.add(&row.at_exit);
    }
    let mut has_rows = vec![false; profile.processes.len()];
    for row in &rows {
        if let Some(has_rows) = has_rows.get_mut(row.process) {
            *has_rows = true;
        }
    }
    for (process, Process { losses, .. }) in profile.processes.iter().enumerate() {
        if !losses.is_none() && !has_rows[process] {
            let interval = losses.interval.max(profile.header.interval);
            let (alloc, inuse, at_exit) = Default::default();
            rows.push(TableRow { process, stack: None, interval, alloc, inuse, at_exit });
        }
    }
    rows
}

/// Names of all columns.
pub(crate) fn columns() -> Vec<String> {
    let nothing = Profile::new(Header::new(0, Criterion::Bytes));
    let fields =
        batch(&nothing).map(|batch| batch.schema().fields().iter().map(|field| field.name().clone()).collect());
    fields.unwrap_or_default()
}

fn batch(profile: &Profile) -> Result<RecordBatch, ArrowError> {
    let interned = Interned::new(profile);
    let rows = table_rows(profile, &interned);
    let table = Table { profile, rows: &rows, no_process: Process::default() };
    let mut columns = table.of_recording_and_process();
    columns.push(("frames".into(), frames(profile, &interned, &rows)?, false));
    columns.extend(table.of_stack(&interned));
    columns.extend(table.of_alloc());
    columns.extend(table.of_followed("inuse", |row| &row.inuse));
    columns.extend(table.of_followed("at_exit", |row| &row.at_exit));
    columns.extend(table.of_losses());
    RecordBatch::try_from_iter_with_nullable(columns)
}

/// Name, values, and whether they may be NULL.
type Column = (String, ArrayRef, bool);

/// The rows of the table, which are written column by column.
struct Table<'a> {
    profile: &'a Profile,
    rows: &'a [TableRow],
    no_process: Process,
}

impl Table<'_> {
    fn of_recording_and_process(&self) -> Vec<Column> {
        let header = &self.profile.header;
        let duration_seconds = header.duration.as_secs_f64();
        let columns = [
            ("host", self.texts(|_| &header.host)),
            ("pid", self.whole(|row| self.process(row).pid.into())),
            ("comm", self.texts(|row| &self.process(row).comm)),
            ("exe", self.texts(|row| &self.process(row).exe)),
            ("cgroup", self.texts(|row| &self.process(row).cgroup)),
            ("container", self.texts(|row| &self.process(row).placement.container)),
            ("pod", self.texts(|row| &self.process(row).placement.pod)),
            ("unit", self.texts(|row| &self.process(row).placement.unit)),
            ("time", self.wall_clock(header.time)),
            ("started", self.wall_clock(header.started)),
            ("duration_seconds", self.real(|_| duration_seconds)),
            ("ended", self.flags(|row| self.process(row).ended)),
            ("interval_bytes", self.whole(|row| row.interval)),
            ("criterion", self.texts(|_| header.criterion.name())),
        ];
        let since = |row: &TableRow| self.process(row).inuse_since.filter(|_| self.profile.knows_inuse(row.process));
        let since: TimestampMicrosecondArray = self.rows.iter().map(|row| since(row).map(micros)).collect();
        let since: ArrayRef = Arc::new(since.with_timezone("UTC"));
        let hook = |row: &TableRow| self.process(row).hook.map(Hook::name);
        let hook: ArrayRef = Arc::new(self.rows.iter().map(hook).collect::<DictionaryArray<Int32Type>>());
        let may_be_null = [("inuse_since".to_owned(), since, true), ("hook".to_owned(), hook, true)];
        never_null(columns).into_iter().chain(may_be_null).collect()
    }

    fn of_stack(&self, interned: &Interned) -> Vec<Column> {
        let header = &self.profile.header;
        let complete =
            |row: &TableRow| row.stack.is_none_or(|stack| interned.stacks[stack as usize].stack.cut.is_none());
        let source = |row: &TableRow| row.stack.and_then(|stack| interned.stacks[stack as usize].stack.source());
        let source: ArrayRef = Arc::new(self.rows.iter().map(source).collect::<DictionaryArray<Int32Type>>());
        let columns = never_null([
            ("complete", self.flags(complete)),
            ("time_windows", self.flags(|_| header.time_windows)),
            ("ended_apart", self.flags(|_| header.ended_apart)),
        ]);
        columns.into_iter().chain([("source".to_owned(), source, true)]).collect()
    }

    fn of_alloc(&self) -> Vec<Column> {
        // Samples from time windows are biased without their correction; other corrections are for display only.
        let time_windows = self.profile.header.time_windows;
        let corrected = |raw: f64, correction: f64| if time_windows { raw + correction } else { raw };
        never_null([
            ("samples", self.whole(|row| row.alloc.samples)),
            ("sampled_bytes", self.whole(|row| row.alloc.sampled_bytes)),
            ("zero_byte_samples", self.whole(|row| row.alloc.zero_byte_samples)),
            ("offset_sum", self.whole(|row| row.alloc.offset_sum)),
            ("smallest_bytes", self.whole(|row| row.alloc.smallest_bytes)),
            ("largest_bytes", self.whole(|row| row.alloc.largest_bytes)),
            ("alloc_bytes", self.real(|row| corrected(row.alloc.bytes, row.alloc.bytes_correction))),
            ("alloc_bytes_var", self.real(|row| row.alloc.bytes_variance)),
            ("alloc_objects", self.real(|row| corrected(row.alloc.objects, row.alloc.objects_correction))),
            ("alloc_objects_var", self.real(|row| row.alloc.objects_variance)),
        ])
    }

    /// The columns of sums that need frees. Without frees they are unknown: NULL, not 0.
    fn of_followed(&self, prefix: &str, sums: fn(&TableRow) -> &SampleSums) -> Vec<Column> {
        let live = |row: &TableRow| self.profile.knows_inuse(row.process);
        let whole = |number: fn(&SampleSums) -> u64| -> ArrayRef {
            let number = |row: &TableRow| live(row).then(|| i64::try_from(number(sums(row))).unwrap_or(i64::MAX));
            Arc::new(self.rows.iter().map(number).collect::<Int64Array>())
        };
        let real = |number: fn(&SampleSums) -> f64| -> ArrayRef {
            let number = |row: &TableRow| live(row).then(|| number(sums(row)));
            Arc::new(self.rows.iter().map(number).collect::<Float64Array>())
        };
        let columns = [
            ("samples", whole(|sums| sums.samples)),
            ("sampled_bytes", whole(|sums| sums.sampled_bytes)),
            ("zero_byte_samples", whole(|sums| sums.zero_byte_samples)),
            ("offset_sum", whole(|sums| sums.offset_sum)),
            ("smallest_bytes", whole(|sums| sums.smallest_bytes)),
            ("largest_bytes", whole(|sums| sums.largest_bytes)),
            ("bytes", real(|sums| sums.bytes)),
            ("bytes_var", real(|sums| sums.bytes_variance)),
            ("objects", real(|sums| sums.objects)),
            ("objects_var", real(|sums| sums.objects_variance)),
        ];
        columns.into_iter().map(|(name, values)| (format!("{prefix}_{name}"), values, true)).collect()
    }

    /// These are figures of the process, repeated in each of its rows.
    fn of_losses(&self) -> Vec<Column> {
        let lost = |number: fn(&Losses) -> u64| self.whole(|row| number(&self.process(row).losses));
        let is_lost = |flag: fn(&Losses) -> bool| self.flags(|row| flag(&self.process(row).losses));
        never_null([
            ("process", self.whole(|row| row.process as u64)),
            ("lost_samples", lost(|losses| losses.alloc.samples)),
            ("lost_sampled_bytes", lost(|losses| losses.alloc.sampled_bytes)),
            ("lost_interval_bytes", lost(|losses| losses.interval)),
            // Why is not told here. Who reads it has no more bounds than who wrote it.
            (
                "losses_unbounded",
                self.flags(|row| self.process(row).losses.unbounded || self.process(row).was_unseen()),
            ),
            ("inuse_missing_samples", lost(|losses| losses.inuse_missing.samples)),
            ("inuse_missing_sampled_bytes", lost(|losses| losses.inuse_missing.sampled_bytes)),
            ("inuse_stale_samples", lost(|losses| losses.inuse_stale.samples)),
            ("inuse_stale_sampled_bytes", lost(|losses| losses.inuse_stale.sampled_bytes)),
            ("inuse_losses_unbounded", is_lost(|losses| losses.inuse_unbounded)),
            ("weights_unproven", is_lost(|losses| losses.weights_unproven)),
        ])
    }

    fn process(&self, row: &TableRow) -> &Process {
        self.profile.processes.get(row.process).unwrap_or(&self.no_process)
    }

    fn texts<'t>(&'t self, text: impl Fn(&'t TableRow) -> &'t str) -> ArrayRef {
        Arc::new(self.rows.iter().map(|row| Some(text(row))).collect::<DictionaryArray<Int32Type>>())
    }

    fn whole(&self, number: impl Fn(&TableRow) -> u64) -> ArrayRef {
        let number = |row: &TableRow| i64::try_from(number(row)).unwrap_or(i64::MAX);
        Arc::new(self.rows.iter().map(number).collect::<Int64Array>())
    }

    fn real(&self, number: impl Fn(&TableRow) -> f64) -> ArrayRef {
        Arc::new(self.rows.iter().map(|row| Some(number(row))).collect::<Float64Array>())
    }

    fn flags(&self, flag: impl Fn(&TableRow) -> bool) -> ArrayRef {
        Arc::new(self.rows.iter().map(|row| Some(flag(row))).collect::<BooleanArray>())
    }

    fn wall_clock(&self, time: SystemTime) -> ArrayRef {
        Arc::new(TimestampMicrosecondArray::from(vec![micros(time); self.rows.len()]).with_timezone("UTC"))
    }
}

/// Microseconds since 1970.
fn micros(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

fn never_null<const N: usize>(columns: [(&str, ArrayRef); N]) -> Vec<Column> {
    columns.into_iter().map(|(name, values)| (name.to_owned(), values, false)).collect()
}

/// The lists of function names, innermost first.
fn frames(profile: &Profile, interned: &Interned, rows: &[TableRow]) -> Result<ArrayRef, ArrowError> {
    let mut ids: HashMap<std::borrow::Cow<str>, i32> = HashMap::new();
    let mut names: Vec<std::borrow::Cow<str>> = Vec::new();
    let id_of_frame: Vec<i32> = interned
        .frames
        .iter()
        .map(|frame| {
            let name = frame_name(profile, frame);
            *ids.entry(name.clone()).or_insert_with(|| {
                names.push(name);
                names.len() as i32 - 1
            })
        })
        .collect();
    let mut keys = Vec::new();
    let mut lengths = Vec::with_capacity(rows.len());
    for row in rows {
        let frames = row.stack.map_or(&[][..], |stack| interned.frame_ids(stack));
        keys.extend(frames.iter().map(|&frame| id_of_frame[frame as usize]));
        lengths.push(frames.len());
    }
    let values = Arc::new(StringArray::from_iter_values(names.iter()));
    let names = DictionaryArray::<Int32Type>::try_new(Int32Array::from(keys), values)?;
    let item = Arc::new(Field::new("item", names_type(), false));
    let offsets = arrow_buffer::OffsetBuffer::from_lengths(lengths);
    Ok(Arc::new(ListArray::try_new(item, offsets, Arc::new(names), None)?))
}

fn names_type() -> DataType {
    DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8))
}

#[cfg(test)]
mod tests {
    use arrow_schema::Schema;

    use super::*;
    use crate::testing;
    use crate::value::Value;

    fn schema_names(schema: &Schema) -> Vec<&str> {
        schema.fields().iter().map(|field| field.name().as_str()).collect()
    }

    fn column(batch: &RecordBatch, name: &str) -> Vec<Option<f64>> {
        let column = batch.column_by_name(name).expect("a column");
        column.as_any().downcast_ref::<Float64Array>().expect("numbers").iter().collect()
    }

    #[test]
    fn columns_are_the_contracts_and_add_up() {
        let profile = testing::small();
        let batch = batch(&profile).expect("a table");
        let names = schema_names(batch.schema_ref()).join(" ");
        for name in "host pid comm exe cgroup container pod unit time duration_seconds interval_bytes criterion frames samples \
                     sampled_bytes alloc_bytes alloc_bytes_var alloc_objects alloc_objects_var inuse_bytes \
                     inuse_bytes_var inuse_objects inuse_objects_var started ended_apart at_exit_bytes at_exit_bytes_var \
                     at_exit_objects at_exit_objects_var hook"
            .split_whitespace()
        {
            assert!(names.split(' ').any(|column| column == name), "{name} in {names}");
        }
        assert_eq!(batch.num_rows(), 5, "rows that differ by function only are one");
        for (value, name) in
            Value::COLUMNS.into_iter().zip(["alloc_objects", "alloc_bytes", "inuse_objects", "inuse_bytes"])
        {
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            let sum: f64 = column(&batch, name).into_iter().flatten().sum();
            assert!((sum - total).abs() < 1e-9 * total, "{name}");
        }
    }

    #[test]
    fn without_frees_in_use_is_null() {
        let mut profile = testing::small();
        profile.header.live = false;
        let batch = batch(&profile).expect("a table");
        assert!(column(&batch, "inuse_bytes").iter().all(Option::is_none));
        assert!(column(&batch, "alloc_bytes").iter().all(Option::is_some));
        let batch = super::batch(&testing::partly_followed()).expect("a table");
        let known: Vec<bool> = column(&batch, "inuse_bytes").iter().map(Option::is_some).collect();
        assert_eq!(known, [true, true, true, false, false]);
    }

    #[test]
    fn a_file_is_written_even_of_nothing() {
        let mut profile = testing::small();
        for rows in [6, 0] {
            profile.rows.truncate(rows);
            let mut out = Vec::new();
            Parquet.write(&profile, &WriteOptions::default(), &mut out).expect("memory");
            assert!(out.starts_with(b"PAR1") && out.ends_with(b"PAR1"));
        }
    }
}
