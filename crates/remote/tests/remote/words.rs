//! Words of memory are written if they are as expected: all of them or none.

use std::os::unix::fs::FileExt as _;

use heapbpf_remote::{Busy, Error, STOP_LIMIT, Target, Word};

use crate::program::{self, Program};

/// The word at an address.
fn word(pid: u32, address: u64) -> u64 {
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("as root");
    let mut bytes = [0; 8];
    memory.read_exact_at(&mut bytes, address).expect("it is mapped");
    u64::from_le_bytes(bytes)
}

#[test]
fn words_are_written_where_they_are_as_expected() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("blocking", &[]);
    let (pid, target) = (program.pid(), Target::look(program.pid()).expect("it runs"));
    // Code that nothing runs: behind the end of the program's own.
    let is_code = |mapping: &&heapbpf_remote::Mapping| mapping.is_executable && mapping.range.contains(&program.hooked);
    let end = target.maps().as_slice().iter().find(is_code).expect("it has code").range.end;
    let [first, second] = [end - 16, end - 8];
    let before = [first, second].map(|address| word(pid, address));
    let change = |address, before, after| Word { address, before, after };
    let write = |words: &[Word]| target.write_words(words, STOP_LIMIT);
    let wrong = [change(first, before[0], 1), change(second, before[1] ^ 8, 2)];
    // A busy machine may not stop it in time.
    let refused = (0..50).find_map(|_| match write(&wrong) {
        Err(Error::Busy { why: Busy::Slow | Busy::InCall, .. }) => None,
        other => Some(other),
    });
    assert!(matches!(refused, Some(Err(Error::Busy { why: Busy::Changed, .. }))), "{refused:?}");
    assert_eq!([first, second].map(|address| word(pid, address)), before);
    let right = [change(first, before[0], 1), change(second, before[1], 2)];
    let written = (0..50).find_map(|_| write(&right).ok()).expect("it is stopped in time");
    assert!(written.outcome && written.threads > 0);
    assert_eq!([first, second].map(|address| word(pid, address)), [1, 2]);
    // A word that already has its new value is no change.
    assert!(!(0..50).find_map(|_| write(&right).ok()).expect("it is stopped in time").outcome);
    program.assert_runs();
    program.finish();
}
