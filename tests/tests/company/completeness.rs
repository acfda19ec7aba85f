//! Known call paths of real programs: a threaded server, JIT code, deep stacks.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use heapbpf_tests::environment::{skipped, tool, tool_or_install, turn};
use heapbpf_tests::others::Beside;
use heapbpf_tests::output::{self, Frame, Profile, Stack};
use heapbpf_tests::program::program;
use heapbpf_tests::python_stacks::{is_python, only_native};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::{Target, children_of, until};
use serde_json::Value;

/// Minimum share of a real program's samples that must have complete stacks.
const WHOLE: f64 = 0.99;

/// The function that node calls to run a script. (Builtins have names only in some builds, not in Debian's.)
const RUNS_SCRIPT: &str = "v8::Script::Run(v8::Local<v8::Context>, v8::Local<v8::Data>)";

/// Whether a function of node's script is on the stack. V8 names it `JS:*middle …`, before version 11
/// `LazyCompile:*middle …` or `Function:*middle …`: kind and optimisation level, name, position.
fn runs(stack: &Stack, function: &str) -> bool {
    let of_script = |name: &str| ["JS:", "LazyCompile:", "Function:"].iter().any(|kind| name.starts_with(kind));
    let mut names = stack.frames.iter().filter_map(|frame| frame.function.as_deref());
    names.any(|name| of_script(name) && name.contains(function))
}

/// Whether these functions are on the stack in this order, innermost first, possibly with others in between.
fn follows(stack: &Stack, path: &[&str]) -> bool {
    let mut names = stack.frames.iter().filter_map(|frame| frame.function.as_deref());
    path.iter().all(|&wanted| names.any(|name| name == wanted))
}

/// Number of samples of one program whose stack contains `path`.
fn samples_on(profile: &Profile, comm: &str, path: &[&str]) -> u64 {
    of(profile, comm).filter(|stack| follows(stack, path)).map(|stack| stack.samples).sum()
}

fn of<'a>(profile: &'a Profile, comm: &str) -> impl Iterator<Item = &'a Stack> {
    let pids: Vec<u32> = profile.processes.iter().filter(|process| process.comm == comm).map(|p| p.pid).collect();
    profile.stacks.iter().filter(move |stack| pids.contains(&stack.pid))
}

/// Checks the share of complete stacks of a program, and that each of these paths was sampled.
fn check(case: &str, comm: &str, outcome: &Outcome, paths: &[&[&str]]) -> Profile {
    let (profile, stats) = outcome.results();
    assert_eq!(stats.lost(), 0, "{stats:?}");
    let all: u64 = of(&profile, comm).map(|stack| stack.samples).sum();
    let whole: u64 = of(&profile, comm).filter(|stack| stack.complete).map(|stack| stack.samples).sum();
    println!("{case}: {whole} of {all} sampled stacks are whole");
    assert!(all > 100, "too few samples to say anything: {all}");
    assert!(whole as f64 >= WHOLE * all as f64, "{whole} of {all} stacks are whole");
    for path in paths {
        assert!(samples_on(&profile, comm, path) > 0, "nothing was sampled on {path:?}: {:?}", profile.notes);
    }
    profile
}

/// A server that is killed when dropped.
struct Server {
    child: Beside,
    port: u16,
}

impl Server {
    /// Starts the server on a free port and waits until it answers.
    fn start(program: &Path, arguments: &dyn Fn(u16) -> Vec<String>) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let mut command = Command::new(program);
        command.args(arguments(port)).current_dir("/tmp").stdout(Stdio::null());
        let server = Self { child: Beside(command.spawn().expect("the server runs")), port };
        until("the server listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        server
    }

    fn connect(&self) -> TcpStream {
        TcpStream::connect(("127.0.0.1", self.port)).expect("the server listens")
    }
}

/// Sends requests and reads this many answers, each equal to `answer`.
fn ask(stream: &mut TcpStream, requests: &[u8], answers: usize, answer: &[u8]) {
    stream.write_all(requests).expect("the server reads");
    let mut got = vec![0; answers * answer.len()];
    stream.read_exact(&mut got).expect("the server answers");
    assert!(got.chunks(answer.len()).all(|one| one == answer), "{}", String::from_utf8_lossy(&got));
}

#[test]
fn redis_with_threads() {
    let case = "redis_with_threads";
    let Some(_turn) = turn(case) else { return };
    let Some(redis) = tool_or_install("redis-server", "redis-server") else {
        return skipped(case, "no redis-server (Debian: redis-server)");
    };
    let arguments = ["--save", "", "--io-threads", "3", "--io-threads-do-reads", "yes", "--bind", "127.0.0.1"];
    let server = Server::start(&redis, &|port| {
        let words = arguments.iter().map(|&word| word.to_owned());
        words.chain(["--port".to_owned(), port.to_string()]).collect()
    });
    let recording = Recorder::of(server.child.0.id(), 4096).start();
    // Many connections at once with many requests each make all its threads read.
    let mut connections: Vec<TcpStream> = (0..30).map(|_| server.connect()).collect();
    let value = "x".repeat(300);
    for round in 0..20 {
        let requests: String = (0..20)
            .map(|key| format!("*3\r\n$3\r\nSET\r\n$4\r\n{:04}\r\n$300\r\n{value}\r\n", round * 20 + key))
            .collect();
        for connection in &mut connections {
            ask(connection, requests.as_bytes(), 20, b"+OK\r\n");
        }
    }
    let outcome = recording.stop();
    let path: &[&str] = &["processMultibulkBuffer", "processInputBuffer", "aeMain", "main", "_start"];
    let accepts: &[&str] = &["createClient", "acceptTcpHandler", "aeMain", "main"];
    check(case, "redis-server", &outcome, &[path, accepts]);
    // Its allocator's mappings have no names: sampled blocks tell them from other memory.
    let profile: Value = output::read(&outcome.file("profile.json"));
    let process = &profile["processes"][0];
    assert!(process["allocators"].to_string().contains("jemalloc"), "{process}");
    let blocks = profile["stacks"].as_array().expect("stacks").iter().map(|stack| &stack["resident_bytes"]);
    let least: f64 = blocks.filter_map(|figure| figure["low"].as_f64()).sum();
    let heap = process["resident"]["heap"].as_f64().expect("it was measured");
    assert!(least > 0.0 && heap >= least, "{least} bytes of blocks are in memory: {process}");
}

/// Native functions of node are on the stacks with the script's functions between them, which node's perf map names,
/// even if the process exits before the profile is made.
#[test]
fn code_made_at_run_time_is_named_after_the_end() {
    let case = "code_made_at_run_time_is_named_after_the_end";
    let Some(_turn) = turn(case) else { return };
    let Some(node) = tool("node") else { return skipped(case, "no /usr/bin/node (Debian: nodejs)") };
    let script = "function innermost(n) { return new Uint8Array(3000 + n).length; }
        function middle(n) { let sum = 0; for (let i = 0; i < n; i++) sum += innermost(i % 100); return sum; }
        let total = 0;
        for (let k = 0; k < 20; k++) total += middle(500);";
    let words = ["--perf-basic-prof", "--interpreted-frames-native-stack", "-e", script];
    let outcome = Recorder::new().interval(32 << 10).command(&node, words).start().finish();
    let (profile, _) = outcome.results();
    let process = profile.processes.iter().find(|process| process.comm.starts_with("node")).expect("node");
    check(case, &process.comm, &outcome, &[&[RUNS_SCRIPT]]);
    assert!(process.ended);
    let below: Vec<&Stack> = profile.stacks.iter().filter(|stack| stack.has(RUNS_SCRIPT)).collect();
    let named = below.iter().filter(|stack| runs(stack, "middle"));
    let samples = |stacks: &mut dyn Iterator<Item = &&Stack>| stacks.map(|stack| stack.samples).sum::<u64>();
    let (named, all) = (samples(&mut named.into_iter()), samples(&mut below.iter()));
    println!("{case}: {named} of {all} samples below the script name its function");
    assert!(named * 10 > all * 8 && all > 100, "{named} of {all}");
    let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", process.pid));
}

/// A Python with perf trampolines (3.12 and later): the one from the environment, the distribution's, or one of
/// pyenv's.
fn python_with_perf() -> Option<PathBuf> {
    let named = std::env::var_os("HEAPBPF_TEST_PYTHON").map(PathBuf::from);
    let installed = ["python3.14", "python3.13", "python3.12", "python3"].into_iter().filter_map(tool);
    let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    let versions = std::fs::read_dir(home.join(".pyenv/versions")).into_iter().flatten().flatten();
    let others = versions.map(|version| version.path().join("bin/python3"));
    named.into_iter().chain(installed).chain(others).find(|python| {
        let script = "import sys; sys.exit(not sys.is_stack_trampoline_active())";
        Command::new(python).args(["-X", "perf", "-c", script]).output().is_ok_and(|output| output.status.success())
    })
}

/// With `-X perf`, Python functions run in trampolines without unwind information or frame pointers. Stacks unwind
/// through them and show each function once, from the interpreter's own frames.
#[test]
fn python_stacks_lead_through_its_trampolines() {
    let case = "python_stacks_lead_through_its_trampolines";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = python_with_perf() else { return skipped(case, "no Python 3.12 or later with -X perf") };
    let script = "def innermost(n): return bytearray(3000 + n)\ndef middle(n):\n  for i in range(n): innermost(i % 100)\n\
                  for k in range(20): middle(500)";
    let outcome = Recorder::new().interval(32 << 10).command(&python, ["-X", "perf", "-c", script]).start().finish();
    let path: &[&str] = &["innermost", "middle", "<module>", "__libc_start_main_impl"];
    let comm = python.file_name().and_then(|name| name.to_str()).expect("our own names");
    let profile = check(case, comm, &outcome, &[path]);
    // Stacks whose Python frames could not be read show the trampolines, and are told.
    let is_of_trampoline = |frame: &Frame| frame.function.as_deref().is_some_and(|name| name.starts_with("py::"));
    let native: Vec<&Stack> = of(&profile, comm).filter(|stack| stack.frames.iter().any(is_of_trampoline)).collect();
    let twice = native.iter().find(|stack| stack.frames.iter().any(is_python));
    assert!(twice.is_none(), "a function is there twice: {twice:?}");
    let samples: u64 = native.iter().map(|stack| stack.samples).sum();
    assert!(samples <= only_native(&profile), "{samples} samples show trampolines: {:?}", profile.notes);
    let _ = std::fs::remove_file(format!("/tmp/perf-{}.map", profile.processes[0].pid));
}

/// Two processes, forked from one, run different code at equal addresses, below equal stacks. Each uses the names of
/// its own perf map.
#[test]
fn forked_processes_have_the_names_of_their_own_code() {
    let case = "forked_processes_have_the_names_of_their_own_code";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("jit_family"), ["100"]);
    target.go();
    target.step();
    let children = children_of(target.pid());
    assert_eq!(children.len(), 2);
    let (profile, stats, truth) = Recorder::of(children[0], 1).pid(children[1]).results_of(&mut target);
    assert_eq!((stats.submitted, stats.lost()), (truth.allocs(), 0), "{stats:?}");
    for (pid, name) in children.iter().zip(["jit_first", "jit_second"]) {
        let path = ["site_00", "wanted", name, "child", "main"];
        let of_process = || profile.stacks.iter().filter(|stack| stack.pid == *pid && stack.site() == Some("site_00"));
        for stack in of_process() {
            assert!(follows(stack, &path), "{name}: {:?}", stack.frames);
        }
        assert_eq!(of_process().map(|stack| stack.samples).sum::<u64>(), 100);
        let _ = std::fs::remove_file(format!("/tmp/perf-{pid}.map"));
    }
}

/// Commands of programs that have deep stacks, or large arrays on them, with the names of their processes. Their input
/// and output files are in `dir`.
fn deep_programs(dir: &Path) -> Vec<(&'static str, &'static str, Vec<String>)> {
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        std::fs::write(&path, text).expect("our own directory");
        path.to_str().expect("our own path").to_owned()
    };
    let rust = write(
        "source.rs",
        "use std::collections::HashMap;\nfn main() { let mut m: HashMap<String, Vec<u64>> = HashMap::new(); for i in 0..9 \
         { m.entry(format!(\"{i}\")).or_default().push(i); } let mut v: Vec<_> = m.iter().map(|(k, v)| (k.clone(), \
         v.iter().sum::<u64>())).collect(); v.sort(); println!(\"{m:?} {v:?}\"); }\n",
    );
    let cpp = write(
        "source.cc",
        "#include <functional>\n#include <iostream>\n#include <map>\n#include <regex>\nint main() { std::regex r(\"a+b*\"); \
         std::map<std::string, std::vector<int>> m; for (int i = 0; i < 9; i++) m[std::to_string(i)].push_back(i); \
         std::function<int(int)> f = [&](int x) { return x + 1; }; std::cout << std::regex_match(\"aab\", r) << f(2); }\n",
    );
    let r = "for (i in 1:6) { x <- lapply(1:200, function(i) rnorm(5000)); d <- data.frame(a = rnorm(2000), g = \
             sample(letters, 2000, TRUE)); s <- summary(lm(a ~ g, d)) }; print(summary(lm(mpg ~ wt + hp, mtcars)))";
    let output = |name: &str| dir.join(name).to_str().expect("our own path").to_owned();
    let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    vec![
        ("rustc", "rustc", words(&["--edition=2021", "-O", "--emit=obj", "-o", &output("rust.o"), &rust])),
        ("clang++", "clang", words(&["-O2", "-c", "-o", &output("cpp.o"), &cpp])),
        ("Rscript", "R", words(&["--vanilla", "-e", r])),
        (
            "convert",
            "convert",
            words(&["-size", "600x400", "plasma:fractal", "-blur", "0x3", "-resize", "50%", &output("picture.png")]),
        ),
    ]
}

/// Path of the compiler itself, not of a launcher that picks one.
fn rust_compiler() -> Option<PathBuf> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let sysroot = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    Some(sysroot.join("bin/rustc")).filter(|path| path.exists())
}

/// Stacks of all processes whose names begin with `comm`.
fn of_prefix<'a>(profile: &'a Profile, comm: &str) -> impl Iterator<Item = &'a Stack> {
    let names = profile.processes.iter().filter(|process| process.comm.starts_with(comm));
    let pids: Vec<u32> = names.map(|process| process.pid).collect();
    profile.stacks.iter().filter(move |stack| pids.contains(&stack.pid))
}

/// Tests of the long set.
mod long {
    use super::*;

    /// Nearly all stacks of programs with deep stacks are complete at default options, and none is lost.
    #[test]
    fn deep_stacks_of_real_programs_are_whole_by_default() {
        const WHOLE: f64 = 0.995;
        let case = "deep_stacks_of_real_programs_are_whole_by_default";
        let Some(_turn) = turn(case) else { return };
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (name, comm, words) in deep_programs(dir.path()) {
            // A distribution may have no Rust compiler, but these tests were built with one.
            let Some(program) = tool(name).or_else(|| rust_compiler().filter(|_| name == "rustc")) else {
                skipped(case, &format!("the part with {name}: it is not installed"));
                continue;
            };
            let outcome = Recorder::new().interval(128 << 10).command(&program, &words).start().finish();
            let (profile, stats) = outcome.results();
            let stacks = || of_prefix(&profile, comm);
            let all: u64 = stacks().map(|stack| stack.samples).sum();
            let whole: u64 = stacks().filter(|stack| stack.complete).map(|stack| stack.samples).sum();
            let cuts = profile.cuts();
            println!("{case}: {name}: {whole} of {all} whole; {cuts:?}");
            assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{name}: {stats:?}");
            assert!(all >= 50, "too few samples to say anything: {all}");
            assert!(whole as f64 >= WHOLE * all as f64, "{name}: {whole} of {all} stacks are whole: {cuts:?}");
        }
    }
}
