//! A table for spreadsheets and data frames: one line per stack, with every value and the ends of its interval.

use std::io;

use indexmap::IndexMap;

use super::{FormatError, WriteOptions};
use crate::escape::escaped;
use crate::estimates::{Pool, intervals_used};
use crate::group::Groups;
use crate::intern::Interned;
use crate::model::{Lifetimes, Profile};
use crate::naming::frame_name;
use crate::round::largest_remainder;
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;
use heapbpf_statistics::survival;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let values = Value::shown_of(profile);
    let mut lines = lines(profile, options);
    let sort = options.value_of(profile)?;
    lines.sort_by(|a, b| b.pool.total(sort).total_cmp(&a.pool.total(sort)));
    let mut writer = csv::Writer::from_writer(out);
    let mut header = vec!["group".to_owned(), "stack".to_owned(), "incomplete".to_owned(), "samples".to_owned()];
    for value in values {
        header.extend([value.name().to_owned(), format!("{}_low", value.name()), format!("{}_high", value.name())]);
    }
    header.extend(["median_lifetime_seconds".to_owned(), "temporary".to_owned()]);
    writer.write_record(&header).map_err(into_format_error)?;
    let columns = values.iter().map(|&value| figures(profile, &lines, value, options.confidence));
    let columns: Vec<Vec<_>> = columns.collect();
    for (index, line) in lines.iter().enumerate() {
        let samples = line.pool.samples(Value::AllocSpace);
        let mut record = vec![
            line.group.clone(),
            line.stack.clone(),
            escaped(line.cut.unwrap_or("")).into_owned(),
            samples.to_string(),
        ];
        for column in &columns {
            // Empty: not known.
            let Some((estimate, figure)) = &column[index] else {
                record.extend([String::new(), String::new(), String::new()]);
                continue;
            };
            // Rounding may have moved the figure by up to one, out of a narrow interval.
            let low = estimate.low.map(|low| (low.round() as i64).min(*figure));
            let high = estimate.high.map(|high| (high.round() as i64).max(*figure));
            let end = |end: Option<i64>| end.map_or_else(String::new, |end| end.to_string());
            record.extend([figure.to_string(), end(low), end(high)]);
        }
        let lives = survival::pooled(&line.lifetimes);
        let median = lives.as_ref().and_then(|lives| lives.median_seconds);
        record.push(median.map_or_else(String::new, |seconds| seconds.to_string()));
        record.push(lives.map_or_else(String::new, |lives| lives.temporary.to_string()));
        writer.write_record(&record).map_err(into_format_error)?;
    }
    Ok(writer.flush()?)
}

/// The estimates of a value for each line, and whole numbers for them that add up to the rounded total, as in pprof.
/// `None`: not known.
fn figures(profile: &Profile, lines: &[Line], value: Value, confidence: f64) -> Vec<Option<(Estimate, i64)>> {
    let estimate =
        |line: &Line| line.pool.knows(profile, value).then(|| line.pool.estimate(profile, value, confidence));
    let estimates: Vec<Option<Estimate>> = lines.iter().map(estimate).collect();
    let known: Vec<f64> = estimates.iter().flatten().map(|estimate| estimate.estimate).collect();
    let mut rounded = largest_remainder(&known).into_iter();
    estimates.into_iter().map(|estimate| estimate.and_then(|estimate| Some((estimate, rounded.next()?)))).collect()
}

fn into_format_error(error: csv::Error) -> FormatError {
    match error.into_kind() {
        csv::ErrorKind::Io(error) => FormatError::Io(error),
        kind => FormatError::Unsupported { format: "csv", reason: format!("{kind:?}") },
    }
}

#[derive(Default)]
struct Line<'a> {
    group: String,
    /// Functions from the outermost to the innermost, separated by `;`.
    stack: String,
    cut: Option<&'a str>,
    pool: Pool,
    lifetimes: Vec<(&'a Lifetimes, f64)>,
}

fn lines<'a>(profile: &'a Profile, options: &WriteOptions) -> Vec<Line<'a>> {
    let interned = Interned::for_viewers(profile);
    let groups = Groups::new(profile, options.group_of(profile));
    let names: Vec<String> =
        interned.frames.iter().map(|frame| escaped(&frame_name(profile, frame)).replace(';', ":")).collect();
    let stacks: Vec<String> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let frames = interned.frame_ids(stack).iter().rev().map(|&frame| names[frame as usize].as_str());
            frames.collect::<Vec<_>>().join(";")
        })
        .collect();
    let mut lines: IndexMap<(String, &str, Option<&str>), Line<'a>> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let text = stacks[stack as usize].as_str();
        let (group, cut) = (groups.name(row), row.key.stack.cut.as_deref());
        let group = escaped(&group).into_owned();
        let line = lines.entry((group.clone(), text, cut));
        let line = line.or_insert_with(|| Line { group, stack: text.to_owned(), cut, ..Line::default() });
        line.pool.add(row);
        line.lifetimes.extend(row.lifetimes.as_ref().map(|lives| (lives, row.alloc.objects)));
    }
    let intervals = intervals_used(profile);
    lines.values_mut().for_each(|line| line.pool.allow_for(&intervals));
    lines.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn table(profile: &Profile) -> (Vec<String>, Vec<csv::StringRecord>) {
        let text = testing::written(profile, "csv");
        let mut reader = csv::Reader::from_reader(text.as_slice());
        let header = reader.headers().expect("a header").iter().map(str::to_owned).collect();
        (header, reader.records().collect::<Result<_, _>>().expect("records"))
    }

    fn column(header: &[String], name: &str) -> usize {
        header.iter().position(|column| column == name).unwrap_or_else(|| panic!("no column {name}: {header:?}"))
    }

    #[test]
    fn lines_add_up_to_the_totals_and_intervals_hold_their_estimates() {
        let mut profile = testing::small();
        profile.processes[0].comm = "a,\"b\"".into();
        // Fractions that would each be rounded down.
        profile.rows.iter_mut().for_each(|row| row.alloc.objects = row.alloc.objects.floor() + 0.4);
        let (header, records) = table(&profile);
        for value in Value::COLUMNS {
            let at = column(&header, value.name());
            let sum: i64 = records.iter().map(|record| record[at].parse::<i64>().expect("a whole number")).sum();
            assert_eq!(sum, Pool::whole(&profile).total(value).round() as i64, "{value:?}");
            for record in &records {
                let [estimate, low, high] = [0, 1, 2].map(|more| record[at + more].parse::<f64>());
                if let (Ok(estimate), Ok(low), Ok(high)) = (estimate, low, high) {
                    assert!(low <= estimate && estimate <= high, "{record:?}");
                }
            }
        }
        let stacks: Vec<&str> = records.iter().map(|record| &record[column(&header, "stack")]).collect();
        assert!(stacks.iter().any(|stack| stack.starts_with("main;handle(Request const&);parse_value")), "{stacks:?}");
        assert!(records.iter().any(|record| !record[column(&header, "incomplete")].is_empty()));
        // Names with separators and quotes stay in their cell.
        assert!(records.iter().any(|record| record[column(&header, "group")].contains("a,\"b\"")), "{records:?}");
    }

    #[test]
    fn what_is_not_known_is_empty() {
        let profile = testing::partly_followed();
        let (header, records) = table(&profile);
        let at = column(&header, "inuse_space");
        assert!(
            records.iter().any(|record| record[at].is_empty()) && records.iter().any(|record| !record[at].is_empty())
        );
    }
}
