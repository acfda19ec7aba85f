//! Tests of the pprof writer against the message itself; `go tool pprof` reads it in `tests/`.

use std::sync::Arc;

use super::*;
use crate::testing;

fn text(profile: &proto::Profile, id: i64) -> &str {
    &profile.string_table[id as usize]
}

fn column(profile: &proto::Profile, index: usize) -> Vec<i64> {
    profile.sample.iter().map(|sample| sample.value[index]).collect()
}

#[test]
fn header_says_what_the_contract_says() {
    let profile = encode(&testing::small());
    let types: Vec<(&str, &str)> =
        profile.sample_type.iter().map(|kind| (text(&profile, kind.r#type), text(&profile, kind.unit))).collect();
    assert_eq!(
        types,
        [("alloc_objects", "count"), ("alloc_space", "bytes"), ("inuse_objects", "count"), ("inuse_space", "bytes")]
    );
    assert_eq!(profile.string_table[0], "");
    assert_eq!(text(&profile, profile.default_sample_type), "inuse_space");
    let period = profile.period_type.expect("period type");
    assert_eq!((text(&profile, period.r#type), text(&profile, period.unit)), ("space", "bytes"));
    assert_eq!(profile.period, 524_288);
    assert_eq!(profile.time_nanos, 1_700_000_000_123_456_789);
    assert_eq!(profile.duration_nanos, 30_500_000_000);
    let comments: Vec<&str> = profile.comment.iter().map(|&id| text(&profile, id)).collect();
    for expected in ["interval=524288", "criterion=bytes", "coverage 50 %", "60000000 bytes", "counted for 50 %"] {
        assert!(comments.iter().any(|comment| comment.contains(expected)), "{expected}: {comments:?}");
    }
}

#[test]
fn stacks_add_up_to_the_rounded_total() {
    for model in [testing::small(), testing::large(3_000, 8)] {
        let profile = encode(&model);
        for (index, value) in Value::COLUMNS.into_iter().enumerate() {
            let total: f64 = model.rows.iter().map(|row| value.of(row)).sum();
            assert_eq!(column(&profile, index).iter().sum::<i64>(), total.round() as i64, "{}", value.name());
        }
    }
}

#[test]
fn rows_that_differ_by_function_or_interval_only_are_one_sample() {
    let model = testing::small();
    let profile = encode(&model);
    assert_eq!(model.rows.len(), 6);
    assert_eq!(profile.sample.len(), 4, "three rows of the first stack of the first process are one");
    let expected: f64 = model.rows[..3].iter().map(|row| row.alloc.bytes).sum();
    assert!((profile.sample[0].value[1] as f64 - expected).abs() < 1.0);
}

#[test]
fn an_inlined_function_shares_the_location_of_its_caller() {
    let profile = encode(&testing::small());
    let first = &profile.location[profile.sample[0].location_id[0] as usize - 1];
    let names: Vec<&str> =
        first.line.iter().map(|line| text(&profile, profile.function[line.function_id as usize - 1].name)).collect();
    assert_eq!(names, ["grow", "parse_value"]);
    assert_eq!(profile.sample[0].location_id.len(), 5);
}

#[test]
fn every_location_lies_in_its_mapping_and_flags_say_what_was_found() {
    let profile = encode(&testing::small());
    for location in &profile.location {
        let mapping = &profile.mapping[location.mapping_id as usize - 1];
        assert!((mapping.memory_start..mapping.memory_limit).contains(&location.address));
        assert!(!text(&profile, mapping.build_id).is_empty());
    }
    let (program, library) = (&profile.mapping[0], &profile.mapping[1]);
    assert_eq!(text(&profile, program.build_id), "abcdef01");
    assert!(program.has_functions && program.has_filenames && program.has_line_numbers);
    assert!(!program.has_inline_frames && library.has_inline_frames);
}

#[test]
fn only_used_mappings_are_written_and_the_programs_own_is_first() {
    let mut model = testing::small();
    model.modules.swap(0, 1);
    model.modules.push(Default::default());
    for row in &mut model.rows {
        let mut stack = row.key.stack.as_ref().clone();
        stack
            .frames
            .iter_mut()
            .map(Arc::make_mut)
            .for_each(|frame| frame.module = frame.module.map(|module| 1 - module));
        row.key.stack = stack.into();
    }
    let profile = encode(&model);
    let names: Vec<&str> = profile.mapping.iter().map(|mapping| text(&profile, mapping.filename)).collect();
    assert_eq!(names, ["/usr/bin/server", "/srv/lib/libjson.so"]);
    assert!(profile.mapping.iter().zip(1..).all(|(mapping, id)| mapping.id == id));
    let first = &profile.location[profile.sample[0].location_id[0] as usize - 1];
    assert_eq!(first.mapping_id, 2);
}

#[test]
fn a_module_without_names_is_not_said_to_have_functions() {
    let mut model = testing::small();
    model.rows.truncate(4);
    model.rows.drain(..3);
    let profile = encode(&model);
    let library = &profile.mapping[1];
    assert_eq!(text(&profile, library.filename), "/srv/lib/libjson.so");
    assert!(!library.has_functions && !library.has_filenames && !library.has_line_numbers);
    let location = &profile.location[profile.sample[0].location_id[0] as usize - 1];
    assert!(location.line.is_empty());
    assert_eq!(location.address, 0x7f00_0000_4000);
}

#[test]
fn one_file_in_two_processes_has_one_location() {
    let mut model = testing::small();
    let mut stack = model.rows[4].key.stack.as_ref().clone();
    for frame in stack.frames.iter_mut().map(Arc::make_mut) {
        frame.address += 0x10_0000_0000;
    }
    model.rows[4].key.stack = stack.into();
    let profile = encode(&model);
    assert_eq!(profile.sample[0].location_id, profile.sample[2].location_id);
}

#[test]
fn labels_name_process_thread_and_cut_stacks() {
    let profile = encode(&testing::small());
    let labels = |sample: usize| -> Vec<(String, String, i64, String)> {
        let sample = &profile.sample[sample];
        let own = |id| text(&profile, id).to_owned();
        sample.label.iter().map(|label| (own(label.key), own(label.str), label.num, own(label.num_unit))).collect()
    };
    let first = labels(0);
    assert!(first.contains(&("pid".into(), "".into(), 4242, "count".into())));
    assert!(first.contains(&("comm".into(), "server".into(), 0, "".into())));
    assert!(first.contains(&("thread".into(), "worker".into(), 0, "".into())));
    assert!(first.iter().all(|label| label.0 != "incomplete"));
    assert!(labels(3).contains(&("incomplete".into(), "stack copy too small".into(), 0, "".into())));
}

#[test]
fn without_frees_there_are_no_columns_in_use() {
    let mut model = testing::small();
    model.header.live = false;
    let profile = encode(&model);
    assert_eq!(profile.sample_type.len(), 2);
    assert!(profile.sample.iter().all(|sample| sample.value.len() == 2));
    assert_eq!(text(&profile, profile.default_sample_type), "alloc_space");
}

#[test]
fn a_process_whose_frees_were_given_up_is_labelled_and_read_back() {
    let profile = encode(&testing::partly_followed());
    let labels = |sample: &proto::Sample| {
        let mut labels = sample.label.iter().map(|label| (text(&profile, label.key), text(&profile, label.str)));
        labels.any(|label| label == ("inuse", "unknown"))
    };
    let unknown: Vec<bool> = profile.sample.iter().map(labels).collect();
    assert_eq!(unknown, [false, false, true, true]);
    let back = crate::read::parse(&profile.encode_to_vec()).expect("ours");
    assert_eq!(back.processes.iter().map(|process| process.inuse_unknown).collect::<Vec<_>>(), [false, true]);
    assert_eq!((back.processes[0].exact_alloc_objects, back.processes[1].coverage), (Some(9_000), 0.5));
}

#[test]
fn how_each_process_is_hooked_is_a_comment_and_read_back() {
    let mut profile = testing::small();
    let text_of = |profile: &Profile| comments(profile).join("\n");
    assert!(
        text_of(&profile).contains("process server (4242): coverage 100 %, hook inline, counted"),
        "{}",
        text_of(&profile)
    );
    let back = crate::read::parse(&encode(&profile).encode_to_vec()).expect("ours");
    for (back, process) in back.processes.iter().zip(&profile.processes) {
        assert_eq!((back.hook, &back.not_inline), (process.hook, &process.not_inline));
        assert!(process.hook.is_some());
    }
    profile.processes.extend(vec![profile.processes[0].clone(); 3]);
    assert!(text_of(&profile).contains("all processes: 5; 4 hooked inline"), "{}", text_of(&profile));
    // The same words in the process's own data do not count.
    profile.processes.truncate(1);
    profile.processes[0].hook = None;
    profile.processes[0].allocators = vec!["x, hook probe".into()];
    let back = crate::read::parse(&encode(&profile).encode_to_vec()).expect("ours");
    assert_eq!(back.processes[0].hook, None);
}

#[test]
fn that_the_hooks_of_another_recording_hid_a_process_is_read_back() {
    let mut profile = testing::small();
    let before = crate::read::parse(&encode(&profile).encode_to_vec()).expect("ours");
    profile.processes[1].missing.push(heapbpf_audit::Missing::unseen());
    let back = crate::read::parse(&encode(&profile).encode_to_vec()).expect("ours");
    let hidden = |profile: &Profile| profile.processes.iter().map(|it| it.was_unseen()).collect::<Vec<_>>();
    assert_eq!((hidden(&before), hidden(&back)), (vec![false, false], vec![false, true]));
}

#[test]
fn since_when_frees_are_followed_is_a_comment_and_read_back() {
    let profile = testing::followed_again();
    let comment =
        comments(&profile).into_iter().find(|comment| comment.starts_with("process server")).expect("a comment");
    assert!(comment.contains(", in use: of blocks since 2023-11-14T22:13:32.623456789Z, allocators"), "{comment}");
    let back = crate::read::parse(&encode(&profile).encode_to_vec()).expect("ours");
    assert_eq!(back.processes[0].inuse_since, profile.processes[0].inuse_since);
    assert_eq!(back.processes[1].inuse_since, None);
}

#[test]
fn hostile_modules_and_empty_stacks_do_no_harm() {
    let mut model = testing::small();
    let mut stack = model.rows[0].key.stack.as_ref().clone();
    Arc::make_mut(&mut stack.frames[1]).module = Some(usize::MAX);
    Arc::make_mut(&mut stack.frames[2]).file_offset = Some(u64::MAX);
    // A stack whose last frame is inlined.
    Arc::make_mut(stack.frames.last_mut().expect("frames")).inlined = true;
    model.rows[0].key.stack = stack.into();
    model.rows[1].key.stack = Default::default();
    model.rows[1].key.process = 99;
    let profile = encode(&model);
    let location = &profile.location[profile.sample[1].location_id[0] as usize - 1];
    let function = &profile.function[location.line[0].function_id as usize - 1];
    assert_eq!((text(&profile, function.name), location.mapping_id), ("[no stack]", 0));
    let back = crate::read::parse(&profile.encode_to_vec()).expect("ours");
    assert!(back.rows[1].key.stack.frames.is_empty());
    let ids = profile.sample.iter().flat_map(|sample| &sample.location_id);
    assert!(ids.into_iter().all(|&id| id >= 1 && id <= profile.location.len() as u64));
}

#[test]
fn comments_say_why_each_probe_is_where_it_is_once_for_each_file() {
    let comments = comments(&crate::testing::small());
    let probes: Vec<&String> = comments.iter().filter(|comment| comment.starts_with("probes in ")).collect();
    assert_eq!(probes, ["probes in /usr/lib/x86_64-linux-gnu/libc.so.6: malloc+0x0 `push %rbp` is emulated"]);
    let profile = encode(&testing::small());
    let back = crate::read::parse(&profile.encode_to_vec()).expect("ours");
    assert!(!back.notes.iter().any(|note| note.starts_with("probes in ")), "no remark: {:?}", back.notes);
}

/// pprof prints all comments above its tables, so for many processes there are only totals and remarks.
#[test]
fn many_processes_have_no_comments_of_their_own() {
    let mut profile = testing::partly_followed();
    let lines = |profile: &Profile| {
        let message = encode(profile);
        let text = |&id: &i64| message.string_table[id as usize].clone();
        message.comment.iter().map(text).collect::<Vec<_>>()
    };
    let of_processes = |lines: &[String]| lines.iter().filter(|line| line.starts_with("process ")).count();
    assert_eq!(of_processes(&lines(&profile)), 2);
    let other = profile.processes[1].clone();
    for pid in 0..20 {
        let losses = Losses { alloc: LossBound { samples: 1, sampled_bytes: 8 }, interval: 64, ..Losses::default() };
        profile.processes.push(Process { pid, exact_alloc_bytes: Some(5), losses, ..other.clone() });
    }
    profile.notes = vec!["a remark".into()];
    let lines = lines(&profile);
    assert_eq!(of_processes(&lines), 0, "{lines:?}");
    assert!(lines.len() <= 10, "{lines:?}");
    for expected in
        ["all processes: 22", "a remark", "losses of other processes: alloc=20/160", "21 with memory in use not known"]
    {
        assert!(lines.iter().any(|line| line.contains(expected)), "{expected}: {lines:?}");
    }
    // Unknown figures are still marked as unknown.
    let back = crate::read::parse(&testing::written(&profile, "pprof")).expect("pprof");
    assert_eq!(back.processes.iter().map(|process| process.inuse_unknown).collect::<Vec<_>>(), [false, true]);
}

/// pprof's tools shorten C++ names that begin with the function. A comparison with other files does not mind.
#[test]
fn names_of_templates_have_no_return_type() {
    let full = "void shop::fill<int>(std::vector<int>&)";
    let mut profile = testing::small().only_process(0);
    for row in &mut profile.rows {
        let rename = |frame: &mut Frame| {
            if frame.function.as_deref() == Some("grow") {
                (frame.function, frame.system_name) =
                    (Some(full.into()), Some("_ZN4shop4fillIiEEvRSt6vectorIiE".into()));
            }
        };
        row.key.stack = std::sync::Arc::new(row.key.stack.with_frames(&mut Default::default(), rename));
    }
    let message = encode(&profile);
    let text = |id: i64| message.string_table[id as usize].as_str();
    let names: Vec<[&str; 2]> = message.function.iter().map(|it| [text(it.name), text(it.system_name)]).collect();
    assert!(names.contains(&["shop::fill<int>(std::vector<int>&)", "_ZN4shop4fillIiEEvRSt6vectorIiE"]), "{names:?}");
    let read = crate::read::parse(&message.encode_to_vec()).expect("our own");
    let found = crate::diff::diff(&profile, &read, &crate::diff::DiffOptions::default());
    assert!(found.functions.iter().all(|it| it.figures.change.estimate.abs() < 1.0), "{:?}", found.functions);
}
