//! Tests of `/metrics`.

use std::time::Duration;

use heapbpf_profile::model::Profile;
use heapbpf_profile::naming::FunctionKey;
use heapbpf_profile::testing;
use heapbpf_record::stats::Stats;
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;

use super::*;
use crate::source::tests::finished;

fn key(tgid: u32, exec_id: u64) -> ProcessKey {
    ProcessKey { start_ns: 5, tgid, exec_id: exec_id as _ }
}

fn made(profile: Profile, keys: Vec<ProcessKey>) -> FinishedProfile {
    let stats = Stats { hits: 10, lost: [("ring_full".to_owned(), 2)].into(), ..Stats::default() };
    FinishedProfile { stats, ..finished(profile, keys) }
}

/// What a client sees that may see everything.
fn text_of(profile: Profile) -> String {
    let keys = profile.processes.iter().map(|process| key(process.pid, 0)).collect();
    Metrics::default().write(&made(profile, keys), &[&Filter::default()], Serving::default())
}

fn process(pid: u32, comm: &str, bytes: u64) -> Process {
    Process {
        pid,
        comm: comm.into(),
        exact_alloc_bytes: Some(bytes),
        exact_alloc_objects: Some(1),
        ..Process::default()
    }
}

fn of(processes: Vec<Process>) -> Profile {
    Profile { rows: Vec::new(), processes, ..testing::small() }
}

/// The value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn every_line_has_its_family_and_numbers_are_the_profiles() {
    let profile = testing::small();
    let total = Pool::of(profile.rows.iter().filter(|row| row.key.process == 0)).total(Value::InuseSpace);
    let labels = labels(&profile.processes[0]);
    let text = text_of(profile);
    let inuse = value(&text, &format!("heapbpf_process_inuse_bytes{labels}")).unwrap();
    assert!((inuse - total).abs() <= 1e-9 * total, "{inuse} {total}\n{text}");
    let hook = labels.replace('}', ",hook=\"inline\"}");
    assert_eq!(value(&text, &format!("heapbpf_process_hook{hook}")), Some(1.0), "{text}");
    assert_eq!(value(&text, "heapbpf_hits_total"), Some(10.0));
    assert_eq!(value(&text, "heapbpf_lost_total{reason=\"ring_full\"}"), Some(2.0));
    let mut families = HashSet::new();
    for line in text.lines() {
        match line.strip_prefix("# TYPE ") {
            Some(rest) => assert!(families.insert(rest.split(' ').next().unwrap().to_owned()), "twice: {line}"),
            None if line.starts_with('#') => {}
            None => assert!(families.contains(line.split(['{', ' ']).next().unwrap()), "{line}"),
        }
    }
}

#[test]
fn growth_is_a_series_with_its_interval_where_it_is_known() {
    let mut profile = testing::small();
    profile.header.growth_over = Some(Duration::from_secs(10));
    let row = &mut profile.rows[0];
    row.growth = Some(Growth { kept: testing::sums(40, 64, row.key.interval), freed: SampleSums::default() });
    let (process, kept_bytes) = (row.key.process, testing::sums(40, 64, row.key.interval).bytes);
    let labels = labels(&profile.processes[process]);
    let mut unknown = profile.clone();
    unknown.header.growth_over = None;
    assert!(!text_of(unknown).contains("heapbpf_process_growth"));
    let text = text_of(profile);
    let series = |end: &str| value(&text, &format!("heapbpf_process_growth{end}_bytes_per_second{labels}"));
    let [low, growth, high] = ["_low", "", "_high"].map(|end| series(end).expect("it is known"));
    assert!(
        (growth / (kept_bytes / 10.0) - 1.0).abs() < 1e-9 && low < growth && growth < high,
        "{low} {growth} {high}"
    );
}

/// A small process may have no samples. What it has in use is then below what would probably have been sampled.
#[test]
fn a_process_without_a_sample_has_an_upper_end() {
    let profile = of(vec![process(7, "quiet", 4096)]);
    let labels = labels(&profile.processes[0]);
    let text = text_of(profile);
    let series = |end: &str| value(&text, &format!("heapbpf_process_inuse{end}_bytes{labels}"));
    assert_eq!((series(""), series("_low")), (Some(0.0), Some(0.0)), "{text}");
    assert!(series("_high").is_some_and(|high| high > 0.0), "{text}");
}

#[test]
fn since_when_frees_are_followed_is_a_series_where_they_were_given_up() {
    let profile = testing::followed_again();
    let labels = labels(&profile.processes[0]);
    let text = text_of(profile);
    let since = "heapbpf_process_inuse_since_timestamp_seconds";
    assert_eq!(value(&text, &format!("{since}{labels}")), Some(1_700_000_012.623), "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with(since)).count(), 1);
}

#[test]
fn resident_memory_is_a_series_per_part() {
    let profile = testing::measured();
    let labels = labels(&profile.processes[0]).replace('}', ",part=\"heap\"}");
    let text = text_of(profile);
    assert_eq!(value(&text, &format!("heapbpf_process_resident_bytes{labels}")), Some(314_572_800.0), "{text}");
    let parts: Vec<&str> = text.split("part=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert_eq!(parts, ["heap", "files", "stacks", "shared", "jit_code", "runtime", "heapbpf", "other", "anonymous"]);
}

#[test]
fn idle_processes_have_series_of_their_memory_alone() {
    let mut profile = testing::whole_host();
    profile.idle[0].cgroup = "/a \"b\".slice".into();
    profile.idle[0].resident.as_mut().expect("measured").cgroup_bytes = Some(700 << 20);
    let labels = labels(&profile.idle[0]);
    let text = text_of(profile);
    let heap = labels.replace('}', ",part=\"heap\"}");
    assert_eq!(value(&text, &format!("heapbpf_process_resident_bytes{heap}")), Some(188_743_680.0), "{text}");
    assert_eq!(value(&text, &format!("heapbpf_process_swapped_bytes{labels}")), Some(31_457_280.0));
    assert_eq!(value(&text, &format!("heapbpf_process_memory_coverage{labels}")), Some(0.0), "nothing is counted");
    let of_sh = text.lines().filter(|line| line.starts_with("heapbpf_process_resident_bytes{pid=\"901\","));
    let parts: Vec<&str> = of_sh.filter_map(|line| line.split("part=\"").nth(1)?.split('"').next()).collect();
    assert_eq!(parts, ["files", "shared", "anonymous"], "its memory was not divided");
    let of_cgroup = r#"heapbpf_cgroup_memory_bytes{cgroup="/a \"b\".slice"}"#;
    assert_eq!(value(&text, of_cgroup), Some(734_003_200.0), "{text}");
    assert_eq!(text.matches("heapbpf_cgroup_memory_bytes{").count(), 1, "of the others it is not known");
    assert!(!text.contains(&format!("heapbpf_process_samples_total{labels}")));
}

#[test]
fn series_are_bounded_and_no_counter_falls_as_processes_come_and_go() {
    let mut metrics = Metrics::default();
    let everything = Filter::default();
    let many = MOST_PROCESSES as u32 + 100;
    let keys = |pids: std::ops::Range<u32>| pids.map(|pid| key(pid, 0)).collect::<Vec<_>>();
    let processes = |pids: std::ops::Range<u32>, bytes| pids.map(|pid| process(pid, "a", bytes)).collect::<Vec<_>>();
    let text =
        metrics.write(&made(of(processes(1..many + 1, 10)), keys(1..many + 1)), &[&everything], Serving::default());
    assert_eq!(text.matches("heapbpf_process_alloc_bytes_total{").count(), MOST_PROCESSES);
    assert_eq!(value(&text, "heapbpf_other_alloc_bytes_total"), Some(1000.0));
    // Half of the first processes end: their counts go to the overflow bucket (no key), and new processes take their
    // slots.
    let mut living = processes(251..many + 301, 10);
    living.push(Process { pid: 0, ..process(0, "a", 2500) });
    let text = metrics.write(&made(of(living), keys(251..many + 301)), &[&everything], Serving::default());
    assert_eq!(text.matches("heapbpf_process_alloc_bytes_total{").count(), MOST_PROCESSES);
    let other = value(&text, "heapbpf_other_alloc_bytes_total").unwrap();
    assert_eq!(other, 1000.0 + 2500.0 + 500.0);
}

#[test]
fn a_replaced_program_is_one_series_and_taken_back_bytes_are_not_seen() {
    let mut metrics = Metrics::default();
    let everything = Filter::default();
    let series = "heapbpf_process_alloc_bytes_total{pid=\"7\",comm=\"new\",cgroup=\"\"}";
    let both = || of(vec![process(7, "old", 50), process(7, "new", 90)]);
    let keys = vec![key(7, 0), key(7, 1)];
    let text = metrics.write(&made(both(), keys.clone()), &[&everything], Serving::default());
    assert_eq!(text.matches("heapbpf_process_alloc_bytes_total{").count(), 1);
    assert_eq!((value(&text, series), value(&text, "heapbpf_other_alloc_bytes_total")), (Some(90.0), Some(50.0)));
    let mut less = both();
    less.processes[1].exact_alloc_bytes = Some(80);
    let text = metrics.write(&made(less, keys), &[&everything], Serving::default());
    assert_eq!(value(&text, series), Some(90.0));
}

/// A process that is not counted has no exact figures, whether it runs or has ended.
#[test]
fn what_is_not_counted_is_left_out_and_told() {
    let mut metrics = Metrics::default();
    let everything = Filter::default();
    let announcing = |pid| Process {
        exact_alloc_bytes: None,
        exact_alloc_objects: None,
        hook: Some(heapbpf_audit::Hook::Usdt),
        ..process(pid, "a", 0)
    };
    let figures = |text: &str| {
        let series = [
            "heapbpf_alloc_bytes_total",
            "heapbpf_allocs_total",
            "heapbpf_other_alloc_bytes_total",
            UNCOUNTED_PROCESSES,
        ];
        series.map(|series| value(text, series))
    };
    let both = of(vec![process(1, "a", 10), announcing(2)]);
    let text = metrics.write(&made(both, vec![key(1, 0), key(2, 0)]), &[&everything], Serving::default());
    for family in ["heapbpf_process_alloc_bytes_total{", "heapbpf_process_allocs_total{"] {
        assert_eq!(text.matches(family).count(), 1, "{text}");
    }
    assert_eq!(text.matches("heapbpf_process_samples_total{").count(), 2, "{text}");
    assert_eq!(figures(&text), [Some(10.0), Some(1.0), None, Some(1.0)], "{text}");
    // That process and two others like it have ended.
    let ended = Process { ended: true, stands_for: 3, ..announcing(0) };
    let after = || of(vec![process(1, "a", 15), ended.clone(), Process { ended: true, ..process(0, "a", 4) }]);
    let text = metrics.write(&made(after(), vec![key(1, 0)]), &[&everything], Serving::default());
    assert_eq!(figures(&text), [Some(19.0), Some(2.0), Some(4.0), Some(3.0)], "{text}");
    let mut of_b = Filter::default();
    of_b.set("comm", "b").unwrap();
    let text = metrics.write(&made(after(), vec![key(1, 0)]), &[&of_b], Serving::default());
    assert_eq!(figures(&text), [None, None, None, Some(0.0)], "{text}");
}

#[test]
fn who_sees_a_part_is_not_told_of_the_whole_and_names_are_escaped() {
    let mut filter = Filter::default();
    filter.set("comm", "b*").unwrap();
    let profile = of(vec![process(1, "a", 10), process(2, "b\"\\\n\x1b[2J\u{9b}", 20)]);
    let text = Metrics::default().write(&made(profile, vec![key(1, 0), key(2, 0)]), &[&filter], Serving::default());
    assert!(
        text.contains(r#"comm="b\"\\\\n\\u{1b}[2J\\u{9b}""#)
            && !text.contains("comm=\"a\"")
            && !text.contains("hits_total"),
        "{text}"
    );
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
}

#[test]
fn a_process_whose_frees_were_given_up_has_no_series_of_what_is_in_use() {
    let profile = testing::partly_followed();
    let [known, unknown] = [0, 1].map(|index| labels(&Process { ended: false, ..profile.processes[index].clone() }));
    let profile = Profile {
        processes: profile.processes.iter().map(|process| Process { ended: false, ..process.clone() }).collect(),
        ..profile
    };
    let text = text_of(profile);
    for family in ["heapbpf_process_inuse_bytes", "heapbpf_process_inuse_high_bytes", "heapbpf_process_inuse_objects"] {
        assert!(value(&text, &format!("{family}{known}")).is_some(), "{family}\n{text}");
        assert_eq!(value(&text, &format!("{family}{unknown}")), None, "{family}\n{text}");
    }
    assert!(value(&text, &format!("heapbpf_process_samples_total{unknown}")).is_some());
}

/// Memory held at exit is reported per program, in a bounded number of series whose sum is the total. This holds
/// wherever the rows are: with the process, or with the rest of its program once the process is retired.
#[test]
fn what_was_held_at_exit_is_told_by_program_and_does_not_fall() {
    let mut metrics = Metrics::default();
    let everything = Filter::default();
    let base = testing::ended_apart();
    let row = base.rows[4].clone();
    let held = row.at_exit.bytes;
    let ended = |pid, comm: &str| Process { ended: true, ..process(pid, comm, 1) };
    let profile = |processes: Vec<Process>, rows: &[usize]| Profile {
        rows: rows.iter().map(|&process| row.clone().with_process(process)).collect(),
        processes,
        ..testing::ended_apart()
    };
    let sum = |text: &str, families: [&str; 2]| -> f64 {
        let lines =
            text.lines().filter(|line| families.iter().any(|family| line.split(['{', ' ']).next() == Some(family)));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    };
    let bytes = ["heapbpf_at_exit_bytes", "heapbpf_other_at_exit_bytes"];
    let series = "heapbpf_at_exit_bytes{comm=\"a\",cgroup=\"\"}";
    let before = profile(vec![process(1, "a", 1), ended(2, "a"), ended(3, "a"), ended(4, "b")], &[1, 2, 3]);
    let text =
        metrics.write(&made(before, (1..5).map(|pid| key(pid, 0)).collect()), &[&everything], Serving::default());
    assert!((value(&text, series).unwrap() / (2.0 * held) - 1.0).abs() < 1e-12, "{text}");
    assert!((sum(&text, bytes) / (3.0 * held) - 1.0).abs() < 1e-12, "{text}");
    let objects = ["heapbpf_at_exit_objects", "heapbpf_other_at_exit_objects"];
    assert!((sum(&text, objects) / (3.0 * row.at_exit.objects) - 1.0).abs() < 1e-12, "{text}");
    let bounds =
        ["heapbpf_at_exit_low_bytes", "heapbpf_at_exit_high_bytes"].map(|family| series.replace(bytes[0], family));
    let [low, high] = bounds.map(|series| value(&text, &series).unwrap());
    assert!(low < 2.0 * held && 2.0 * held < high, "{text}");
    // Both were retired.
    let after = profile(vec![process(1, "a", 1), ended(0, "a"), ended(0, "b")], &[1, 1, 2]);
    let text = metrics.write(&made(after, vec![key(1, 0)]), &[&everything], Serving::default());
    assert!((value(&text, series).unwrap() / (2.0 * held) - 1.0).abs() < 1e-12, "{text}");

    let many = MOST_PROGRAMS + 50;
    let processes: Vec<Process> = (0..many).map(|number| ended(0, &format!("p{number}"))).collect();
    let text = metrics.write(
        &made(profile(processes, &(0..many).collect::<Vec<_>>()), Vec::new()),
        &[&everything],
        Serving::default(),
    );
    assert_eq!(text.matches("heapbpf_at_exit_bytes{").count(), MOST_PROGRAMS - 2, "two are of programs seen before");
    assert!((sum(&text, bytes) / (many as f64 * held) - 1.0).abs() < 1e-9);

    let mut of_b = Filter::default();
    of_b.set("comm", "b").unwrap();
    let part = profile(vec![ended(0, "a"), ended(0, "b")], &[0, 1]);
    let text = metrics.write(&made(part, Vec::new()), &[&of_b], Serving::default());
    assert_eq!((text.matches("heapbpf_at_exit_bytes{").count(), value(&text, series)), (1, None), "{text}");
    let text = metrics.write(&made(testing::small(), Vec::new()), &[&everything], Serving::default());
    assert!(!text.contains("at_exit"), "where it counts as in use there is no such series");
}

/// Suspects have series in the order in which they were found. What a client sees only in part is not shown to it.
#[test]
fn growing_functions_are_a_bounded_number_of_series() {
    let profile = of(vec![process(1, "shop", 10), process(2, "other", 10)]);
    let growing = |function: &str, processes: &[usize]| Growing {
        program: "shop (1)".into(),
        name: "as it is shown".into(),
        function: FunctionKey { home: "shop.so".into(), ..FunctionKey::named(function.to_owned()) },
        how_much: String::new(),
        why: String::new(),
        full: None,
        per_second: Some(Estimate { estimate: 41.0, low: Some(33.0), high: Some(50.0), ..Estimate::default() }),
        processes: processes.iter().copied().collect(),
    };
    let mut all = vec![growing("shop::audit", &[0]), growing("both", &[0, 1])];
    all.push(Growing { per_second: None, ..growing("unknown", &[0]) });
    all.push(Growing { full: all[0].per_second, per_second: None, ..growing("cache", &[0]) });
    let mut metrics = Metrics::default();
    let mut text = |growing: &[Growing], visible: fn(&Process) -> bool| {
        let suspects = growing_series(&profile, growing, visible, |it| it.per_second);
        let full = growing_series(&profile, growing, visible, |it| it.full);
        let serving = Serving { suspects, full, ..Serving::default() };
        metrics.write(&made(profile.clone(), vec![key(1, 0), key(2, 0)]), &[&Filter::default()], serving)
    };
    let labels = program_labels(&profile.processes[0]).replace('}', ",function=\"shop::audit\",module=\"shop.so\"}");
    let whole = text(&all, |_| true);
    for (end, expected) in [("", 41.0), ("_low", 33.0), ("_high", 50.0)] {
        let series = format!("heapbpf_suspect_growth{end}_bytes_per_second{labels}");
        assert_eq!(value(&whole, &series), Some(expected), "{whole}");
        let series = format!("heapbpf_full_inuse{end}_bytes{}", labels.replace("shop::audit", "cache"));
        assert_eq!(value(&whole, &series), Some(expected), "{whole}");
    }
    assert!(whole.contains("function=\"both\"") && !whole.contains("function=\"unknown\""), "{whole}");
    let part = text(&all, |process| process.comm == "shop");
    assert!(part.contains("shop::audit") && !part.contains("function=\"both\""), "{part}");
    let many: Vec<Growing> = (0..MOST_SUSPECTS + 2).map(|number| growing(&format!("f{number}"), &[0])).collect();
    let bounded = text(&many, |_| true);
    assert_eq!(bounded.matches("heapbpf_suspect_growth_bytes_per_second{").count(), MOST_SUSPECTS, "{bounded}");
}
