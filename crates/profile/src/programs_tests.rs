use super::*;
use crate::estimates::{Pool, exact};
use crate::formats::{self, WriteOptions};
use crate::group::GroupBy;
use crate::model::LossBound;
use crate::value::Value;
use crate::{merge, read, testing};

/// Four workers of one program with equal stacks, each with its code mapped elsewhere, and another program.
fn workers() -> Profile {
    let mut profile = testing::small();
    let (server, other) = (profile.processes[0].clone(), profile.processes[1].clone());
    let own: Vec<Row> = profile.rows.iter().filter(|row| row.key.process == 0).cloned().collect();
    let others: Vec<Row> = profile.rows.iter().filter(|row| row.key.process == 1).cloned().collect();
    profile.processes.clear();
    profile.rows.clear();
    for worker in 0..4u32 {
        let losses = crate::model::Losses {
            alloc: LossBound { samples: 1, sampled_bytes: 100 },
            interval: 524_288,
            ..Default::default()
        };
        profile.processes.push(Process { pid: 100 + worker, losses, ..server.clone() });
        // Only the second worker has the last stack.
        for row in own.iter().filter(|row| worker == 1 || row.alloc.samples != 1) {
            let mut stack = Stack::clone(&row.key.stack);
            for frame in stack.frames.iter_mut().map(Arc::make_mut) {
                frame.address += u64::from(worker) << 40;
            }
            let mut row = row.clone().with_process(worker as usize);
            row.key.stack = Arc::new(stack);
            profile.rows.push(row);
        }
    }
    profile.processes.push(other);
    profile.rows.extend(others.into_iter().map(|row| row.with_process(4)));
    profile
}

fn estimates(profile: &Profile) -> Vec<String> {
    Value::ALL.map(|value| format!("{:?}", Pool::whole(profile).estimate(profile, value, 0.95))).to_vec()
}

fn close(one: &Profile, other: &Profile) {
    for value in Value::ALL {
        let [a, b] = [one, other].map(|profile| Pool::whole(profile).estimate(profile, value, 0.95));
        for (a, b) in [(Some(a.estimate), Some(b.estimate)), (a.low, b.low), (a.high, b.high)] {
            let (a, b) = (a.unwrap_or(-1.0), b.unwrap_or(-1.0));
            assert!((a - b).abs() <= 1e-9 * a.abs().max(1.0), "{}: {a} {b}", value.name());
        }
        assert_eq!(exact(one, None, value), exact(other, None, value));
    }
}

#[test]
fn equal_stacks_of_a_program_become_one_and_every_sum_stays() {
    let profile = workers();
    let together = put_together(&profile, false);
    assert_eq!((together.processes.len(), together.number_of_processes()), (2, 5));
    assert_eq!((together.rows.len(), profile.rows.len()), (6, 15));
    close(&together, &profile);
    let of_two = together.rows.iter().filter(|row| row.key.process == 0).map(|row| row.member);
    assert_eq!(of_two.collect::<Vec<_>>(), [None, None, None, Some(1)]);
    assert_eq!(together.processes[0].coverage, 1.0);
    assert_eq!(together.processes[0].losses.alloc.samples, 4);
    // A second time, nothing changes.
    let again = put_together(&together, false);
    assert_eq!((again.rows.len(), estimates(&again)), (6, estimates(&together)));
}

#[test]
fn each_process_keeps_its_totals() {
    let profile = workers();
    let apart = by_process(&profile).into_owned();
    assert_eq!(apart.rows.len(), profile.rows.len(), "nothing was put together");
    let apart = by_process(&put_together(&profile, false)).into_owned();
    assert_eq!(apart.processes.len(), 5);
    for process in 0..5 {
        let of = |profile: &Profile| {
            let rows: Vec<Row> = profile.rows.iter().filter(|row| row.key.process == process).cloned().collect();
            Value::ALL.map(|value| Pool::of(&rows).estimate(profile, value, 0.95).high.map(|high| high.round()))
        };
        assert_eq!(of(&apart), of(&profile), "{process}");
    }
}

#[test]
fn what_cannot_be_added_stays_apart() {
    let mut profile = workers();
    profile.processes[1].ended = true;
    profile.processes[2].inuse_unknown = true;
    profile.processes[3].cgroup = "/elsewhere".into();
    let names = |profile: &Profile| profile.processes.iter().map(Process::count).collect::<Vec<_>>();
    assert_eq!(names(&put_together(&profile, false)), [2, 1, 1, 1]);
    assert_eq!(names(&put_together(&profile, true)), [1, 1, 1, 1, 1]);
    close(&put_together(&profile, false), &profile);
    let mut later = workers();
    let before = put_together(&later, false).processes.len();
    later.processes[1].inuse_since = Some(later.header.started);
    assert_eq!(put_together(&later, false).processes.len(), before + 1, "blocks of different times");
}

#[test]
fn json_keeps_every_process_and_a_stack_its_process_if_it_has_one() {
    let profile = workers();
    let write = |profile: &Profile, group_by| {
        let mut file = Vec::new();
        let options = WriteOptions { group_by, ..WriteOptions::default() };
        formats::by_name("json").expect("built").write(profile, &options, &mut file).expect("memory");
        file
    };
    let file = write(&profile, None);
    let json: serde_json::Value = serde_json::from_slice(&file).expect("JSON");
    let pids =
        |key: &str| json[key].as_array().expect("a list").iter().map(|it| it["pid"].as_u64()).collect::<Vec<_>>();
    assert_eq!(pids("processes"), [100, 101, 102, 103, 4300].map(Some));
    assert_eq!(pids("stacks"), [None, None, None, Some(101), Some(4300), Some(4300)]);
    let figures = |process: usize| json["processes"][process]["alloc_bytes"]["estimate"].as_f64().expect("a figure");
    assert!(figures(1) > figures(0) && figures(0) == figures(2));
    let back = read::parse(&file).expect("a profile");
    close(&back, &profile);
    assert_eq!((back.processes.len(), back.number_of_processes()), (2, 5));
    assert_eq!(write(&back, None), file, "it is written as it was read");
    let merged = merge::merge(vec![back, profile.clone()]).expect("the same criterion");
    assert_eq!(merged.number_of_processes(), 10);
    let each: serde_json::Value = serde_json::from_slice(&write(&profile, Some(GroupBy::Process))).expect("JSON");
    assert_eq!(each["stacks"].as_array().expect("a list").len(), 15);
    assert!(each["stacks"].as_array().expect("a list").iter().all(|stack| stack["pid"].is_u64()));
}

#[test]
fn compressed_json_is_a_format_and_is_read() {
    let profile = workers();
    let format = formats::by_extension(std::path::Path::new("a.json.gz")).expect("known");
    let file = crate::testing::written(&profile, format.name());
    assert!(file.starts_with(&[0x1f, 0x8b]));
    close(&read::parse(&file).expect("a profile"), &profile);
}

#[test]
fn lost_samples_of_a_program_are_one_row() {
    let mut profile = workers();
    crate::lost_samples::add_rows(&mut profile);
    let together = put_together(&profile, false);
    assert_eq!(together.rows.iter().filter(|row| row.is_of_lost_samples()).count(), 1);
    close(&together, &profile);
    close(&by_process(&together), &profile);
}
