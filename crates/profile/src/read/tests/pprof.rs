//! pprof profiles from heapbpf and Go, and hostile ones.

use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message as _;

use super::*;
use crate::proto::pprof as proto;

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

/// The program dropped 50,000 blocks of 1 KiB and kept 20,000 of 256 bytes and ten of 1 MiB; R is 16,384 bytes.
#[test]
fn a_profile_of_a_go_program_holds_what_it_allocated() {
    let bytes = include_bytes!("../../../../../tests/fixtures/profiles/go_heap.pprof");
    let profile = parse(bytes).expect("a Go profile");
    assert!(profile.header.samples_known && profile.header.live);
    assert_eq!((profile.header.interval, profile.processes[0].comm.as_str()), (16_384, "heap"));
    let of = |function: &str, size: u64| {
        let rows = profile.rows.iter().filter(|row| {
            row.key.stack.frames[0].function.as_deref() == Some(function) && row.alloc.largest_bytes == size
        });
        crate::estimates::Pool::of(rows)
    };
    for (function, size, count, value) in [
        ("main.drop", 1024, 50_000.0, Value::AllocObjects),
        ("main.keep", 256, 20_000.0, Value::InuseObjects),
        ("main.keep", 1 << 20, 10.0, Value::InuseObjects),
    ] {
        let estimate = of(function, size).estimate(&profile, value, 0.95);
        let (low, high) = estimate.low.zip(estimate.high).expect("an interval");
        // Ten blocks far above R are all sampled, and the interval of a count is never below the number of samples.
        assert!(low - 1.0 <= count && count <= high, "{function}: {low} to {high}, truth {count}");
    }
    assert_eq!(of("main.drop", 1024).total(Value::InuseSpace), 0.0);
}

/// Every viewer shows the placeholder of a function without a name; it is read back as a placeholder, not as a name.
#[test]
fn functions_without_names_are_shown_and_read_back_without() {
    let profile = testing::stripped();
    let starts = |profile: &Profile| -> Vec<(Option<u64>, bool)> {
        let frames = profile.rows.iter().flat_map(|row| &row.key.stack.frames);
        frames.map(|frame| (frame.function_start, frame.function.is_some())).collect()
    };
    let bytes = written(&profile, "pprof");
    let back = parse(&bytes).expect("its own output");
    assert!(starts(&back).contains(&(Some(0x3f40), false)));
    let reasons = |profile: &Profile| profile.modules.iter().map(|module| module.reason.clone()).collect::<Vec<_>>();
    assert_eq!((reasons(&back), &back.notes), (reasons(&profile), &profile.notes));
    for format in ["folded", "pprof", "json", "svg", "html", "speedscope", "parquet"] {
        let mut text = written(&profile, format);
        if format == "pprof" {
            text.clear();
            flate2::read::GzDecoder::new(&bytes[..]).read_to_end(&mut text).expect("gzip");
        }
        let found = text.windows(17).any(|window| window == b"libjson.so+0x3f40");
        assert!(found, "{format}");
    }
}

#[test]
fn our_pprof_keeps_estimates_and_says_that_samples_are_gone() {
    let profile = testing::small();
    let back = parse(&written(&profile, "pprof")).expect("its own output");
    assert!(!back.header.samples_known && back.header.live);
    assert_eq!(
        (back.header.interval, back.header.version.as_str(), back.header.host.as_str()),
        (profile.header.interval, "0.1.0", "host1")
    );
    assert_eq!((back.header.started, back.header.duration), (profile.header.started, profile.header.duration));
    for value in Value::COLUMNS {
        let total = |profile: &Profile| profile.rows.iter().map(|row| value.of(row)).sum::<f64>();
        assert_eq!(total(&back), total(&profile).round(), "{}", value.name());
    }
    let names: Vec<_> = back.processes.iter().map(|process| (process.pid, process.comm.as_str())).collect();
    assert_eq!(names, [(4242, "server"), (4300, "worker \"x\"")]);
    let first = &back.rows[0].key.stack;
    assert_eq!(first.frames.len(), 6);
    assert!(first.frames[0].inlined && !first.frames[1].inlined);
    assert_eq!(first.frames[1].function.as_deref(), Some("parse_value"));
    assert_eq!(first.frames[1].file_offset, profile.rows[0].key.stack.frames[1].file_offset);
    assert_eq!(back.rows[3].key.stack.cut.as_deref(), Some("stack copy too small"));
    assert_eq!(&*back.rows[0].key.thread, "worker");
}

/// A profile as Go's runtime writes it, with two samples of one stack and different block sizes.
fn go_profile(period: i64) -> proto::Profile {
    let table =
        ["", "alloc_objects", "count", "alloc_space", "bytes", "inuse_objects", "inuse_space", "space", "main.work"];
    let kind = |kind, unit| proto::ValueType { r#type: kind, unit };
    let sample = |value: [i64; 4], size| proto::Sample {
        location_id: vec![1],
        value: value.into(),
        label: vec![proto::Label { key: 4, num: size, ..Default::default() }],
    };
    proto::Profile {
        sample_type: vec![kind(1, 2), kind(3, 4), kind(5, 2), kind(6, 4)],
        // 3 samples of 64 KiB at R = 512 KiB: weight 1/(1 - e^(-1/8)) = 8.5104.
        sample: vec![sample([25, 1_638_400, 8, 524_288], 65_536), sample([1, 10_000_000, 0, 0], 10_000_000)],
        location: vec![proto::Location {
            id: 1,
            address: 0x1000,
            line: vec![proto::Line { function_id: 1, line: 7 }],
            ..Default::default()
        }],
        function: vec![proto::Function { id: 1, name: 8, system_name: 8, ..Default::default() }],
        string_table: table.iter().map(ToString::to_string).collect(),
        period_type: Some(kind(7, 4)),
        period,
        ..Default::default()
    }
}

#[test]
fn samples_of_go_are_counted_again() {
    let profile = parse(&gzip(&go_profile(524_288).encode_to_vec())).expect("a Go profile");
    assert!(profile.header.samples_known && !profile.header.offsets_known);
    assert!(!parse(&written(&profile, "json")).expect("its own output").header.offsets_known);
    let (first, second) = (&profile.rows[0], &profile.rows[1]);
    assert_eq!((first.alloc.samples, first.alloc.sampled_bytes, first.inuse.samples), (3, 196_608, 1));
    assert_eq!(first.alloc.bytes, 1_638_400.0, "estimates are Go's own");
    assert_eq!((second.alloc.samples, second.inuse.samples), (1, 0));
    let weight = 1.0 / -(-0.125f64).exp_m1();
    let variance = 3.0 * 65_536.0 * 65_536.0 * weight * (weight - 1.0);
    assert!((first.alloc.bytes_variance / variance - 1.0).abs() < 1e-12);
}

#[test]
fn a_profile_of_something_else_than_a_heap_is_named() {
    let mut cpu = go_profile(100);
    cpu.string_table[1] = "samples".into();
    for id in [3, 5, 6] {
        cpu.string_table[id] = "cpu".into();
    }
    assert!(message(parse(&cpu.encode_to_vec())).contains("not of a heap (samples/count"));
}

#[test]
fn pprof_without_an_interval_cannot_be_unbiased() {
    cannot_be_unbiased(&go_profile(0).encode_to_vec());
}

#[test]
fn damaged_pprof_does_no_harm() {
    let profile = testing::small();
    damaged_does_no_harm(crate::formats::encode_pprof(&profile).encode_to_vec());
    let whole = written(&profile, "pprof");
    damaged_does_no_harm(whole.clone());
    assert!(message(parse(&whole[..whole.len() / 2])).contains("damaged"));
}

#[test]
fn bombs_are_refused() {
    // Ten megabytes of empty strings compress to a few kilobytes.
    let bomb = gzip(&[0x32u8, 0].repeat(5 << 20));
    assert!(bomb.len() < 1 << 17);
    assert!(message(parse_within(&bomb, 1 << 20)).contains("too large: more than 1 MiB when decompressed"));
    // Small enough to be decompressed, but with too many entries.
    assert!(message(parse(&[0x12u8, 0].repeat(MOST_FRAMES + 2))).contains("too large"));
    // One stack with many frames, many times over.
    let mut deep = go_profile(524_288);
    deep.location[0].line = vec![proto::Line { function_id: 1, line: 1 }; 5_000];
    deep.sample[0].location_id = vec![1; 5_000];
    assert!(message(parse(&deep.encode_to_vec())).contains("too large"));
}

#[test]
fn hostile_references_are_checked() {
    let mut profile = go_profile(524_288);
    profile.sample[0].location_id = vec![9];
    assert!(message(parse(&profile.encode_to_vec())).contains("no location 9"));
    let mut profile = go_profile(524_288);
    profile.sample[0].value.pop();
    assert!(message(parse(&profile.encode_to_vec())).contains("3 values for 4 types"));
    let mut profile = go_profile(524_288);
    profile.location[0].line[0] = proto::Line { function_id: 77, line: -1 };
    profile.location[0].mapping_id = 5;
    profile.sample[0].label[0] = proto::Label { key: -1, str: 999, num: -5, num_unit: 3 };
    profile.time_nanos = i64::MIN;
    let read = parse(&profile.encode_to_vec()).expect("readable");
    assert_eq!(read.rows[0].key.stack.frames[0].function, None);
    assert!(!read.header.samples_known, "a sample without its block size");
}

#[test]
fn parts_of_a_newer_version_are_named() {
    let mut newer = testing::small();
    newer.header.version = "99.0.1".into();
    let message = |profile: &Profile| crate::formats::encode_pprof(profile);
    let read = |message: &proto::Profile, more: &[u8]| {
        parse(&gzip(&[&message.encode_to_vec()[..], more].concat())).expect("the rest is understood").notes
    };
    assert_eq!(read(&message(&newer), &[]), newer.notes, "nothing is new");
    let added = |mut message: proto::Profile| {
        let mut id = |text: &str| {
            message.string_table.push(text.into());
            message.string_table.len() as i64 - 1
        };
        let [kind, unit, label, comment, criterion] =
            ["peak_space", "bytes", "numa\u{1b}[31m", "flavour=sweet", "criterion=phase"].map(&mut id);
        message.sample_type.push(proto::ValueType { r#type: kind, unit });
        message.sample.iter_mut().for_each(|sample| sample.value.push(1));
        message.sample[0].label.push(proto::Label { key: label, num: 1, ..Default::default() });
        message.comment.extend([comment, criterion]);
        message
    };
    // Field 99, with the number 1.
    let field = [0x98, 0x06, 0x01];
    let notes = read(&added(message(&newer)), &field);
    let said = notes.last().expect("a note");
    for part in
        ["the comment criterion=phase", "comment flavour=sweet", "label numa\\u{1b}[31m", "type peak_space", "field 99"]
    {
        assert!(said.contains("by heapbpf 99.0.1") && said.contains(part), "{part} in {said}");
    }
    assert_eq!(notes.len(), newer.notes.len() + 1, "{notes:?}");
    // In a profile of this version, unknown parts are not explained by a newer one.
    let same = testing::small();
    assert!(read(&added(message(&same)), &field).iter().all(|note| !note.contains("does not understand")));
}
