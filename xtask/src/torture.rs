//! `cargo xtask torture`: a table of faults and results. Each fault is a test in `tests/tests` that is repeated.
//! docs/reliability.md says what must hold.

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
    /// Show the rows and their tests, and run nothing
    #[arg(long)]
    list: bool,
}

/// A fault injected into heapbpf or a target.
#[derive(Clone, Copy)]
struct Row {
    /// Name on the command line.
    name: &'static str,
    /// File of the test, without extension, below the name of its program, or of its crate for a unit test.
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

/// A row whose test repeats the fault as often as [`TIMES`] says: by itself, and in a short round.
const fn row(name: &'static str, file: &'static str, test: &'static str, [times, times_quick]: [u32; 2]) -> Row {
    let times_variable = Some(TIMES);
    Row { name, file, test, times_variable, times, times_quick, seconds: None }
}

/// A row whose test does not repeat the fault itself.
const fn case(name: &'static str, file: &'static str, test: &'static str) -> Row {
    Row { times_variable: None, ..row(name, file, test, [10, 1]) }
}

/// A row whose test puts heapbpf or the target into a state once, for this many seconds.
const fn lasting(name: &'static str, file: &'static str, test: &'static str, seconds: u32) -> Row {
    Row { seconds: Some(seconds), ..row(name, file, test, [1, 1]) }
}

impl Row {
    const fn told_by(self, variable: &'static str) -> Self {
        Self { times_variable: Some(variable), ..self }
    }
}

const ROWS: &[Row] = &[
    row("cycles", TORTURE, "attached_and_detached", [1000, 3]),
    row("kills", TORTURE, "killed", [500, 4]),
    row("kills-forking", "alone/guardian", "killed_at_any_moment_no_probe_stays", [100, 8])
        .told_by("HEAPBPF_TEST_KILLS"),
    row(
        "kills-inline",
        "alone/inline_left",
        "whatever_kills_leave_the_target_is_right_and_the_next_recording_exact",
        [100, 20],
    )
    .told_by("HEAPBPF_TEST_KILLS"),
    row("exact", "company/inline_agreement", "eight_threads_are_exact_in_every_run", [1000, 4])
        .told_by("HEAPBPF_TEST_ROUNDS"),
    row("memory", TORTURE, "killed_for_want_of_memory", [10, 1]),
    row("all-killed", TORTURE, "killed_with_all_its_helpers", [20, 2]),
    row("files", TORTURE, "without_file_descriptors", [10, 2]),
    row("disk", TORTURE, "without_space_on_the_disk", [10, 1]),
    lasting("sigterm", TORTURE, "ended_with_many_live_samples", 1),
    lasting("maps", TORTURE, "with_full_maps", 60),
    lasting("ring", TORTURE, "with_a_full_ring", 60),
    lasting("daemon-stopped", TORTURE, "with_heapbpf_stopped", 60),
    row("strace", TARGETS, "under_strace", [10, 1]),
    row("gdb", TARGETS, "under_gdb", [10, 1]),
    row("seccomp", TARGETS, "under_seccomp", [10, 1]),
    row("stopped", TARGETS, "stopped", [12, 2]),
    row("zombie", TARGETS, "a_zombie", [10, 1]),
    row("exec", TARGETS, "executing_in_a_loop", [50, 2]),
    row("threads", TARGETS, "many_threads", [3, 1]),
    row("tracers", TARGETS, "with_other_tracers", [10, 1]),
    row("twice", TARGETS, "recorded_twice", [5, 2]),
    row("file-size", TORTURE, "with_a_limit_on_the_size_of_files", [10, 1]),
    case("guardian-killed", "alone/guardian", "a_recording_goes_on_without_its_guardian"),
    case("cut-off", "kernel/guardian/process", "tests::a_request_that_was_cut_off_is_refused_and_the_next_one_served"),
    case("helpers-stopped", "alone/guardian", "a_stopped_helper_keeps_heapbpf_from_nothing"),
    case(
        "standstill",
        "company/inline_standstill",
        "who_stops_a_process_for_too_long_is_ended_and_the_process_goes_on",
    ),
    case("faults", "remote/places", "a_process_that_serves_its_own_page_faults_does_not_stand_still"),
    case("calls-in-part", "remote/calls", "calls_that_would_return_a_part_are_spared"),
    case("shared-memory", "remote/refusals", "a_process_whose_memory_another_shares_is_refused"),
    case("moved-text", "remote/places", "a_process_that_has_moved_its_text_keeps_the_code_that_it_jumps_to"),
    case("moved-before", "company/processes", "a_process_that_has_moved_its_c_library_is_refused_with_the_reason"),
    case("patched-text", "remote/places", "code_that_somebody_else_has_changed_stays_as_it_is"),
    case("own-stacks", "remote/cycles", "data_below_small_stacks_comes_to_no_harm"),
    case("fibers", "remote/places", "a_fiber_that_sleeps_in_the_code_comes_back_to_it"),
    case("limits", "company/inline_harmless", "a_process_with_little_left_or_locked_memory_is_probed"),
    case("limit-mappings", "company/inline_harmless", "a_process_with_few_mappings_left_is_probed"),
    case("limit-cgroup", "company/inline_harmless", "a_process_with_little_memory_of_its_control_group_left_is_probed"),
    case("variadic", "company/inline_allocators", "a_variadic_allocator_is_probed"),
    case("no-ops", "company/harmless", "children_live_though_their_allocator_begins_with_no_ops"),
    case("ends-prepared", "alone/inline_left", "what_was_prepared_for_a_process_that_ended_is_let_go"),
    case("frozen", "remote/limits", "a_process_that_is_frozen_during_the_stop_is_released_as_it_was"),
    case(
        "frozen-crash",
        "company/inline_breaker",
        "a_frozen_process_loses_its_hooks_once_it_is_thawed_after_another_one_died",
    ),
    case("descriptors", "remote/places", "the_lowest_free_descriptor_is_the_processs_own"),
    case("cycles-memory", "company/inline_harmless", "a_process_has_the_same_after_the_first_and_the_fifth_recording"),
    case("overwritten", "company/links", "each_build_that_is_copied_over_a_probed_file_is_right_and_exact"),
    case("translated", "alone/translated", "a_program_that_is_translated_is_left_alone"),
    case("bystanders", "alone/active", "bystanders_see_files_as_they_are"),
    case("crash", "company/inline_breaker", "a_fault_in_code_of_ours_ends_all_inline_hooks"),
    case("hostile", "company/hostile", "counts_that_are_rewritten_by_their_owner_harm_nobody_else"),
    case("unread", "host/reader_thread", "tests::threads_that_do_not_come_back_are_few_and_count_no_more_once_they_do"),
    case("unserved", "host/open", "tests::a_file_whose_server_never_answers_is_not_opened"),
    case("names", "company/hostile", "a_name_that_takes_for_ever_to_demangle_holds_nothing_up"),
    case("metrics", "company/names", "metrics_do_not_wait_for_names_nor_do_profiles_pile_up"),
    case("forgotten", "alone/whole_host", "programs_that_never_come_again_are_forgotten"),
    lasting("flood-mappings", FLOODS, "of_mappings", 1),
    lasting("flood-processes", FLOODS, "of_processes", 1),
    lasting("flood-stacks", FLOODS, "of_stacks", 1),
    lasting("flood-threads", FLOODS, "of_threads", 1),
];

impl Row {
    fn times(&self, selection: &Selection) -> u32 {
        selection.times.unwrap_or(if selection.quick { self.times_quick } else { self.times })
    }

    /// Runs the row. Returns its lines of the table, and whether everything was as promised.
    fn run(&self, context: &Context, selection: &Selection, file: &Path) -> anyhow::Result<(Vec<String>, bool)> {
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

    /// Returns the row's lines of the table, from what its test wrote.
    fn seen(&self, text: &str, succeeded: bool, times: &str) -> Vec<String> {
        let seen = |[fault, hook, times, what]: [&str; 4]| {
            format!("| {} | {fault} | {hook} | {times} | {what} |\n", self.name)
        };
        let mut found: Vec<String> = text
            .lines()
            .filter_map(|line| <[&str; 4]>::try_from(line.split('\t').collect::<Vec<_>>()).ok())
            .map(seen)
            .collect();
        if !succeeded {
            found.push(seen(["", "", times, "**not as promised**: the test's message is above"]));
        } else if found.is_empty() {
            // A test that also has another purpose writes no line.
            found.push(seen(["", "", times, "as promised"]));
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
            println!("{:<15} {:>4} times: {}::{}", row.name, row.times(selection), row.file, row.test);
        }
        return Ok(ExitCode::SUCCESS);
    }
    test::prepare(context)?;
    let file = context.target().join("torture.tsv");
    let (mut table, mut kept) = (Vec::new(), true);
    for row in rows {
        say!("{}: {}, {} times", row.name, row.test, row.times(selection));
        let begun = Instant::now();
        let (seen, succeeded) = row.run(context, selection, &file)?;
        say!("{}: {:.0} s", row.name, begun.elapsed().as_secs_f64());
        table.extend(seen);
        kept &= succeeded;
    }
    print!("| row | fault | hook | times | seen |\n|---|---|---|---|---|\n{}", table.concat());
    Ok(if kept { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_in_name_and_name_tests_that_are_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name), "{} twice", row.name);
            let file = match row.file.split_once('/').expect("a program") {
                ("alone" | "company", _) => format!("tests/tests/{}.rs", row.file),
                ("remote", _) => format!("crates/remote/tests/{}.rs", row.file),
                (of, file) => format!("crates/{of}/src/{file}.rs"),
            };
            let text = std::fs::read_to_string(root.join(file)).expect("a file of tests");
            let test = row.test.trim_start_matches("tests::");
            assert!(text.contains(&format!("fn {test}()")), "no test {test} in {}", row.file);
            assert!(row.times >= row.times_quick, "{}", row.name);
        }
    }
}
