//! Round trips, profiles of other profilers, damaged and hostile files.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message as _;

use super::*;
use crate::profile::formats::{WriteOptions, by_name};
use crate::profile::model::{Profile, Row};
use crate::profile::proto::pprof as proto;
use crate::profile::testing;
use crate::profile::value::Value;

fn written(profile: &Profile, format: &str) -> Vec<u8> {
    let mut out = Vec::new();
    by_name(format).expect("known").write(profile, &WriteOptions::default(), &mut out).expect("memory");
    out
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).expect("memory");
    encoder.finish().expect("memory")
}

fn message(result: Result<Profile, ContentError>) -> String {
    result.map(|_| ()).expect_err("must be refused").to_string()
}

#[test]
fn json_comes_back_whole() {
    for profile in [testing::small(), testing::partly_followed(), testing::large(50, 7)] {
        let back = parse(&written(&profile, "json")).expect("its own output");
        let same = |a: &Row, b: &Row| {
            a.process == b.process
                && a.thread == b.thread
                && a.function == b.function
                && a.interval == b.interval
                && a.alloc == b.alloc
                && a.inuse == b.inuse
                && a.peak == b.peak
                && a.lifetimes == b.lifetimes
                && a.stack == b.stack
        };
        assert_eq!(back.rows.len(), profile.rows.len());
        assert!(back.rows.iter().zip(&profile.rows).all(|(a, b)| same(a, b)));
        assert_eq!(back.processes, profile.processes);
        assert_eq!(back.modules, profile.modules);
        assert_eq!((back.started, back.duration), (profile.started, profile.duration));
        assert_eq!((back.counters, back.notes), (profile.counters, profile.notes));
        assert_eq!((back.version, back.host, back.unwind), (profile.version, profile.host, profile.unwind));
        assert!(back.live && back.samples_known && back.offsets_known);
    }
}

#[test]
fn json_without_our_additions_is_read() {
    let mut value: serde_json::Value = serde_json::from_slice(&written(&testing::small(), "json")).expect("JSON");
    let top = value.as_object_mut().expect("an object");
    for addition in ["modules", "notes", "host", "live", "samples_known", "confidence"] {
        top.remove(addition);
    }
    for stack in top["stacks"].as_array_mut().expect("a list") {
        let stack = stack.as_object_mut().expect("an object");
        for addition in
            ["process", "cut", "unwinder", "peak", "lifetimes", "zero_byte_samples", "smallest_bytes", "largest_bytes"]
        {
            stack.remove(addition);
        }
    }
    let back = parse(value.to_string().as_bytes()).expect("the contract's schema");
    assert_eq!(back.rows.len(), 6);
    assert_eq!(back.rows[4].process, 1);
    assert_eq!(back.rows[5].stack.cut.as_deref(), Some("unknown reason"));
    assert_eq!(back.modules.len(), 2, "modules are found from frames");
    let count = crate::profile::estimates::of_row(&back, &back.rows[4], Value::AllocObjects, 0.95);
    assert_eq!(count.low, None, "no claim about counts of blocks whose sizes are not known");
}

#[test]
fn parquet_keeps_what_a_comparison_needs() {
    let profile = testing::small();
    let back = parse(&written(&profile, "parquet")).expect("its own output");
    assert!(back.live && back.samples_known && back.offsets_known);
    assert_eq!((back.interval, back.host.as_str(), back.duration), (524_288, "host1", profile.duration));
    assert_eq!(back.started, profile.started - std::time::Duration::from_nanos(789));
    let mut first = profile.rows[0].alloc;
    first.add(&profile.rows[1].alloc);
    assert_eq!((back.rows[0].alloc, back.rows[1].alloc), (first, profile.rows[2].alloc));
    assert_eq!((back.rows[1].interval, back.rows[4].process), (1_048_576, 1));
    assert_eq!(back.rows[2].stack.frames[0].function.as_deref(), Some("[libjson.so+0x4000]"));
    assert!(back.rows[4].stack.cut.is_some());
    let back = parse(&written(&testing::partly_followed(), "parquet")).expect("its own output");
    assert_eq!(back.processes.iter().map(|process| process.inuse_unknown).collect::<Vec<_>>(), [false, true]);
    let mut without_frees = profile;
    without_frees.live = false;
    assert!(!parse(&written(&without_frees, "parquet")).expect("its own output").live);
}

/// 50,000 blocks of 1 KiB dropped, 20,000 of 256 bytes and ten of 1 MiB kept, one byte in 16,384 sampled.
#[test]
fn a_profile_of_a_go_program_holds_what_it_allocated() {
    let bytes = include_bytes!("../../../../tests/fixtures/profiles/go_heap.pprof");
    let profile = parse(bytes).expect("a Go profile");
    assert!(profile.samples_known && profile.live);
    assert_eq!((profile.interval, profile.processes[0].comm.as_str()), (16_384, "heap"));
    let of = |function: &str, size: u64| {
        let rows = profile
            .rows
            .iter()
            .filter(|row| row.stack.frames[0].function.as_deref() == Some(function) && row.alloc.largest_bytes == size);
        crate::profile::estimates::Pool::of(rows)
    };
    for (function, size, count, value) in [
        ("main.drop", 1024, 50_000.0, Value::AllocObjects),
        ("main.keep", 256, 20_000.0, Value::InuseObjects),
        ("main.keep", 1 << 20, 10.0, Value::InuseObjects),
    ] {
        let estimate = of(function, size).estimate(&profile, value, 0.95);
        let (low, high) = estimate.low.zip(estimate.high).expect("an interval");
        // Ten blocks far above R are all sampled: the interval of a count is never below what was seen.
        assert!(low - 1.0 <= count && count <= high, "{function}: {low} to {high}, truth {count}");
    }
    assert_eq!(of("main.drop", 1024).total(Value::InuseSpace), 0.0);
}

#[test]
fn a_profile_of_jemalloc_has_the_totals_of_jeprof() {
    let bytes = include_bytes!("../../../../tests/fixtures/profiles/jemalloc.heap");
    let profile = parse(bytes).expect("heap_v2");
    assert_eq!((profile.interval, profile.processes[0].comm.as_str()), (16_384, "program"));
    let total = crate::profile::estimates::Pool::of(&profile.rows).total(Value::InuseSpace);
    assert!((total - 28_210_378.0).abs() < 2.0, "{total}");
    assert!(profile.rows.iter().any(|row| row.alloc.bytes > row.inuse.bytes), "what was freed is in it");
    let program = profile.modules.iter().position(|module| &*module.path == "/tmp/demo/program");
    assert!(profile.rows[0].stack.frames.iter().any(|frame| frame.module == program));
}

#[test]
fn our_pprof_keeps_estimates_and_says_that_samples_are_gone() {
    let profile = testing::small();
    let back = parse(&written(&profile, "pprof")).expect("its own output");
    assert!(!back.samples_known && back.live);
    assert_eq!((back.interval, back.version.as_str(), back.host.as_str()), (profile.interval, "0.1.0", "host1"));
    assert_eq!((back.started, back.duration), (profile.started, profile.duration));
    for value in Value::COLUMNS {
        let total = |profile: &Profile| profile.rows.iter().map(|row| value.of(row)).sum::<f64>();
        assert_eq!(total(&back), total(&profile).round(), "{}", value.name());
    }
    let names: Vec<_> = back.processes.iter().map(|process| (process.pid, process.comm.as_str())).collect();
    assert_eq!(names, [(4242, "server"), (4300, "worker \"x\"")]);
    let first = &back.rows[0].stack;
    assert_eq!(first.frames.len(), 6);
    assert!(first.frames[0].inlined && !first.frames[1].inlined);
    assert_eq!(first.frames[1].function.as_deref(), Some("parse_value"));
    assert_eq!(first.frames[1].file_offset, profile.rows[0].stack.frames[1].file_offset);
    assert_eq!(back.rows[3].stack.cut.as_deref(), Some("stack copy too small"));
    assert_eq!(&*back.rows[0].thread, "worker");
}

/// A profile as Go's runtime writes it: two samples of one stack, of different block sizes.
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
    assert!(profile.samples_known && !profile.offsets_known);
    assert!(!parse(&written(&profile, "json")).expect("its own output").offsets_known);
    let (first, second) = (&profile.rows[0], &profile.rows[1]);
    assert_eq!((first.alloc.samples, first.alloc.sampled_bytes, first.inuse.samples), (3, 196_608, 1));
    assert_eq!(first.alloc.bytes, 1_638_400.0, "estimates are Go's own");
    assert_eq!((second.alloc.samples, second.inuse.samples), (1, 0));
    let weight = 1.0 / -(-0.125f64).exp_m1();
    let variance = 3.0 * 65_536.0 * 65_536.0 * weight * (weight - 1.0);
    assert!((first.alloc.bytes_variance / variance - 1.0).abs() < 1e-12);
}

#[test]
fn a_foreign_profile_without_an_interval_cannot_be_unbiased() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("x");
    for bytes in [go_profile(0).encode_to_vec(), b"heap_v2/\n".to_vec(), b"heap_v2/0\n".to_vec()] {
        std::fs::write(&path, bytes).expect("written");
        let text = open(&path).map(|_| ()).expect_err("no interval").to_string();
        assert_eq!(text, format!("cannot unbias: no sampling interval recorded in {}", path.display()));
    }
}

const JEMALLOC: &str = "heap_v2/524288
  t*: 4: 262208 [0: 0]
  t0: 4: 262208 [0: 0]
@ 0x401001 0x402002
  t*: 3: 196608 [0: 0]
  t0: 3: 196608 [0: 0]
@ 0x7f0000001010
  t*: 1: 65600 [0: 0]

MAPPED_LIBRARIES:
00400000-00410000 r-xp 00001000 08:01 42 /usr/bin/program
00410000-00420000 rw-p 00011000 08:01 42 /usr/bin/program
7f0000000000-7f0000010000 r-xp 00000000 08:01 43 /usr/lib/lib.so
";

#[test]
fn heap_v2_is_unbiased_by_mean_size() {
    let profile = parse(JEMALLOC.as_bytes()).expect("heap_v2");
    assert_eq!((profile.interval, profile.rows.len(), profile.modules.len()), (524_288, 2, 2));
    let weight = 1.0 / -(-0.125f64).exp_m1();
    let sums = &profile.rows[0].inuse;
    assert!(
        (sums.bytes / (196_608.0 * weight) - 1.0).abs() < 1e-12 && (sums.objects / (3.0 * weight) - 1.0).abs() < 1e-12
    );
    let frame = &profile.rows[0].stack.frames[0];
    assert_eq!((frame.address, frame.module, frame.file_offset), (0x401000, Some(0), Some(0x2000)));
    assert_eq!(profile.rows[1].stack.frames[0].module, Some(1));
    assert_eq!(profile.processes[0].comm, "program");
    assert!(!profile.samples_known);
}

#[test]
fn gperftools_text_is_read_too() {
    let text = "heap profile:     3:   196608 [    10:   655360] @ heap_v2/524288
     3:   196608 [    10:   655360] @ 0x00401001 0x00402002
";
    let profile = parse(text.as_bytes()).expect("heap_v2");
    let weight = 1.0 / -(-0.125f64).exp_m1();
    assert!((profile.rows[0].alloc.bytes / (655_360.0 * weight) - 1.0).abs() < 1e-12);
    let exact = parse(text.replace("heap_v2/524288", "heapprofile").as_bytes()).expect("every allocation");
    assert_eq!((exact.rows[0].inuse.bytes, exact.rows[0].alloc.objects), (196_608.0, 10.0));
}

#[test]
fn what_is_no_profile_is_named() {
    for (bytes, what) in [
        (&b""[..], "empty"),
        (b"  \n", "empty"),
        (b"PAR1....", "Parquet"),
        (b"PAR1....PAR1", "Parquet"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"\x7fELF\x02", "a program"),
        (b"{}", "not a profile of heapbpf"),
        (b"{\"$schema\":\"https://www.speedscope.app/x\"}", "speedscope"),
        (b"[1]", "a JSON array"),
        (b"hello world, this is text", "no profile"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "no profile"),
    ] {
        let text = message(parse(bytes));
        assert!(text.contains(what), "{what}: {text}");
    }
    let mut cpu = go_profile(100);
    cpu.string_table[1] = "samples".into();
    for id in [3, 5, 6] {
        cpu.string_table[id] = "cpu".into();
    }
    assert!(message(parse(&cpu.encode_to_vec())).contains("not of a heap (samples/count"));
    let missing = open(Path::new("/no/such/file.json")).map(|_| ()).expect_err("missing").to_string();
    assert!(missing.contains("/no/such/file.json") && missing.contains("No such file"));
}

/// Every truncation and many corruptions are read or refused, and never more.
#[test]
fn time_windows_are_remembered_with_the_corrected_figures() {
    let mut profile = testing::small();
    profile.time_windows = true;
    profile.rows[0].alloc.bytes_correction = 12_345.0;
    let total = |profile: &Profile| -> f64 { profile.rows.iter().map(|row| Value::AllocSpace.of(row)).sum() };
    for format in ["json", "parquet"] {
        let back = parse(&written(&profile, format)).unwrap();
        assert!(back.time_windows, "{format}");
        assert!((total(&back) / total(&profile) - 1.0).abs() < 1e-12, "{format}");
    }
}

#[test]
fn damaged_files_do_no_harm() {
    let profile = testing::small();
    let pprof = crate::profile::formats::encode_pprof(&profile).encode_to_vec();
    let whole =
        [written(&profile, "json"), written(&profile, "parquet"), written(&profile, "pprof"), pprof, JEMALLOC.into()];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for bytes in whole {
        for length in (0..bytes.len()).step_by(bytes.len() / 200 + 1) {
            let _ = parse(&bytes[..length]);
        }
        for _ in 0..200 {
            let mut bytes = bytes.clone();
            for _ in 0..3 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = (state >> 8) as usize % bytes.len();
                bytes[at] = state as u8;
            }
            if let Ok(profile) = parse(&bytes) {
                // What was read can be shown.
                let _ = crate::view::report::report(&profile, &Default::default());
                let _ = written(&profile, "pprof");
            }
        }
    }
    let cut = written(&profile, "json");
    assert!(message(parse(&cut[..cut.len() / 2])).contains("damaged"));
    let cut = written(&profile, "pprof");
    assert!(message(parse(&cut[..cut.len() / 2])).contains("damaged"));
}

#[test]
fn absurd_numbers_of_samples_are_refused_and_large_ones_are_shown() {
    let mut profile = testing::small();
    profile.rows[0].alloc.samples = MOST_SAMPLES + 1;
    assert!(message(parse(&written(&profile, "json"))).contains("it is too large: 10995"));
    profile.rows[0].alloc.samples = MOST_SAMPLES / 2;
    let read = parse(&written(&profile, "json")).expect("reads");
    let _ = crate::view::report::report(&read, &Default::default());
}

#[test]
fn bombs_are_refused() {
    // Ten megabytes of empty strings in a few kilobytes.
    let bomb = gzip(&[0x32u8, 0].repeat(5 << 20));
    assert!(bomb.len() < 1 << 17);
    assert!(message(parse_within(&bomb, 1 << 20)).contains("too large: more than 1048576 bytes when decompressed"));
    // Small enough to be decompressed, but too many entries.
    assert!(message(parse(&[0x12u8, 0].repeat(MOST_FRAMES + 2))).contains("too large"));
    // One stack of many frames, many times.
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
    assert_eq!(read.rows[0].stack.frames[0].function, None);
    assert!(!read.samples_known, "a sample without its block size");
}
