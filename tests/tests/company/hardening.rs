//! What a recording drops once its probes are in place, what its command does not inherit, and that no target memory
//! leaks into a core dump, a file, a spool or a log.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use heapbpf_tests::environment::{libc_file, skipped, tool_or_install, turn};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::kernel::linux;
use heapbpf_tests::pprof::unpacked;
use heapbpf_tests::program::{copy_file, copy_of, program};
use heapbpf_tests::receivers::Reserved;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};
use object::{Object as _, ObjectSegment as _};
use procfs::process::{Process, Status};

/// User and group id of a user without privileges.
const NOBODY: u32 = 65534;

/// BPF, PERFMON, SYS_PTRACE, DAC_READ_SEARCH, CHECKPOINT_RESTORE: to hook new processes. SYS_NICE: to be in time.
const NEEDED: u64 = 1 << 39 | 1 << 38 | 1 << 19 | 1 << 2 | 1 << 40 | 1 << 23;
/// DAC_OVERRIDE, CHOWN, FOWNER: to write files in other users' directories.
const WRITING: u64 = 1 << 1 | 1 << 0 | 1 << 3;
/// DAC_OVERRIDE: to write into other users' processes.
const OVERRIDE: u64 = 1 << 1;
/// SYS_ADMIN: needed before Linux 6.6.
const ADMIN: u64 = 1 << 21;

/// Checks that every thread has a system call filter, and only the capabilities that it needs. The server's thread
/// restricts itself as soon as it gets a processor, which may be after heapbpf has said where it listens.
fn restricted(pid: u32, needed: u64) {
    let threads = || {
        let threads = Process::new(pid.cast_signed()).and_then(|process| process.tasks()).expect("it runs");
        threads.flatten().filter_map(|thread| thread.status().ok()).collect::<Vec<_>>()
    };
    let is_server = |thread: &Status| thread.name == "server";
    until("the server has no capabilities", || threads().iter().any(|thread| is_server(thread) && thread.capprm == 0));
    let threads = threads();
    assert!(threads.len() >= 3, "{threads:?}");
    let sudo = if std::env::var_os("SUDO_UID").is_some() { WRITING } else { 0 };
    for thread in &threads {
        let name = &thread.name;
        assert_eq!((thread.nonewprivs, thread.seccomp), (Some(1), Some(2)), "{name}");
        let allowed = if ["server", "history"].contains(&name.as_str()) { 0 } else { needed | sudo };
        let extra = (thread.capeff | thread.capprm | thread.capinh) & !allowed;
        assert_eq!(extra, 0, "{name} keeps {extra:x}");
    }
    assert!(threads.iter().any(is_server), "{threads:?}");
}

#[test]
fn a_service_gives_up_what_it_does_not_need_and_goes_on_attaching() {
    let Some(_turn) = turn("a_service_gives_up_what_it_does_not_need_and_goes_on_attaching") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [spool, totals] = ["spool", "spool/history/totals"].map(|name| dir.path().join(name));
    let recorder = Recorder::new().service().without_outputs().option("--comm", "secretive").interval(1);
    let recorder = recorder.option("--hook", "probe").option("--spool", &spool.display().to_string());
    let (mut recording, address) = recorder.serve();
    assert_eq!(get(address, "/metrics").status, 200);
    let tasks = format!("/proc/{}/task", recording.pid());
    until("the thread that keeps totals has no capabilities", || {
        let tasks = fs::read_dir(&tasks).expect("it runs").flatten();
        let mut statuses = tasks.filter_map(|task| fs::read_to_string(task.path().join("status")).ok());
        statuses.any(|status| status.starts_with("Name:\thistory\n") && status.contains("CapPrm:\t0000000000000000\n"))
    });
    restricted(recording.pid(), NEEDED | ADMIN);
    // A program that starts only now is hooked, with a library that no process has mapped yet.
    fs::copy(libc_file().expect("we use one"), dir.path().join("libc.so.6")).expect("there is space");
    let mut command = Command::new(program("secretive"));
    let mut target = Target::start_command(command.env("MARKER", "x").env("LD_LIBRARY_PATH", dir.path()));
    recording.await_links_of(&dir.path().join("libc.so.6"));
    target.run();
    until("its calls are counted", || {
        get(address, "/metrics").metric_of("heapbpf_process_allocs_total", target.pid()).is_some_and(|n| n >= 2000.0)
    });
    recording.stop();
    assert!(fs::metadata(&totals).is_ok_and(|about| about.len() > 0), "they are written without capabilities");
}

/// A helper process stops the processes that are hooked inline and suspends their seccomp filters, so the service
/// itself does not need CAP_SYS_ADMIN.
#[test]
fn a_service_that_hooks_inline_keeps_its_filter() {
    let Some(_turn) = turn("a_service_that_hooks_inline_keeps_its_filter") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = copy_of(&program("confined"), dir.path(), "unsuspended");
    let (recording, address) = Recorder::new().service().without_outputs().option("--comm", "unsuspended").serve();
    // Before Linux 6.6, links need CAP_SYS_ADMIN.
    let needed = NEEDED | OVERRIDE | if linux() < (6, 6) { ADMIN } else { 0 };
    restricted(recording.pid(), needed);
    let mut target = Target::start(&path, ["errno", "1000000000"]);
    target.go();
    until("it is hooked", || is_hooked(target.pid()));
    restricted(recording.pid(), needed);
    until("its calls are counted", || {
        get(address, "/metrics").metric_of("heapbpf_process_allocs_total", target.pid()).is_some_and(|n| n > 0.0)
    });
    recording.stop();
    assert!(!is_hooked(target.pid()));
    target.assert_runs("the end of the recording");
}

#[test]
fn a_command_inherits_no_restriction() {
    let Some(_turn) = turn("a_command_inherits_no_restriction") else { return };
    let script = "grep -E '^(NoNewPrivs|Seccomp|CapEff|CapPrm|CapBnd|CapInh):' /proc/self/status; \
        cat /proc/self/coredump_filter; [ -r /proc/self/mem ] && [ -O /proc/self/environ ] && echo its own";
    let plain = Command::new("sh").args(["-c", script]).output().expect("sh runs");
    let recorder = Recorder::new().interval(4096).without_outputs().option("--listen", "127.0.0.1:0");
    // Under sudo the command would run as another user than this test.
    let recorder = recorder.through(&["env", "-u", "SUDO_UID", "-u", "SUDO_GID"].map(OsStr::new));
    let outcome = recorder.command(Path::new("/bin/sh"), ["-c", script]).start().finish();
    assert_eq!(outcome.stdout, String::from_utf8_lossy(&plain.stdout).trim_end());
    assert!(outcome.stdout.contains("NoNewPrivs:\t0") && outcome.stdout.ends_with("its own"), "{}", outcome.stdout);
}

/// How often the bytes occur in a file, after decompression if it is compressed.
fn count(path: &Path, marker: &[u8]) -> usize {
    let bytes = fs::read(path).unwrap_or_default();
    let is_compressed = bytes.starts_with(&[0x1f, 0x8b]);
    occurrences(&if is_compressed { unpacked(&bytes) } else { bytes }, marker)
}

fn occurrences(bytes: &[u8], marker: &[u8]) -> usize {
    bytes.windows(marker.len()).filter(|window| *window == marker).count()
}

/// The memory in a core dump, without the registers of each thread, which may hold some of what the thread copied last.
fn memory_of(core: &Path) -> Vec<u8> {
    let core = fs::read(core).expect("readable");
    let core = object::File::parse(&*core).expect("an ELF file");
    core.segments().flat_map(|segment| segment.data().expect("it is whole")).copied().collect()
}

fn files_in(dir: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(dir).expect("readable").flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files_in(&path) } else { vec![path] }).collect()
}

#[test]
fn no_memory_of_a_target_gets_out() {
    let Some(_turn) = turn("no_memory_of_a_target_gets_out") else { return };
    let now = std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos();
    let marker = format!("marker-{}-{now}", std::process::id());
    let mut command = Command::new(program("secretive"));
    // It pauses, so that its memory stays small: all of it is searched.
    let mut target = Target::start_command(command.args(["1000000000", "1000"]).env("MARKER", &marker));
    let recorder = Recorder::of(target.pid(), 4096).flag("-v").option("--every", "1s");
    let dir = recorder.dir().to_path_buf();
    let nowhere = Reserved::new();
    let recorder = recorder.option("--push", &format!("otlp+http://{}", nowhere.address()));
    let recorder = recorder.option("--push-every", "1s").option("--spool", &dir.join("spool").display().to_string());
    let (recording, address) = recorder.serve();
    // The target continues while memory is dumped, so that there are copies of its stack.
    target.go();
    until("a batch waits", || {
        files_in(&dir.join("spool")).iter().any(|file| file.extension().is_some_and(|it| it == "batch"))
    });
    until("samples", || get(address, "/metrics").metric("heapbpf_samples_total").is_some_and(|n| n > 1000.0));
    let scraped = get(address, "/debug/pprof/heap").body;
    fs::write(dir.join("scraped.pb.gz"), scraped).expect("there is space");
    fs::write(dir.join("metrics.txt"), get(address, "/metrics").body).expect("there is space");
    let cores = tempfile::tempdir().expect("a temporary directory");
    if tool_or_install("gcore", "gdb").is_some() {
        for (name, pid) in [("target", target.pid()), ("daemon", recording.pid())] {
            let core = cores.path().join(name);
            let mut gcore = Command::new("gcore");
            let output =
                gcore.arg("-o").arg(&core).arg(pid.to_string()).stdin(Stdio::null()).output().expect("gcore runs");
            let written = cores.path().join(format!("{name}.{pid}"));
            assert!(written.exists(), "{}", String::from_utf8_lossy(&output.stderr));
            let found = occurrences(&memory_of(&written), marker.as_bytes());
            assert_eq!(found > 0, name == "target", "{found} times in a core of the {name}");
        }
    } else {
        skipped("no_memory_of_a_target_gets_out", "there is no gdb, so core dumps were not looked at");
    }
    let filter = fs::read_to_string(format!("/proc/{}/coredump_filter", recording.pid())).expect("it runs");
    assert_eq!(u32::from_str_radix(filter.trim(), 16), Ok(0));
    let outcome = recording.stop();
    assert!(outcome.dir() == dir, "as it began");
    let (profile, stats) = outcome.results();
    assert!(profile.totals.alloc_objects.value() > 1000.0, "{stats:?}");
    let files = files_in(&dir);
    assert!(files.len() >= 8, "{files:?}");
    for file in &files {
        assert_eq!(count(file, marker.as_bytes()), 0, "{}", file.display());
    }
    assert!(!outcome.stdout.contains(&marker) && !outcome.stderr.contains(&marker));
}

#[test]
fn files_under_sudo_belong_to_the_user_alone() {
    let Some(_turn) = turn("files_under_sudo_belong_to_the_user_alone") else { return };
    let mut target = Target::start(&program("mix"), ["500"]);
    let nobody = NOBODY.to_string();
    let recorder = Recorder::of(target.pid(), 1);
    let recorder = recorder.variable("SUDO_UID", OsStr::new(&nobody)).variable("SUDO_GID", OsStr::new(&nobody));
    let recorder = recorder.option("-o", "link.json").flag("--force");
    // The user's own directory, with a symlink in it that somebody else planted.
    let dir = recorder.dir().to_path_buf();
    std::os::unix::fs::chown(&dir, Some(NOBODY), Some(NOBODY)).expect("we are root");
    let victim = dir.join("victim");
    fs::write(&victim, "kept").expect("there is space");
    let victim_mode = fs::Permissions::from_mode(0o644);
    fs::set_permissions(&victim, victim_mode).expect("our own file");
    let recording = recorder.start();
    symlink("victim", dir.join("link.json")).expect("there is space");
    std::os::unix::fs::lchown(dir.join("link.json"), Some(1), Some(1)).expect("we are root");
    target.run();
    recording.signal(libc::SIGINT);
    let outcome = recording.ends();
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("link.json"), "{}", outcome.stderr);
    assert_eq!(fs::read_to_string(&victim).expect("still there"), "kept");
    for name in ["profile.json", "profile.pb.gz", "profile.folded", "stats.json"] {
        let metadata = fs::metadata(outcome.file(name)).expect("written");
        let all = (metadata.uid(), metadata.gid(), metadata.mode() & 0o777);
        assert_eq!(all, (NOBODY, NOBODY, 0o600), "{name}");
    }
}

/// Whether a character controls a terminal, begins a line, or reverses text.
fn is_hostile(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A program's name appears in its comm, its path, and the names of its files.
#[test]
fn hostile_names_reach_no_terminal_and_break_no_format() {
    let Some(_turn) = turn("hostile_names_reach_no_terminal_and_break_no_format") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let names: [&[u8]; 2] = [b"\x1b]0;t\x07\n\xe2\x80\xae<b>\"\\", b"\xff\xfe{}\"'\r\xc2\x9b&<i>"];
    for name in names {
        let path = dir.path().join(<OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(name));
        copy_file(program("mix"), &path);
        let mut target = Target::start(&path, ["500"]);
        let recorder =
            Recorder::of(target.pid(), 1).option("-o", "p.html").option("-o", "p.svg").option("-o", "p.heap");
        let (recording, address) = recorder.option("-o", "p.speedscope.json").serve();
        let truth = target.run();
        until("its calls are counted", || {
            let counted = get(address, "/metrics").metric("heapbpf_allocs_total");
            counted.is_some_and(|calls| calls >= truth.allocs() as f64)
        });
        let metrics = get(address, "/metrics").text();
        for line in metrics.lines().filter(|line| !line.starts_with('#')) {
            let value = line.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok());
            assert!(value.is_some() && line.starts_with("heapbpf_"), "{line}");
        }
        let outcome = recording.stop();
        outcome.results();
        for line in outcome.stderr.lines() {
            assert!(line.starts_with("heapbpf: "), "a name brought a line along: {line}");
        }
        let mut texts = vec![metrics, outcome.stdout.clone(), outcome.stderr.clone()];
        for file in ["profile.json", "profile.folded", "p.html", "p.svg", "p.heap", "p.speedscope.json"] {
            texts.push(fs::read_to_string(outcome.file(file)).expect("UTF-8"));
        }
        for text in &texts {
            assert!(!text.contains(is_hostile), "{text}");
        }
        for file in ["p.html", "p.svg"] {
            let text = fs::read_to_string(outcome.file(file)).expect("UTF-8");
            assert!(!text.contains("<b>\"") && !text.contains("&<i>"), "{file}");
        }
        for line in fs::read_to_string(outcome.file("profile.folded")).expect("UTF-8").lines() {
            let weight = line.rsplit_once(' ').and_then(|(_, weight)| weight.parse::<f64>().ok());
            assert!(weight.is_some(), "{line}");
        }
        for file in ["profile.json", "p.speedscope.json"] {
            let text = fs::read_to_string(outcome.file(file)).expect("UTF-8");
            assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{file}");
        }
    }
}
