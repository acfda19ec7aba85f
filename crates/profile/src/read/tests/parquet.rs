//! What a Parquet table preserves of a profile.

use super::*;
use heapbpf_audit::Hook;

#[test]
fn parquet_keeps_what_a_comparison_needs() {
    let profile = testing::small();
    let back = parse(&written(&profile, "parquet")).expect("its own output");
    assert!(back.header.live && back.header.samples_known && back.header.offsets_known);
    assert_eq!(
        (back.header.interval, back.header.host.as_str(), back.header.duration),
        (524_288, "host1", profile.header.duration)
    );
    assert_eq!(back.header.started, profile.header.started - std::time::Duration::from_nanos(789));
    let mut first = profile.rows[0].alloc;
    first.add(&profile.rows[1].alloc);
    assert_eq!((back.rows[0].alloc, back.rows[1].alloc), (first, profile.rows[2].alloc));
    assert_eq!((back.rows[1].key.interval, back.rows[4].key.process), (1_048_576, 1));
    assert_eq!(back.rows[2].key.stack.frames[0].function.as_deref(), Some("[libjson.so+0x4000]"));
    assert!(back.rows[4].key.stack.cut.is_some());
    let back = parse(&written(&testing::partly_followed(), "parquet")).expect("its own output");
    assert_eq!(back.processes.iter().map(|process| process.inuse_unknown).collect::<Vec<_>>(), [false, true]);
    let back = parse(&written(&testing::followed_again(), "parquet")).expect("its own output");
    let since = testing::followed_again().processes[0].inuse_since.expect("a moment");
    assert_eq!(back.processes[0].inuse_since, Some(since - std::time::Duration::from_nanos(789)));
    assert_eq!(back.processes[1].inuse_since, None);
    assert_eq!(back.processes.iter().map(|it| it.hook).collect::<Vec<_>>(), [Some(Hook::Inline), Some(Hook::Probe)]);
    let mut without_frees = profile;
    without_frees.header.live = false;
    assert!(!parse(&written(&without_frees, "parquet")).expect("its own output").header.live);
}

/// The table as a version would write it that has an additional column, or replaces one of ours.
fn with_column(profile: &Profile, name: &str, version: &str) -> Vec<u8> {
    let mut profile = profile.clone();
    profile.header.version = version.into();
    crate::formats::parquet::tests::with_column(&profile, name)
}

#[test]
fn columns_of_a_newer_version_are_named() {
    let profile = testing::small();
    let same = with_column(&profile, "flavour", env!("CARGO_PKG_VERSION"));
    assert_eq!(parse(&same).expect("ours").notes, Vec::<String>::new(), "somebody's own column");
    let read = parse(&with_column(&profile, "numa\u{1b}[31m", "99.0.1")).expect("the rest is understood");
    let [said] = &read.notes[..] else { panic!("{:?}", read.notes) };
    assert!(
        said.contains("by heapbpf 99.0.1") && said.contains("understand the column numa\\u{1b}[31m and ignores it"),
        "{said}"
    );
    assert_eq!(read.rows.len(), parse(&same).expect("ours").rows.len());
    let mut newer = profile;
    newer.header.version = "99.0.1".into();
    assert_eq!(parse(&written(&newer, "parquet")).expect("nothing new").notes, Vec::<String>::new());
    // A column with a different meaning is rejected, and the error names the newer writer.
    let error = parse(&with_column(&newer, "criterion", "99.0.1")).expect_err("no criterion");
    assert!(error.to_string().contains("99.0.1"), "{error}");
}
