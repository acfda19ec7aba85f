//! Tests process events of real processes. Skipped without the privilege to open perf events on every CPU.

use std::os::fd::AsRawFd;
use std::process::Command;

use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::events::HostEvents;
use heapbpf_host::record::HostEvent;
use heapbpf_testing::skipped;

fn open() -> Option<HostEvents> {
    match HostEvents::open() {
        Ok(events) => Some(events),
        Err(error) => {
            skipped(error);
            None
        }
    }
}

/// Waits until there is something to drain, at most 10 s.
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
