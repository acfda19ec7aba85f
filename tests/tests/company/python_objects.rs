//! Python's own objects: what is in use by line equals what tracemalloc counts in another run of the same program. This
//! holds for each CPython version on this machine, whether or not its compiler inlined the object allocator into its
//! callers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks;
use heapbpf_tests::doctor::doctor;
use heapbpf_tests::environment::{programs_dir, skipped, tool, turn};
use heapbpf_tests::inline::{is_hooked, mapped};
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::python_stacks;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::{Target, file_of, mappings, stat, until};
use procfs::process::{MMPermissions, MemoryMap};

/// Bytes and blocks in use, by line of the program.
type Lines = BTreeMap<u32, [u64; 2]>;

fn script() -> PathBuf {
    programs_dir().join("python_objects.py")
}

/// The interpreters on this machine from 3.8 on, from the distribution and from pyenv.
fn interpreters() -> Vec<PathBuf> {
    let at_home = || std::env::home_dir().unwrap_or_default().join(".pyenv");
    let root = std::env::var_os("PYENV_ROOT").map_or_else(at_home, PathBuf::from);
    let mut found: Vec<PathBuf> = tool("python3").into_iter().collect();
    for minor in 8..=13 {
        let versions = std::fs::read_dir(root.join("versions")).into_iter().flatten().flatten();
        let of_minor = versions.map(|it| it.path().join("bin").join(format!("python3.{minor}")));
        found.extend(of_minor.filter(|path| path.exists()).take(1));
    }
    found
}

/// Counts of tracemalloc.
fn counted_by_tracemalloc(python: &Path, parts: &[&str], variables: &[(&str, &str)]) -> Lines {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let truth = dir.path().join("truth");
    let mut command = command(python, variables);
    let mut target = Target::start_command(command.arg("--truth").arg(&truth).args(parts));
    target.go();
    assert_eq!(target.line(), "DONE");
    assert!(target.end().success());
    serde_json::from_str(&std::fs::read_to_string(&truth).expect("it was written")).expect("lines")
}

/// The same counts from a process's profile.
fn counted_by_heapbpf(profile: &Profile, pid: u32) -> Lines {
    counted_of(profile, pid, |_| true)
}

/// The same counts for some functions only.
fn counted_of(profile: &Profile, pid: u32, is_wanted: impl Fn(&str) -> bool) -> Lines {
    let script = script();
    let mut lines = Lines::new();
    for stack in profile.stacks.iter().filter(|stack| stack.pid == pid && is_wanted(&stack.function)) {
        let Some(innermost) = stack.frames.iter().find(|frame| frame.module.is_none()) else { continue };
        if innermost.file.as_deref().map(Path::new) != Some(&script) {
            continue;
        }
        let value = |figure: &Option<heapbpf_tests::output::Estimate>| {
            figure.as_ref().map_or(0.0, heapbpf_tests::output::Estimate::value) as u64
        };
        let line = lines.entry(innermost.line.expect("a line")).or_default();
        line[0] += value(&stack.figures.inuse_bytes);
        line[1] += value(&stack.figures.inuse_objects);
    }
    lines.retain(|_, counted| *counted != [0, 0]);
    lines
}

/// Line numbers of a function of the program.
fn lines_of(function: &str) -> std::ops::Range<u32> {
    let text = std::fs::read_to_string(script()).expect("our own program");
    let start = text.lines().position(|line| line.starts_with(&format!("def {function}("))).expect("a part") as u32 + 1;
    let rest = text.lines().skip(start as usize).position(|line| !line.is_empty() && !line.starts_with(' '));
    start..start + 1 + rest.expect("it is not the last") as u32
}

/// Waits until heapbpf has read all pending records: it uses no CPU time for a while.
fn until_idle(pid: u32) {
    let used = || stat(pid).utime + stat(pid).stime;
    until("heapbpf to be idle", || {
        let before = used();
        std::thread::sleep(std::time::Duration::from_millis(300));
        used() <= before + 1
    });
}

/// Runs the program under an interpreter, with the same hashes in every run.
fn command(python: &Path, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(python);
    command.env("PYTHONHASHSEED", "0").envs(variables.iter().copied()).arg(script());
    command
}

/// How a run is recorded.
struct Run<'a> {
    interval: u64,
    variables: &'a [(&'a str, &'a str)],
    /// Number of lines that the program prints before it waits.
    lines: usize,
    /// Options that select how its calls are counted.
    options: &'a [&'a str],
}

/// Probes count objects only on request. Inline hooks always do.
const PROBES: &[&str] = &["--hook=probe", "--python-objects"];
const INLINE: &[&str] = &["--hook=inline"];

impl Default for Run<'_> {
    fn default() -> Self {
        Self { interval: 1, variables: &[], lines: 1, options: PROBES }
    }
}

/// Records a run of these parts of the program.
fn record(python: &Path, parts: &[&str], run: Run<'_>) -> (Profile, Stats, u32) {
    let mut target = Target::start_command(command(python, run.variables).args(parts));
    let pid = target.pid();
    let recording = Recorder::of(pid, run.interval).option("--ring-bytes", "64MiB").flags(run.options).start();
    target.go();
    for _ in 0..run.lines {
        let line = target.line();
        assert!(line == "DONE" || line.starts_with("CHILD"), "{line}");
    }
    // After its last line, it makes a block to read its input.
    until("the program to wait for input", || stat(pid).state == 'S');
    until_idle(recording.pid());
    let (profile, stats) = recording.stop().results();
    assert!(target.end().success());
    (profile, stats, pid)
}

/// The lines of these parts that either count mentions: line, tracemalloc's count, heapbpf's count.
fn compared(parts: &[&str], truth: &Lines, counted: &Lines) -> Vec<(u32, [u64; 2], [u64; 2])> {
    let lines = parts.iter().chain(&["hold"]).flat_map(|part| lines_of(part));
    let value = |lines: &Lines, line| lines.get(&line).copied().unwrap_or_default();
    lines
        .map(|line| (line, value(truth, line), value(counted, line)))
        .filter(|it| it.1 != it.2 || it.1 != [0, 0])
        .collect()
}

/// All parts except the one where a difference is expected.
const PARTS: [&str; 6] = ["small", "freed", "large", "grows", "shrinks", "nothing"];

fn assert_equal(what: &str, parts: &[&str], truth: &Lines, counted: &Lines, profile: &Profile) {
    let all = compared(parts, truth, counted);
    let differ: Vec<_> = all.iter().filter(|it| it.1 != it.2).collect();
    let [bytes, blocks] = all.iter().fold([0, 0], |sum, it| [sum[0] + it.1[0], sum[1] + it.1[1]]);
    println!("{what}: {} of {} lines equal, {bytes} bytes, {blocks} blocks", all.len() - differ.len(), all.len());
    assert!(all.len() >= 15, "{all:?}");
    // A block is missing at its line only if its Python frames could not be read, which the profile reports.
    let missing = |it: &&(u32, [u64; 2], [u64; 2])| (it.2[0] < it.1[0] && it.2[1] < it.1[1]).then(|| it.1[1] - it.2[1]);
    let unread: Option<u64> = differ.iter().map(missing).sum();
    let is_reported = unread.is_some_and(|unread| unread <= python_stacks::unread(profile));
    assert!(is_reported, "{what}: (line, tracemalloc, heapbpf): {differ:?} {:?}", profile.notes);
}

#[test]
fn objects_in_use_by_line_equal_tracemalloc_s() {
    by_line("objects_in_use_by_line_equal_tracemalloc_s", interpreters().into_iter().take(1).collect());
}

/// Compares the counts under each of these interpreters, and totals at other intervals with those of every object.
fn by_line(case: &str, found: Vec<PathBuf>) {
    let Some(_turn) = turn(case) else { return };
    if found.is_empty() {
        return skipped(case, "there is no CPython, or no other one");
    }
    for python in found {
        let truth = counted_by_tracemalloc(&python, &PARTS, &[]);
        let [every, _] = [PROBES, INLINE].map(|options| {
            let (profile, stats, pid) = record(&python, &PARTS, Run { options, ..Run::default() });
            assert_eq!(stats.lost(), 0, "{stats:?}");
            let what = format!("{} {}", python.display(), options[0]);
            assert_equal(&what, &PARTS, &truth, &counted_by_heapbpf(&profile, pid), &profile);
            checks::identity(&stats);
            let process = profile.process(pid);
            assert!(process.allocators.iter().any(|name| name.contains("Python objects")), "{:?}", process.allocators);
            assert!(!process.missing.iter().any(|missing| missing.what.contains("Python")), "{:?}", process.missing);
            // A list of ten million bytes is a list object with its array; the bytes themselves are one block.
            let large = stats_of(&profile, pid, "large");
            assert_eq!(large.iter().filter(|bytes| **bytes >= 10_000_000).count(), 2, "{large:?}");
            (stats.exact_alloc_bytes, stats.exact_alloc_objects)
        });
        // Totals are exact at every interval.
        for (interval, options) in [(0, PROBES), (4096, INLINE)] {
            let (_, stats, _) = record(&python, &PARTS, Run { interval, options, ..Run::default() });
            let totals = (stats.exact_alloc_bytes, stats.exact_alloc_objects);
            assert_eq!(totals, every, "-i {interval} {}", options[0]);
        }
    }
}

/// Sampled bytes of each stack at a part's lines.
fn stats_of(profile: &Profile, pid: u32, part: &str) -> Vec<u64> {
    let stacks = profile.stacks.iter().filter(|stack| stack.pid == pid && stack.has(part));
    stacks.map(|stack| stack.sampled_bytes).collect()
}

/// The interpreter keeps freed floats for reuse. They stay in use where they were allocated. tracemalloc moves them to
/// where they are reused.
#[test]
fn reused_floats_stay_where_they_were_allocated() {
    const FLOATS: [u64; 2] = [50 * 24, 50];
    let case = "reused_floats_stay_where_they_were_allocated";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let truth = counted_by_tracemalloc(&python, &["floats"], &[]);
    let (profile, _, pid) = record(&python, &["floats"], Run::default());
    let all = compared(&["floats"], &truth, &counted_by_heapbpf(&profile, pid));
    let differ: Vec<_> = all.iter().filter(|it| it.1 != it.2).collect();
    let [(_, first, ours_first), (_, again, ours_again)] = differ[..] else { panic!("{all:?}") };
    assert_eq!([ours_first[0] - first[0], ours_first[1] - first[1]], FLOATS);
    assert_eq!([again[0] - ours_again[0], again[1] - ours_again[1]], FLOATS);
}

#[test]
fn forked_workers_objects_are_counted() {
    let case = "forked_workers_objects_are_counted";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let truth = counted_by_tracemalloc(&python, &PARTS, &[]);
    let parts: Vec<&str> = ["fork"].into_iter().chain(PARTS).collect();
    for options in [PROBES, INLINE] {
        let (profile, stats, parent) = record(&python, &parts, Run { lines: 2, options, ..Run::default() });
        assert_eq!(stats.lost(), 0, "{stats:?}");
        let worker = profile.processes.iter().find(|process| process.pid != parent).expect("the worker is a target");
        assert!(worker.allocators.iter().any(|name| name.contains("Python objects")), "{:?}", worker.allocators);
        let counted = counted_by_heapbpf(&profile, worker.pid);
        assert_equal(&format!("a worker {}", options[0]), &PARTS, &truth, &counted, &profile);
    }
}

/// The pointers of the interpreter's table are restored, so one recording can follow another. Inline hooks leave only
/// unreachable code behind; probes leave nothing.
#[test]
fn a_process_is_as_before_afterwards() {
    let case = "a_process_is_as_before_afterwards";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let mut target = Target::start_command(Command::new(&python).arg(script()).args(PARTS));
    let data = || writable_words(target.pid(), &python);
    // It may still be on its way from printing its line to waiting.
    until("the program to wait for input", || stat(target.pid()).state == 'S');
    let before = data();
    let mut code = Vec::new();
    for options in [PROBES, INLINE, PROBES] {
        let recording = Recorder::of(target.pid(), 1).flags(options).start();
        let during = data();
        recording.stop();
        let after = data();
        let changed = |other: &[u64]| before.iter().zip(other).filter(|(was, is)| was != is).count();
        println!("{} words led elsewhere meanwhile, {} afterwards", changed(&during), changed(&after));
        assert_eq!(changed(&after), 0);
        assert!(!is_hooked(target.pid()), "the original pages are back");
        let stays = mapped(target.pid());
        if options == PROBES {
            assert_eq!(stays, code, "probes map nothing");
        }
        code = stays;
    }
    target.go();
    assert_eq!(target.line(), "DONE");
    assert!(target.end().success());
}

/// The words of a program's writable mappings. The process waits while they are read.
fn writable_words(pid: u32, program: &Path) -> Vec<u64> {
    use std::os::unix::fs::FileExt as _;
    let program = program.canonicalize().expect("it is there");
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("as root");
    let mut words = Vec::new();
    let is_data = |map: &MemoryMap| map.perms.contains(MMPermissions::WRITE) && Path::new(file_of(map)) == program;
    for (start, end) in mappings(pid).into_iter().filter(is_data).map(|map| map.address) {
        let mut bytes = vec![0; (end - start) as usize];
        memory.read_exact_at(&mut bytes, start).expect("it is mapped");
        words.extend(bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))));
    }
    words
}

#[test]
fn what_is_not_counted_without_the_option_is_said() {
    let case = "what_is_not_counted_without_the_option_is_said";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
    let target = Target::start_command(Command::new(&python).arg(script()).arg("floats"));
    let pid = target.pid().to_string();
    let (_, default) = doctor(&["--pid", &pid]);
    let found = &default["processes"][0];
    assert!(!found["missing"].to_string().contains("Python's own heap"), "counted inside the process: {default}");
    assert!(found["allocators"].to_string().contains("Python objects"), "{default}");
    assert!(found["limits"].to_string().contains("free lists"), "{default}");
    assert!(found["python"].as_str().is_some_and(|version| version.starts_with("3.")), "{default}");
    let checks = default["kernel"]["checks"].to_string();
    assert!(checks.contains("--hook auto") && checks.contains("inline hooks: "), "{checks}");
    let (_, without) = doctor(&["--pid", &pid, "--python-objects=no"]);
    let missing = without["processes"][0]["missing"].to_string();
    assert!(missing.contains("Python's own heap") && missing.contains("--python-objects"), "{without}");
    let (_, with) = doctor(&["--pid", &pid, "--python-objects"]);
    let found = &with["processes"][0];
    assert!(!found["missing"].to_string().contains("Python's own heap"), "{with}");
    assert!(found["attach"].to_string().contains("python realloc"), "{with}");
    assert!(found["limits"].to_string().contains("free lists"), "{with}");
}

/// Tests of the long set.
mod long {
    use super::*;

    #[test]
    fn objects_of_other_versions_equal_tracemalloc_s() {
        by_line("objects_of_other_versions_equal_tracemalloc_s", interpreters().into_iter().skip(1).collect());
    }

    /// With debug hooks, each block is 24 bytes larger. With malloc in place of the object allocator, nothing counts
    /// twice. Under tracemalloc, the table points to tracemalloc's functions, which call the object allocator.
    #[test]
    fn other_allocators_of_the_interpreter_count_once() {
        let case = "other_allocators_of_the_interpreter_count_once";
        let parts = ["small", "freed", "large", "grows", "shrinks"];
        let Some(_turn) = turn(case) else { return };
        let Some(python) = tool("python3") else { return skipped(case, "python3 is not installed") };
        let usual = counted_by_tracemalloc(&python, &parts, &[]);
        let variables =
            [("PYTHONMALLOC", "malloc", 0), ("PYTHONMALLOC", "pymalloc_debug", 24), ("PYTHONTRACEMALLOC", "1", 0)];
        for ((variable, value, extra), options) in variables.into_iter().flat_map(|it| [(it, PROBES), (it, INLINE)]) {
            let run = Run { variables: &[(variable, value)], options, ..Run::default() };
            let (profile, stats, pid) = record(&python, &parts, run);
            assert_eq!(stats.lost(), 0, "{stats:?}");
            let truth =
                usual.iter().map(|(line, [bytes, blocks])| (*line, [bytes + extra * blocks, *blocks])).collect();
            // tracemalloc gets its own tables from malloc, at the lines that it traces.
            let traces = variable == "PYTHONTRACEMALLOC";
            let counted = counted_of(&profile, pid, |function| !traces || function.starts_with("python "));
            assert_equal(&format!("{variable}={value} {}", options[0]), &parts, &truth, &counted, &profile);
            let missing = profile.process(pid).missing.iter().map(|missing| &missing.why);
            let is_reported = profile.notes.iter().chain(missing).any(|note| note.contains("calls malloc for each"));
            assert_eq!(is_reported, value == "malloc", "{:?}", profile.notes);
        }
    }
}
