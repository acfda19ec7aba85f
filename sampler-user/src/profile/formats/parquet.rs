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
use crate::heap::sums::SampleSums;
use crate::profile::intern::Interned;
use crate::profile::model::{Losses, Process, Profile};
use crate::profile::naming::frame_name;

pub(super) struct Parquet;

/// Room for all distinct function names of a profile, so that each is written once.
const DICTIONARY_BYTES: usize = 16 << 20;

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
            .set_created_by(format!("heapbpf {}", profile.version))
            .build();
        // The writer must own what it writes to or be given a borrow that can move to threads: ours cannot.
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

/// A row of the table: sums of all threads and functions.
struct TableRow {
    process: usize,
    /// None for a process that is there for what it lost.
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
        let index = *known.entry((row.process, stack, row.interval)).or_insert_with(|| {
            let (alloc, inuse, at_exit) = Default::default();
            let stack = Some(stack);
            rows.push(TableRow { process: row.process, stack, interval: row.interval, alloc, inuse, at_exit });
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
            let interval = losses.interval.max(profile.interval);
            let (alloc, inuse, at_exit) = Default::default();
            rows.push(TableRow { process, stack: None, interval, alloc, inuse, at_exit });
        }
    }
    rows
}

fn batch(profile: &Profile) -> Result<RecordBatch, ArrowError> {
    let interned = Interned::new(profile);
    let rows = table_rows(profile, &interned);
    let no_process = Process::default();
    let process = |row: &TableRow| profile.processes.get(row.process).unwrap_or(&no_process);
    let of_process = |text: fn(&Process) -> &str| -> ArrayRef {
        Arc::new(rows.iter().map(|row| Some(text(process(row)))).collect::<DictionaryArray<Int32Type>>())
    };
    let same =
        |text: &str| -> ArrayRef { Arc::new(rows.iter().map(|_| Some(text)).collect::<DictionaryArray<Int32Type>>()) };
    let whole = |number: &dyn Fn(&TableRow) -> u64| -> ArrayRef {
        Arc::new(rows.iter().map(|row| i64::try_from(number(row)).unwrap_or(i64::MAX)).collect::<Int64Array>())
    };
    let real = |number: &dyn Fn(&TableRow) -> f64| -> ArrayRef {
        Arc::new(rows.iter().map(|row| Some(number(row))).collect::<Float64Array>())
    };
    // Without frees nothing is known of what is in use: NULL, not 0. Nor of errors, without samples.
    let live = |row: &TableRow| profile.knows_inuse(row.process);
    let followed = |sums: fn(&TableRow) -> &SampleSums, number: fn(&SampleSums) -> f64| -> ArrayRef {
        Arc::new(rows.iter().map(|row| live(row).then(|| number(sums(row)))).collect::<Float64Array>())
    };
    let followed_whole = |sums: fn(&TableRow) -> &SampleSums, number: fn(&SampleSums) -> u64| -> ArrayRef {
        let number = |row: &TableRow| live(row).then(|| i64::try_from(number(sums(row))).unwrap_or(i64::MAX));
        Arc::new(rows.iter().map(number).collect::<Int64Array>())
    };
    let inuse = |number| followed(|row| &row.inuse, number);
    let inuse_whole = |number| followed_whole(|row| &row.inuse, number);
    let at_exit = |number| followed(|row| &row.at_exit, number);
    let at_exit_whole = |number| followed_whole(|row| &row.at_exit, number);
    let wall_clock = |time: SystemTime| -> ArrayRef {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        let micros = i64::try_from(since.as_micros()).unwrap_or(i64::MAX);
        Arc::new(TimestampMicrosecondArray::from(vec![micros; rows.len()]).with_timezone("UTC"))
    };
    let everywhere = |flag: bool| -> ArrayRef { Arc::new(rows.iter().map(|_| Some(flag)).collect::<BooleanArray>()) };
    // What was seen in time windows alone is biased; other corrections are for the eye.
    let corrected = |raw: f64, correction: f64| if profile.time_windows { raw + correction } else { raw };
    let complete =
        |row: &TableRow| Some(row.stack.is_none_or(|stack| interned.stacks[stack as usize].stack.cut.is_none()));
    let lost = |number: fn(&Losses) -> u64| whole(&move |row| number(&process(row).losses));
    let is_lost = |flag: fn(&Losses) -> bool| -> ArrayRef {
        Arc::new(rows.iter().map(|row| Some(flag(&process(row).losses))).collect::<BooleanArray>())
    };

    RecordBatch::try_from_iter_with_nullable(vec![
        ("host", same(&profile.host), false),
        ("pid", whole(&|row| process(row).pid.into()), false),
        ("comm", of_process(|process| &process.comm), false),
        ("exe", of_process(|process| &process.exe), false),
        ("cgroup", of_process(|process| &process.cgroup), false),
        ("time", wall_clock(profile.time), false),
        ("started", wall_clock(profile.started), false),
        ("duration_seconds", real(&|_| profile.duration.as_secs_f64()), false),
        ("ended", Arc::new(rows.iter().map(|row| Some(process(row).ended)).collect::<BooleanArray>()), false),
        ("interval_bytes", whole(&|row| row.interval), false),
        ("criterion", same(profile.criterion.name()), false),
        ("frames", frames(profile, &interned, &rows)?, false),
        ("complete", Arc::new(rows.iter().map(complete).collect::<BooleanArray>()), false),
        ("time_windows", everywhere(profile.time_windows), false),
        ("ended_apart", everywhere(profile.ended_apart), false),
        ("samples", whole(&|row| row.alloc.samples), false),
        ("sampled_bytes", whole(&|row| row.alloc.sampled_bytes), false),
        ("zero_byte_samples", whole(&|row| row.alloc.zero_byte_samples), false),
        ("offset_sum", whole(&|row| row.alloc.offset_sum), false),
        ("smallest_bytes", whole(&|row| row.alloc.smallest_bytes), false),
        ("largest_bytes", whole(&|row| row.alloc.largest_bytes), false),
        ("alloc_bytes", real(&|row| corrected(row.alloc.bytes, row.alloc.bytes_correction)), false),
        ("alloc_bytes_var", real(&|row| row.alloc.bytes_variance), false),
        ("alloc_objects", real(&|row| corrected(row.alloc.objects, row.alloc.objects_correction)), false),
        ("alloc_objects_var", real(&|row| row.alloc.objects_variance), false),
        ("inuse_samples", inuse_whole(|sums| sums.samples), true),
        ("inuse_sampled_bytes", inuse_whole(|sums| sums.sampled_bytes), true),
        ("inuse_zero_byte_samples", inuse_whole(|sums| sums.zero_byte_samples), true),
        ("inuse_offset_sum", inuse_whole(|sums| sums.offset_sum), true),
        ("inuse_smallest_bytes", inuse_whole(|sums| sums.smallest_bytes), true),
        ("inuse_largest_bytes", inuse_whole(|sums| sums.largest_bytes), true),
        ("inuse_bytes", inuse(|sums| sums.bytes), true),
        ("inuse_bytes_var", inuse(|sums| sums.bytes_variance), true),
        ("inuse_objects", inuse(|sums| sums.objects), true),
        ("inuse_objects_var", inuse(|sums| sums.objects_variance), true),
        ("at_exit_samples", at_exit_whole(|sums| sums.samples), true),
        ("at_exit_sampled_bytes", at_exit_whole(|sums| sums.sampled_bytes), true),
        ("at_exit_zero_byte_samples", at_exit_whole(|sums| sums.zero_byte_samples), true),
        ("at_exit_offset_sum", at_exit_whole(|sums| sums.offset_sum), true),
        ("at_exit_smallest_bytes", at_exit_whole(|sums| sums.smallest_bytes), true),
        ("at_exit_largest_bytes", at_exit_whole(|sums| sums.largest_bytes), true),
        ("at_exit_bytes", at_exit(|sums| sums.bytes), true),
        ("at_exit_bytes_var", at_exit(|sums| sums.bytes_variance), true),
        ("at_exit_objects", at_exit(|sums| sums.objects), true),
        ("at_exit_objects_var", at_exit(|sums| sums.objects_variance), true),
        // Of the whole process, the same in each of its rows.
        ("process", whole(&|row| row.process as u64), false),
        ("lost_samples", lost(|losses| losses.alloc.samples), false),
        ("lost_sampled_bytes", lost(|losses| losses.alloc.sampled_bytes), false),
        ("lost_interval_bytes", lost(|losses| losses.interval), false),
        ("losses_unbounded", is_lost(|losses| losses.unbounded), false),
        ("inuse_missing_samples", lost(|losses| losses.inuse_missing.samples), false),
        ("inuse_missing_sampled_bytes", lost(|losses| losses.inuse_missing.sampled_bytes), false),
        ("inuse_stale_samples", lost(|losses| losses.inuse_stale.samples), false),
        ("inuse_stale_sampled_bytes", lost(|losses| losses.inuse_stale.sampled_bytes), false),
        ("inuse_losses_unbounded", is_lost(|losses| losses.inuse_unbounded), false),
    ])
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
    use crate::profile::testing;
    use crate::profile::value::Value;

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
        for name in "host pid comm exe cgroup time duration_seconds interval_bytes criterion frames samples \
                     sampled_bytes alloc_bytes alloc_bytes_var alloc_objects alloc_objects_var inuse_bytes \
                     inuse_bytes_var inuse_objects inuse_objects_var started ended_apart at_exit_bytes at_exit_bytes_var \
                     at_exit_objects at_exit_objects_var"
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
        profile.live = false;
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
