//! DHAT: the file that Valgrind's viewer `dh_view.html` opens.
//!
//! Fields are those of file version 2 (Valgrind, `dhat/dh_main.c`). The viewer walks from the allocation outwards.

use std::io;

use indexmap::{IndexMap, IndexSet};
use serde::Serialize;

use super::{FormatError, WriteOptions};
use crate::escape::{JsonText, escaped};
use crate::group::Groups;
use crate::intern::Interned;
use crate::model::{Frame, Lifetimes, Profile};
use crate::naming::{base_name, frame_name};
use crate::report::subject;
use crate::round::largest_remainder;
use crate::value::Value;
use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    // The viewer expects a root in front.
    let mut table = IndexSet::from(["[root]".to_owned()]);
    let points = points(profile, options, &mut table);
    let microseconds = profile.header.duration.as_micros() as u64;
    let pid = match profile.processes.as_slice() {
        [process] => process.pid,
        _ => 0,
    };
    let has_peak = points.iter().any(|point| point.peak.objects != 0.0);
    let file = File {
        dhat_file_version: 2,
        mode: "heapbpf, estimated from samples",
        verb: "Allocated",
        bklt: profile.header.live,
        bkacc: false,
        tu: "µs",
        time_unit_per_million: "s",
        tuth: 500,
        cmd: subject(profile),
        pid,
        te: microseconds,
        // The time of the peak is not recorded; without a peak, the end is shown.
        tg: if has_peak { 0 } else { microseconds },
        pps: rounded(&points, has_peak, profile.header.live),
        ftbl: table.into_iter().collect(),
    };
    serde_json::to_writer(JsonText(out), &file)?;
    Ok(())
}

/// The field names are DHAT's.
#[derive(Serialize)]
struct File {
    #[serde(rename = "dhatFileVersion")]
    dhat_file_version: u32,
    mode: &'static str,
    verb: &'static str,
    bklt: bool,
    bkacc: bool,
    tu: &'static str,
    #[serde(rename = "Mtu")]
    time_unit_per_million: &'static str,
    tuth: u64,
    cmd: String,
    pid: u32,
    te: u64,
    tg: u64,
    pps: Vec<ProgramPoint>,
    ftbl: Vec<String>,
}

/// A program point: a stack with its figures.
#[derive(Serialize)]
struct ProgramPoint {
    /// Bytes and blocks allocated.
    tb: i64,
    tbk: i64,
    /// Absent if frees were not followed.
    #[serde(flatten)]
    lives: Option<Lives>,
    /// Frames, innermost first.
    fs: Vec<usize>,
}

/// Figures that need frees.
#[derive(Serialize)]
struct Lives {
    /// Sum of lifetimes, in time units.
    tl: i64,
    /// Largest known bytes and blocks in use: at the peak of the total, or at the end.
    mb: i64,
    mbk: i64,
    /// At the peak of the total.
    gb: i64,
    gbk: i64,
    /// At the end.
    eb: i64,
    ebk: i64,
}

#[derive(Default)]
struct Point<'a> {
    frames: Vec<usize>,
    alloc: SampleSums,
    end: SampleSums,
    peak: SampleSums,
    lifetimes: Vec<(&'a Lifetimes, f64)>,
}

/// `function (file:line)`, as DHAT writes frames.
fn text(profile: &Profile, frame: &Frame) -> String {
    let name = frame_name(profile, frame);
    let module = profile.module_of(frame);
    let text = match (&frame.file, frame.line, module) {
        (Some(file), Some(line), _) => format!("{name} ({}:{line})", base_name(file)),
        (Some(file), None, _) => format!("{name} ({})", base_name(file)),
        (None, _, Some(module)) if frame.function.is_some() => format!("{name} (in {})", module.path),
        _ => name.into_owned(),
    };
    escaped(&text).into_owned()
}

/// Each distinct stack of each group once. The viewer rejects duplicate stacks.
fn points<'a>(profile: &'a Profile, options: &WriteOptions, table: &mut IndexSet<String>) -> Vec<Point<'a>> {
    let interned = Interned::for_viewers(profile);
    let groups = Groups::new(profile, options.group_of(profile));
    let numbers: Vec<usize> = interned.frames.iter().map(|frame| table.insert_full(text(profile, frame)).0).collect();
    let mut points: IndexMap<Vec<usize>, Point<'a>> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let mut frames: Vec<usize> = interned.frame_ids(stack).iter().map(|&frame| numbers[frame as usize]).collect();
        if row.key.stack.cut.is_some() {
            frames.push(table.insert_full("[incomplete]".to_owned()).0);
        }
        let group = groups.name(row);
        if !group.is_empty() {
            frames.push(table.insert_full(escaped(&group).into_owned()).0);
        }
        let point = points.entry(frames);
        let point = point.or_insert_with_key(|frames| Point { frames: frames.clone(), ..Point::default() });
        point.alloc.add(&row.alloc);
        point.end.add(&row.inuse);
        point.end.add(&row.at_exit);
        if let Some(peak) = &row.peak {
            point.peak.add(peak);
        }
        point.lifetimes.extend(row.lifetimes.as_ref().map(|lifetimes| (lifetimes, row.alloc.objects)));
    }
    points.into_values().collect()
}

/// Points as whole numbers whose sums are the rounded totals.
fn rounded(points: &[Point], has_peak: bool, live: bool) -> Vec<ProgramPoint> {
    let column = |of: &dyn Fn(&Point) -> f64| largest_remainder(&points.iter().map(of).collect::<Vec<_>>());
    let objects = |sums: &SampleSums| Value::AllocObjects.estimate_of(sums);
    let both = |sums: fn(&Point) -> SampleSums| {
        [column(&|point| Value::AllocSpace.estimate_of(&sums(point))), column(&|point| objects(&sums(point)))]
    };
    let ([tb, tbk], [eb, ebk]) = (both(|point| point.alloc), both(|point| point.end));
    let [gb, gbk] = if has_peak { both(|point| point.peak) } else { [eb.clone(), ebk.clone()] };
    let tl = column(&|point| objects(&point.alloc) * mean_microseconds(&point.lifetimes));
    let lives = |index: usize| Lives {
        tl: tl[index],
        mb: gb[index].max(eb[index]),
        mbk: gbk[index].max(ebk[index]),
        gb: gb[index],
        gbk: gbk[index],
        eb: eb[index],
        ebk: ebk[index],
    };
    let point = |(index, point): (usize, &Point)| ProgramPoint {
        tb: tb[index],
        tbk: tbk[index],
        lives: live.then(|| lives(index)),
        fs: point.frames.clone(),
    };
    points.iter().enumerate().map(point).collect()
}

/// Mean lifetime in microseconds: the area under the survival curve up to its last step; what blocks that are still
/// alive do after it is not included (the restricted mean of Kaplan and Meier, 1958).
fn mean_microseconds(lifetimes: &[(&Lifetimes, f64)]) -> f64 {
    let Some(Lifetimes { survival, .. }) = survival::pooled(lifetimes) else { return 0.0 };
    let (mut area, mut since, mut alive) = (0.0, 0.0, 1.0);
    for (age, then) in survival {
        area += (age - since) * alive;
        (since, alive) = (age, then);
    }
    area * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn sum(file: &serde_json::Value, field: &str) -> i64 {
        file["pps"].as_array().expect("a list").iter().filter_map(|point| point[field].as_i64()).sum()
    }

    #[test]
    fn points_add_up_and_are_distinct() {
        for profile in [testing::small(), testing::large(300, 30), testing::ended_apart()] {
            let file = testing::json(&profile, "dhat");
            let total = |values: &[Value]| {
                let of = |value: &Value| profile.rows.iter().map(|row| value.of(row)).sum::<f64>();
                values.iter().map(of).sum::<f64>().round() as i64
            };
            assert_eq!(sum(&file, "tb"), total(&[Value::AllocSpace]));
            assert_eq!(sum(&file, "tbk"), total(&[Value::AllocObjects]));
            assert_eq!(sum(&file, "eb"), total(&[Value::InuseSpace, Value::AtExitSpace]));
            let points = file["pps"].as_array().expect("a list");
            let frames = file["ftbl"].as_array().expect("a list");
            let mut stacks: Vec<&serde_json::Value> = points.iter().map(|point| &point["fs"]).collect();
            let all = stacks.len();
            stacks.sort_by_key(|stack| stack.to_string());
            stacks.dedup();
            assert_eq!(stacks.len(), all, "the viewer refuses a stack that comes twice");
            for frame in stacks.iter().flat_map(|stack| stack.as_array().expect("a list")) {
                assert!(frame.as_u64().is_some_and(|frame| frame > 0 && frame < frames.len() as u64));
            }
        }
    }

    #[test]
    fn frames_are_written_as_dhat_does() {
        let file = testing::json(&testing::small(), "dhat");
        let frames: Vec<&str> = file["ftbl"].as_array().expect("a list").iter().filter_map(|it| it.as_str()).collect();
        for expected in ["[root]", "main (main.c:10)", "server (4242)", "[incomplete]"] {
            assert!(frames.contains(&expected), "{frames:?}");
        }
    }

    #[test]
    fn without_frees_there_are_totals_only() {
        let mut profile = testing::small();
        profile.header.live = false;
        let file = testing::json(&profile, "dhat");
        assert_eq!(file["bklt"], false);
        assert!(file["pps"].as_array().expect("a list").iter().all(|point| point.get("eb").is_none()));
    }

    #[test]
    fn the_mean_lifetime_is_the_area_below_the_curve() {
        let lifetimes = Lifetimes { survival: vec![(1.0, 0.5), (3.0, 0.0)], ..Lifetimes::default() };
        assert!((mean_microseconds(&[(&lifetimes, 1.0)]) - 2e6).abs() < 1.0);
        assert_eq!(mean_microseconds(&[]), 0.0);
    }
}
