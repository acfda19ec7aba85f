//! Round trips, profiles of other profilers, and damaged or hostile files.

mod against_go;
mod go_heap;
mod heap_v2;
mod json;
mod losses;
mod parquet;
mod pprof;

use super::*;
use crate::testing::{self, written};
use crate::value::Value;

fn message(result: Result<Profile, ContentError>) -> String {
    result.map(|_| ()).expect_err("must be refused").to_string()
}

/// Checks that a profile without a sampling interval is rejected with the file's name.
fn cannot_be_unbiased(bytes: &[u8]) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join("x");
    std::fs::write(&path, bytes).expect("written");
    let text = open(&path).map(|_| ()).expect_err("no interval").to_string();
    assert_eq!(text, format!("cannot unbias: no sampling interval recorded in {}", path.display()));
}

/// Checks that truncated and corrupted files are read or rejected without a panic.
fn damaged_does_no_harm(whole: Vec<u8>) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for length in (0..whole.len()).step_by(whole.len() / 200 + 1) {
        let _ = parse(&whole[..length]);
    }
    for _ in 0..200 {
        let mut bytes = whole.clone();
        for _ in 0..3 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let at = (state >> 8) as usize % bytes.len();
            bytes[at] = state as u8;
        }
        if let Ok(profile) = parse(&bytes) {
            // A profile that could be read can also be shown.
            let _ = crate::report::report(&profile, &Default::default());
            let _ = written(&profile, "pprof");
        }
    }
}

#[test]
fn heap_v2_without_an_interval_cannot_be_unbiased() {
    for bytes in ["heap_v2/\n", "heap_v2/0\n"] {
        cannot_be_unbiased(bytes.as_bytes());
    }
}

#[test]
fn damaged_files_do_no_harm() {
    let profile = testing::small();
    let json = written(&profile, "json");
    assert!(message(parse(&json[..json.len() / 2])).contains("damaged"));
    damaged_does_no_harm(json);
    damaged_does_no_harm(heap_v2::JEMALLOC.into());
    damaged_does_no_harm(written(&profile, "parquet"));
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
    let missing = open(Path::new("/no/such/file.json")).map(|_| ()).expect_err("missing").to_string();
    assert!(missing.contains("/no/such/file.json") && missing.contains("No such file"));
}

#[test]
fn time_windows_are_remembered_with_the_corrected_figures() {
    let mut profile = testing::small();
    profile.header.time_windows = true;
    profile.rows[0].alloc.bytes_correction = 12_345.0;
    let total = |profile: &Profile| -> f64 { profile.rows.iter().map(|row| Value::AllocSpace.of(row)).sum() };
    for format in ["json", "parquet"] {
        let back = parse(&written(&profile, format)).unwrap();
        assert!(back.header.time_windows, "{format}");
        assert!((total(&back) / total(&profile) - 1.0).abs() < 1e-12, "{format}");
    }
}
