//! Memory that ended processes held at exit, and the time of the figures, in every format that can store them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message as _;

use super::{WriteOptions, by_name};
use crate::estimates::Pool;
use crate::model::{Profile, Unread};
use crate::proto::otlp;
use crate::read::{ContentError, parse};
use crate::report::{ReportOptions, report};
use crate::testing::{self, written};
use crate::value::Value;
use heapbpf_statistics::sums::SampleSums;

/// The values that are always recorded, without those of where blocks are.
const RECORDED: [Value; 6] = *Value::ALL.first_chunk().expect("six and two");

/// Their names in JSON, in the same order.
const FIGURES: [&str; 6] =
    ["alloc_objects", "alloc_bytes", "inuse_objects", "inuse_bytes", "at_exit_objects", "at_exit_bytes"];

fn json(profile: &Profile) -> serde_json::Value {
    testing::json(profile, "json")
}

fn total(profile: &Profile, value: Value) -> f64 {
    profile.rows.iter().map(|row| value.of(row)).sum()
}

fn of_process(profile: &Profile, process: usize) -> Pool {
    Pool::of(profile.rows.iter().filter(|row| row.key.process == process))
}

/// Profiles with memory held at exit, without any, with such memory counted as in use, and with unknown figures for the
/// ended process.
fn profiles() -> [Profile; 4] {
    let mut nothing = testing::ended_apart();
    nothing.rows.iter_mut().for_each(|row| row.at_exit = SampleSums::default());
    let mut unknown = testing::partly_followed();
    unknown.header.ended_apart = true;
    [testing::ended_apart(), nothing, testing::small(), unknown]
}

#[test]
fn json_has_the_time_of_its_figures() {
    let share = json(&testing::partly_read())["unread"]["share"].as_f64();
    assert_eq!(share, Some(0.012));
    assert!(json(&testing::small()).get("unread").is_none());
    assert_eq!(json(&testing::ended_apart())["time"], "2023-11-14T22:13:49.250000000Z");
}

#[test]
fn parquet_gives_sums_and_times_back() {
    for profile in profiles() {
        let back = parse(&written(&profile, "parquet")).expect("its own output");
        for process in 0..2 {
            let (is, was) = (of_process(&back, process), of_process(&profile, process));
            for value in RECORDED {
                assert!((is.total(value) - was.total(value)).abs() <= 1e-9 * was.total(value), "{}", value.name());
                assert!((is.variance(value) - was.variance(value)).abs() <= 1e-9 * was.variance(value));
                assert_eq!(
                    (is.samples(value), is.sampled_bytes(value)),
                    (was.samples(value), was.sampled_bytes(value))
                );
            }
        }
        let in_microseconds = |time: SystemTime| {
            let nanoseconds = time.duration_since(UNIX_EPOCH).expect("later").subsec_nanos();
            time - Duration::from_nanos(u64::from(nanoseconds % 1_000))
        };
        assert_eq!(
            (back.header.started, back.header.ended_apart),
            (in_microseconds(profile.header.started), profile.header.ended_apart)
        );
        assert_eq!(back.header.time, in_microseconds(profile.header.time));
    }
}

#[test]
fn pprof_gives_rounded_figures_back() {
    for profile in profiles().into_iter().chain([testing::partly_read()]) {
        let back = parse(&written(&profile, "pprof")).expect("its own output");
        for value in RECORDED {
            assert_eq!(total(&back, value), total(&profile, value).round(), "{}", value.name());
        }
        assert_eq!(of_process(&back, 0).total(Value::AtExitSpace), 0.0);
        assert_eq!(
            (back.header.time, back.header.unread, back.header.ended_apart),
            (profile.header.time, profile.header.unread, profile.header.ended_apart)
        );
        assert_eq!(back.notes, profile.notes, "what is read back is no remark");
    }
    let back = parse(&written(&testing::ended_apart(), "pprof")).expect("its own output");
    assert_eq!(back.processes.iter().map(|process| process.ended).collect::<Vec<_>>(), [false, true]);
    let text = report(&back, &ReportOptions { width: 140, ..ReportOptions::default() });
    let of_ended = text.lines().find(|line| line.contains("(4300) ended")).expect("a process that ended");
    assert!(of_ended.contains("5.02 MiB"), "{text}");
}

/// Stacks and processes of JSON add up to the totals. Figures at exit are exactly zero for processes that have not
/// ended.
#[test]
fn figures_at_exit_add_up_and_the_living_have_none() {
    for profile in profiles() {
        let value = json(&profile);
        for name in FIGURES {
            let of = |value: &serde_json::Value| value[name]["estimate"].as_f64().unwrap_or(0.0);
            let sum = |list: &str| value[list].as_array().expect("a list").iter().map(of).sum::<f64>();
            let whole = of(&value["totals"]);
            for list in ["stacks", "processes"] {
                assert!((sum(list) - whole).abs() <= 1e-9 * whole, "{name} {list}");
            }
        }
        for figure in [&value["processes"][0], &value["stacks"][0]].map(|of| &of["at_exit_bytes"]) {
            assert_eq!((figure["low"].as_f64(), figure["high"].as_f64()), (Some(0.0), Some(0.0)));
            assert_eq!(figure["guaranteed"]["high"].as_f64(), Some(0.0));
        }
    }
    let [held, nothing, in_use, unknown] = profiles().map(|profile| json(&profile)["totals"]["at_exit_bytes"].clone());
    assert!(held["low"].as_f64() < held["estimate"].as_f64() && held["estimate"].as_f64() < held["high"].as_f64());
    assert!(held["low"].as_f64() > Some(0.0) && held["guaranteed"]["high"].as_f64() > held["estimate"].as_f64());
    assert!(nothing["high"].as_f64() > Some(0.0), "a process ended, and what it held may have had no sample");
    assert_eq!(in_use["high"].as_f64(), Some(0.0));
    assert!(unknown["reason"].as_str().is_some_and(|reason| reason.contains("without the processes")));
    let of_unknown = json(&profiles()[3])["processes"][1]["at_exit_bytes"].clone();
    assert!(of_unknown["estimate"].is_null() && of_unknown["reason"].is_string());
}

/// Seeded: profiles of 400 stacks, each of which holds some or none of its samples at exit. In every format that is
/// read back, the rows add up to the totals, and rounded rows to the rounded totals.
#[test]
fn rows_of_any_mix_add_up() {
    for seed in 1..=8 {
        let mut state = sampler_ebpf::rng::seed(seed, 0);
        let mut profile = testing::large(400, 4);
        profile.header.ended_apart = true;
        for row in profile.rows.iter_mut().filter(|row| row.key.process == 1) {
            let held = sampler_ebpf::rng::next(&mut state) % (2 * row.inuse.samples + 1);
            let size = row.inuse.largest_bytes.max(1);
            row.at_exit = testing::sums(held.saturating_sub(row.inuse.samples), size, row.key.interval);
            row.inuse = SampleSums::default();
        }
        let expected = RECORDED.map(|value| total(&profile, value));
        let near =
            |found: [f64; 6]| found.iter().zip(expected).all(|(found, value)| (found - value).abs() <= 1e-9 * value);
        for format in ["json", "parquet"] {
            let back = parse(&written(&profile, format)).expect("its own output");
            assert!(near(RECORDED.map(|value| total(&back, value))), "{format} {seed}");
        }
        let back = parse(&written(&profile, "pprof")).expect("its own output");
        assert_eq!(RECORDED.map(|value| total(&back, value)), expected.map(f64::round), "{seed}");
        let json = json(&profile);
        assert!(near(FIGURES.map(|name| json["totals"][name]["estimate"].as_f64().expect("a figure"))), "{seed}");
    }
}

#[test]
fn viewers_show_what_is_in_use_by_the_living_and_what_was_held_beside_it() {
    let profile = testing::ended_apart();
    let held = total(&profile, Value::AtExitSpace).round() as i64;
    let living = of_process(&profile, 0).total(Value::InuseSpace).round() as i64;
    assert!(held > 0 && total(&profile, Value::InuseSpace).round() as i64 == living);
    let folded = |value| {
        let mut text = Vec::new();
        let options = WriteOptions { value, ..WriteOptions::default() };
        by_name("folded").expect("a format").write(&profile, &options, &mut text).expect("memory");
        let text = String::from_utf8(text).expect("text");
        let values =
            text.lines().map(|line| line.rsplit(' ').next().expect("a value").parse::<i64>().expect("a number"));
        (values.sum::<i64>(), text.contains("server (4242)"), text.contains("(4300)"))
    };
    assert_eq!(folded(None), (living, true, false));
    assert_eq!(folded(Some(Value::AtExitSpace)), (held, false, true));
    let speedscope = testing::json(&profile, "speedscope");
    let ends = speedscope["profiles"].as_array().expect("a list").iter().map(|one| one["endValue"].as_i64());
    let expected = RECORDED.map(|value| Some(total(&profile, value).round() as i64));
    assert_eq!(ends.collect::<Vec<_>>(), expected);
    assert!(testing::text(&profile, "html").contains("bytes held at exit"));
    assert!(!testing::text(&testing::small(), "html").contains("held at exit"));
}

#[test]
fn opentelemetry_has_profiles_at_exit_of_ended_processes() {
    let profile = testing::ended_apart();
    let data = otlp::ProfilesData::decode(written(&profile, "otlp").as_slice()).expect("its own output");
    let dictionary = data.dictionary.expect("a dictionary");
    let kinds: Vec<Vec<(&str, i64)>> = data
        .resource_profiles
        .iter()
        .map(|resource| {
            let of = |one: &otlp::Profile| {
                let kind = one.sample_type.expect("a type").type_strindex;
                let sum = one.samples.iter().flat_map(|sample| &sample.values).sum();
                (dictionary.string_table[kind as usize].as_str(), sum)
            };
            resource.scope_profiles[0].profiles.iter().map(of).collect()
        })
        .collect();
    assert_eq!(kinds[0].len(), 4, "{kinds:?}");
    assert!(kinds[0].iter().all(|(kind, _)| !kind.starts_with("at_exit")));
    let held = |value: Value| (value.name(), total(&profile, value).round() as i64);
    assert!(
        kinds[1].contains(&held(Value::AtExitSpace)) && kinds[1].contains(&held(Value::AtExitObjects)),
        "{kinds:?}"
    );
    assert!(kinds[1].contains(&("inuse_space", 0)));
}

/// Formats with one heap per process cannot store figures at exit; an ended process has nothing in use there.
#[test]
fn heaps_of_ended_processes_are_empty_where_there_is_no_place() {
    let profile = testing::ended_apart();
    let heap = parse(&written(&profile.only_process(1), "heap_v2")).expect("its own output");
    assert_eq!((total(&heap, Value::InuseSpace), total(&heap, Value::AtExitSpace)), (0.0, 0.0));
    assert!((total(&heap, Value::AllocSpace) - of_process(&profile, 1).total(Value::AllocSpace)).abs() <= 1.0);
}

#[test]
fn hostile_values_are_refused_or_bounded() {
    let with = |change: fn(&mut serde_json::Value)| {
        let mut value = json(&testing::ended_apart());
        change(&mut value);
        parse(value.to_string().as_bytes())
    };
    assert!(matches!(with(|value| value["time"] = "yesterday".into()), Err(ContentError::Damaged { .. })));
    let more = with(|value| value["unread"] = serde_json::json!({"records": 9, "of": 3})).expect("bounded");
    assert_eq!(more.header.unread, Some(Unread { records: 3, of: 3 }));
    assert!(with(|value| value["unread"]["records"] = (-1).into()).is_err());
    let many = with(|value| value["stacks"][4]["at_exit_samples"] = u64::MAX.into());
    assert!(matches!(many, Err(ContentError::TooLarge(_))));
    let unknown = with(|value| value["processes"][1]["live"] = false.into()).expect("not known");
    assert_eq!(total(&unknown, Value::AtExitSpace), 0.0);
    // The duration is so long that the end of the recording overflows.
    let long = with(|value| {
        value["duration_seconds"] = 1e15.into();
        value.as_object_mut().expect("an object").remove("time");
    });
    let again = parse(&written(&long.expect("readable"), "json")).expect("its own output");
    assert_eq!(json(&again)["time"], "9999-12-31T23:59:59.000000000Z");
    let mut message = super::encode_pprof(&testing::ended_apart());
    let text = message.string_table.clone();
    for sample in &mut message.sample {
        let labels = sample.label.iter_mut().filter(|label| text[label.key as usize].starts_with("at_exit"));
        labels.for_each(|label| label.num = -label.num);
    }
    let back = parse(&message.encode_to_vec()).expect("readable");
    assert_eq!(total(&back, Value::AtExitSpace), 0.0);
}
