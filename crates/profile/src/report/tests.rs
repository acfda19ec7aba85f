//! Tests of the report as a whole.

use std::sync::Arc;

use heapbpf_audit::Missing;
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;

use super::*;
use crate::model::{Frame, Header, LossBound, Octave, Process, Resident, Stack};
use crate::report::figure::FigureText;
use crate::report::text::width;
use crate::testing;

#[test]
fn lines_fit_and_colours_change_nothing_else() {
    let plain = |text: &str| {
        let mut plain = String::new();
        let mut rest = text;
        while let Some((before, after)) = rest.split_once("\x1b[") {
            plain.push_str(before);
            rest = after.split_once('m').expect("a whole sequence").1;
        }
        plain + rest
    };
    for profile in [testing::small(), testing::large(300, 30), testing::ended_apart()] {
        for columns in [60, 80, 100, 160] {
            let options = ReportOptions { width: columns, ..ReportOptions::default() };
            let text = report(&profile, &options);
            // The totals at the top need 80 columns.
            for line in text.lines().skip(if columns < 80 { head(&text).len() } else { 0 }) {
                assert!(width(line) <= columns, "{columns}: {line}");
            }
            assert_eq!(plain(&report(&profile, &ReportOptions { color: true, ..options })), text);
        }
    }
}

#[test]
fn sorting_and_grouping_are_the_users() {
    let profile = testing::small();
    let with = |sort, group_by| {
        report(&profile, &ReportOptions { sort, group_by, top: 1, width: 120, ..ReportOptions::default() })
    };
    let by_calls = with(Some(Value::AllocObjects), None);
    assert!(by_calls.contains("By allocations · top 1 of 4 stacks") && by_calls.contains("worker \"x\" (4300): "));
    let together = with(None, Some(GroupBy::Nothing));
    assert!(together.contains("top 1 of 3 stacks") && !together.contains("server (4242): grow"));
}

#[test]
fn with_nothing_in_use_the_stacks_are_sorted_by_what_they_allocated() {
    let mut profile = testing::small();
    assert!(report(&profile, &ReportOptions::default()).contains("By bytes in use"));
    for row in &mut profile.rows {
        row.inuse = Default::default();
    }
    let text = report(&profile, &ReportOptions::default());
    assert!(text.contains("By bytes allocated") && text.contains('%'), "{text}");
}

#[test]
fn escape_sequences_of_a_target_do_not_reach_the_terminal() {
    let mut profile = testing::small();
    profile.processes[0].comm = "\x1b[2Jevil".into();
    profile.notes = vec!["a\u{7}note".into()];
    let mut stack = profile.rows[3].key.stack.as_ref().clone();
    Arc::make_mut(&mut stack.frames[1]).function = Some("f\x1b]0;x\u{7}".into());
    profile.rows[3].key.stack = stack.into();
    assert!(!report(&profile, &ReportOptions::default()).chars().any(|c| c.is_control() && c != '\n'));
}

#[test]
fn a_profile_without_samples_says_so() {
    let mut profile = testing::small();
    profile.rows.clear();
    let text = report(&profile, &ReportOptions::default());
    assert!(text.contains("0 samples") && text.contains("nothing was sampled") || text.contains("0 B"), "{text}");
    profile.processes.clear();
    assert!(report(&profile, &ReportOptions::default()).contains("no process was counted"));
}

/// An exact total that contradicts the samples raises an alarm that names the responsible counter. A difference that
/// chance explains does not, even if |z| > 5 by the variance (one sample where six were expected).
#[test]
fn the_self_check_allows_for_chance_and_names_the_counter() {
    let mut profile = testing::small().only_process(0);
    let estimated = Pool::of(&profile.rows).total(Value::AllocSpace);
    let alarm = "chance does not explain";
    profile.processes[0].exact_alloc_bytes = Some(estimated as u64);
    assert!(!report(&profile, &ReportOptions::default()).contains(alarm));
    profile.processes[0].exact_alloc_bytes = Some(20 * estimated as u64);
    profile.counters.insert("lost_ring_full".into(), 3);
    let text = report(&profile, &ReportOptions { width: 1_000, ..ReportOptions::default() });
    assert!(text.contains(alarm) && text.contains("lost_ring_full is 3"), "{text}");
    profile.rows.truncate(1);
    profile.rows[0].alloc = testing::sums(1, 16, profile.header.interval);
    profile.rows[0].key.interval = profile.header.interval;
    profile.processes[0].exact_alloc_bytes = Some(65 * profile.header.interval / 10);
    let text = report(&profile, &ReportOptions::default());
    // By the variance of the single sample it would be +5.5 σ.
    assert!(text.contains("+1.6 σ") && !text.contains(alarm), "{text}");
}

/// Rows are titled by functions of the program. What these called to allocate is one word, and all frames are available
/// on request.
#[test]
fn libraries_and_wrappers_title_no_row() {
    let mut profile = testing::small().only_process(0);
    let mut stack = profile.rows[0].key.stack.as_ref().clone();
    let frame = |function: &str, module| Frame { function: Some(function.into()), module, ..Frame::default() };
    profile.modules[1].path = "/usr/lib/x86_64-linux-gnu/libjson.so.4".into();
    stack.frames =
        ["malloc", "operator new(unsigned long)", "void std::vector<int>::_M_realloc_insert<int>(int*, int&&)"]
            .into_iter()
            .map(|function| Arc::new(frame(function, Some(0))))
            .chain([Arc::new(frame("int shop::fill<int>(std::vector<int>&)", Some(0)))])
            .chain([Arc::new(frame("json_visit", Some(1))), Arc::new(frame("main", Some(0)))])
            .chain([Arc::new(frame("__libc_start_main_impl", Some(1)))])
            .collect();
    profile.rows.retain(|row| row.key.process == 0);
    let stack = Arc::new(stack);
    profile.rows.iter_mut().for_each(|row| row.key.stack = Arc::clone(&stack));
    let with = |frames| report(&profile, &ReportOptions { frames, width: 160, ..ReportOptions::default() });
    let text = with(FrameView::default());
    assert!(
        text.contains("shop::fill server (via vector) ← main") && text.contains("where      shop::fill server"),
        "{text}"
    );
    assert!(
        !["operator new", "json_visit", "__libc_start", "realloc_insert"].iter().any(|it| text.contains(it)),
        "{text}"
    );
    let text = with(FrameView { all_frames: true, ..FrameView::default() });
    assert!(
        text.contains("std::vector::_M_realloc_insert server ← shop::fill ← json_visit libjson.so.4 ← main"),
        "{text}"
    );
    let text = with(FrameView { full_names: true, ..FrameView::default() });
    assert!(text.contains("int shop::fill<int>(std::vector<int>&) server (via vector) ← main"), "{text}");
}

/// A function includes everything that is allocated through it, with the interval of that sum; recursion counts once.
#[test]
fn functions_have_figures_of_their_own() {
    let mut profile = testing::small();
    profile.rows.retain(|row| row.key.interval == profile.header.interval);
    assert!(!report(&profile, &ReportOptions::default()).contains("By function"));
    let text = report(&profile, &ReportOptions { functions: 4, width: 140, ..ReportOptions::default() });
    let section: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("By function")).collect();
    assert!(section[0].contains("top 4 of 4"), "{text}");
    // `parse_value` occurs twice on the stacks of rows 0, 1 and 4, and on no other.
    let through = Pool::of([0, 1, 3].map(|row| &profile.rows[row]));
    let figure = crate::report::figure::FigureText::new(&profile, &through, Value::InuseSpace, 0.95);
    let line = section.iter().find(|line| line.ends_with("parse_value")).expect("a top function");
    assert!(line.contains(&figure.figure) && line.contains(&figure.bounds), "{line} {figure:?}");
}

#[test]
fn what_is_not_known_to_be_in_use_is_not_said_to_be_nothing() {
    let options = ReportOptions { width: 160, ..ReportOptions::default() };
    let text = report(&testing::partly_followed(), &options);
    print!("{text}");
    assert!(text.contains("without 1 process whose frees were not tracked"));
    let of_process = text.lines().find(|line| line.trim_start().starts_with("worker") && line.contains("ended"));
    assert!(of_process.is_some_and(|line| line.contains("not known")), "{of_process:?}");
    let mut silent = testing::partly_followed();
    silent.rows.retain(|row| row.key.process == 0);
    assert!(report(&silent, &options).contains("not known"), "a process without samples");
}

#[test]
fn what_ended_processes_held_has_a_line_a_column_and_a_section() {
    let profile = testing::ended_apart();
    let options = ReportOptions { width: 140, ..ReportOptions::default() };
    let text = report(&profile, &options);
    print!("{text}");
    let held = Pool::of(&profile.rows[4..]);
    let figure = FigureText::new(&profile, &Pool::of(&profile.rows), Value::AtExitSpace, 0.95);
    let head = text.lines().find(|line| line.trim_start().starts_with("at exit ")).expect("a line at the head");
    assert!(head.contains(&figure.figure) && head.contains(&figure.bounds), "{head}");
    assert!(head.contains("held by processes when they ended, not in use"));
    assert_eq!(held.total(Value::AtExitSpace), Pool::of(&profile.rows).total(Value::AtExitSpace));
    let section: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("By bytes held at exit")).collect();
    assert!(section[0].contains("all 2 stacks") && section[1].contains("AT EXIT"), "{text}");
    assert!(section[2].contains("90.0 %") && section[3].contains("worker \"x\" (4300): grow"), "{text}");
    let processes: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("Programs")).collect();
    assert!(processes[1].contains("IN USE") && processes[1].contains("AT EXIT"), "{text}");
    let of_ended = processes.iter().find(|line| line.contains("ended")).expect("a process that ended");
    assert!(of_ended.contains(&figure.figure), "{of_ended}");
    let partly_read = report(&testing::partly_read(), &options);
    let remark = "figures are as of 22:13:49.2 UTC; 1.2 % of the records sent by then were not read in time";
    assert!(partly_read.contains(remark) && !text.contains("as of"), "{partly_read}");

    let by_held = report(&profile, &ReportOptions { sort: Some(Value::AtExitSpace), ..options.clone() });
    assert_eq!(by_held.matches("By bytes held at exit").count(), 1, "{by_held}");
    assert!(!by_held.contains("By bytes in use"), "{by_held}");
    let text = report(&testing::small(), &options).to_lowercase();
    assert!(!text.contains("at exit") && !text.contains("as of"), "{text}");
}

#[test]
fn a_value_that_the_profile_has_not_is_not_claimed() {
    let mut profile = testing::small();
    profile.header.live = false;
    for sort in [Value::InuseSpace, Value::AtExitObjects] {
        let text = report(&profile, &ReportOptions { sort: Some(sort), ..ReportOptions::default() });
        assert!(text.contains("By bytes allocated") && !text.contains("By bytes in use"), "{text}");
        assert!(!text.contains("held at exit"), "{text}");
        let remark = format!("no {} in this profile: frees were not tracked (--no-live); sorted by bytes", sort.name());
        assert!(text.contains(&remark), "{text}");
    }
    let known = report(&profile, &ReportOptions { sort: Some(Value::AllocObjects), ..ReportOptions::default() });
    assert!(known.contains("By allocations") && !known.contains("in this profile"), "{known}");
}

/// A profile in which every allocation was sampled: five blocks of 100 bytes.
fn all_sampled() -> Profile {
    let mut profile = testing::small();
    profile.header.interval = 1;
    profile.processes.truncate(1);
    profile.processes[0].exact_alloc_bytes = Some(500);
    profile.processes[0].exact_alloc_objects = Some(5);
    profile.rows.truncate(1);
    profile.rows[0].key.interval = 1;
    (profile.rows[0].alloc, profile.rows[0].inuse) = (testing::sums(5, 100, 1), testing::sums(5, 100, 1));
    profile.counters = [("submitted".to_owned(), 5)].into();
    profile
}

#[test]
fn a_service_ends_with_three_lines() {
    let begins = |profile: &Profile| -> Vec<String> {
        let text = totals(profile, &ReportOptions::default());
        text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
    };
    let mut profile = testing::whole_host();
    assert_eq!(begins(&profile), ["5", "in", "allocated", "!"], "something was lost");
    profile.counters.clear();
    assert_eq!(begins(&profile), ["5", "in", "allocated"]);
}

/// Remarks about the largest share of bytes or calls come first, whatever their kind.
#[test]
fn remarks_are_in_the_order_of_what_they_touch() {
    let mut profile = testing::whole_host();
    profile.idle[0].missing = vec![Missing::new("Java's own heap", "not included")];
    profile.notes = [
        "after 2.0 s: something happened",
        "7 samples were not tracked (12.50 %): why",
        "Go's own heap is not included (x): its memory is not known",
        "Java's own heap is not included (ledgerd): advice",
        "100,000 samples have only their caller as a stack (60.61 %): the stacks ring was full",
    ]
    .map(str::to_owned)
    .into();
    let listed = remarks(&profile, &ReportOptions::default());
    let begins = ["Java's", "100,000", "7 samples", "worker", "3 samples", "2 of 60", "Go's", "after"];
    assert_eq!(listed.len(), begins.len(), "{listed:?}");
    for (remark, begin) in listed.iter().zip(begins) {
        assert!(remark.starts_with(begin), "{begin}: {listed:?}");
    }
    let brief = report(&profile, &ReportOptions { brief: true, ..ReportOptions::default() });
    assert!(brief.contains("  ! Java's own heap"), "{brief}");
    profile.notes = (0..9).map(|number| format!("note {number}")).collect();
    let listed = remarks(&profile, &ReportOptions::default());
    assert_eq!(listed.last().map(String::as_str), Some("and 4 more remarks"), "{listed:?}");
}

/// Memory that no recorded call allocated is reported if its share is large: a runtime's own heap must not be
/// summarized as "missed nothing".
#[test]
fn memory_that_nothing_accounts_for_is_missed() {
    let mut profile = testing::measured().only_process(0);
    profile.processes[0].missing.clear();
    let missed = |profile: &Profile| {
        let text = report(profile, &ReportOptions { brief: true, width: 140, ..ReportOptions::default() });
        text.lines().find(|line| line.starts_with("  missed")).expect("a line").to_owned()
    };
    assert!(!missed(&profile).contains("resident"), "{}", missed(&profile));
    let high = Pool::of(&profile.rows).estimate(&profile, Value::InuseSpace, 0.95).high.expect("an interval");
    profile.processes[0].resident.as_mut().expect("measured").other_bytes = high as u64 + (100 << 20);
    assert!(
        missed(&profile).contains("≥ 100 MiB of other resident memory: mmap, a runtime's, or older"),
        "{}",
        missed(&profile)
    );
    profile.processes[0].missing = vec![heapbpf_audit::Missing::new("Erlang's own heap", "not included")];
    assert!(!missed(&profile).contains("resident"), "it is named: {}", missed(&profile));
    // Nothing bounds what is in use, or what is free in another allocator; or the memory was not divided into parts.
    profile.processes[0].missing.clear();
    let mut with_jemalloc = profile.clone();
    with_jemalloc.processes[0].allocators.push("jemalloc 5.3.0".into());
    assert!(missed(&with_jemalloc).contains("MiB of resident memory of unknown use"), "{}", missed(&with_jemalloc));
    let unbounded = Profile { header: Header { live: false, ..profile.header.clone() }, ..profile.clone() };
    assert!(missed(&unbounded).contains("MiB of resident memory of unknown use"), "{}", missed(&unbounded));
    let resident = profile.processes[0].resident.as_mut().expect("measured");
    *resident = Resident { undivided_bytes: 400 << 20, ..Resident::default() };
    assert!(missed(&profile).contains("MiB of resident memory of unknown use"), "{}", missed(&profile));
}

/// A report of many processes has the same summary of what was missed as that of one.
#[test]
fn a_host_of_which_something_is_missing_has_not_missed_nothing() {
    let missed = |profile: &Profile| {
        let text = report(profile, &ReportOptions { width: 300, ..ReportOptions::default() });
        text.lines().find(|line| line.starts_with("  missed")).expect("a line").to_owned()
    };
    let mut profile = testing::whole_host();
    profile.rows.clear();
    profile.counters.clear();
    profile.notes.clear();
    profile.processes.iter_mut().for_each(|process| process.coverage = 1.0);
    let all = missed(&profile);
    assert!(all.contains("≥ 430 MiB of other resident memory") && all.contains("/opt/lib/custom.so"), "{all}");
    profile.idle[0].resident.as_mut().expect("measured").other_bytes = 0;
    profile.processes[0].missing.clear();
    assert!(missed(&profile).ends_with("nothing"), "{}", missed(&profile));
    profile.idle[0].missing.push(Missing::new("Erlang's own heap", "not included"));
    assert!(missed(&profile).contains("Erlang's own heap (heapbpf doctor)"), "{}", missed(&profile));
    // Nothing accounts for a heap whose allocator was not found.
    profile.idle[0].missing.clear();
    profile.idle[0].allocators.clear();
    assert!(missed(&profile).contains("≥ 180 MiB of other resident memory"), "{}", missed(&profile));
    profile.idle.push(Process { pid: 903, ended: true, ..profile.idle[0].clone() });
    assert!(missed(&profile).contains("≥ 180 MiB of other resident memory"), "one has ended: {}", missed(&profile));
    profile.idle.pop();
    profile.idle[0].hook = Some(heapbpf_audit::Hook::Probe);
    assert!(missed(&profile).ends_with("nothing"), "{}", missed(&profile));
    // A process without a line is only in a remark; what a line says is not repeated.
    profile.notes.push("not counted: /srv/tool: a static program without symbols".into());
    assert!(missed(&profile).ends_with("see 1 remark below"), "{}", missed(&profile));
    profile.idle[0].missing.push(Missing::new("/srv/tool", "a static program without symbols"));
    assert!(missed(&profile).ends_with("/srv/tool (heapbpf doctor)"), "{}", missed(&profile));
}

/// If samples and counts must agree, a call that was counted after the time of the samples raises no alarm as long as
/// it is part of the slack; nor do samples that are known to be lost. An unexplained call does.
#[test]
fn the_self_check_knows_of_losses_and_of_the_last_call() {
    let wide = ReportOptions { width: 1_000, ..ReportOptions::default() };
    let alarms = |profile: &Profile| report(profile, &wide).contains("do not trust this process's figures");
    let mut profile = all_sampled();
    assert!(!alarms(&profile));
    profile.processes[0].exact_alloc_bytes = Some(600);
    profile.processes[0].exact_alloc_objects = Some(6);
    assert!(alarms(&profile));
    // A call in flight does not explain the difference.
    profile.counters.insert("lost_in_flight".into(), 1);
    assert!(report(&profile, &wide).contains("no loss was counted"));
    assert!(!report(&profile, &wide).contains("in flight") && !report(&profile, &wide).contains("1 sample lost"));
    let call = LossBound { samples: 1, sampled_bytes: 100 };
    profile.processes[0].slack = call;
    assert!(!alarms(&profile));
    // A difference larger than the slack is unexplained.
    profile.processes[0].exact_alloc_bytes = Some(700);
    assert!(alarms(&profile));
    profile.processes[0].losses.alloc = call;
    profile.counters.insert("lost_ring_full".into(), 1);
    assert!(!alarms(&profile));
    let text = report(&profile, &wide);
    let expected = "1 sample lost (16.7 % of all): ring full 1; allocated figures may miss 1 sample (100 B); error bars \
                    allow for it";
    assert!(text.contains(expected), "{text}");
    assert!(text.contains("[500, 600]"), "the interval shows it: {text}");
    profile.processes[0].slack = LossBound::default();
    assert!(alarms(&profile));
}

#[test]
fn losses_of_figures_in_use_are_reported() {
    let wide = ReportOptions { width: 1_000, ..ReportOptions::default() };
    let mut profile = all_sampled();
    assert!(!report(&profile, &wide).contains("records were lost"));
    profile.processes[0].losses.inuse_missing = LossBound { samples: 2, sampled_bytes: 200 };
    profile.processes[0].losses.inuse_stale = LossBound { samples: 1, sampled_bytes: 100 };
    let text = report(&profile, &wide);
    let expected = "records were lost: figures in use may miss 2 samples (200 B) and may include 1 sample (100 B) already \
                    freed; error bars allow for it";
    assert!(text.contains(expected) && text.contains("[400, 700]"), "{text}");
    // Nothing is in use, but lost samples might be.
    profile.rows[0].inuse = Default::default();
    assert!(report(&profile, &wide).contains("[0, 200 B]"), "{}", report(&profile, &wide));
    // A single sample is not shown as "≥" its size if it may have been freed.
    profile.rows[0].inuse = testing::sums(1, 100, 1);
    assert!(!report(&profile, &wide).contains("≥"));
    profile.processes[0].losses.unbounded = true;
    let text = report(&profile, &wide);
    assert!(
        text.contains("no error bars for allocated and in-use figures of 1 process") && text.contains("~500 B"),
        "{text}"
    );
}

#[test]
fn what_is_in_use_since_a_moment_only_says_so() {
    let text = report(&testing::followed_again(), &ReportOptions { width: 200, ..ReportOptions::default() });
    assert!(text.contains("only blocks allocated since 22:13:32.6 UTC are known"), "{text}");
    assert!(text.contains("without older blocks of 1 process"), "{text}");
    let mut both = testing::followed_again();
    both.processes[1].inuse_since = both.processes[0].inuse_since;
    let text = report(&both, &ReportOptions { width: 200, ..ReportOptions::default() });
    assert!(text.contains("only blocks since 22:13:32.6 UTC") && text.contains("in use in 2 processes:"), "{text}");
    let text = report(&testing::small(), &ReportOptions::default());
    assert!(!text.contains("since 22:13") && !text.contains("older blocks"), "{text}");
}

/// It may still grow: what was freed while its frees were hidden is not known.
#[test]
fn what_is_in_use_since_a_moment_only_is_not_called_full() {
    let mut profile = testing::followed_again();
    let lifetimes = profile.rows[0].lifetimes.as_mut().expect("lifetimes");
    lifetimes.ages = vec![Octave { exponent: 33, freed: 0, left: 20 }];
    let is_full = |profile: &Profile| {
        report(profile, &ReportOptions { suspects: true, ..ReportOptions::default() }).contains("no longer growing")
    };
    assert!(!is_full(&profile));
    profile.processes[0].inuse_since = None;
    assert!(is_full(&profile));
}

/// The default report fits on a screen, and says how to get the rest.
#[test]
fn a_brief_report_has_at_most_25_lines() {
    let mut many = testing::small();
    many.notes = (0..40)
        .map(|number| {
            format!("remark {number} of many, which is so long that it needs more than one line of a usual screen")
        })
        .collect();
    let files = vec![("x.json".to_owned(), "heapbpf report x.json".to_owned())];
    let all = [
        testing::small(),
        testing::measured(),
        testing::ended_apart(),
        testing::large(300, 30),
        testing::partly_read(),
        many,
    ];
    for profile in all.iter().chain([&all[0].only_process(0), &all[1].only_process(0)]) {
        for columns in [80, 100, 160] {
            let options =
                ReportOptions { brief: true, width: columns, files: files.clone(), ..ReportOptions::default() };
            let text = report(profile, &options);
            assert!(text.lines().count() <= 25, "{columns}: {text}");
            assert!(text.lines().all(|line| width(line) <= columns), "{columns}: {text}");
            assert!(text.contains("\nBy function · "), "{text}");
        }
    }
    let remarks_of = |profile: &Profile| {
        let text = report(profile, &ReportOptions { brief: true, files: files.clone(), ..ReportOptions::default() });
        let more = text.split_once("  … and ").and_then(|(_, rest)| {
            rest.split_once(" more remarks (heapbpf report --details x.json)")?.0.parse::<usize>().ok()
        });
        text.matches("\n  ! ").count() + more.unwrap_or_else(|| panic!("{text}"))
    };
    // The small profile has one note.
    assert_eq!(remarks_of(&all[5]), remarks_of(&all[0]) + 39, "those that are left out count, too");
}

/// The lines before the first table.
fn head(text: &str) -> Vec<&str> {
    text.lines().take_while(|line| !line.is_empty()).collect()
}

/// A report about many processes starts with the answer, in ten lines.
#[test]
fn many_processes_are_answered_for_in_ten_lines() {
    let mut profile = testing::small();
    let server = profile.processes[0].clone();
    for pid in 0..53 {
        let row = profile.rows[0].clone().with_process(profile.processes.len());
        profile.processes.push(crate::model::Process { pid, coverage: 0.5, inuse_unknown: pid == 3, ..server.clone() });
        profile.rows.push(row);
    }
    profile.processes[0].losses.alloc = LossBound { samples: 200, sampled_bytes: 20_000 };
    profile.processes[0].losses.interval = 524_288;
    profile.counters.insert("untracked".into(), 7);
    for columns in [80, 120] {
        let text = report(&profile, &ReportOptions { width: columns, ..ReportOptions::default() });
        print!("{text}");
        let head = head(&text);
        assert!(head.len() <= 10, "{head:?}");
        assert!(head[0].starts_with("55 processes · "), "{}", head[0]);
        let line = |title: &str| {
            let at = head.iter().position(|line| line.trim_start().starts_with(title)).expect(title);
            head[at..head.len().min(at + 2)].join(" ")
        };
        assert!(line("holding").contains("server (54 processes) ") && line("holding").contains('['), "{head:?}");
        assert!(line("allocating").contains("server (54 processes) "), "{head:?}");
        assert!(line("missed").contains("200 lost samples"), "{head:?}");
        assert!(line("missed").contains("(a larger -i)"), "{head:?}");
        assert!(text.contains("Programs\n") && !text.contains("Processes\n"), "{text}");
    }
    let each = report(&profile, &ReportOptions { group_by: Some(GroupBy::Process), ..ReportOptions::default() });
    assert!(each.contains("Processes\n") && each.contains("and 45 more"), "{each}");
    assert!(!each.contains("server (54 processes)"), "{each}");
}

#[test]
fn an_untroubled_recording_gave_up_nothing() {
    let mut profile = testing::small();
    profile.processes.iter_mut().for_each(|process| process.coverage = 1.0);
    profile.rows.iter_mut().for_each(|row| row.key.stack = std::sync::Arc::new(crate::model::Stack::default()));
    let missed_nothing = |profile: &Profile| report(profile, &ReportOptions::default()).contains("missed     nothing");
    assert!(!missed_nothing(&profile), "an allocator could not be hooked");
    profile.processes.iter_mut().for_each(|process| process.missing.clear());
    assert!(missed_nothing(&profile));
    profile.processes.truncate(1);
    profile.rows.retain(|row| row.key.process == 0);
    assert!(missed_nothing(&profile));
}

/// The rows of callers that are missing from stacks are too small. The table names the rows that have their samples.
#[test]
fn rows_whose_samples_lack_callers_are_named() {
    let by_function = ReportOptions { by: By::Function, ..ReportOptions::default() };
    let mut profile = testing::small();
    assert!(!report(&profile, &by_function).contains("lack callers"), "2 of 60 samples are worth a remark alone");
    let whole = Stack::clone(&profile.rows[0].key.stack);
    profile.rows[0].key.stack = Stack { cut: Some("its stack was lost".into()), ..whole }.into();
    let text = report(&profile, &by_function);
    let note = "samples whose stacks lack callers: 70 % of handle, 69 % of main, 70.2 % of grow, …";
    assert!(text.contains(note), "{text}");
    let listed = remarks(&profile, &by_function);
    let by_program = "; by program: server (4242) 81.6 %, worker \"x\" (4300) 18.2 %";
    assert!(listed.iter().any(|remark| remark.ends_with(by_program)), "{listed:?}");
}

/// A report about one process starts with the answer: how much, how certain, where, growing or not, what was missed,
/// what next.
#[test]
fn one_process_is_answered_for_in_ten_lines() {
    let options = |columns| ReportOptions { width: columns, source: Some("x.json".into()), ..ReportOptions::default() };
    for profile in [golden::leaking(), testing::small(), testing::stripped(), testing::ended_apart()] {
        let profile = profile.only_process(0);
        for columns in [80, 100] {
            let text = report(&profile, &options(columns));
            let head = head(&text);
            assert!(head.len() <= 10, "{text}");
            let titles: Vec<&str> = head.iter().filter_map(|line| line.split_whitespace().next()).collect();
            for title in ["in", "allocated", "where", "growing", "missed", "next"] {
                assert!(titles.contains(&title), "{title}: {text}");
            }
            assert!(head.iter().skip(1).all(|line| width(line) <= columns), "{text}");
        }
    }
}

/// The suggested command depends on the findings.
#[test]
fn what_to_do_next_is_a_command() {
    let next = |profile: &Profile, options: ReportOptions| {
        let text = report(profile, &options);
        let line = text.lines().find_map(|line| line.strip_prefix("  next       "));
        line.unwrap_or_else(|| panic!("{text}")).to_owned()
    };
    let of = |file: &str| ReportOptions { source: Some(file.into()), ..ReportOptions::default() };
    let leaking = golden::leaking().only_process(0);
    assert_eq!(next(&leaking, of("x.json")), "heapbpf report --suspects x.json");
    assert!(next(&leaking, of("x.pb.gz")).starts_with("record with -o x.json"));
    let suspects = ReportOptions { suspects: true, ..of("x.json") };
    assert_eq!(next(&leaking, suspects), "heapbpf report --callers grow x.json (who calls it?)");
    let closing =
        ReportOptions { files: vec![("y.json".into(), "heapbpf report y.json".into())], ..ReportOptions::default() };
    assert_eq!(next(&leaking, closing), "heapbpf report --suspects y.json");
    // Only .json contains the ages of blocks.
    let wrote = |file: &str| ReportOptions { files: vec![(file.into(), format!("view {file}"))], ..Default::default() };
    for file in ["y.pb.gz", "y.svg"] {
        assert!(next(&leaking, wrote(file)).starts_with("record with -o x.json"), "{file}");
    }
    let mut few = leaking.clone();
    few.rows.truncate(0);
    few.rows.push(leaking.rows[3].clone());
    assert!(next(&few, of("x.json")).starts_with("heapbpf plan x.json"));
    let mut unnamed = leaking.clone();
    let mut stack = unnamed.rows[3].key.stack.as_ref().clone();
    stack.frames.truncate(1);
    unnamed.rows[0].key.stack = stack.into();
    assert!(next(&unnamed, of("x.json")).starts_with("heapbpf report --symbolize x.json"));
    unnamed.modules[1].reason = Some("it is stripped".into());
    assert!(next(&unnamed, of("x.json")).starts_with("install the debug symbols"));
    // Where the leak has a name, the names of others can wait.
    let mut others = leaking.clone();
    (others.rows[3].alloc, others.rows[3].inuse) = (leaking.rows[0].alloc, leaking.rows[0].inuse);
    others.rows[3].key.stack = unnamed.rows[0].key.stack.clone();
    others.modules[1].reason = Some("it is stripped".into());
    assert_eq!(next(&others, of("x.json")), "heapbpf report --suspects x.json");
    let shown = ReportOptions { suspects: true, ..of("x.json") };
    assert!(next(&others, shown).starts_with("install the debug symbols"));
}

/// With time windows, a process that was hooked throughout shows its count instead of an estimate that contradicts it.
#[test]
fn a_count_of_all_takes_the_place_of_an_estimate_from_time_windows() {
    let mut profile = testing::small();
    profile.header.time_windows = true;
    for row in &mut profile.rows {
        row.alloc.bytes_correction = row.alloc.bytes;
    }
    let estimate = |profile: &Profile, process| {
        let rows = profile.rows.iter().filter(|row| row.key.process == process);
        units::bytes(Pool::of(rows).total(Value::AllocSpace))
    };
    let wide = ReportOptions { width: 160, ..ReportOptions::default() };
    let text = report(&profile, &wide);
    let line = |text: &str, name: &str| {
        let of = |line: &&str| line.trim_start().starts_with(name) && line.contains('%');
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("Pro")).filter(of).collect();
        lines.first().map(|line| (*line).to_owned()).expect(name)
    };
    let hooked = line(&text, "server");
    assert!(hooked.contains("57.2 MiB") && !hooked.contains(&estimate(&profile, 0)), "{hooked}");
    let in_part = line(&text, "worker");
    assert!(in_part.contains(&estimate(&profile, 1)) && in_part.contains("not counted"), "{in_part}");
    assert!(!head(&text).iter().any(|line| line.contains("counted exactly")), "{text}");
    let one = profile.only_process(0);
    let text = report(&one, &wide);
    let total = head(&text).into_iter().find(|line| line.contains("allocated")).expect("a total");
    assert!(total.contains("57.2 MiB") && total.contains("counted exactly"), "{total}");
    assert!(!total.contains(&estimate(&profile, 0)), "{total}");
}

/// A function may free blocks of one stack and none of another.
#[test]
fn what_a_function_frees_elsewhere_is_not_denied() {
    let growing = |profile: &Profile| {
        let text = report(profile, &ReportOptions { brief: true, ..ReportOptions::default() });
        text.lines().find(|line| line.contains("growing")).expect("a line").to_owned()
    };
    let mut profile = golden::leaking().only_process(1);
    assert!(growing(&profile).ends_with("nothing freed in 30.5 s"), "{}", growing(&profile));
    let mut row = profile.rows[0].clone();
    let mut stack = Stack::clone(&row.key.stack);
    stack.frames.truncate(1);
    (row.key.stack, row.growth) = (stack.into(), None);
    row.lifetimes = golden::leaking().rows[3].lifetimes.clone();
    profile.rows.push(row);
    assert!(growing(&profile).ends_with("nothing freed in 30.5 s where it grows"), "{}", growing(&profile));
}

/// Of several processes of a program, those that hold a leak are named. A file keeps that where only one does.
#[test]
fn a_leak_in_one_of_several_workers_has_its_process() {
    let says = |profile: &Profile, brief: bool, expected: &str| {
        let text = report(profile, &ReportOptions { brief, width: 1_000, ..ReportOptions::default() });
        assert!(text.contains(expected), "{expected}: {text}");
    };
    let mut profile = golden::leaking();
    profile.processes.push(Process { pid: 4301, ..profile.processes[1].clone() });
    profile.rows.push(profile.rows[5].clone().with_process(2));
    for profile in [&profile, &crate::programs::put_together(&profile, false)] {
        says(profile, true, "nothing freed in 30.5 s, in 1 of 2 processes: pid 4300");
        says(profile, false, "a cache that fills; in 1 of 2 processes: pid 4300");
    }
    let mut row = profile.rows[4].clone().with_process(2);
    row.growth = Some(Growth { kept: testing::sums(1, 4_096, 512 << 10), freed: SampleSums::default() });
    profile.rows.push(row);
    says(&profile, false, "a cache that fills; in 2 of 2 processes: pid 4300 has 90 %");
    let together = report(&crate::programs::put_together(&profile, false), &ReportOptions::default());
    assert!(!together.contains("pid 43"), "their rows are one: {together}");
}

/// Many samples of allocations do not help if few are in use.
#[test]
fn few_samples_in_use_call_for_a_smaller_interval() {
    let mut profile = testing::small().only_process(0);
    profile.rows.truncate(1);
    let row = &mut profile.rows[0];
    row.inuse = testing::sums(4, 70_000, row.key.interval);
    row.growth = Some(Growth { kept: testing::sums(4, 70_000, row.key.interval), freed: SampleSums::default() });
    let ages = vec![Octave { exponent: 33, freed: 0, left: 4 }];
    row.lifetimes.as_mut().expect("lifetimes").ages = ages;
    let brief = || ReportOptions { brief: true, source: Some("x.json".into()), ..ReportOptions::default() };
    let says = |profile: &Profile, options: &ReportOptions, expected: &str| {
        let text = report(profile, options);
        assert!(text.lines().any(|line| line.trim_end() == expected), "{expected}: {text}");
    };
    says(&profile, &brief(), "  growing    too few samples to judge growth");
    says(&profile, &brief(), "  next       only 4 samples in use: try -i 8KiB or record longer");
    let suspects = ReportOptions { suspects: true, brief: false, ..brief() };
    says(&profile, &suspects, "Leak suspects · too few samples to judge growth");
    profile.header.criterion = Criterion::Allocations;
    says(&profile, &brief(), "  next       only 4 samples in use: try a smaller -i or record longer");
    // The order was by allocations.
    let by_allocated = ReportOptions { sort: Some(Value::AllocSpace), ..brief() };
    says(&profile, &by_allocated, "  next       heapbpf report --callers grow x.json (who calls it?)");
    // There are enough, and none of them is new.
    let row = &mut profile.rows[0];
    (row.inuse, row.growth) = (testing::sums(40, 70_000, row.key.interval), None);
    says(&profile, &brief(), "  growing    nothing stands out");
    says(&profile, &brief(), "  next       heapbpf report --callers grow x.json (who calls it?)");
    // A name that needs quotes.
    let mut stack = Stack::clone(&profile.rows[0].key.stack);
    stack.frames.truncate(1);
    stack.frames[0] = Arc::new(Frame { function: Some("<module>".into()), ..Frame::clone(&stack.frames[0]) });
    profile.rows[0].key.stack = stack.into();
    says(&profile, &brief(), "  next       heapbpf report --details x.json (whole stacks)");
}

/// A heading explains brackets only if there are some.
#[test]
fn exact_figures_have_no_intervals_to_explain() {
    let mut profile = testing::small().only_process(0);
    profile.counters.clear();
    let explains = |profile: &Profile, brief: bool| {
        report(profile, &ReportOptions { brief, ..ReportOptions::default() }).contains("confidence intervals]")
    };
    assert!(explains(&profile, true) && explains(&profile, false));
    profile.header.interval = 1;
    for row in &mut profile.rows {
        row.key.interval = 1;
        (row.alloc, row.inuse) = (testing::sums(40, 512, 1), testing::sums(20, 512, 1));
    }
    assert!(!explains(&profile, true) && !explains(&profile, false));
}

/// Overloads, and functions of the same name in two modules, are rows of their own, which do not look alike.
#[test]
fn functions_whose_short_names_are_equal_are_told_apart() {
    let profile = testing::with_overload(golden::leaking().only_process(0), "grow", ["grow(int)", "grow(long)"]);
    let mut elsewhere = testing::with_overload(golden::leaking().only_process(0), "grow", ["grow", "grow"]);
    if let Some(row) = elsewhere.rows.last_mut() {
        let of_grow = |frame: &mut Frame| frame.module = frame.module.filter(|_| !frame.inlined).or(Some(0));
        row.key.stack = Arc::new(row.key.stack.with_frames(&mut Default::default(), of_grow));
    }
    let default = || ReportOptions { width: 160, ..ReportOptions::default() };
    for options in [
        default(),
        ReportOptions { brief: true, ..default() },
        ReportOptions { by: By::Function, ..default() },
        ReportOptions { suspects: true, ..default() },
        ReportOptions { tree: Some(Tree::Down), ..default() },
    ] {
        let text = report(&profile, &options);
        assert!(text.contains("grow(int)") && text.contains("grow(long)"), "{text}");
        let text = report(&elsewhere, &options);
        let has = |module: &str| text.contains(&format!("grow ({module})")) || text.contains(&format!("grow {module}"));
        assert!(has("libjson.so") && (has("server") || options.brief), "{text}");
    }
    let names = |profile: &Profile| -> Vec<String> {
        let growing = growing(profile, 0.95, FrameView::default(), 5).expect("known");
        growing.into_iter().map(|it| it.name).filter(|name| name.starts_with("grow")).collect()
    };
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(names(&profile)), ["grow(int)", "grow(long)"]);
    assert_eq!(sorted(names(&elsewhere)), ["grow (libjson.so)", "grow (server)"]);
    let of_grow = growing(&elsewhere, 0.95, FrameView::default(), 5)
        .expect("known")
        .into_iter()
        .filter(|it| it.name.starts_with("grow ("));
    assert!(of_grow.into_iter().all(|it| it.function.name == "grow"), "the page searches for it");
}

#[test]
fn what_was_said_already_is_not_said_again() {
    let mut profile = testing::small();
    let note = "the command was ended: Killed, signal 9";
    profile.notes.insert(0, note.into());
    let says = |said| report(&profile, &ReportOptions { said, ..ReportOptions::default() }).contains(note);
    assert!(says(None) && !says(Some(note.into())));
}

/// A cache that is full is told apart from what grows, wherever suspects are shown.
#[test]
fn what_is_full_is_shown_with_the_suspects() {
    let mut profile = golden::leaking().only_process(0);
    let mut full = profile.rows[0].clone();
    let rename = |frame: &mut Frame| frame.function = Some("cache".into());
    full.key.stack = Arc::new(full.key.stack.with_frames(&mut Default::default(), rename));
    full.lifetimes.as_mut().expect("lifetimes").ages = vec![Octave { exponent: 34, freed: 0, left: 20 }];
    full.growth = None;
    profile.rows.push(full);
    let found = growing(&profile, 0.95, FrameView::default(), 5).expect("known");
    let names: Vec<&str> = found.iter().map(|it| it.name.as_str()).collect();
    assert_eq!(names, ["grow", "cache"]);
    assert!(found[1].how_much.starts_with("full at ") && found[1].how_much.ends_with(" since 17.2 s"), "{found:?}");
    assert!(found[1].per_second.is_none());
    let options = ReportOptions { suspects: true, ..ReportOptions::default() };
    let text = report(&profile, &options);
    assert!(text.contains("full at ") && text.contains(", since 17"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&data::json(&profile, &options).expect("JSON")).expect("JSON");
    assert_eq!(json["rows"].as_array().map(Vec::len), Some(1), "it is no suspect: {json}");
    assert_eq!(json["full"][0]["stack"][0], "cache");
    assert!(json["full"][0]["full_seconds"].as_f64().is_some_and(|seconds| seconds > 17.0), "{json}");
}
