//! `cargo xtask torture`: a table of faults and results. Each fault is a test in `tests/tests` that is repeated.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::context::Context;
use crate::shell::say;
use crate::test::{self, AmongTests};

/// What to repeat, and how often; by default every row as often as it says.
#[derive(Args, Debug, Default)]
pub struct Selection {
    /// Only rows whose name begins with this
    row: Option<String>,
    /// How often each is repeated, instead of its own number
    #[arg(long, value_name = "N")]
    times: Option<u32>,
    /// The short round that runs among the tests
    #[arg(long)]
    quick: bool,
    /// Only one way of hooking
    #[arg(long, value_parser = ["probe", "inline"])]
    hook: Option<String>,
    /// Show the rows and what they promise, and run nothing
    #[arg(long)]
    list: bool,
}

/// A fault injected into heapbpf or a target.
struct Row {
    /// Name on the command line.
    name: &'static str,
    /// What is done.
    fault: &'static str,
    /// What must hold.
    promised: &'static str,
    /// File of the test, without extension, below its program's name.
    file: &'static str,
    /// Name of the test.
    test: &'static str,
    /// The variable that tells the test how often to repeat the fault. `None`: the test itself is repeated.
    times_variable: Option<&'static str>,
    /// Number of repetitions.
    times: u32,
    /// Number of repetitions in a short round.
    times_quick: u32,
    /// How many seconds the state lasts, if that matters. Not used in a short round.
    seconds: Option<u32>,
}

/// The variable of tests that exist only for this table.
const TIMES: &str = "HEAPBPF_TORTURE_TIMES";
const TORTURE: &str = "alone/long/torture";
const TARGETS: &str = "alone/long/torture_targets";
const FLOODS: &str = "alone/long/floods";
/// Number of threads of the row with many threads, except in a short round.
const THREADS: &str = "10000";

const ROW: Row = Row {
    name: "",
    fault: "",
    promised: "",
    file: TORTURE,
    test: "",
    times_variable: Some(TIMES),
    times: 10,
    times_quick: 1,
    seconds: None,
};

/// A test that does not repeat the fault itself.
const CASE: Row = Row { times_variable: None, ..ROW };

const ROWS: &[Row] = &[
    Row {
        name: "cycles",
        fault: "attached and detached",
        promised: "target right, nothing left",
        test: "attached_and_detached",
        times: 1000,
        times_quick: 3,
        ..ROW
    },
    Row {
        name: "kills",
        fault: "heapbpf killed (SIGKILL)",
        promised: "target right; no probe, no link and no inline hook left",
        test: "killed",
        times: 500,
        times_quick: 4,
        ..ROW
    },
    Row {
        name: "kills-forking",
        fault: "heapbpf killed (SIGKILL), target forks",
        promised: "target right; no probe, no link left",
        file: "alone/guardian",
        test: "killed_at_any_moment_no_probe_stays",
        times_variable: Some("HEAPBPF_TEST_KILLS"),
        times: 100,
        times_quick: 8,
        ..ROW
    },
    Row {
        name: "kills-inline",
        fault: "heapbpf killed (SIGKILL), next one follows",
        promised: "target right, next recording exact",
        file: "alone/inline_left",
        test: "whatever_kills_leave_the_target_is_right_and_the_next_recording_exact",
        times_variable: Some("HEAPBPF_TEST_KILLS"),
        times: 100,
        times_quick: 20,
        ..ROW
    },
    Row {
        name: "exact",
        fault: "eight threads that move between processors, at interval 1",
        promised: "each run equals the truth",
        file: "company/inline_agreement",
        test: "eight_threads_are_exact_in_every_run",
        times_variable: Some("HEAPBPF_TEST_ROUNDS"),
        times: 1000,
        times_quick: 4,
        ..ROW
    },
    Row {
        name: "memory",
        fault: "heapbpf out of memory in its cgroup",
        promised: "target right, no probe left",
        test: "killed_for_want_of_memory",
        ..ROW
    },
    Row {
        name: "all-killed",
        fault: "heapbpf, guardian and cleaner killed at once",
        promised: "target right, no probe left; inline hooks stay until the next heapbpf takes them out",
        test: "killed_with_all_its_helpers",
        times: 20,
        times_quick: 2,
        ..ROW
    },
    Row {
        name: "files",
        fault: "no file descriptors",
        promised: "it says so; target right, nothing left",
        test: "without_file_descriptors",
        times_quick: 2,
        ..ROW
    },
    Row {
        name: "disk",
        fault: "disk full",
        promised: "it says so; no half file; target right, nothing left",
        test: "without_space_on_the_disk",
        ..ROW
    },
    Row {
        name: "sigterm",
        fault: "SIGTERM with a million live samples",
        promised: "the last profile has everything; how long it took",
        test: "ended_with_many_live_samples",
        times: 1,
        seconds: Some(1),
        ..ROW
    },
    Row {
        name: "maps",
        fault: "maps full",
        promised: "losses counted, totals exact; targets right",
        test: "with_full_maps",
        times: 1,
        seconds: Some(60),
        ..ROW
    },
    Row {
        name: "ring",
        fault: "ring full",
        promised: "losses counted, totals exact; targets right",
        test: "with_a_full_ring",
        times: 1,
        seconds: Some(60),
        ..ROW
    },
    Row {
        name: "daemon-stopped",
        fault: "heapbpf stopped (SIGSTOP)",
        promised: "losses counted, totals exact; targets right",
        test: "with_heapbpf_stopped",
        times: 1,
        seconds: Some(60),
        ..ROW
    },
    Row {
        name: "strace",
        fault: "target under strace",
        promised: "target right, strace goes on; probes if inline hooks cannot be",
        file: TARGETS,
        test: "under_strace",
        ..ROW
    },
    Row {
        name: "gdb",
        fault: "target under gdb",
        promised: "target right, gdb goes on; probes if inline hooks cannot be",
        file: TARGETS,
        test: "under_gdb",
        ..ROW
    },
    Row {
        name: "seccomp",
        fault: "target under seccomp",
        promised: "no call that its filter refuses; target right",
        file: TARGETS,
        test: "under_seccomp",
        ..ROW
    },
    Row {
        name: "stopped",
        fault: "target stopped (SIGSTOP)",
        promised: "stays stopped, goes on right; probes if inline hooks cannot be",
        file: TARGETS,
        test: "stopped",
        times: 12,
        times_quick: 2,
        ..ROW
    },
    Row {
        name: "zombie",
        fault: "target a zombie",
        promised: "the recording ends; a new one is refused, with the reason",
        file: TARGETS,
        test: "a_zombie",
        ..ROW
    },
    Row {
        name: "exec",
        fault: "target exec'ing in a loop",
        promised: "target right, nothing left",
        file: TARGETS,
        test: "executing_in_a_loop",
        times: 50,
        times_quick: 2,
        ..ROW
    },
    Row {
        name: "threads",
        fault: "target with many threads",
        promised: "target right, nothing left",
        file: TARGETS,
        test: "many_threads",
        times: 3,
        ..ROW
    },
    Row {
        name: "tracers",
        fault: "two heapbpfs, bpftrace and perf at once",
        promised: "target right, nothing left",
        file: TARGETS,
        test: "with_other_tracers",
        ..ROW
    },
    Row {
        name: "twice",
        fault: "two recordings of one target",
        promised: "both exact; what each costs",
        file: TARGETS,
        test: "recorded_twice",
        times: 5,
        times_quick: 2,
        ..ROW
    },
    Row {
        name: "file-size",
        fault: "heapbpf may write no file (RLIMIT_FSIZE)",
        promised: "it says so; target right, nothing left",
        test: "with_a_limit_on_the_size_of_files",
        ..ROW
    },
    Row {
        name: "guardian-killed",
        fault: "the guardian killed",
        promised: "the recording goes on, exact",
        file: "alone/guardian",
        test: "a_recording_goes_on_without_its_guardian",
        ..CASE
    },
    Row {
        name: "helpers-stopped",
        fault: "helpers stopped (SIGSTOP)",
        promised: "heapbpf ends all the same",
        file: "alone/guardian",
        test: "a_stopped_helper_keeps_heapbpf_from_nothing",
        ..CASE
    },
    Row {
        name: "standstill",
        fault: "whoever stops a target waits",
        promised: "it is ended, and the target goes on",
        file: "company/inline_standstill",
        test: "who_stops_a_process_for_too_long_is_ended_and_the_process_goes_on",
        ..CASE
    },
    Row {
        name: "faults",
        fault: "target serves its own page faults (userfaultfd)",
        promised: "no standstill",
        file: "remote/places",
        test: "a_process_that_serves_its_own_page_faults_does_not_stand_still",
        ..CASE
    },
    Row {
        name: "calls-in-part",
        fault: "target writes to full pipes and receives with MSG_WAITALL",
        promised: "hardly a call comes back early",
        file: "remote/calls",
        test: "calls_that_would_return_a_part_are_spared",
        ..CASE
    },
    Row {
        name: "shared-memory",
        fault: "target shares its memory with another process",
        promised: "refused with the reason",
        file: "remote/refusals",
        test: "a_process_whose_memory_another_shares_is_refused",
        ..CASE
    },
    Row {
        name: "moved-text",
        fault: "target moves its code while it is hooked",
        promised: "target right",
        file: "remote/places",
        test: "a_process_that_has_moved_its_text_keeps_the_code_that_it_jumps_to",
        ..CASE
    },
    Row {
        name: "patched-text",
        fault: "target changes the code that is hooked",
        promised: "it stays as the target left it",
        file: "remote/places",
        test: "code_that_somebody_else_has_changed_stays_as_it_is",
        ..CASE
    },
    Row {
        name: "own-stacks",
        fault: "threads whose stacks are data of others",
        promised: "no byte of them is changed",
        file: "remote/cycles",
        test: "data_below_small_stacks_comes_to_no_harm",
        ..CASE
    },
    Row {
        name: "fibers",
        fault: "a fiber sleeps in the hooks' code",
        promised: "it comes back to it",
        file: "remote/places",
        test: "a_fiber_that_sleeps_in_the_code_comes_back_to_it",
        ..CASE
    },
    Row {
        name: "limits",
        fault: "target near its limits, or with locked memory",
        promised: "probed, with the limit's name",
        file: "company/inline_harmless",
        test: "a_process_with_little_left_or_locked_memory_is_probed",
        ..CASE
    },
    Row {
        name: "frozen",
        fault: "target frozen during a stop",
        promised: "released as it was",
        file: "remote/limits",
        test: "a_process_that_is_frozen_during_the_stop_is_released_as_it_was",
        ..CASE
    },
    Row {
        name: "frozen-crash",
        fault: "target frozen while another one dies of its hooks",
        promised: "no other waits; it loses its hooks once it is thawed",
        file: "company/inline_breaker",
        test: "a_frozen_process_loses_its_hooks_once_it_is_thawed_after_another_one_died",
        ..CASE
    },
    Row {
        name: "descriptors",
        fault: "target counts on its lowest free descriptor",
        promised: "it gets that",
        file: "remote/places",
        test: "the_lowest_free_descriptor_is_the_processs_own",
        ..CASE
    },
    Row {
        name: "cycles-memory",
        fault: "attached and detached",
        promised: "mappings and memory equal after the first and the fifth time",
        file: "company/inline_harmless",
        test: "a_process_has_the_same_after_the_first_and_the_fifth_recording",
        ..CASE
    },
    Row {
        name: "overwritten",
        fault: "a probed file overwritten in place",
        promised: "each build is right and exact",
        file: "company/links",
        test: "each_build_that_is_copied_over_a_probed_file_is_right_and_exact",
        ..CASE
    },
    Row {
        name: "translated",
        fault: "target executed by translation (valgrind)",
        promised: "left alone, with the reason",
        file: "alone/translated",
        test: "a_program_that_is_translated_is_left_alone",
        ..CASE
    },
    Row {
        name: "bystanders",
        fault: "a bystander reads a file that targets map",
        promised: "it is as on the disk, unless links serve every process",
        file: "alone/active",
        test: "bystanders_see_files_as_they_are",
        ..CASE
    },
    Row {
        name: "crash",
        fault: "target dies of its hooks",
        promised: "all hooks are taken out",
        file: "company/inline_breaker",
        test: "a_fault_in_code_of_ours_ends_all_inline_hooks",
        ..CASE
    },
    Row {
        name: "hostile",
        fault: "target overwrites its own counts",
        promised: "the figures of others are exact",
        file: "company/hostile",
        test: "counts_that_are_rewritten_by_their_owner_harm_nobody_else",
        ..CASE
    },
    Row {
        name: "names",
        fault: "a name that takes for ever to demangle",
        promised: "nothing waits for it",
        file: "company/hostile",
        test: "a_name_that_takes_for_ever_to_demangle_holds_nothing_up",
        ..CASE
    },
    Row {
        name: "forgotten",
        fault: "programs that never come again",
        promised: "descriptors and tables end where they began",
        file: "alone/whole_host",
        test: "programs_that_never_come_again_are_forgotten",
        ..CASE
    },
    Row {
        name: "flood-mappings",
        fault: "a hundred thousand executable mappings",
        promised: "totals exact; bounded time and memory",
        file: FLOODS,
        test: "of_mappings",
        times: 1,
        seconds: Some(1),
        ..ROW
    },
    Row {
        name: "flood-processes",
        fault: "ten thousand short processes",
        promised: "totals exact; bounded time and memory",
        file: FLOODS,
        test: "of_processes",
        times: 1,
        seconds: Some(1),
        ..ROW
    },
    Row {
        name: "flood-stacks",
        fault: "a million stacks",
        promised: "totals exact, what is not kept is told; bounded time and memory",
        file: FLOODS,
        test: "of_stacks",
        times: 1,
        seconds: Some(1),
        ..ROW
    },
    Row {
        name: "flood-threads",
        fault: "ten thousand threads",
        promised: "accounts add up; bounded time and memory",
        file: FLOODS,
        test: "of_threads",
        times: 1,
        seconds: Some(1),
        ..ROW
    },
];

/// The result of a row.
#[derive(Debug, PartialEq, Eq)]
struct RowResult {
    fault: String,
    hook: String,
    times: String,
    promised: &'static str,
    what: String,
}

impl Row {
    fn times(&self, selection: &Selection) -> u32 {
        selection.times.unwrap_or(if selection.quick { self.times_quick } else { self.times })
    }

    /// Runs the row. Returns its results, and whether everything was as promised.
    fn run(&self, context: &Context, selection: &Selection, file: &Path) -> anyhow::Result<(Vec<RowResult>, bool)> {
        let times = self.times(selection).to_string();
        let seconds = self.seconds.filter(|_| !selection.quick).map(|seconds| seconds.to_string());
        let mut variables: Vec<(&str, &OsStr)> = vec![("HEAPBPF_TORTURE_SEEN", file.as_os_str())];
        variables.extend(self.times_variable.map(|variable| (variable, OsStr::new(&times))));
        variables.extend(seconds.iter().map(|seconds| ("HEAPBPF_TORTURE_SECONDS", OsStr::new(seconds))));
        variables.extend(selection.hook.iter().map(|hook| ("HEAPBPF_TORTURE_HOOK", OsStr::new(hook))));
        if !selection.quick {
            variables.push(("HEAPBPF_TORTURE_THREADS", OsStr::new(THREADS)));
        }
        if file.exists() {
            std::fs::remove_file(file).with_context(|| file.display().to_string())?;
        }
        let (program, file_of_test) =
            self.file.split_once('/').context("each file is in the directory of a program")?;
        let test = format!("{}::{}", file_of_test.replace('/', "::"), self.test);
        let tests = AmongTests { program, filter: &test, arguments: &["--exact"], variables: &variables };
        let rounds = if self.times_variable.is_some() { 1 } else { self.times(selection) };
        let mut succeeded = true;
        for _ in 0..rounds {
            succeeded = succeeded && tests.run(context)?;
        }
        let text = if file.exists() { std::fs::read_to_string(file)? } else { String::new() };
        Ok((self.seen(&text, succeeded, &times), succeeded))
    }

    /// Returns the row's results, from the lines that its test wrote.
    fn seen(&self, text: &str, succeeded: bool, times: &str) -> Vec<RowResult> {
        let seen = |[fault, hook, times, what]: [&str; 4]| RowResult {
            fault: fault.into(),
            hook: hook.into(),
            times: times.into(),
            promised: self.promised,
            what: what.into(),
        };
        let mut found: Vec<RowResult> = text
            .lines()
            .filter_map(|line| <[&str; 4]>::try_from(line.split('\t').collect::<Vec<_>>()).ok())
            .map(seen)
            .collect();
        if !succeeded {
            found.push(seen([self.fault, "", times, "**not as promised**: the test's message is above"]));
        } else if found.is_empty() {
            // A test that also has another purpose writes no line.
            found.push(seen([self.fault, "", times, "as promised"]));
        }
        found
    }
}

/// Runs the rows and prints their table. The exit code is a failure if one of them was not as promised.
pub fn torture(context: &Context, selection: &Selection) -> anyhow::Result<ExitCode> {
    let chosen = |row: &&Row| selection.row.as_ref().is_none_or(|name| row.name.starts_with(name.as_str()));
    let rows: Vec<&Row> = ROWS.iter().filter(chosen).collect();
    if rows.is_empty() {
        let names: Vec<_> = ROWS.iter().map(|row| row.name).collect();
        bail!("there is no such row; there are {}", names.join(", "));
    }
    if selection.list {
        for row in rows {
            println!("{:<15} {:>4} times: {}: {}", row.name, row.times(selection), row.fault, row.promised);
        }
        return Ok(ExitCode::SUCCESS);
    }
    test::prepare(context)?;
    let file = context.target().join("torture.tsv");
    let (mut table, mut kept) = (Vec::new(), true);
    for row in rows {
        say!("{}: {}, {} times", row.name, row.fault, row.times(selection));
        let begun = Instant::now();
        let (seen, succeeded) = row.run(context, selection, &file)?;
        say!("{}: {:.0} s", row.name, begun.elapsed().as_secs_f64());
        table.extend(seen);
        kept &= succeeded;
    }
    print!("{}", markdown(&table));
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the table in the format of docs/reliability.md.
fn markdown(table: &[RowResult]) -> String {
    let mut text = "| fault | hook | times | promised | seen |\n|---|---|---|---|---|\n".to_owned();
    for RowResult { fault, hook, times, promised, what } in table {
        text += &format!("| {fault} | {hook} | {times} | {promised} | {what} |\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_in_name_and_name_tests_that_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name), "{} twice", row.name);
            let dir = if row.file.starts_with("remote/") { "crates/remote/tests" } else { "tests/tests" };
            let file = root.join(dir).join(row.file).with_extension("rs");
            let text = std::fs::read_to_string(file).expect("a file of tests");
            assert!(text.contains(&format!("fn {}()", row.test)), "no test {} in {}", row.test, row.file);
            assert!(!row.fault.is_empty() && !row.promised.is_empty() && row.times >= row.times_quick, "{}", row.name);
        }
    }

    #[test]
    fn a_row_says_what_its_test_wrote_or_that_it_failed() {
        let row = &ROWS[0];
        let seen = row.seen("a\tprobe\t3\tright\nb\tinline\t3\tright too\n", true, "3");
        assert_eq!(seen.iter().map(|seen| seen.what.as_str()).collect::<Vec<_>>(), ["right", "right too"]);
        let failed = row.seen("a\tprobe\t3\tright\n", false, "3");
        assert_eq!(failed.len(), 2);
        assert!(failed[1].what.contains("not as promised"), "{failed:?}");
        assert_eq!(row.seen("", true, "3")[0].what, "as promised");
        assert!(markdown(&seen).contains("| b | inline | 3 | target right, nothing left | right too |\n"));
    }
}
