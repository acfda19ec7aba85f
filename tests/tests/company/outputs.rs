//! Destinations of outputs: files are replaced only on request, devices, FIFOs and sockets never, and links are followed only
//! on request.

use std::ffi::CString;
use std::fs::{self, OpenOptions, Permissions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use heapbpf_tests::checks;
use heapbpf_tests::environment::{heapbpf, is_root, skipped, tool, turn};
use heapbpf_tests::output::{self, Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::{Target, until};
use tempfile::TempDir;

/// Id of a user without privileges.
const NOBODY: u32 = 65534;

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no zero in it")
}

/// Creates a node like `/dev/null`, or returns why that is not possible.
fn null_node(path: &Path) -> std::io::Result<()> {
    let name = c_path(path);
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    if unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3)) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    OpenOptions::new().write(true).open(path).map(|_| ())
}

fn fifo(path: &Path) {
    let name = c_path(path);
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0, "{}", std::io::Error::last_os_error());
}

/// Reads a FIFO from its opening to its end.
fn reader(path: &Path) -> JoinHandle<Vec<u8>> {
    let path = path.to_path_buf();
    thread::spawn(move || fs::read(path).expect("a FIFO of our own"))
}

/// Takes one connection and reads it to its end.
fn listener(path: &Path) -> JoinHandle<Vec<u8>> {
    let listener = UnixListener::bind(path).expect("a socket in our own folder");
    thread::spawn(move || {
        let mut read = Vec::new();
        let (mut stream, _) = listener.accept().expect("our own socket");
        stream.read_to_end(&mut read).expect("our own connection");
        read
    })
}

fn is_device(path: impl AsRef<Path>) -> bool {
    fs::symlink_metadata(path).expect("still there").file_type().is_char_device()
}

/// Makes a short recording.
fn record(recorder: impl FnOnce(Recorder) -> Recorder) -> Outcome {
    let mut target = Target::start(&program("pairs"), ["500"]);
    let recording = recorder(Recorder::of(target.pid(), 1).without_outputs()).start();
    target.run();
    recording.stop()
}

fn forced(recorder: Recorder, force: bool) -> Recorder {
    if force { recorder.flag("--force") } else { recorder }
}

#[test]
fn a_device_stays_a_device() {
    let case = "a_device_stays_a_device";
    let Some(_turn) = turn(case) else { return };
    for force in [false, true] {
        let recorder = Recorder::new().without_outputs();
        for name in ["null.json", "null.stats"] {
            if let Err(error) = null_node(&recorder.folder().join(name)) {
                return skipped(case, &format!("no device nodes in temporary folders: {error}"));
            }
        }
        let mut target = Target::start(&program("pairs"), ["500"]);
        let recorder = forced(recorder.pid(target.pid()).interval(1), force);
        let recorder = recorder.option("-o", "null.json").option("--stats", "null.stats").option("--every", "10ms");
        let recording = recorder.option("-o", "profile.json").start();
        target.run();
        until("a snapshot", || recording.folder().join("profile.0001.json").exists());
        let outcome = recording.stop();
        assert!(is_device(outcome.file("null.json")) && is_device(outcome.file("null.stats")), "{force}");
        let mut files = outcome.files();
        files.retain(|name| !name.starts_with("profile."));
        assert_eq!(files, ["null.json", "null.stats"], "a device has no snapshots");
        assert!(outcome.stderr.contains("null.json is a device: it gets no snapshots"), "{}", outcome.stderr);
    }
    // The host's own /dev/null, now that the copy was not replaced.
    for force in [false, true] {
        record(|recorder| {
            let recorder = forced(recorder, force).option("-o", "/dev/null").option("--format", "json");
            recorder.option("--stats", "/dev/null").option("--every", "10ms")
        });
        assert!(is_device("/dev/null"), "{force}");
        assert!(!Path::new("/dev/null.0001").exists());
    }
}

#[test]
fn a_fifo_and_a_socket_are_read_by_others() {
    let Some(_turn) = turn("a_fifo_and_a_socket_are_read_by_others") else { return };
    for (force, profile_to_fifo) in [(false, true), (true, false)] {
        let mut readers = None;
        let outcome = record(|recorder| {
            let (pipe, socket) = (recorder.folder().join("fifo.json"), recorder.folder().join("socket.json"));
            fifo(&pipe);
            readers = Some((reader(&pipe), listener(&socket)));
            let names = if profile_to_fifo { ["fifo.json", "socket.json"] } else { ["socket.json", "fifo.json"] };
            forced(recorder, force).option("-o", names[0]).option("--stats", names[1])
        });
        let (from_fifo, from_socket) = readers.expect("they were started");
        let read = [from_fifo, from_socket].map(|thread| thread.join().expect("it reads"));
        let [profile, stats] = if profile_to_fifo { [&read[0], &read[1]] } else { [&read[1], &read[0]] };
        let profile: Profile = serde_json::from_slice(profile).expect("a whole profile");
        let stats: Stats = serde_json::from_slice(stats).expect("the whole accounting");
        checks::always(&profile, &stats);
        assert_eq!(outcome.files(), ["fifo.json", "socket.json"]);
        let kind = |name: &str| fs::symlink_metadata(outcome.file(name)).expect("still there").file_type();
        assert!(kind("fifo.json").is_fifo() && kind("socket.json").is_socket());
    }
}

/// The recording still ends, and its other outputs are written.
#[test]
fn a_fifo_that_nobody_reads_is_told() {
    let Some(_turn) = turn("a_fifo_that_nobody_reads_is_told") else { return };
    let mut target = Target::start(&program("pairs"), ["500"]);
    let recorder = Recorder::of(target.pid(), 1).without_outputs();
    fifo(&recorder.folder().join("fifo.json"));
    let recording = recorder.option("-o", "fifo.json").option("--stats", "stats.json").start();
    target.run();
    recording.signal(libc::SIGINT);
    let outcome = recording.ends();
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("nobody has read fifo.json (a FIFO)"), "{}", outcome.stderr);
    let _: Stats = output::read(&outcome.file("stats.json"));
    assert_eq!(outcome.files(), ["fifo.json", "stats.json"]);
}

/// If the reader closes the FIFO as soon as heapbpf has opened it, there is an error message and an exit status, no signal.
#[test]
fn a_reader_that_goes_away_is_told() {
    let case = "a_reader_that_goes_away_is_told";
    let Some(folder) = offline(case) else { return };
    let at = |name: &str| folder.path().join(name);
    // Larger than a pipe's capacity, so that it cannot be written before the reader has closed it.
    let lines: String = (0..40_000).map(|n| format!("@ {:#x}\n  t*: 1: 100 [1: 100]\n", 0x1000 + n * 16)).collect();
    fs::write(at("large.heap"), format!("heap_v2/524288\n  t*: 40000: 4000000 [40000: 4000000]\n{lines}"))
        .expect("our own folder");
    fifo(&at("fifo.json"));
    let opened = at("fifo.json");
    let reader = thread::spawn(move || drop(fs::File::open(opened).expect("a FIFO of our own")));
    let (status, said) = report(&mut Command::new(heapbpf()), &folder, "large.heap", "fifo.json", true);
    reader.join().expect("it ends");
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("fifo.json") && said.contains("its reader went away"), "{said}");
}

#[test]
fn a_link_is_refused_before_anything_is_attached() {
    let Some(_turn) = turn("a_link_is_refused_before_anything_is_attached") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    for option in ["-o", "--stats"] {
        for leads_to in ["there.json", "missing.json", "/dev/null"] {
            let recorder = Recorder::of(target.pid(), 4096).without_outputs();
            fs::write(recorder.folder().join("there.json"), "an earlier one").expect("our own folder");
            symlink(leads_to, recorder.folder().join("link.json")).expect("our own folder");
            let refused = recorder.option(option, "link.json").refused();
            refused.check(1, &["link.json is a symbolic link to"]);
            refused.check(1, &["--force"]);
            let file = |name: &str| refused.folder.path().join(name);
            assert_eq!(fs::read_link(file("link.json")).expect("still a link"), Path::new(leads_to));
            assert_eq!(fs::read_to_string(file("there.json")).expect("still there"), "an earlier one");
            assert!(!file("missing.json").exists());
        }
    }
}

#[test]
fn forced_links_lead_to_what_is_written() {
    let case = "forced_links_lead_to_what_is_written";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("pairs"), ["500"]);
    let mut recorder = Recorder::of(target.pid(), 1).without_outputs().flag("--force");
    let folder = recorder.folder().to_path_buf();
    let elsewhere = folder.join("elsewhere");
    fs::create_dir(&elsewhere).expect("our own folder");
    fs::write(elsewhere.join("there.json"), "an earlier one").expect("our own folder");
    fifo(&elsewhere.join("fifo.json"));
    let mut names = vec!["there.json", "missing.json", "fifo.json", "socket.json"];
    match null_node(&elsewhere.join("null.json")) {
        Ok(()) => names.push("null.json"),
        Err(error) => skipped(case, &format!("no device nodes in temporary folders: {error}")),
    }
    let readers = [reader(&elsewhere.join("fifo.json")), listener(&elsewhere.join("socket.json"))];
    for name in &names {
        symlink(Path::new("elsewhere").join(name), folder.join(name)).expect("our own folder");
        recorder = recorder.option("-o", name);
    }
    symlink("elsewhere/stats.json", folder.join("stats.json")).expect("our own folder");
    let recording = recorder.option("--stats", "stats.json").start();
    target.run();
    let outcome = recording.stop();

    let stats: Stats = output::read(&elsewhere.join("stats.json"));
    let from_file: Profile = output::read(&elsewhere.join("there.json"));
    checks::always(&from_file, &stats);
    let _: Profile = output::read(&elsewhere.join("missing.json"));
    for thread in readers {
        let _: Profile = serde_json::from_slice(&thread.join().expect("it reads")).expect("a whole profile");
    }
    for name in names.iter().chain(&["stats.json"]) {
        assert!(outcome.file(name).is_symlink(), "{name}");
    }
    let kind = |name: &str| fs::symlink_metadata(elsewhere.join(name)).expect("still there").file_type();
    assert!(kind("fifo.json").is_fifo() && kind("socket.json").is_socket());
    assert!(!names.contains(&"null.json") || kind("null.json").is_char_device());
    let mut expected: Vec<&str> = names.iter().copied().chain(["stats.json"]).collect();
    expected.sort_unstable();
    let mut left: Vec<_> = fs::read_dir(&elsewhere).expect("our own folder").flatten().collect();
    left.sort_by_key(fs::DirEntry::file_name);
    assert!(left.iter().map(fs::DirEntry::file_name).eq(expected), "{left:?}");
}

#[test]
fn the_accounting_is_replaced_only_if_forced() {
    let Some(_turn) = turn("the_accounting_is_replaced_only_if_forced") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    let recorder = Recorder::of(target.pid(), 4096).without_outputs().option("--stats", "stats.json");
    fs::write(recorder.folder().join("stats.json"), "an earlier one").expect("our own folder");
    let refused = recorder.refused();
    refused.check(1, &["stats.json exists; use --force"]);
    let kept = fs::read_to_string(refused.folder.path().join("stats.json"));
    assert_eq!(kept.expect("still there"), "an earlier one");

    let outcome = record(|recorder| {
        fs::write(recorder.folder().join("stats.json"), "an earlier one").expect("our own folder");
        recorder.option("--stats", "stats.json").option("-o", "profile.json").flag("--force")
    });
    outcome.results();
}

/// One would replace the other at the end of a recording that cannot be repeated.
#[test]
fn two_outputs_of_one_name_are_refused_first() {
    let Some(_turn) = turn("two_outputs_of_one_name_are_refused_first") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    for (force, other) in [(false, "x.json"), (true, "x.json"), (true, "./x.json")] {
        for option in ["-o", "--stats"] {
            let recorder = forced(Recorder::of(target.pid(), 4096).without_outputs(), force);
            let refused = recorder.option("-o", "x.json").option(option, other).refused();
            refused.check(2, &["are the same file"]);
            assert!(!refused.folder.path().join("x.json").exists());
        }
    }
}

/// The accounting on standard output is all there is on it.
#[test]
fn the_accounting_has_standard_output_for_itself() {
    let Some(_turn) = turn("the_accounting_has_standard_output_for_itself") else { return };
    let mut target = Target::start(&program("pairs"), ["500"]);
    let recorder = Recorder::of(target.pid(), 4096).without_outputs();
    let recording = recorder.option("-o", "x.json").option("--stats", "-").start();
    target.run();
    let outcome = recording.stop();
    serde_json::from_str::<Stats>(&outcome.stdout).expect("the accounting alone");
    assert!(outcome.stderr.contains("By bytes"), "the closing table: {}", outcome.stderr);
}

/// A folder that every user can reach, with heapbpf and a small profile in it.
fn offline(case: &str) -> Option<TempDir> {
    if !is_root() {
        skipped(case, "needs root to become other users");
        return None;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    // Copied by another process, so that no child of this one has the file open for writing when it is executed.
    let copied = Command::new("cp").arg(heapbpf()).arg(at("heapbpf")).status().expect("cp runs");
    assert!(copied.success(), "no {}: run `cargo xtask build`, or set HEAPBPF_BIN", heapbpf().display());
    fs::write(at("known.heap"), "heap_v2/524288\n  t*: 1: 100 [0: 0]\n").expect("our own folder");
    for (path, mode) in [(folder.path().to_path_buf(), 0o777), (at("heapbpf"), 0o755), (at("known.heap"), 0o644)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("our own");
    }
    Some(folder)
}

/// Runs `heapbpf report PROFILE -o OUTPUT` through a command that executes heapbpf; returns exit status and standard error.
fn report(through: &mut Command, folder: &TempDir, profile: &str, output: &str, force: bool) -> (Option<i32>, String) {
    through.current_dir(folder.path()).args(["report", profile, "-o", output]).args(force.then_some("--force"));
    let done = through.output().expect("it runs");
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}

fn as_nobody(setpriv: &Path, folder: &TempDir) -> Command {
    let mut command = Command::new(setpriv);
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".into()]);
    command.arg(folder.path().join("heapbpf"));
    command
}

fn link_of(owner: u32, target: &str, link: &PathBuf) {
    let _ = fs::remove_file(link);
    symlink(target, link).expect("our own folder");
    lchown(link, Some(owner), Some(owner)).expect("we are root");
}

#[test]
fn whose_link_it_is_decides() {
    let case = "whose_link_it_is_decides";
    let Some(setpriv) = tool("setpriv") else { return skipped(case, "no setpriv (Debian: util-linux)") };
    let Some(folder) = offline(case) else { return };
    let link = folder.path().join("link.json");
    let target = folder.path().join("target.json");
    // As sudo sets them.
    let sudo_variables = |mut command: Command, sudo: Option<u32>| {
        for name in ["SUDO_UID", "SUDO_GID"] {
            command.env_remove(name).envs(sudo.map(|id| (name, id.to_string())));
        }
        command
    };
    let root = |sudo: Option<u32>| sudo_variables(Command::new(heapbpf()), sudo);
    let nobody = |sudo: Option<u32>| sudo_variables(as_nobody(&setpriv, &folder), sudo);
    let cases: [(Command, u32, bool); 7] = [
        (nobody(None), NOBODY, true),
        (nobody(None), 0, false),
        // SUDO_UID is only believed if heapbpf runs as root.
        (nobody(Some(0)), 0, false),
        (root(None), 0, true),
        (root(None), NOBODY, false),
        (root(Some(NOBODY)), NOBODY, true),
        (root(Some(NOBODY)), NOBODY - 1, false),
    ];
    for (index, (mut command, owner, follows)) in cases.into_iter().enumerate() {
        link_of(owner, "target.json", &link);
        let (status, said) = report(&mut command, &folder, "known.heap", "link.json", true);
        assert_eq!(status, Some(if follows { 0 } else { 1 }), "{index}: {said}");
        assert_eq!(target.exists(), follows, "{index}: {said}");
        assert!(follows || said.contains("symbolic link of another user") && said.contains("target.json"), "{said}");
        assert!(link.is_symlink(), "{index}");
        let _ = fs::remove_file(&target);
    }
    for mut command in [nobody(None), root(Some(NOBODY))] {
        link_of(NOBODY, "target.json", &link);
        let (status, said) = report(&mut command, &folder, "known.heap", "link.json", false);
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains("is a symbolic link to target.json; use --force"), "{said}");
        assert!(!target.exists());
    }
}

#[test]
fn other_users_write_to_what_they_may() {
    let case = "other_users_write_to_what_they_may";
    let Some(setpriv) = tool("setpriv") else { return skipped(case, "no setpriv (Debian: util-linux)") };
    let Some(folder) = offline(case) else { return };
    let at = |name: &str| folder.path().join(name);
    let run = |output: &str, force| report(&mut as_nobody(&setpriv, &folder), &folder, "known.heap", output, force);
    fifo(&at("fifo.json"));
    let (status, said) = run("fifo.json", true);
    assert_eq!(status, Some(1), "it is root's alone: {said}");
    assert!(said.contains("fifo.json") && said.contains("Permission denied"), "{said}");

    lchown(at("fifo.json"), Some(NOBODY), Some(NOBODY)).expect("we are root");
    let (pipe, socket) = (reader(&at("fifo.json")), listener(&at("socket.json")));
    lchown(at("socket.json"), Some(NOBODY), Some(NOBODY)).expect("we are root");
    for name in ["fifo.json", "socket.json"] {
        let (status, said) = run(name, false);
        assert_eq!(status, Some(0), "{name}: {said}");
    }
    for thread in [pipe, socket] {
        let _: Profile = serde_json::from_slice(&thread.join().expect("it reads")).expect("a whole profile");
    }
    link_of(NOBODY, "/dev/null", &at("null.json"));
    for (force, expected) in [(false, 1), (true, 0)] {
        let (status, said) = run("null.json", force);
        assert_eq!(status, Some(expected), "{said}");
    }
    assert!(is_device("/dev/null") && at("null.json").is_symlink());
}
