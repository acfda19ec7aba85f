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

/// The rows: the fields of [`Row`] in the order of [`Row::parse`]. A test `itself` is repeated if it has no variable.
const ROWS: &str = "\
cycles          | 1000 |  3 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | attached_and_detached | attached and detached | target right, nothing left
kills           |  500 |  4 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | killed | heapbpf killed (SIGKILL) | target right; no probe, no link and no inline hook left
kills-forking   |  100 |  8 | HEAPBPF_TEST_KILLS    |    | alone/guardian | killed_at_any_moment_no_probe_stays | heapbpf killed (SIGKILL), target forks | target right; no probe, no link left
kills-inline    |  100 | 20 | HEAPBPF_TEST_KILLS    |    | alone/inline_left | whatever_kills_leave_the_target_is_right_and_the_next_recording_exact | heapbpf killed (SIGKILL), next one follows | target right, next recording exact
exact           | 1000 |  4 | HEAPBPF_TEST_ROUNDS   |    | company/inline_agreement | eight_threads_are_exact_in_every_run | eight threads that move between processors, at interval 1 | each run equals the truth
memory          |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | killed_for_want_of_memory | heapbpf out of memory in its cgroup | target right, no probe left
all-killed      |   20 |  2 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | killed_with_all_its_helpers | heapbpf, guardian and cleaner killed at once | target right, no probe left; inline hooks stay until the next heapbpf takes them out
files           |   10 |  2 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | without_file_descriptors | no file descriptors | it says so; target right, nothing left
disk            |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | without_room_on_the_disk | disk full | it says so; no half file; target right, nothing left
sigterm         |    1 |  1 | HEAPBPF_TORTURE_TIMES |  1 | alone/long/torture | ended_with_many_live_samples | SIGTERM with a million live samples | the last profile has everything; how long it took
maps            |    1 |  1 | HEAPBPF_TORTURE_TIMES | 60 | alone/long/torture | with_full_maps | maps full | losses counted, totals exact; targets right
ring            |    1 |  1 | HEAPBPF_TORTURE_TIMES | 60 | alone/long/torture | with_a_full_ring | ring full | losses counted, totals exact; targets right
daemon-stopped  |    1 |  1 | HEAPBPF_TORTURE_TIMES | 60 | alone/long/torture | with_heapbpf_stopped | heapbpf stopped (SIGSTOP) | losses counted, totals exact; targets right
strace          |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | under_strace | target under strace | target right, strace goes on; probes if inline hooks cannot be
gdb             |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | under_gdb | target under gdb | target right, gdb goes on; probes if inline hooks cannot be
seccomp         |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | under_seccomp | target under seccomp | no call that its filter refuses; target right
stopped         |   12 |  2 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | stopped | target stopped (SIGSTOP) | stays stopped, goes on right; probes if inline hooks cannot be
zombie          |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | a_zombie | target a zombie | the recording ends; a new one is refused, with the reason
exec            |   50 |  2 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | executing_in_a_loop | target exec'ing in a loop | target right, nothing left
threads         |    3 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | many_threads | target with many threads | target right, nothing left
tracers         |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | with_other_tracers | two heapbpfs, bpftrace and perf at once | target right, nothing left
twice           |    5 |  2 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture_targets | recorded_twice | two recordings of one target | both exact; what each costs
file-size       |   10 |  1 | HEAPBPF_TORTURE_TIMES |    | alone/long/torture | with_a_limit_on_the_size_of_files | heapbpf may write no file (RLIMIT_FSIZE) | it says so; target right, nothing left
guardian-killed |   10 |  1 | itself                |    | alone/guardian | a_recording_goes_on_without_its_guardian | the guardian killed | the recording goes on, exact
helpers-stopped |   10 |  1 | itself                |    | alone/guardian | a_stopped_helper_keeps_heapbpf_from_nothing | helpers stopped (SIGSTOP) | heapbpf ends all the same
standstill      |   10 |  1 | itself                |    | company/inline_standstill | who_stops_a_process_for_too_long_is_ended_and_the_process_goes_on | whoever stops a target waits | it is ended, and the target goes on
faults          |   10 |  1 | itself                |    | remote/places | a_process_that_serves_its_own_page_faults_does_not_stand_still | target serves its own page faults (userfaultfd) | no standstill
calls-in-part   |   10 |  1 | itself                |    | remote/calls | calls_that_would_return_a_part_are_spared | target writes to full pipes and receives with MSG_WAITALL | hardly a call comes back early
shared-memory   |   10 |  1 | itself                |    | remote/refusals | a_process_whose_memory_another_shares_is_refused | target shares its memory with another process | refused with the reason
moved-text      |   10 |  1 | itself                |    | remote/places | a_process_that_has_moved_its_text_keeps_the_code_that_it_jumps_to | target moves its code while it is hooked | target right
patched-text    |   10 |  1 | itself                |    | remote/places | code_that_somebody_else_has_changed_stays_as_it_is | target changes the code that is hooked | it stays as the target left it
own-stacks      |   10 |  1 | itself                |    | remote/cycles | data_below_small_stacks_comes_to_no_harm | threads whose stacks are data of others | no byte of them is changed
fibers          |   10 |  1 | itself                |    | remote/places | a_fiber_that_sleeps_in_the_code_comes_back_to_it | a fiber sleeps in the hooks' code | it comes back to it
limits          |   10 |  1 | itself                |    | company/inline_harmless | a_process_with_little_left_or_locked_memory_is_probed | target near its limits, or with locked memory | probed, with the limit's name
descriptors     |   10 |  1 | itself                |    | remote/places | the_lowest_free_descriptor_is_the_processs_own | target counts on its lowest free descriptor | it gets that
cycles-memory   |   10 |  1 | itself                |    | company/inline_harmless | a_process_has_the_same_after_the_first_and_the_fifth_recording | attached and detached | mappings and memory equal after the first and the fifth time
overwritten     |   10 |  1 | itself                |    | company/links | each_build_that_is_copied_over_a_probed_file_is_right_and_exact | a probed file overwritten in place | each build is right and exact
translated      |   10 |  1 | itself                |    | alone/translated | a_program_that_is_translated_is_left_alone | target executed by translation (valgrind) | left alone, with the reason
bystanders      |   10 |  1 | itself                |    | alone/active | bystanders_see_files_as_they_are | a bystander reads a file that targets map | it is as on the disk, unless links serve every process
crash           |   10 |  1 | itself                |    | company/inline_breaker | a_fault_in_code_of_ours_ends_all_inline_hooks | target dies of its hooks | all hooks are taken out
hostile         |   10 |  1 | itself                |    | company/hostile | counts_that_are_rewritten_by_their_owner_harm_nobody_else | target overwrites its own counts | the figures of others are exact
names           |   10 |  1 | itself                |    | company/hostile | a_name_that_takes_for_ever_to_demangle_holds_nothing_up | a name that takes for ever to demangle | nothing waits for it
forgotten       |   10 |  1 | itself                |    | alone/whole_host | programs_that_never_come_again_are_forgotten | programs that never come again | descriptors and tables end where they began
flood-mappings  |    1 |  1 | HEAPBPF_TORTURE_TIMES |  1 | alone/long/floods | of_mappings | a hundred thousand executable mappings | totals exact; bounded time and memory
flood-processes |    1 |  1 | HEAPBPF_TORTURE_TIMES |  1 | alone/long/floods | of_processes | ten thousand short processes | totals exact; bounded time and memory
flood-stacks    |    1 |  1 | HEAPBPF_TORTURE_TIMES |  1 | alone/long/floods | of_stacks | a million stacks | totals exact, what is not kept is told; bounded time and memory
flood-threads   |    1 |  1 | HEAPBPF_TORTURE_TIMES |  1 | alone/long/floods | of_threads | ten thousand threads | accounts add up; bounded time and memory";
/// Number of threads of the row with many threads, except in a short round.
const THREADS: &str = "10000";

/// The result of a row.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    fault: String,
    hook: String,
    times: String,
    promised: &'static str,
    what: String,
}

impl Row {
    /// All rows.
    fn all() -> Vec<Self> {
        ROWS.lines().map(|line| Self::parse(line).expect("a unit test reads the table")).collect()
    }

    fn parse(line: &'static str) -> Option<Self> {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [name, times, times_quick, variable, seconds, file, test, fault, promised] =
            <[&str; 9]>::try_from(fields).ok()?;
        Some(Self {
            name,
            fault,
            promised,
            file,
            test,
            times_variable: (variable != "itself").then_some(variable),
            times: times.parse().ok()?,
            times_quick: times_quick.parse().ok()?,
            seconds: seconds.parse().ok(),
        })
    }

    fn times(&self, selection: &Selection) -> u32 {
        selection.times.unwrap_or(if selection.quick { self.times_quick } else { self.times })
    }

    /// Runs the row. Returns its results, and whether everything was as promised.
    fn run(&self, context: &Context, selection: &Selection, file: &Path) -> anyhow::Result<(Vec<Seen>, bool)> {
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
        let (program, file_of_test) = self.file.split_once('/').context("each file is in the folder of a program")?;
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
    fn seen(&self, text: &str, succeeded: bool, times: &str) -> Vec<Seen> {
        let seen = |[fault, hook, times, what]: [&str; 4]| Seen {
            fault: fault.into(),
            hook: hook.into(),
            times: times.into(),
            promised: self.promised,
            what: what.into(),
        };
        let mut found: Vec<Seen> = text
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
    let mut rows = Row::all();
    let names: Vec<_> = rows.iter().map(|row| row.name).collect();
    rows.retain(|row| selection.row.as_ref().is_none_or(|name| row.name.starts_with(name.as_str())));
    if rows.is_empty() {
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
fn markdown(table: &[Seen]) -> String {
    let mut text = "| fault | hook | times | promised | seen |\n|---|---|---|---|---|\n".to_owned();
    for Seen { fault, hook, times, promised, what } in table {
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
        let rows = Row::all();
        for (i, row) in rows.iter().enumerate() {
            assert!(rows[..i].iter().all(|other| other.name != row.name), "{} twice", row.name);
            let dir = if row.file.starts_with("remote/") { "crates/remote/tests" } else { "tests/tests" };
            let file = root.join(dir).join(row.file).with_extension("rs");
            let text = std::fs::read_to_string(file).expect("a file of tests");
            assert!(text.contains(&format!("fn {}()", row.test)), "no test {} in {}", row.test, row.file);
            assert!(!row.fault.is_empty() && !row.promised.is_empty() && row.times >= row.times_quick, "{}", row.name);
        }
    }

    #[test]
    fn a_row_says_what_its_test_wrote_or_that_it_failed() {
        let rows = Row::all();
        let row = &rows[0];
        let seen = row.seen("a\tprobe\t3\tright\nb\tinline\t3\tright too\n", true, "3");
        assert_eq!(seen.iter().map(|seen| seen.what.as_str()).collect::<Vec<_>>(), ["right", "right too"]);
        let failed = row.seen("a\tprobe\t3\tright\n", false, "3");
        assert_eq!(failed.len(), 2);
        assert!(failed[1].what.contains("not as promised"), "{failed:?}");
        assert_eq!(row.seen("", true, "3")[0].what, "as promised");
        assert!(markdown(&seen).contains("| b | inline | 3 | target right, nothing left | right too |\n"));
    }
}
