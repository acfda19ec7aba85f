//! Process events of real processes. Needs the right to open perf events on every CPU; says so if it has not.

use std::os::fd::AsRawFd;
use std::process::Command;

use sampler_user::host::events::{HostEvents, monotonic_ns};
use sampler_user::host::perf_ring::RingOptions;
use sampler_user::host::record::HostEvent;

#[path = "../src/testing.rs"]
mod testing;

use testing::skipped;

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
    // SAFETY: one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, 10_000) };
}

/// Everything that concerns process `pid`, up to its end.
fn life_of(events: &mut HostEvents, pid: u32) -> Vec<HostEvent> {
    let (mut all, mut life) = (Vec::new(), Vec::new());
    let give_up = monotonic_ns() + 20_000_000_000;
    while monotonic_ns() < give_up {
        all.clear();
        events.drain(&mut all);
        for event in all.drain(..) {
            let of = match &event {
                HostEvent::Fork { pid, .. } | HostEvent::Comm { pid, .. } | HostEvent::Exit { pid, .. } => *pid,
                HostEvent::Map(map) => map.pid,
                HostEvent::Lost { .. } => panic!("records were lost"),
            };
            if of == pid {
                life.push(event);
            }
        }
        if matches!(life.last(), Some(HostEvent::Exit { tid, .. }) if *tid == pid) {
            return life;
        }
        wait(events);
    }
    panic!("the end of process {pid} was not reported; seen: {life:?}")
}

#[test]
fn a_short_life_in_order() {
    let Some(mut events) = open() else { return };
    let before_ns = monotonic_ns();
    let mut child = Command::new("/bin/true").spawn().expect("/bin/true starts");
    let pid = child.id();
    child.wait().expect("waits");
    let life = life_of(&mut events, pid);
    let after_ns = monotonic_ns();

    assert!(
        matches!(life[0], HostEvent::Fork { parent_pid, tid, .. } if parent_pid == std::process::id() && tid == pid)
    );
    let exec = life
        .iter()
        .position(|event| matches!(event, HostEvent::Comm { exec: true, comm, .. } if comm.starts_with(b"true\0")));
    let exec = exec.expect("the exec is reported");
    let maps: Vec<_> = life[exec..]
        .iter()
        .filter_map(|event| if let HostEvent::Map(map) = event { Some(map) } else { None })
        .collect();
    assert!(maps[0].path.ends_with(b"/true"), "the program comes first: {maps:?}");
    assert!(maps.iter().any(|map| map.path.windows(7).any(|part| part == b"/libc.s")), "{maps:?}");
    assert!(maps.iter().any(|map| &*map.path == b"[vdso]"), "{maps:?}");
    assert!(life.is_sorted_by_key(HostEvent::time_ns));
    assert!(life.iter().all(|event| (before_ns..=after_ns).contains(&event.time_ns())));
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
    let life = life_of(&mut events, pid);
    let ssl = life
        .iter()
        .any(|event| matches!(event, HostEvent::Map(map) if map.path.windows(7).any(|part| part == b"/_ssl.c")));
    assert!(ssl, "the module that was opened at run time: {life:?}");
}
