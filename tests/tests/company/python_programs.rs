//! Python programs that fork their workers or switch stacks themselves: every Python frame that is shown is true.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use heapbpf_tests::environment::{programs_dir, skipped, turn};
use heapbpf_tests::guardian;
use heapbpf_tests::output::Stack;
use heapbpf_tests::python_stacks::{Named, has, is_python, truth_of};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Lines, Target, until};
use serde::Deserialize;

/// Path of a Python that has this module, if there is one.
fn python_with(module: &str) -> Option<PathBuf> {
    let python = std::env::var_os("HEAPBPF_TEST_PYTHON").map_or_else(|| "python3".into(), PathBuf::from);
    let found = Command::new(&python).args(["-c", &format!("import {module}")]).output();
    found.is_ok_and(|output| output.status.success()).then_some(python)
}

/// What `python_gunicorn.py` answers.
#[derive(Debug, Deserialize)]
struct Answered {
    pid: u32,
    frames: Vec<Named>,
}

/// A gunicorn server with one worker, serving `python_gunicorn.py`.
struct Gunicorn {
    master: Child,
    said: Lines,
    address: SocketAddr,
}

impl Gunicorn {
    fn start(python: &PathBuf) -> Self {
        let mut command = Command::new(python);
        command.args(["-m", "gunicorn", "--workers", "1", "--bind", "127.0.0.1:0", "--chdir"]).arg(programs_dir());
        command.arg("python_gunicorn:application").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        let mut master = command.spawn().expect("python runs");
        let said = Lines::of(master.stderr.take().expect("piped"));
        let address = Self::line_with(&said, "Listening at: http://");
        let address = address.split(' ').next().and_then(|address| address.parse().ok()).expect("an address");
        Self { master, said, address }
    }

    /// What follows `words` in the next line that contains them.
    fn line_with(said: &Lines, words: &str) -> String {
        loop {
            let line = said.next().expect("gunicorn runs");
            if let Some((_, rest)) = line.split_once(words) {
                return rest.to_owned();
            }
        }
    }

    /// Process id of the next worker that has started.
    fn next_worker(&self) -> u32 {
        Self::line_with(&self.said, "Booting worker with pid: ").trim().parse().expect("a process id")
    }

    fn signal(&self, signal: libc::c_int) {
        guardian::signal(signal, [self.master.id()]);
    }
}

impl Drop for Gunicorn {
    fn drop(&mut self) {
        // The master ends its workers.
        self.signal(libc::SIGTERM);
        let _ = self.master.wait();
    }
}

/// Requests an allocation of this many bytes.
fn ask(address: SocketAddr, bytes: u64) -> Answered {
    serde_json::from_slice(&get(address, &format!("/{bytes}")).body).expect("an answer of the application")
}

/// Workers that were forked before or during the recording show the stacks that the application itself reports.
#[test]
fn workers_of_gunicorn_have_python_stacks() {
    let case = "workers_of_gunicorn_have_python_stacks";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = python_with("gunicorn") else { return skipped(case, "there is no Python with gunicorn") };
    let gunicorn = Gunicorn::start(&python);
    let (address, first) = (gunicorn.address, gunicorn.next_worker());
    let recording = Recorder::of(gunicorn.master.id(), 1).pid(first).start();
    // Start one more worker.
    gunicorn.signal(libc::SIGTTIN);
    let second = gunicorn.next_worker();
    let (mut answers, mut bytes) = (Vec::new(), 300_007);
    until("both workers have answered", || {
        // Send two requests at once, for two workers.
        let both: Vec<(u64, Answered)> = std::thread::scope(|scope| {
            let asked = [bytes, bytes + 1009].map(|bytes| (bytes, scope.spawn(move || ask(address, bytes))));
            asked.into_iter().map(|(bytes, asked)| (bytes, asked.join().expect("it answers"))).collect()
        });
        bytes += 2 * 1009;
        answers.extend(both);
        [first, second].iter().all(|pid| answers.iter().filter(|(_, answer)| answer.pid == *pid).count() >= 2)
    });
    let (profile, _) = recording.stop().results();
    let mut wanted: BTreeMap<(u32, &[Named]), u64> = BTreeMap::new();
    for (bytes, answer) in &answers {
        *wanted.entry((answer.pid, &answer.frames)).or_default() += bytes;
        assert!(answer.frames.len() > 5 && answer.frames[0].0 == "Page.render", "{answer:?}");
    }
    for ((pid, frames), bytes) in &wanted {
        let of_process = profile.stacks.iter().filter(|stack| stack.pid == *pid && stack.sampled_bytes == *bytes);
        let found: Vec<&Stack> = of_process.collect();
        let said = format!("{bytes} bytes of {pid} at {frames:?}\n{found:?}\n{:?}", profile.notes);
        assert!(found.iter().any(|stack| has(stack, frames)), "{said}");
    }
    let pids: BTreeSet<u32> = wanted.keys().map(|(pid, _)| *pid).collect();
    println!("{} answers of {} workers have the stacks that the application reports", answers.len(), pids.len());
    assert_eq!(pids, BTreeSet::from([first, second]));
}

/// A greenlet has its own part of the native stack, which is copied in and out. Where it is not certain which Python
/// frames belong to which native ones, native frames stay and a note says so.
#[test]
fn greenlets_have_true_python_frames_or_none() {
    let case = "greenlets_have_true_python_frames_or_none";
    let Some(_turn) = turn(case) else { return };
    let Some(python) = python_with("greenlet") else { return skipped(case, "there is no Python with greenlet") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let truth = dir.path().join("truth");
    let script = programs_dir().join("python_greenlets.py");
    let mut target = Target::start_command(Command::new(&python).arg(script).arg(&truth));
    let recording = Recorder::of(target.pid(), 1).start();
    target.go();
    assert!(target.end().success(), "the program failed");
    let (profile, _) = recording.finish().results();
    let truth = truth_of(&truth);
    // The arrays are large, and other allocations in the same functions are not.
    let is_array = |stack: &Stack| stack.sampled_bytes > 200_000;
    let noted_at = |stack: &Stack| truth.iter().find(|noted| is_array(stack) && stack.has(&noted.frames[0].0));
    let noted_of = |bytes: u64| truth.iter().find(|noted| noted.bytes == bytes);
    let (mut shown, mut native_bytes, mut wrong) = (BTreeSet::new(), 0, Vec::new());
    for stack in &profile.stacks {
        if !stack.frames.iter().any(is_python) {
            native_bytes += stack.sampled_bytes;
            continue;
        }
        let Some(noted) = noted_at(stack).or_else(|| noted_of(stack.sampled_bytes)) else { continue };
        if noted.bytes == stack.sampled_bytes && has(stack, &noted.frames) {
            shown.insert(noted.bytes);
        } else {
            wrong.push(format!("{noted:?}\n  instead: {stack:?}"));
        }
    }
    let shown_bytes: u64 = shown.iter().sum();
    let (shown, native) = (shown.len(), truth.len() - shown.len());
    println!("{shown} stacks show their Python frames, {native} native ones: {:?}", profile.notes);
    assert!(wrong.is_empty(), "{}\n{:?}", wrong.join("\n"), profile.notes);
    // Stacks without Python frames show native ones.
    let not_shown: u64 = truth.iter().map(|noted| noted.bytes).sum::<u64>() - shown_bytes;
    assert!(native_bytes >= not_shown, "{native_bytes} {not_shown}");
    // At least the allocations made outside greenlets.
    assert!(shown >= 4 && truth.len() > 50, "{shown} of {}", truth.len());
    let is_reported = profile.notes.iter().any(|note| note.contains("did not agree"));
    assert_eq!(native > 0, is_reported, "{:?}", profile.notes);
}
