//! Tests of `processes` with invented event histories.

use super::*;
use crate::record::Device;

/// Higher than any PID that Linux assigns, so that no real process is opened.
const P: u32 = 5_000_000;
const Q: u32 = P + 1;

#[derive(Default)]
struct World {
    processes: Processes,
    modules: Option<ModuleTable>,
}

impl World {
    fn apply(&mut self, event: &HostEvent) {
        self.processes.apply(event, 0, self.modules.get_or_insert_with(|| ModuleTable::new(8)));
    }

    fn fork(&mut self, time_ns: u64, pid: u32, parent_pid: u32) {
        self.apply(&HostEvent::Fork { time_ns, pid, tid: pid, parent_pid });
    }

    fn exec(&mut self, time_ns: u64, pid: u32, name: &[u8]) {
        let mut comm = [0; 16];
        comm[..name.len()].copy_from_slice(name);
        self.apply(&HostEvent::Comm { time_ns, pid, tid: pid, comm, exec: true });
    }

    fn exit(&mut self, time_ns: u64, pid: u32) {
        self.apply(&HostEvent::Exit { time_ns, pid, tid: pid });
    }

    fn map(&mut self, time_ns: u64, pid: u32, address: u64, inode: u64) {
        self.apply(&HostEvent::Map(map(time_ns, pid, address, inode)));
    }

    fn found(&mut self, pid: u32, maps: &[MapEvent], time_ns: u64) {
        let info = ProcessInfo { pid, exe: "/found".into(), threads: 1, start_ns: 7, ..ProcessInfo::default() };
        self.processes.found(info, maps, 0, time_ns, self.modules.get_or_insert_with(|| ModuleTable::new(8)));
    }

    fn inode_at(&self, pid: u32, address: u64, time_ns: u64) -> Option<u64> {
        let module = self.processes.at(pid, time_ns)?.space.resolve(address, time_ns)?.module;
        Some(self.modules.as_ref()?.get(module)?.inode)
    }

    fn changes(&mut self) -> Vec<HostChange> {
        let mut changes = Vec::new();
        self.processes.drain_changes(&mut changes);
        changes
    }
}

fn map(time_ns: u64, pid: u32, address: u64, inode: u64) -> MapEvent {
    MapEvent {
        time_ns,
        pid,
        tid: pid,
        address,
        length: 0x1000,
        device: Device { major: 4095, minor: 1 },
        inode,
        prot: 5,
        path: format!("/nowhere/{inode}").into_bytes().into(),
        ..MapEvent::default()
    }
}

#[test]
fn a_child_inherits_and_exec_clears() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.fork(20, Q, P);
    world.map(21, P, 0x5000, 2);
    world.exec(30, Q, b"new");
    world.map(31, Q, 0x1000, 3);

    assert_eq!(world.inode_at(Q, 0x1800, 25), Some(1), "inherited");
    assert_eq!(world.inode_at(Q, 0x5800, 25), None, "mapped by the parent after the fork");
    assert_eq!(world.inode_at(P, 0x5800, 25), Some(2));
    assert_eq!(world.inode_at(Q, 0x1800, 30), None, "exec cleared it");
    assert_eq!(world.inode_at(Q, 0x1800, 31), Some(3));
    assert_eq!(world.inode_at(Q, 0x1800, 29), Some(1), "an old sample still resolves in the old generation");
    let generation = world.processes.current(Q).expect("runs");
    assert_eq!((&*generation.info.comm, &*generation.info.exe, generation.info.parent_pid), ("new", "/nowhere/3", P));
}

#[test]
fn a_pid_used_again_is_another_process() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.exit(20, P);
    assert!(world.processes.current(P).is_none());
    assert_eq!(world.inode_at(P, 0x1000, 22), Some(1), "just ended: late samples resolve");
    world.fork(30, P, 1);
    world.map(31, P, 0x1000, 2);
    assert_eq!((world.inode_at(P, 0x1000, 19), world.inode_at(P, 0x1000, 31)), (Some(1), Some(2)));
    assert_eq!(world.inode_at(P, 0x1000, 30), None);

    let old = world.processes.at(P, 15).expect("kept").id;
    world.processes.note_sampled(old);
    world.processes.expire(1000, 0);
    assert!(world.processes.get(old).is_some(), "it has samples");
    world.processes.expire(1000, 20);
    assert!(world.processes.get(old).is_some(), "samples at 20 may still come");
    world.processes.expire(0, 21);
    assert!(world.processes.get(old).is_none());
    assert_eq!(world.processes.iter().count(), 1);
}

#[test]
fn what_an_exec_maps_belongs_to_the_new_generation_even_if_it_is_reported_first() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.map(31, P, 0x5000, 2);
    world.exec(30, P, b"next");
    let (old, new) = (world.processes.at(P, 20).expect("kept").id, world.processes.at(P, 30).expect("begun"));
    assert_eq!(world.inode_at(P, 0x5000, 31), Some(2));
    assert_eq!(world.inode_at(P, 0x1000, 31), None, "of the program before");
    assert!(!new.exe_pending && !new.info.exe.is_empty());
    let new = new.id;
    let changes = world.changes();
    let mapped = changes.iter().filter_map(|change| match change {
        HostChange::Mapped { generation, .. } => Some(*generation),
        _ => None,
    });
    assert_eq!(mapped.collect::<Vec<_>>(), [old, new]);
    assert!(changes.contains(&HostChange::Replaced(old, new)));
}

#[test]
fn changes_report_what_to_attach_to() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.map(12, P, 0x1000, 1);
    world.exec(13, P, b"x");
    world.map(14, P, 0x1000, 1);
    world.exit(15, P);
    let changes = world.changes();
    let [HostChange::Started(one), first, HostChange::Replaced(old, new), again, HostChange::Ended(ended)] =
        changes[..]
    else {
        panic!("{changes:?}")
    };
    assert_eq!((one, new), (old, ended));
    assert!(matches!(first, HostChange::Mapped { generation, first: true, .. } if generation == old));
    assert!(matches!(again, HostChange::Mapped { generation, first: false, .. } if generation == new));
    assert!(world.changes().is_empty());
}

/// The completion of an exec is reported after the events that began the next generation.
#[test]
fn an_exec_replaces_the_generation_before_it() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.exec(20, P, b"one");
    world.map(21, P, 0x1000, 1);
    world.exec(30, P, b"two");
    let replaced = |time_ns| {
        world.processes.replaced_at(P, time_ns).map(|generation| (generation.since_ns, &*generation.info.comm))
    };
    assert_eq!(replaced(22), Some((10, "")));
    assert_eq!(replaced(32), Some((20, "one")));
    // The event of that exec was lost, so there is only one generation.
    world.fork(50, Q, 1);
    assert_eq!(world.processes.replaced_at(Q, 60).map(|generation| generation.since_ns), Some(50));
    assert!(world.processes.replaced_at(Q + 1, 60).is_none());
}

#[test]
fn a_process_runs_until_its_last_thread_exits() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.apply(&HostEvent::Fork { time_ns: 11, pid: P, tid: Q, parent_pid: P });
    world.exit(12, P);
    assert!(world.processes.current(P).is_some());
    assert_eq!(world.processes.headless(), [P]);
    world.apply(&HostEvent::Exit { time_ns: 13, pid: P, tid: Q });
    assert_eq!(world.processes.at(P, 12).and_then(|generation| generation.until_ns), Some(13));
}

#[test]
fn older_events_do_not_undo_what_was_read_from_proc() {
    let mut world = World::default();
    // /proc was read after all events below, so its mappings are the latest.
    world.found(P, &[map(0, P, 0x1000, 3)], 100);
    let id = world.processes.current(P).expect("found").id;
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.exec(20, P, b"x");
    world.map(21, P, 0x1000, 2);
    world.exit(22, P);
    assert_eq!(world.processes.current(P).map(|generation| generation.id), Some(id));
    assert_eq!(world.inode_at(P, 0x1000, 101), Some(3));
    world.map(102, P, 0x1000, 4);
    assert_eq!((world.inode_at(P, 0x1000, 101), world.inode_at(P, 0x1000, 102)), (Some(3), Some(4)));
    // Read again after lost events: the same process with different mappings.
    world.changes();
    world.found(P, &[map(0, P, 0x9000, 5)], 200);
    assert_eq!(world.processes.current(P).map(|generation| generation.id), Some(id));
    assert_eq!((world.inode_at(P, 0x1000, 199), world.inode_at(P, 0x1000, 200)), (Some(4), None));
    assert_eq!(world.inode_at(P, 0x9000, 201), Some(5));
    assert!(matches!(world.changes()[..], [HostChange::Mapped { first: true, .. }]));
    world.exit(201, P);
    assert!(world.processes.current(P).is_none());
}

#[test]
fn a_lost_fork_does_not_lose_the_process() {
    let mut world = World::default();
    world.map(50, P, 0x1000, 1);
    assert_eq!(world.inode_at(P, 0x1000, 50), Some(1));
    world.exec(60, Q, b"q");
    assert_eq!(world.processes.current(Q).map(|generation| generation.info.comm.to_string()).as_deref(), Some("q"));
}

#[test]
fn a_fork_ends_a_process_whose_exit_was_lost() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.fork(50, P, 1);
    assert_eq!(world.processes.at(P, 20).and_then(|generation| generation.until_ns), Some(50));
    assert_eq!(world.processes.iter().count(), 2);
}

#[test]
fn names_that_are_not_text() {
    let mut comm = *b"ab\xff\xfe\0\0\0\0\0\0\0\0\0\0\0\0";
    assert_eq!(comm_text(&comm), "ab");
    comm[0] = 0xff;
    assert_eq!(comm_text(&comm), "?");
    assert_eq!(comm_text(&[0; 16]), "");
    assert_eq!(comm_text(b"sixteen-letters!"), "sixteen-letters!");
}

#[test]
fn pages_that_inline_hooks_replaced_stay_the_files() {
    let mut world = World::default();
    world.fork(10, P, 1);
    let file = MapEvent { length: 0x3000, ..map(11, P, 0x10_0000, 1) };
    world.apply(&HostEvent::Map(file));
    let memfd = |time_ns, address| MapEvent {
        file_offset: 0x5000,
        path: b"/memfd:heapbpf-inline-7e0000000000-6000".as_slice().into(),
        ..map(time_ns, P, address, 7)
    };
    world.apply(&HostEvent::Map(memfd(12, 0x7e00_0000_0000)));
    world.apply(&HostEvent::Map(memfd(13, 0x10_1000)));
    world.apply(&HostEvent::Map(memfd(14, 0x10_3000)));
    assert_eq!(world.inode_at(P, 0x7e00_0000_0000, 15), Some(7), "the code itself");
    assert_eq!(world.inode_at(P, 0x10_1800, 15), Some(1));
    assert_eq!(world.inode_at(P, 0x10_2800, 15), Some(1));
    assert_eq!(world.inode_at(P, 0x10_3800, 15), Some(7), "no file was there");
}
