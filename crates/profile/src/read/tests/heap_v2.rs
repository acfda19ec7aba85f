//! Profiles of jemalloc and gperftools.

use super::*;

pub(super) const JEMALLOC: &str = "heap_v2/524288
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
fn a_profile_of_jemalloc_has_the_totals_of_jeprof() {
    let bytes = include_bytes!("../../../../../tests/fixtures/profiles/jemalloc.heap");
    let profile = parse(bytes).expect("heap_v2");
    assert_eq!((profile.header.interval, profile.processes[0].comm.as_str()), (16_384, "program"));
    let total = crate::estimates::Pool::of(&profile.rows).total(Value::InuseSpace);
    assert!((total - 28_210_378.0).abs() < 2.0, "{total}");
    assert!(profile.rows.iter().any(|row| row.alloc.bytes > row.inuse.bytes), "what was freed is in it");
    let program = profile.modules.iter().position(|module| &*module.path == "/tmp/demo/program");
    assert!(profile.rows[0].key.stack.frames.iter().any(|frame| frame.module == program));
}

#[test]
fn heap_v2_is_unbiased_by_mean_size() {
    let profile = parse(JEMALLOC.as_bytes()).expect("heap_v2");
    assert_eq!((profile.header.interval, profile.rows.len(), profile.modules.len()), (524_288, 2, 2));
    let weight = 1.0 / -(-0.125f64).exp_m1();
    let sums = &profile.rows[0].inuse;
    assert!(
        (sums.bytes / (196_608.0 * weight) - 1.0).abs() < 1e-12 && (sums.objects / (3.0 * weight) - 1.0).abs() < 1e-12
    );
    let frame = &profile.rows[0].key.stack.frames[0];
    assert_eq!((frame.address, frame.module, frame.file_offset), (0x401000, Some(0), Some(0x2000)));
    assert_eq!(profile.rows[1].key.stack.frames[0].module, Some(1));
    assert_eq!(profile.processes[0].comm, "program");
    assert!(!profile.header.samples_known);
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
    assert!(crate::report::subject(&exact).ends_with("every allocation sampled"));
}

/// heapbpf writes 1 whatever the interval was; jemalloc means it.
#[test]
fn an_interval_of_one_is_believed_of_jemalloc() {
    let subject = |text: &str| crate::report::subject(&parse(text.as_bytes()).expect("heap_v2"));
    let jemallocs = JEMALLOC.replace("heap_v2/524288", "heap_v2/1");
    assert!(subject(&jemallocs).ends_with("every allocation sampled"));
    let ours = jemallocs.replace("  t0: 4: 262208 [0: 0]\n", "").replace("  t0: 3: 196608 [0: 0]\n", "");
    assert!(subject(&ours).ends_with("sampling interval unknown"));
    assert!(subject(JEMALLOC).ends_with("one sample per 512 KiB"));
}

/// The format cannot express it: a recording without frees looks as if nothing were in use.
#[test]
fn nothing_in_use_may_mean_that_frees_were_not_followed() {
    let is_reported = |text: &str| {
        let profile = parse(text.as_bytes()).expect("heap_v2");
        profile.notes.iter().any(|note| note.contains("no stack has blocks in use"))
    };
    let stack = "@ 0x401001\n  t*: 0: 0 [10: 655360]\n";
    assert!(is_reported(&format!("heap_v2/524288\n  t*: 0: 0 [10: 655360]\n{stack}")));
    let other = stack.replace("0: 0 [", "1: 65536 [").replace("0x401001", "0x402002");
    assert!(!is_reported(&format!("heap_v2/524288\n  t*: 1: 65536 [20: 1310720]\n{stack}{other}")));
    assert!(!is_reported(JEMALLOC));
    assert!(!is_reported("heap_v2/524288\n  t*: 0: 0 [0: 0]\n"));
}
