//! Process events of real processes. Skipped without the privilege to open perf events on every CPU.

use std::os::fd::{AsFd as _, AsRawFd};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use heapbpf_remote::{NotHeld, Raised, Waiting};
use heapbpf_testing::skipped;
use sampler_user::clock::monotonic_ns;
use sampler_user::host::events::HostEvents;
use sampler_user::host::exec_watch::ExecWatch;
use sampler_user::host::perf_ring::RingOptions;
use sampler_user::host::record::HostEvent;

fn open() -> Option<HostEvents> {
    match HostEvents::open(RingOptions::default()) {
        Ok(events) => Some(events),
        Err(error) => {
            skipped(error);
            None
        }
    }
}

/// Waits for something to drain, at most 10 s.
fn wait(events: &HostEvents) {
    let mut poll = libc::pollfd { fd: events.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one initialised entry, as the count says, and outlives the call.
    unsafe { libc::poll(&raw mut poll, 1, 10_000) };
}

/// All events of process `pid` up to its exit.
fn history_of(events: &mut HostEvents, pid: u32) -> Vec<HostEvent> {
    let (mut all, mut history) = (Vec::new(), Vec::new());
    let deadline = monotonic_ns() + 20_000_000_000;
    while monotonic_ns() < deadline {
        all.clear();
        events.drain(&mut all);
        for event in all.drain(..) {
            let of = match &event {
                HostEvent::Fork { pid, .. } | HostEvent::Comm { pid, .. } | HostEvent::Exit { pid, .. } => *pid,
                HostEvent::Map(map) => map.pid,
                HostEvent::Lost { .. } => panic!("records were lost"),
            };
            if of == pid {
                history.push(event);
            }
        }
        if matches!(history.last(), Some(HostEvent::Exit { tid, .. }) if *tid == pid) {
            return history;
        }
        wait(events);
    }
    panic!("the end of process {pid} was not reported; seen: {history:?}")
}

#[test]
fn a_short_lived_process_in_order() {
    let Some(mut events) = open() else { return };
    let before_ns = monotonic_ns();
    let mut child = Command::new("/bin/true").spawn().expect("/bin/true starts");
    let pid = child.id();
    child.wait().expect("waits");
    let history = history_of(&mut events, pid);
    let after_ns = monotonic_ns();

    assert!(
        matches!(history[0], HostEvent::Fork { parent_pid, tid, .. } if parent_pid == std::process::id() && tid == pid)
    );
    let exec = history
        .iter()
        .position(|event| matches!(event, HostEvent::Comm { exec: true, comm, .. } if comm.starts_with(b"true\0")));
    let exec = exec.expect("the exec is reported");
    let maps: Vec<_> = history[exec..]
        .iter()
        .filter_map(|event| if let HostEvent::Map(map) = event { Some(map) } else { None })
        .collect();
    assert!(maps[0].path.ends_with(b"/true"), "the program comes first: {maps:?}");
    assert!(maps.iter().any(|map| map.path.windows(7).any(|part| part == b"/libc.s")), "{maps:?}");
    assert!(maps.iter().any(|map| &*map.path == b"[vdso]"), "{maps:?}");
    assert!(history.is_sorted_by_key(HostEvent::time_ns));
    assert!(history.iter().all(|event| (before_ns..=after_ns).contains(&event.time_ns())));
}

#[test]
fn a_library_opened_late_is_reported() {
    let Some(mut events) = open() else { return };
    let child = Command::new("python3").args(["-c", "import ssl"]).spawn();
    let Ok(mut child) = child else {
        skipped("no python3");
        return;
    };
    let pid = child.id();
    child.wait().expect("waits");
    let history = history_of(&mut events, pid);
    let ssl = history
        .iter()
        .any(|event| matches!(event, HostEvent::Map(map) if map.path.windows(7).any(|part| part == b"/_ssl.c")));
    assert!(ssl, "the module that was opened at run time: {history:?}");
}

/// Processes that a shell starts one after the other: how many were held at their entry point, were late, or were gone.
fn held_of(watch: &ExecWatch, shell: &mut Child) -> [u32; 3] {
    let [mut held, mut late, mut gone] = [0; 3];
    let has_ended = |pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.is_empty() || stat.contains(") Z ")
    };
    // One that is late may wait for another one that is held.
    let mut arriving: Vec<(u32, Waiting)> = Vec::new();
    loop {
        let has_shell_ended = shell.try_wait().expect("it is our child").is_some();
        let pause = if arriving.is_empty() { 100 } else { 1 };
        let mut poll = libc::pollfd { fd: watch.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one initialised entry, as the count says, and outlives the call.
        unsafe { libc::poll(&raw mut poll, 1, pause) };
        while let Some(executed) = watch.take() {
            match executed.held {
                Ok(waiting) => arriving.push((executed.pid, waiting)),
                Err(NotHeld::Gone) => gone += 1,
                Err(why) => panic!("{why}"),
            }
        }
        arriving.retain(|(pid, waiting)| {
            let (is_there, is_over) = (waiting.is_there(), has_ended(*pid));
            held += u32::from(is_there);
            late += u32::from(is_over && !is_there);
            !is_there && !is_over
        });
        if has_shell_ended && arriving.is_empty() {
            return [held, late, gone];
        }
    }
}

#[test]
fn children_of_a_shell_are_held_at_their_entry_point() {
    if open().is_none() {
        return;
    }
    let shell_pid = Arc::new(AtomicU32::new(0));
    let is_target = {
        let shell_pid = Arc::clone(&shell_pid);
        move |pid: u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit(')').next().and_then(|fields| fields.split_whitespace().nth(1)?.parse().ok());
            parent == Some(shell_pid.load(Ordering::Relaxed))
        }
    };
    let watch = ExecWatch::start(is_target, Duration::from_secs(600)).expect("execs are heard of");
    let script = "read _; i=0; while [ $i -lt 100 ]; do ls / | cksum; i=$((i + 1)); done";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut shell = shell.spawn().expect("it starts");
    shell_pid.store(shell.id(), Ordering::Relaxed);
    drop(shell.stdin.take());
    let mut said = shell.stdout.take().expect("it is piped");
    let reader = std::thread::spawn(move || std::io::read_to_string(&mut said).expect("it can be read"));
    let [held, late, gone] = held_of(&watch, &mut shell);
    eprintln!("{held} held, {late} late, {gone} gone, {} missed", watch.missed());
    // One that has ended before anybody asks whether it is a target is none.
    assert!(held + late + gone <= 200, "each is told once");
    // Without a real-time priority, others may have the CPU until it is too late.
    let least = if Raised::begin().is_real_time() { 180 } else { 1 };
    assert!(held >= least, "{held} of 200 held");
    let said = reader.join().expect("it ends");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.len() == 100 && lines.iter().all(|line| *line == lines[0]), "{lines:?}");
}
