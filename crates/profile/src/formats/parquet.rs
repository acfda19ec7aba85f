//! Parquet: rows for SQL engines. There is one row per process, stack and interval, with estimates and their variances,
//! so that `sum(alloc_bytes)` and `sqrt(sum(alloc_bytes_var))` are correct over any rows of any hosts.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedColumnWriter, SerializedFileWriter};
use parquet::schema::parser::parse_message_type;

use self::Values::{Flag, Real, Time, Whole};
use super::{FormatError, WriteOptions};
use crate::intern::Interned;
use crate::model::{Criterion, Header, Losses, Process, Profile};
use crate::naming::frame_name;
use heapbpf_audit::Hook;
use heapbpf_statistics::sums::SampleSums;

/// Size of the dictionary page: large enough for all distinct function names of a profile, so that each is written
/// once.
const DICTIONARY_BYTES: usize = 16 << 20;

/// Maximum number of rows in a row group.
const ROWS_OF_GROUP: usize = 1 << 20;

/// Number of rows passed to the library at a time.
const ROWS_AT_A_TIME: usize = 4096;

/// The Arrow schema of the same columns, in base64, as pyarrow's `schema.serialize()` returns it. It makes pandas and
/// other Arrow users read text as categories.
const ARROW_SCHEMA: &str = include_str!("arrow_schema.base64");

/// Prefix of the file's writer name: our name, before the version.
pub(crate) const CREATED_BY: &str = "heapbpf ";

pub(super) fn write(profile: &Profile, _: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let interned = Interned::new(profile);
    let table = Table::new(profile, &interned);
    // The writer needs a `Send` destination, which `out` is not.
    let mut file = Vec::new();
    table.write(&table.columns(), &mut file).map_err(|error| unsupported(&error))?;
    Ok(out.write_all(&file)?)
}

fn unsupported(error: &dyn std::error::Error) -> FormatError {
    FormatError::Unsupported { format: "parquet", reason: error.to_string() }
}

/// A row of the table: sums over all threads and allocator functions.
#[derive(Default)]
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
    let mut rows: IndexMap<(usize, u32, u64), TableRow> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let (process, interval) = (row.key.process, row.key.interval);
        let new = || TableRow { process, stack: Some(stack), interval, ..TableRow::default() };
        let sums = rows.entry((process, stack, interval)).or_insert_with(new);
        sums.alloc.add(&row.alloc);
        sums.inuse.add(&row.inuse);
        sums.at_exit.add(&row.at_exit);
    }
    let mut rows: Vec<TableRow> = rows.into_values().collect();
    let with_rows: HashSet<usize> = rows.iter().map(|row| row.process).collect();
    for (process, Process { losses, .. }) in profile.processes.iter().enumerate() {
        if !losses.is_none() && !with_rows.contains(&process) {
            let interval = losses.interval.max(profile.header.interval);
            rows.push(TableRow { process, interval, ..TableRow::default() });
        }
    }
    rows
}

/// Names of all columns.
pub(crate) fn columns() -> Vec<String> {
    let nothing = Profile::new(Header::new(0, Criterion::Bytes));
    let interned = Interned::new(&nothing);
    Table::new(&nothing, &interned).columns().into_iter().map(|column| column.name).collect()
}

/// A column of the table.
struct Column<'a> {
    name: String,
    may_be_null: bool,
    values: Values<'a>,
}

/// Returns the value of a row.
type Of<'a, T> = Box<dyn Fn(&TableRow) -> Option<T> + 'a>;

/// A value that every row has.
fn given<'t, T: 't>(of: impl Fn(&TableRow) -> T + 't) -> Of<'t, T> {
    Box::new(move |row| Some(of(row)))
}

/// The values of a column by row; `None` is NULL.
enum Values<'a> {
    Text(Of<'a, &'a str>),
    Whole(Of<'a, u64>),
    Real(Of<'a, f64>),
    Flag(Of<'a, bool>),
    Time(Of<'a, SystemTime>),
    /// The function names of a stack, innermost first.
    Frames,
}

/// The rows of the table. They are written column by column.
struct Table<'a> {
    profile: &'a Profile,
    interned: &'a Interned<'a>,
    rows: Vec<TableRow>,
    no_process: Process,
}

impl<'a> Table<'a> {
    fn new(profile: &'a Profile, interned: &'a Interned<'a>) -> Self {
        Self { profile, interned, rows: table_rows(profile, interned), no_process: Process::default() }
    }

    fn columns(&self) -> Vec<Column<'_>> {
        let mut columns = self.of_recording_and_process();
        columns.push(Column { name: "frames".into(), may_be_null: false, values: Values::Frames });
        columns.extend(self.of_stack());
        columns.extend(self.of_alloc());
        columns.extend(self.of_followed("inuse", |row| &row.inuse));
        columns.extend(self.of_followed("at_exit", |row| &row.at_exit));
        columns.extend(self.of_losses());
        columns
    }

    fn write(&self, columns: &[Column], file: &mut Vec<u8>) -> Result<(), ParquetError> {
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_dictionary_page_size_limit(DICTIONARY_BYTES)
            .set_created_by(format!("{CREATED_BY}{}", self.profile.header.version))
            .set_key_value_metadata(Some(vec![KeyValue::new("ARROW:schema".into(), ARROW_SCHEMA.trim().to_owned())]))
            .build();
        let schema: String = columns.iter().map(Column::schema).collect();
        let schema = parse_message_type(&format!("message arrow_schema {{ {schema} }}"))?;
        let names: Vec<ByteArray> =
            self.interned.frames.iter().map(|frame| (*frame_name(self.profile, frame)).into()).collect();
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties))?;
        for rows in self.rows.chunks(ROWS_OF_GROUP) {
            let mut group = writer.next_row_group()?;
            for column in columns {
                let Some(mut writer) = group.next_column()? else { break };
                for rows in rows.chunks(ROWS_AT_A_TIME) {
                    self.write_column(column, rows, &names, &mut writer)?;
                }
                writer.close()?;
            }
            group.close()?;
        }
        writer.close().map(|_| ())
    }

    fn write_column(
        &self,
        column: &Column,
        rows: &[TableRow],
        names: &[ByteArray],
        writer: &mut SerializedColumnWriter,
    ) -> Result<(), ParquetError> {
        let rows = rows.iter();
        let whole = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        match &column.values {
            Values::Text(of) => {
                // Consecutive rows mostly have the same text.
                let mut last = ("", ByteArray::from(""));
                let shared = rows.map(|row| {
                    let text = of(row)?;
                    if text != last.0 {
                        last = (text, text.into());
                    }
                    Some(last.1.clone())
                });
                column.write::<ByteArrayType>(shared, writer)
            }
            Whole(of) => column.write::<Int64Type>(rows.map(|row| of(row).map(whole)), writer),
            Real(of) => column.write::<DoubleType>(rows.map(of), writer),
            Flag(of) => column.write::<BoolType>(rows.map(of), writer),
            Time(of) => column.write::<Int64Type>(rows.map(|row| of(row).map(micros)), writer),
            Values::Frames => {
                let (mut values, mut defined, mut repeated) = (Vec::new(), Vec::new(), Vec::new());
                for row in rows {
                    let frames = row.stack.map_or(&[][..], |stack| self.interned.frame_ids(stack));
                    values.extend(frames.iter().map(|&frame| names[frame as usize].clone()));
                    // An empty list is one level that defines nothing.
                    defined.extend((0..frames.len().max(1)).map(|_| i16::from(!frames.is_empty())));
                    repeated.extend((0..frames.len().max(1)).map(|at| i16::from(at > 0)));
                }
                writer.typed::<ByteArrayType>().write_batch(&values, Some(&defined), Some(&repeated)).map(|_| ())
            }
        }
    }

    fn of_recording_and_process(&self) -> Vec<Column<'_>> {
        let header = &self.profile.header;
        let duration_seconds = header.duration.as_secs_f64();
        let columns = [
            ("host", self.texts(|_| &header.host)),
            ("pid", Whole(given(|row| self.process(row).pid.into()))),
            ("comm", self.texts(|row| &self.process(row).comm)),
            ("exe", self.texts(|row| &self.process(row).exe)),
            ("cgroup", self.texts(|row| &self.process(row).cgroup)),
            ("container", self.texts(|row| &self.process(row).placement.container)),
            ("pod", self.texts(|row| &self.process(row).placement.pod)),
            ("unit", self.texts(|row| &self.process(row).placement.unit)),
            ("time", Time(given(move |_| header.time))),
            ("started", Time(given(move |_| header.started))),
            ("duration_seconds", Real(given(move |_| duration_seconds))),
            ("ended", Flag(given(|row| self.process(row).ended))),
            ("interval_bytes", Whole(given(|row| row.interval))),
            ("criterion", self.texts(|_| header.criterion.name())),
        ];
        let since = |row: &TableRow| self.process(row).inuse_since.filter(|_| self.profile.knows_inuse(row.process));
        let hook = |row: &TableRow| self.process(row).hook.map(Hook::name);
        let may_be_null = [("inuse_since", Time(Box::new(since))), ("hook", Values::Text(Box::new(hook)))];
        named(columns, false).chain(named(may_be_null, true)).collect()
    }

    fn of_stack(&self) -> Vec<Column<'_>> {
        let stacks = &self.interned.stacks;
        let header = &self.profile.header;
        let complete = |row: &TableRow| row.stack.is_none_or(|stack| stacks[stack as usize].stack.cut.is_none());
        let source = |row: &TableRow| row.stack.and_then(|stack| stacks[stack as usize].stack.source());
        let columns = [
            ("complete", Flag(given(complete))),
            ("time_windows", Flag(given(|_| header.time_windows))),
            ("ended_apart", Flag(given(|_| header.ended_apart))),
        ];
        named(columns, false).chain(named([("source", Values::Text(Box::new(source)))], true)).collect()
    }

    fn of_alloc(&self) -> Vec<Column<'_>> {
        // Samples from time windows are biased without their correction; other corrections are for display only.
        let time_windows = self.profile.header.time_windows;
        let corrected = move |raw: f64, correction: f64| if time_windows { raw + correction } else { raw };
        let columns = [
            ("samples", Whole(given(|row| row.alloc.samples))),
            ("sampled_bytes", Whole(given(|row| row.alloc.sampled_bytes))),
            ("zero_byte_samples", Whole(given(|row| row.alloc.zero_byte_samples))),
            ("offset_sum", Whole(given(|row| row.alloc.offset_sum))),
            ("smallest_bytes", Whole(given(|row| row.alloc.smallest_bytes))),
            ("largest_bytes", Whole(given(|row| row.alloc.largest_bytes))),
            ("alloc_bytes", Real(given(move |row| corrected(row.alloc.bytes, row.alloc.bytes_correction)))),
            ("alloc_bytes_var", Real(given(|row| row.alloc.bytes_variance))),
            ("alloc_objects", Real(given(move |row| corrected(row.alloc.objects, row.alloc.objects_correction)))),
            ("alloc_objects_var", Real(given(|row| row.alloc.objects_variance))),
        ];
        named(columns, false).collect()
    }

    /// The columns of sums that need frees. Without frees the values are unknown: NULL, not 0.
    fn of_followed(&self, prefix: &str, sums: fn(&TableRow) -> &SampleSums) -> Vec<Column<'_>> {
        let live = move |row: &TableRow| self.profile.knows_inuse(row.process);
        let whole = |number: fn(&SampleSums) -> u64| Whole(Box::new(move |row| live(row).then(|| number(sums(row)))));
        let real = |number: fn(&SampleSums) -> f64| Real(Box::new(move |row| live(row).then(|| number(sums(row)))));
        let offsets = move |row: &TableRow| sums(row).known_offset_sum().filter(|_| live(row));
        let columns = [
            ("samples", whole(|sums| sums.samples)),
            ("sampled_bytes", whole(|sums| sums.sampled_bytes)),
            ("zero_byte_samples", whole(|sums| sums.zero_byte_samples)),
            ("offset_sum", Whole(Box::new(offsets))),
            ("smallest_bytes", whole(|sums| sums.smallest_bytes)),
            ("largest_bytes", whole(|sums| sums.largest_bytes)),
            ("bytes", real(|sums| sums.bytes)),
            ("bytes_var", real(|sums| sums.bytes_variance)),
            ("objects", real(|sums| sums.objects)),
            ("objects_var", real(|sums| sums.objects_variance)),
        ];
        let columns = named(columns, true);
        columns.map(|column| Column { name: format!("{prefix}_{}", column.name), ..column }).collect()
    }

    /// Columns of losses. They are figures of the process, repeated in each of its rows.
    fn of_losses(&self) -> Vec<Column<'_>> {
        let lost = |number: fn(&Losses) -> u64| Whole(given(move |row| number(&self.process(row).losses)));
        let is_lost = |flag: fn(&Losses) -> bool| Flag(given(move |row| flag(&self.process(row).losses)));
        let columns = [
            ("process", Whole(given(|row| row.process as u64))),
            ("lost_samples", lost(|losses| losses.alloc.samples)),
            ("lost_sampled_bytes", lost(|losses| losses.alloc.sampled_bytes)),
            ("lost_interval_bytes", lost(|losses| losses.interval)),
            // The reason is not stored. A reader has no more bounds than the writer had.
            (
                "losses_unbounded",
                Flag(given(|row| self.process(row).losses.unbounded || self.process(row).was_unseen())),
            ),
            ("inuse_missing_samples", lost(|losses| losses.inuse_missing.samples)),
            ("inuse_missing_sampled_bytes", lost(|losses| losses.inuse_missing.sampled_bytes)),
            ("inuse_stale_samples", lost(|losses| losses.inuse_stale.samples)),
            ("inuse_stale_sampled_bytes", lost(|losses| losses.inuse_stale.sampled_bytes)),
            ("inuse_losses_unbounded", is_lost(|losses| losses.inuse_unbounded)),
            ("weights_unproven", is_lost(|losses| losses.weights_unproven)),
        ];
        named(columns, false).collect()
    }

    fn process(&self, row: &TableRow) -> &Process {
        self.profile.processes.get(row.process).unwrap_or(&self.no_process)
    }

    fn texts<'t>(&'t self, text: impl Fn(&TableRow) -> &'t str + 't) -> Values<'t> {
        Values::Text(Box::new(move |row| Some(text(row))))
    }
}

impl Column<'_> {
    /// The column in Parquet's schema language.
    fn schema(&self) -> String {
        let (name, repetition) = (&self.name, if self.may_be_null { "optional" } else { "required" });
        match self.values {
            Values::Text(_) => format!("{repetition} binary {name} (STRING); "),
            Whole(_) => format!("{repetition} int64 {name}; "),
            Real(_) => format!("{repetition} double {name}; "),
            Flag(_) => format!("{repetition} boolean {name}; "),
            Time(_) => format!("{repetition} int64 {name} (TIMESTAMP(MICROS,true)); "),
            Values::Frames => {
                format!(
                    "{repetition} group {name} (LIST) {{ repeated group list {{ required binary item (STRING); }} }} "
                )
            }
        }
    }

    fn write<T: DataType>(
        &self,
        values: impl Iterator<Item = Option<T::T>>,
        writer: &mut SerializedColumnWriter,
    ) -> Result<(), ParquetError> {
        let mut defined = Vec::new();
        let values: Vec<T::T> = values.inspect(|value| defined.push(i16::from(value.is_some()))).flatten().collect();
        let defined = self.may_be_null.then_some(&defined[..]);
        writer.typed::<T>().write_batch(&values, defined, None).map(|_| ())
    }
}

fn named<'a, const N: usize>(columns: [(&str, Values<'a>); N], may_be_null: bool) -> impl Iterator<Item = Column<'a>> {
    columns.map(|(name, values)| Column { name: name.to_owned(), may_be_null, values }).into_iter()
}

/// Microseconds since 1970.
fn micros(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use parquet::file::reader::{FileReader as _, SerializedFileReader};

    use super::*;
    use crate::testing;
    use crate::value::Value;

    /// The table with an extra column of ones, which replaces a column of the same name.
    pub(crate) fn with_column(profile: &Profile, name: &str) -> Vec<u8> {
        let interned = Interned::new(profile);
        let table = Table::new(profile, &interned);
        let mut columns = table.columns();
        columns.retain(|column| column.name != name);
        columns.extend(named([(name, Values::Whole(Box::new(|_| Some(1))))], true));
        let mut file = Vec::new();
        table.write(&columns, &mut file).expect("memory");
        file
    }

    fn column(profile: &Profile, name: &str) -> Vec<Option<f64>> {
        let interned = Interned::new(profile);
        let table = Table::new(profile, &interned);
        let column = table.columns().into_iter().find(|column| column.name == name).expect("a column");
        let Values::Real(of) = column.values else { panic!("{name} is no number") };
        table.rows.iter().map(of).collect()
    }

    /// Engines skip files and row groups in which a statement's values cannot be.
    #[test]
    fn every_column_has_its_smallest_and_its_largest_value() {
        let profile = testing::small();
        let mut file = Vec::new();
        write(&profile, &WriteOptions::default(), &mut file).expect("memory");
        let file = SerializedFileReader::new(bytes::Bytes::from(file)).expect("a table");
        let [group] = file.metadata().row_groups() else { panic!("it has few rows") };
        let range = |name: &str| {
            let column = group.columns().iter().find(|column| column.column_path().parts()[0] == name);
            let statistics = column.and_then(|column| column.statistics()).unwrap_or_else(|| panic!("none of {name}"));
            let is_null = statistics.null_count_opt() == Some(group.num_rows() as u64);
            let range = statistics.min_bytes_opt().zip(statistics.max_bytes_opt());
            assert!(is_null || range.is_some() && statistics.min_is_exact() && statistics.max_is_exact(), "{name}");
            range.map(|(least, most)| [least.to_vec(), most.to_vec()])
        };
        columns().iter().for_each(|name| drop(range(name)));
        assert_eq!(range("host"), Some([profile.header.host.as_bytes(); 2].map(<[u8]>::to_vec)));
        assert_eq!(range("time"), Some([micros(profile.header.time).to_le_bytes(); 2].map(Vec::from)));
        let bytes: Vec<f64> = column(&profile, "alloc_bytes").into_iter().flatten().collect();
        let least_and_most = [f64::min, f64::max].map(|of| bytes.iter().copied().reduce(of).expect("it has rows"));
        assert_eq!(range("alloc_bytes"), Some(least_and_most.map(|bytes| bytes.to_le_bytes().to_vec())));
    }

    #[test]
    fn columns_are_the_contracts_and_add_up() {
        let profile = testing::small();
        let names = columns().join(" ");
        for name in "host pid comm exe cgroup container pod unit time duration_seconds interval_bytes criterion frames samples \
                     sampled_bytes alloc_bytes alloc_bytes_var alloc_objects alloc_objects_var inuse_bytes \
                     inuse_bytes_var inuse_objects inuse_objects_var started ended_apart at_exit_bytes at_exit_bytes_var \
                     at_exit_objects at_exit_objects_var hook"
            .split_whitespace()
        {
            assert!(names.split(' ').any(|column| column == name), "{name} in {names}");
        }
        assert_eq!(column(&profile, "alloc_bytes").len(), 5, "rows that differ by function only are one");
        for (value, name) in
            Value::COLUMNS.into_iter().zip(["alloc_objects", "alloc_bytes", "inuse_objects", "inuse_bytes"])
        {
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            let sum: f64 = column(&profile, name).into_iter().flatten().sum();
            assert!((sum - total).abs() < 1e-9 * total, "{name}");
        }
    }

    #[test]
    fn without_frees_in_use_is_null() {
        let mut profile = testing::small();
        profile.header.live = false;
        assert!(column(&profile, "inuse_bytes").iter().all(Option::is_none));
        assert!(column(&profile, "alloc_bytes").iter().all(Option::is_some));
        let known: Vec<bool> = column(&testing::partly_followed(), "inuse_bytes").iter().map(Option::is_some).collect();
        assert_eq!(known, [true, true, true, false, false]);
    }

    #[test]
    fn a_file_is_written_even_of_nothing() {
        let mut profile = testing::small();
        for rows in [6, 0] {
            profile.rows.truncate(rows);
            let mut out = Vec::new();
            write(&profile, &WriteOptions::default(), &mut out).expect("memory");
            assert!(out.starts_with(b"PAR1") && out.ends_with(b"PAR1"));
        }
    }

    #[test]
    fn the_arrow_schema_names_the_columns() {
        const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let bits = ARROW_SCHEMA.trim().trim_end_matches('=').chars().map(|digit| DIGITS.find(digit).expect("a digit"));
        let bits: Vec<usize> = bits.collect();
        let bytes = bits.chunks(4).flat_map(|four| {
            let number = four.iter().fold(0, |number, digit| number << 6 | digit) << (6 * (4 - four.len()));
            [(number >> 16) as u8, (number >> 8) as u8, number as u8]
        });
        let schema = String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned();
        for name in columns() {
            assert!(schema.contains(&format!("{name}\0")), "{name}: what the constant says makes it anew");
        }
    }
}
