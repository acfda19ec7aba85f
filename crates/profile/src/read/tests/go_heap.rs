//! Rows with samples from Go's runtime.

use super::*;
use crate::estimates::{IN_USE_ALONE, of_row};
use crate::formats::{WriteOptions, by_name};
use crate::model::{Process, Row, SampleSums};
use crate::{GroupBy, Pool};

fn go_rows(profile: &Profile) -> Vec<&Row> {
    profile.rows.iter().filter(|row| row.is_of_go_runtime()).collect()
}

#[test]
fn they_count_in_what_is_in_use_and_nowhere_else() {
    let (with, without) = (testing::with_go_heap(), testing::small());
    let (all, before) = (Pool::whole(&with), Pool::whole(&without));
    for value in Value::ALL.into_iter().filter(|value| !value.is_inuse()) {
        assert_eq!(all.estimate(&with, value, 0.95), before.estimate(&without, value, 0.95), "{value:?}");
    }
    let (go, value) = (go_rows(&with)[0], Value::InuseSpace);
    let sum: f64 = with.rows.iter().map(|row| value.of(row)).sum();
    let total = all.estimate(&with, value, 0.95);
    assert!((total.estimate / sum - 1.0).abs() < 1e-12 && total.high > before.estimate(&without, value, 0.95).high);
    let alone = of_row(&with, go, value, 0.95);
    assert!((alone.estimate / go.inuse.bytes - 1.0).abs() < 1e-12 && alone.low > Some(0.0) && alone.high.is_some());
    assert_eq!(of_row(&with, go, Value::AllocSpace, 0.95).reason, Some(IN_USE_ALONE));
    assert!(all.guaranteed(&with, value, 0.95).is_err() && all.guaranteed(&with, Value::AllocSpace, 0.95).is_ok());
}

#[test]
fn files_tell_who_has_sampled_them() {
    let profile = testing::with_go_heap();
    for format in ["json", "parquet", "pprof"] {
        let back = parse(&written(&profile, format)).expect("it is ours");
        let [row] = go_rows(&back)[..] else { panic!("{format}: {:?}", back.rows) };
        assert_eq!(row.key.stack.frames[0].function.as_deref(), Some("main.list"), "{format}");
        assert!((row.inuse.bytes / go_rows(&profile)[0].inuse.bytes - 1.0).abs() < 1e-3, "{format}");
        assert_eq!(row.alloc, SampleSums::default(), "{format}");
    }
    let text = testing::text(&profile, "json");
    assert!(text.contains(r#""source":"go runtime""#) && text.contains(r#""hook":"go runtime""#));
}

#[test]
fn processes_of_a_program_keep_them_apart() {
    let mut profile = testing::with_go_heap();
    profile.processes[1] = Process { pid: profile.processes[1].pid, ..profile.processes[0].clone() };
    let mut out = Vec::new();
    let options = WriteOptions { group_by: Some(GroupBy::Program), ..WriteOptions::default() };
    by_name("json").expect("known").write(&profile, &options, &mut out).expect("memory");
    let back = parse(&out).expect("it is ours");
    let members: Vec<_> = back.processes.iter().flat_map(|process| &process.members).collect();
    let of_go = |totals: &[Row]| totals.iter().filter(|row| row.is_of_go_runtime()).count();
    assert_eq!(members.iter().map(|member| of_go(&member.totals)).collect::<Vec<_>>(), [0, 1]);
    let (one, other) = (Pool::whole(&profile), Pool::whole(&back));
    for value in [Value::AllocSpace, Value::InuseSpace] {
        let [one, other] = [(&one, &profile), (&other, &back)].map(|(pool, of)| pool.estimate(of, value, 0.95));
        assert!((one.estimate / other.estimate - 1.0).abs() < 1e-9, "{value:?} {one:?} {other:?}");
    }
}
