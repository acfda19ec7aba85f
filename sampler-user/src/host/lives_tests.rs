//! Tests of `lives`: histories of made-up processes.

use super::*;
use crate::host::record::Device;

/// Beyond any pid that Linux hands out, so that nothing of this machine is opened.
const P: u32 = 5_000_000;
const Q: u32 = P + 1;

#[derive(Default)]
struct World {
    lives: Lives,
    modules: Option<ModuleTable>,
}

impl World {
    fn apply(&mut self, event: &HostEvent) {
        self.lives.apply(event, 0, self.modules.get_or_insert_with(|| ModuleTable::new(8)));
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
        self.lives.found(info, maps, 0, time_ns, self.modules.get_or_insert_with(|| ModuleTable::new(8)));
    }

    fn inode_at(&self, pid: u32, address: u64, time_ns: u64) -> Option<u64> {
        let module = self.lives.at(pid, time_ns)?.space.resolve(address, time_ns)?.module;
        Some(self.modules.as_ref()?.get(module)?.file_identity().1)
    }

    fn changes(&mut self) -> Vec<HostChange> {
        let mut changes = Vec::new();
        self.lives.drain_changes(&mut changes);
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
    assert_eq!(world.inode_at(Q, 0x1800, 29), Some(1), "an old sample still resolves in the old life");
    let life = world.lives.current(Q).expect("lives");
    assert_eq!((&*life.info.comm, &*life.info.exe, life.info.parent_pid), ("new", "/nowhere/3", P));
}

#[test]
fn a_pid_used_again_is_another_process() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.exit(20, P);
    assert!(world.lives.current(P).is_none());
    assert_eq!(world.inode_at(P, 0x1000, 22), Some(1), "just ended: late samples resolve");
    world.fork(30, P, 1);
    world.map(31, P, 0x1000, 2);
    assert_eq!((world.inode_at(P, 0x1000, 19), world.inode_at(P, 0x1000, 31)), (Some(1), Some(2)));
    assert_eq!(world.inode_at(P, 0x1000, 30), None);

    let old = world.lives.at(P, 15).expect("kept").id;
    world.lives.note_sampled(old);
    world.lives.expire(1000, 0);
    assert!(world.lives.get(old).is_some(), "it has samples");
    world.lives.expire(1000, 20);
    assert!(world.lives.get(old).is_some(), "samples at 20 may still come");
    world.lives.expire(0, 21);
    assert!(world.lives.get(old).is_none());
    assert_eq!(world.lives.len(), 1);
}

#[test]
fn what_an_exec_maps_is_of_the_new_life_even_if_it_is_heard_of_first() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.map(31, P, 0x5000, 2);
    world.exec(30, P, b"next");
    let (old, new) = (world.lives.at(P, 20).expect("kept").id, world.lives.at(P, 30).expect("begun"));
    assert_eq!(world.inode_at(P, 0x5000, 31), Some(2));
    assert_eq!(world.inode_at(P, 0x1000, 31), None, "of the program before");
    assert!(!new.exe_pending && !new.info.exe.is_empty());
    let new = new.id;
    let changes = world.changes();
    let mapped = changes.iter().filter_map(|change| match change {
        HostChange::Mapped { life, .. } => Some(*life),
        _ => None,
    });
    assert_eq!(mapped.collect::<Vec<_>>(), [old, new]);
    assert!(changes.contains(&HostChange::Replaced(old, new)));
}

#[test]
fn changes_tell_what_to_attach_to() {
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
    assert!(matches!(first, HostChange::Mapped { life, first: true, .. } if life == old));
    assert!(matches!(again, HostChange::Mapped { life, first: false, .. } if life == new));
    assert!(world.changes().is_empty());
}

/// The end of an exec is reported after the events by which the next life began.
#[test]
fn what_an_exec_replaced_is_the_life_before() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.exec(20, P, b"one");
    world.map(21, P, 0x1000, 1);
    world.exec(30, P, b"two");
    let replaced = |time_ns| world.lives.replaced_at(P, time_ns).map(|life| (life.since_ns, &*life.info.comm));
    assert_eq!(replaced(22), Some((10, "")));
    assert_eq!(replaced(32), Some((20, "one")));
    // The event of that exec was lost: the one life there is.
    world.fork(50, Q, 1);
    assert_eq!(world.lives.replaced_at(Q, 60).map(|life| life.since_ns), Some(50));
    assert!(world.lives.replaced_at(Q + 1, 60).is_none());
}

#[test]
fn a_process_lives_as_long_as_any_thread() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.apply(&HostEvent::Fork { time_ns: 11, pid: P, tid: Q, parent_pid: P });
    world.exit(12, P);
    assert!(world.lives.current(P).is_some());
    assert_eq!(world.lives.headless(), [P]);
    world.apply(&HostEvent::Exit { time_ns: 13, pid: P, tid: Q });
    assert_eq!(world.lives.at(P, 12).and_then(|life| life.until_ns), Some(13));
}

#[test]
fn what_proc_told_is_not_undone_by_older_events() {
    let mut world = World::default();
    // Found with the mappings that it has after everything that the events below tell.
    world.found(P, &[map(0, P, 0x1000, 3)], 100);
    let id = world.lives.current(P).expect("found").id;
    world.fork(10, P, 1);
    world.map(11, P, 0x1000, 1);
    world.exec(20, P, b"x");
    world.map(21, P, 0x1000, 2);
    world.exit(22, P);
    assert_eq!(world.lives.current(P).map(|life| life.id), Some(id));
    assert_eq!(world.inode_at(P, 0x1000, 101), Some(3));
    world.map(102, P, 0x1000, 4);
    assert_eq!((world.inode_at(P, 0x1000, 101), world.inode_at(P, 0x1000, 102)), (Some(3), Some(4)));
    // Read again after losses: the same process, other mappings.
    world.changes();
    world.found(P, &[map(0, P, 0x9000, 5)], 200);
    assert_eq!(world.lives.current(P).map(|life| life.id), Some(id));
    assert_eq!((world.inode_at(P, 0x1000, 199), world.inode_at(P, 0x1000, 200)), (Some(4), None));
    assert_eq!(world.inode_at(P, 0x9000, 201), Some(5));
    assert!(matches!(world.changes()[..], [HostChange::Mapped { first: true, .. }]));
    world.exit(201, P);
    assert!(world.lives.current(P).is_none());
}

#[test]
fn a_lost_fork_does_not_lose_the_process() {
    let mut world = World::default();
    world.map(50, P, 0x1000, 1);
    assert_eq!(world.inode_at(P, 0x1000, 50), Some(1));
    world.exec(60, Q, b"q");
    assert_eq!(world.lives.current(Q).map(|life| life.info.comm.to_string()).as_deref(), Some("q"));
}

#[test]
fn an_ended_process_whose_exit_was_lost_makes_room() {
    let mut world = World::default();
    world.fork(10, P, 1);
    world.fork(50, P, 1);
    assert_eq!(world.lives.at(P, 20).and_then(|life| life.until_ns), Some(50));
    assert_eq!(world.lives.len(), 2);
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
