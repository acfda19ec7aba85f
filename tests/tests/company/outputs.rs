//! Destinations of outputs: files are replaced only on request, devices, FIFOs and sockets never. Links are followed
//! only on request.

use std::fs::{self};
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::{self, JoinHandle};

use heapbpf_tests::checks;
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stats};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::target::Target;
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Opens a FIFO and reads it to its end, on another thread.
fn reader(path: &Path) -> JoinHandle<Vec<u8>> {
    let path = path.to_path_buf();
    thread::spawn(move || fs::read(path).expect("a FIFO of our own"))
}

/// Accepts one connection and reads it to its end, on another thread.
fn listener(path: &Path) -> JoinHandle<Vec<u8>> {
    let listener = UnixListener::bind(path).expect("a socket in our own directory");
    thread::spawn(move || {
        let mut read = Vec::new();
        let (mut stream, _) = listener.accept().expect("our own socket");
        stream.read_to_end(&mut read).expect("our own connection");
        read
    })
}

/// Makes a short recording.
fn record(recorder: impl FnOnce(Recorder) -> Recorder) -> Outcome {
    let mut target = Target::start(&program("pairs"), ["500"]);
    let recording = recorder(Recorder::of(target.pid(), 1).without_outputs()).start();
    target.run();
    recording.stop()
}

#[test]
fn a_fifo_and_a_socket_are_read_by_others() {
    let Some(_turn) = turn("a_fifo_and_a_socket_are_read_by_others") else { return };
    let mut readers = None;
    let outcome = record(|recorder| {
        let (pipe, socket) = (recorder.dir().join("fifo.json"), recorder.dir().join("socket.json"));
        mknodat(CWD, &pipe, FileType::Fifo, Mode::from_raw_mode(0o600), 0).expect("our own directory");
        readers = Some((reader(&pipe), listener(&socket)));
        recorder.option("-o", "fifo.json").option("--stats", "socket.json")
    });
    let (from_fifo, from_socket) = readers.expect("they were started");
    let [profile, stats] = [from_fifo, from_socket].map(|thread| thread.join().expect("it reads"));
    let profile: Profile = serde_json::from_slice(&profile).expect("a whole profile");
    let stats: Stats = serde_json::from_slice(&stats).expect("the whole accounting");
    checks::always(&profile, &stats);
    assert_eq!(outcome.files(), ["fifo.json", "socket.json"]);
    let kind = |name: &str| fs::symlink_metadata(outcome.file(name)).expect("still there").file_type();
    assert!(kind("fifo.json").is_fifo() && kind("socket.json").is_socket());
}

#[test]
fn the_accounting_is_replaced_only_if_forced() {
    let Some(_turn) = turn("the_accounting_is_replaced_only_if_forced") else { return };
    let target = Target::start(&program("pairs"), ["10"]);
    let recorder = Recorder::of(target.pid(), 4096).without_outputs().option("--stats", "stats.json");
    fs::write(recorder.dir().join("stats.json"), "an earlier one").expect("our own directory");
    let refused = recorder.refused();
    refused.check(1, &["stats.json exists; use --force"]);
    let kept = fs::read_to_string(refused.dir.path().join("stats.json"));
    assert_eq!(kept.expect("still there"), "an earlier one");

    let outcome = record(|recorder| {
        fs::write(recorder.dir().join("stats.json"), "an earlier one").expect("our own directory");
        recorder.option("--stats", "stats.json").option("-o", "profile.json").flag("--force")
    });
    outcome.results();
}
