//! heapbpf's JSON is read back without loss; absurd numbers are rejected.

use std::sync::Arc;

use super::*;

#[test]
fn json_comes_back_whole() {
    let host = || crate::programs::put_together(&testing::whole_host(), false);
    let [apart, unread, again] = [testing::ended_apart(), testing::partly_read(), testing::followed_again()];
    let known = [testing::small(), testing::stripped(), testing::partly_followed(), testing::large(50, 7), host()];
    for profile in known.into_iter().chain([apart, unread, again]) {
        let back = parse(&written(&profile, "json")).expect("its own output");
        let sums = |row: &Row| (row.alloc, row.inuse, row.at_exit, row.peak);
        let same = |a: &Row, b: &Row| a.key == b.key && sums(a) == sums(b) && a.lifetimes == b.lifetimes;
        assert_eq!(back.rows.len(), profile.rows.len());
        assert!(back.rows.iter().zip(&profile.rows).all(|(a, b)| same(a, b)));
        assert_eq!((back.processes, back.idle), (profile.processes, profile.idle));
        assert_eq!(back.modules, profile.modules);
        assert_eq!((back.header.started, back.header.duration), (profile.header.started, profile.header.duration));
        assert_eq!((back.header.time, back.header.unread), (profile.header.time, profile.header.unread));
        assert_eq!(back.header.ended_apart, profile.header.ended_apart);
        assert_eq!((back.counters, back.notes), (profile.counters, profile.notes));
        assert_eq!(
            (back.header.version, back.header.host, back.header.unwind),
            (profile.header.version, profile.header.host, profile.header.unwind)
        );
        assert!(back.header.live && back.header.samples_known && back.header.offsets_known);
    }
}

#[test]
fn intervals_without_samples_are_read_back() {
    let mut profile = testing::small();
    profile.header.set_interval(1_000);
    profile.header.set_interval(4_000);
    let back = parse(&written(&profile, "json")).expect("its own output");
    assert_eq!(crate::estimates::intervals_used(&back), [1_000, 4_000, 524_288, 1_048_576]);
    assert_eq!(back.header.interval, 4_000);
}

/// In use, the offset of a mapping that was unmapped in part is not known.
#[test]
fn offsets_that_are_not_known_stay_unknown() {
    use heapbpf_statistics::sums::SampleSums;
    let mut profile = testing::small();
    profile.rows[0].inuse.offset_sum = SampleSums::UNKNOWN_OFFSET;
    profile.rows[0].peak = Some(profile.rows[0].inuse);
    profile.rows[0].growth.as_mut().expect("growth").freed.offset_sum = SampleSums::UNKNOWN_OFFSET;
    for format in ["json", "parquet"] {
        let text = written(&profile, format);
        let back = parse(&text).expect("its own output");
        let is_known = |row: usize, value| crate::Pool::of([&back.rows[row]]).guaranteed(&back, value, 0.95).is_ok();
        assert!(back.header.offsets_known && is_known(0, Value::AllocSpace), "{format}");
        assert!(!is_known(0, Value::InuseSpace) && is_known(2, Value::InuseSpace), "{format}");
        if format == "json" {
            let sums = |profile: &Profile| (profile.rows[0].inuse, profile.rows[0].peak, profile.rows[0].growth);
            assert_eq!(sums(&back), sums(&profile));
            // Older versions read no file in which it is missing.
            let json: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
            for sums in ["/stacks/0/peak", "/stacks/0/growth/freed"] {
                let offsets = json.pointer(sums).and_then(|sums| sums["offset_sum"].as_u64());
                assert_eq!(offsets, Some(SampleSums::UNKNOWN_OFFSET), "{sums}");
            }
        }
    }
}

/// System names are as long as the rest of a frame, so a file contains each frame's only once.
#[test]
fn a_system_name_is_written_once_and_read_for_every_stack() {
    let mut profile = testing::small();
    for row in &mut profile.rows {
        for frame in Arc::make_mut(&mut row.key.stack).frames.iter_mut().map(Arc::make_mut) {
            frame.system_name = frame.function.as_deref().map(|name| format!("_ZN{name}").into());
        }
    }
    let text = written(&profile, "json");
    let count = |what: &str| String::from_utf8_lossy(&text).matches(what).count();
    assert!(count("\"function\":\"main\"") > 1);
    assert_eq!(count("_ZNmain"), 1);
    let back = parse(&text).expect("its own output");
    assert!(back.rows.iter().zip(&profile.rows).all(|(a, b)| a.key == b.key), "each frame has it again");
}

#[test]
fn json_without_our_additions_is_read() {
    let mut value = testing::json(&testing::small(), "json");
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
    assert_eq!(back.rows[4].key.process, 1);
    assert_eq!(back.rows[5].key.stack.cut.as_deref(), Some("unknown reason"));
    assert_eq!(back.modules.len(), 2, "modules are found from frames");
    let count = crate::estimates::of_row(&back, &back.rows[4], Value::AllocObjects, 0.95);
    assert_eq!(count.low, None, "no claim about counts of blocks whose sizes are not known");
}

#[test]
fn absurd_numbers_of_samples_are_refused_and_large_ones_are_shown() {
    let mut profile = testing::small();
    profile.rows[0].alloc.samples = MOST_SAMPLES + 1;
    assert!(message(parse(&written(&profile, "json"))).contains("it is too large: 10995"));
    profile.rows[0].alloc.samples = MOST_SAMPLES / 2;
    let read = parse(&written(&profile, "json")).expect("reads");
    let _ = crate::report::report(&read, &Default::default());
}
