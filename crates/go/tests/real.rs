//! A real Go program: the profile read from its memory must equal the one that it writes itself.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_go::{Functions, Heap, Memory, Moments, Places, Program, Unread};
use heapbpf_testing::skipped;

/// Objects and bytes in use, by function names with lines, innermost first.
type Stacks = BTreeMap<Vec<String>, (u64, u64)>;

struct ProcessMemory(File);

impl Memory for ProcessMemory {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_exact_at(buffer, address).is_ok()
    }
}

/// A running program, which is killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The Go command: from `GO`, or the installed one.
fn go() -> String {
    std::env::var("GO").unwrap_or_else(|_| "go".into())
}

/// Builds a Go program; `None` if Go is not installed.
fn build(dir: &Path, source: &Path, flags: &[&str]) -> Option<PathBuf> {
    let program = dir.join("program");
    let mut command = Command::new(go());
    command.arg("build").args(flags).arg("-o").arg(&program).arg(source);
    command.env("GO111MODULE", "off").env("GOFLAGS", "").env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local");
    match command.output() {
        Ok(built) if built.status.success() => Some(program),
        Ok(built) => panic!("{}", String::from_utf8_lossy(&built.stderr)),
        Err(error) => {
            skipped(format_args!("no Go: {error}"));
            None
        }
    }
}

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/programs/go_heap.go")
}

fn run(program: &Path, arguments: &[&str]) -> Running {
    let mut child =
        Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("it is piped")).read_line(&mut line).expect("it speaks");
    assert!(line.starts_with("READY"), "{line:?}");
    Running(child)
}

/// Reads the heap profile of a running program.
fn read(running: &Running, program: &Program, path: &Path) -> Result<Heap, Unread> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", running.0.id())).expect("it runs");
    let is_code = |line: &&str| line.contains(" r-xp ") && line.ends_with(&*path.to_string_lossy());
    let fields: Vec<&str> = maps.lines().find(is_code).expect("it has code").split_whitespace().collect();
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("a number");
    let start = hex(fields[0].split('-').next().expect("a range"));
    let bias = program.bias(start, hex(fields[2])).expect("it is code of the file");
    let memory = ProcessMemory(File::open(format!("/proc/{}/mem", running.0.id())).expect("it is ours"));
    Heap::read(program, bias, &memory, Moments::One, Instant::now() + Duration::from_secs(20))
}

fn named(functions: &Functions, file: &File, places: &Places, stack: &[u64]) -> Vec<String> {
    let frames = stack.iter().map(|pc| functions.at(file, places, *pc).expect("every address is in a function"));
    let frames: Vec<String> = frames.map(|frame| format!("{} {}:{}", frame.name, frame.file, frame.line)).collect();
    shown(frames)
}

/// Removes the frames that some versions leave out of their profiles.
fn shown(frames: Vec<String>) -> Vec<String> {
    let name = |frame: &String| frame.split(' ').next().unwrap_or_default().to_owned();
    let names: Vec<String> = frames.iter().map(name).collect();
    frames[heapbpf_go::functions::shown(names.iter().map(String::as_str))].to_vec()
}

/// Parses the program's profile: `1: 1008 [1: 1008] @ 0x… 0x…`, then lines `# 0x… name+0x… file:line`, then an empty
/// one.
fn written(path: &Path) -> Stacks {
    let text = std::fs::read_to_string(path).expect("it was written");
    let mut stacks = Stacks::new();
    let text = text.split("# runtime.MemStats").next().expect("a first part");
    let mut lines = text.lines().skip(1).peekable();
    while let Some(line) = lines.next() {
        let Some((numbers, _)) = line.split_once(" [") else { continue };
        let (objects, bytes) = numbers.split_once(": ").expect("two numbers");
        let [objects, bytes] = [objects, bytes].map(|number| number.trim().parse::<u64>().expect("a number"));
        let mut frames = Vec::new();
        while let Some(frame) = lines.next_if(|line| line.starts_with('#')) {
            let fields: Vec<&str> = frame.split_whitespace().collect();
            let name = fields[2].rsplit_once("+0x").map_or(fields[2], |(name, _)| name);
            frames.push(format!("{name} {}", fields[3]));
        }
        if objects > 0 {
            let sum = stacks.entry(shown(frames)).or_default();
            *sum = (sum.0 + objects, sum.1 + bytes);
        }
    }
    stacks
}

fn found(heap: &Heap, program: &Program, path: &Path) -> Stacks {
    let file = File::open(path).expect("it is there");
    let mut stacks = Stacks::new();
    for bucket in &heap.buckets {
        let sum = stacks.entry(named(&program.functions, &file, &heap.places, &bucket.stack)).or_default();
        *sum = (sum.0 + bucket.objects, sum.1 + bucket.objects * bucket.size);
    }
    stacks
}

fn assert_equal(flags: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(path) = build(dir.path(), &source(), flags) else { return };
    let program = Program::find(&File::open(&path).expect("it is there")).expect("it is known").expect("it is Go's");
    let profile = dir.path().join("profile");
    let running = run(&path, &[&profile.to_string_lossy(), "1"]);
    let heap = read(&running, &program, &path).expect("it can be read");
    assert_eq!(heap.rate, 1);
    let (written, found) = (written(&profile), found(&heap, &program, &path));
    assert!(written.keys().any(|stack| stack[0].starts_with("main.list ")), "{written:#?}");
    assert_eq!(found, written);
}

#[test]
fn what_is_in_use_is_what_the_program_says_itself() {
    assert_equal(&[]);
}

#[test]
fn without_symbols_the_same_is_found() {
    if std::env::consts::ARCH != "x86_64" {
        return skipped(format_args!("code is read on x86-64 only"));
    }
    assert_equal(&["-ldflags=-s -w"]);
}

#[test]
fn a_program_at_changing_addresses_is_read_too() {
    assert_equal(&["-buildmode=pie"]);
}

#[test]
fn a_program_that_samples_nothing_says_why() {
    let dir = tempfile::tempdir().expect("a directory");
    let Some(path) = build(dir.path(), &source(), &[]) else { return };
    let program = Program::find(&File::open(&path).expect("it is there")).expect("it is known").expect("it is Go's");
    let running = run(&path, &["/dev/null", "0"]);
    assert_eq!(read(&running, &program, &path), Err(Unread::Off));
    drop(running);
    let source = dir.path().join("small.go");
    let text = "package main\nimport (\"os\"; \"time\")\nfunc main() { os.Stdout.WriteString(\"READY\\n\"); time.Sleep(time.Hour) }\n";
    std::fs::write(&source, text).expect("it is writable");
    let Some(path) = build(dir.path(), &source, &[]) else { return };
    let program = Program::find(&File::open(&path).expect("it is there")).expect("it is known").expect("it is Go's");
    assert_eq!(read(&run(&path, &[]), &program, &path), Err(Unread::LeftOut));
}
