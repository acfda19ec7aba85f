//! Go programs: what they have in use equals what they report themselves, and whatever cannot be read is reported.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use heapbpf_tests::doctor::doctor_text_of;
use heapbpf_tests::environment::{skipped, turn};
use heapbpf_tests::output::{Profile, Stack};
use heapbpf_tests::pprof::sums;
use heapbpf_tests::program::{go_program, program};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::Target;

/// Functions with files and lines, innermost first, and objects and bytes in use.
type Stacks = BTreeMap<Vec<String>, (f64, f64)>;

/// Reads what a Go program wrote: `1: 1008 [1: 1008] @ 0x…`, then lines `# 0x… name+0x… file:line`.
fn written(path: &Path) -> Stacks {
    let text = std::fs::read_to_string(path).expect("it was written");
    let text = text.split("# runtime.MemStats").next().expect("a first part");
    let mut stacks = Stacks::new();
    let mut lines = text.lines().skip(1).peekable();
    while let Some(line) = lines.next() {
        let Some((numbers, _)) = line.split_once(" [") else { continue };
        let numbers: Vec<f64> = numbers.split(':').map(|number| number.trim().parse().expect("a number")).collect();
        let mut frames = Vec::new();
        while let Some(frame) = lines.next_if(|line| line.starts_with('#')) {
            let fields: Vec<&str> = frame.split_whitespace().collect();
            let name = fields[2].rsplit_once("+0x").map_or(fields[2], |(name, _)| name);
            if name != "runtime.goexit" {
                frames.push(format!("{name} {}", fields[3]));
            }
        }
        add(&mut stacks, frames, (numbers[0], numbers[1]));
    }
    stacks
}

fn add(stacks: &mut Stacks, frames: Vec<String>, (objects, bytes): (f64, f64)) {
    if objects > 0.0 {
        let sum = stacks.entry(frames).or_default();
        *sum = (sum.0 + objects, sum.1 + bytes);
    }
}

fn found(profile: &Profile) -> Stacks {
    let mut stacks = Stacks::new();
    for stack in profile.stacks.iter().filter(|stack| stack.source.as_deref() == Some("go runtime")) {
        let frame = |frame: &heapbpf_tests::output::Frame| {
            let [name, file] = [&frame.function, &frame.file].map(|text| text.as_deref().unwrap_or("?"));
            format!("{name} {file}:{}", frame.line.unwrap_or(0))
        };
        add(&mut stacks, stack.frames.iter().map(frame).collect(), in_use(stack));
    }
    stacks
}

/// Objects and bytes of a stack in use.
fn in_use(stack: &Stack) -> (f64, f64) {
    let value = |estimate: &Option<heapbpf_tests::output::Estimate>| estimate.as_ref().map_or(0.0, |it| it.value());
    (value(&stack.figures.inuse_objects), value(&stack.figures.inuse_bytes))
}

fn notes_of(profile: &Profile) -> Vec<&String> {
    profile.notes.iter().filter(|note| note.starts_with("Go's own heap")).collect()
}

fn start(program: &Path, dir: &Path, rate: &str) -> Target {
    Target::start(program, [dir.join("truth").as_os_str(), OsStr::new(rate)])
}

fn record(target: &Target) -> Outcome {
    Recorder::of(target.pid(), 1).option("--output", "profile.parquet").start().stop()
}

/// The program samples everything, so nothing is estimated: stacks, objects and bytes are equal. Its own profile and
/// ours are of the same moment, because it does nothing in between.
#[test]
fn what_go_programs_have_in_use_is_what_they_say_themselves() {
    let case = "what_go_programs_have_in_use_is_what_they_say_themselves";
    let Some(_turn) = turn(case) else { return };
    for (name, flags) in [("go-heap", &[][..]), ("go-heap-stripped", &["-ldflags=-s -w"])] {
        let Some(program) = go_program("go_heap", name, flags) else { return skipped(case, "there is no go") };
        let dir = tempfile::tempdir().expect("a temporary directory");
        let target = start(&program, dir.path(), "1");
        let outcome = record(&target);
        let (profile, stats) = outcome.results();
        let truth = written(&dir.path().join("truth"));
        assert!(truth.keys().any(|frames| frames[0].starts_with("main.list ")), "{truth:#?}");
        assert_eq!(found(&profile), truth, "{name}");
        let (objects, bytes) = truth.values().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        let total = |estimate: &Option<heapbpf_tests::output::Estimate>| {
            let estimate = estimate.as_ref().expect("frees were followed");
            (estimate.low, estimate.estimate, estimate.high)
        };
        assert_eq!(total(&profile.totals.inuse_bytes), (Some(bytes), Some(bytes), Some(bytes)));
        assert_eq!(total(&profile.totals.inuse_objects).1, Some(objects));
        assert_eq!(profile.totals.alloc_bytes.estimate, Some(0.0), "nothing was allocated by a hooked function");
        let process = profile.process(target.pid());
        assert_eq!((process.hook.as_deref(), process.coverage), (Some("go runtime"), 1.0), "{process:?}");
        assert!(process.missing.is_empty(), "{process:?}");
        let [note] = notes_of(&profile)[..] else { panic!("{:?}", profile.notes) };
        assert!(note.contains("is included (go-heap") && note.contains("every object"), "{note}");
        assert!(outcome.stdout.contains("main.list") && outcome.stdout.contains("Go's own heap is included"));
        assert_eq!(stats.lost(), 0, "{stats:?}");
        assert!(target.end().success(), "it was not harmed");
    }
}

#[test]
fn a_service_shows_go_heaps_of_all_processes() {
    let case = "a_service_shows_go_heaps_of_all_processes";
    let Some(_turn) = turn(case) else { return };
    let Some(program) = go_program("go_heap", "go-serve", &[]) else { return skipped(case, "there is no go") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = start(&program, dir.path(), "1");
    let truth = written(&dir.path().join("truth"));
    let (objects, bytes) = truth.values().fold((0.0, 0.0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let (recording, address) = Recorder::new().option("--comm", "go-serve").interval(1).serve();
    let scrape = get(address, "/debug/pprof/heap");
    assert_eq!(sums(&scrape.body), [0, 0, objects as i64, bytes as i64]);
    let metric = get(address, "/metrics").metric_of("heapbpf_process_inuse_bytes", target.pid());
    assert_eq!(metric, Some(bytes));
    recording.stop();
}

#[test]
fn a_go_program_that_samples_nothing_is_told() {
    let case = "a_go_program_that_samples_nothing_is_told";
    let Some(_turn) = turn(case) else { return };
    let Some(program) = go_program("go_heap", "go-off", &[]) else { return skipped(case, "there is no go") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let target = start(&program, dir.path(), "0");
    let (profile, _) = record(&target).results();
    let [note] = notes_of(&profile)[..] else { panic!("{:?}", profile.notes) };
    assert!(note.contains("is not included (go-off)") && note.contains("its MemProfileRate is 0"), "{note}");
    let process = profile.process(target.pid());
    assert!(process.missing.iter().any(|gap| gap.why.contains("MemProfileRate is 0")), "{process:?}");
    assert!(found(&profile).is_empty() && process.hook.is_none(), "{process:?}");
}

/// A C program with sections like those of a Go program is recorded as usual, and what heapbpf does not believe is
/// reported.
#[test]
fn a_program_that_pretends_to_be_gos_is_not_believed() {
    let case = "a_program_that_pretends_to_be_gos_is_not_believed";
    let Some(_turn) = turn(case) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let pretending = dir.path().join("pretending");
    let info = [b"\xff Go buildinf:\x08\x02".as_slice(), &[0; 16], b"\x08go1.22.1"].concat();
    // The header of a function table whose offsets are all invalid.
    let table = [&[0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8][..], &[0xff; 64]].concat();
    std::fs::write(dir.path().join("info"), info).expect("it is ours");
    std::fs::write(dir.path().join("table"), table).expect("it is ours");
    let added = Command::new("objcopy")
        .args(["--add-section", ".go.buildinfo=info", "--add-section", ".gopclntab=table"])
        .arg(program("mix"))
        .arg(&pretending)
        .current_dir(dir.path())
        .status();
    if !added.is_ok_and(|status| status.success()) {
        return skipped(case, "there is no objcopy");
    }
    let mut target = Target::start(&pretending, ["500"]);
    let (profile, ..) = Recorder::of(target.pid(), 1).results_of(&mut target);
    let allocated = &profile.totals.alloc_bytes;
    assert!(allocated.estimate > Some(0.0) && allocated.estimate == allocated.exact, "{allocated:?}");
    let [note] = notes_of(&profile)[..] else { panic!("{:?}", profile.notes) };
    assert!(note.contains("is not included (pretending)") && note.contains("table of functions"), "{note}");
    let said = doctor_text_of(target.pid());
    assert!(said.contains("Go's own heap"), "{said}");
}
