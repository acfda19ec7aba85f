//! The memory of a hooked process: its counts, and what is mapped into it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use heapbpf_inline::abi::STATE;
use heapbpf_inline::read::{COUNTS_BYTES, Counts};
use heapbpf_remote::{STOP_LIMIT, TakeOut, Target};

/// Opens the memory of a process.
pub(super) fn open(pid: u32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))
}

/// Everything that the hooks count.
pub(super) fn state(memory: &File, base: u64) -> io::Result<Vec<u8>> {
    let mut state = vec![0; COUNTS_BYTES];
    memory.read_exact_at(&mut state, base + STATE)?;
    Ok(state)
}

/// The sums of it.
pub(super) fn counts(memory: &File, base: u64) -> io::Result<Counts> {
    Counts::of(&state(memory, base)?).map_err(io::Error::other)
}

/// Takes what is ours out of a process, if it still runs.
pub(super) fn take_out(pid: u32) {
    const ATTEMPTS: usize = 5;
    const PAUSE: Duration = Duration::from_millis(2);
    for _ in 0..ATTEMPTS {
        let Ok(target) = Target::look(pid) else { return };
        let found = target.found();
        let out = found.iter().map(|found| target.take_out(found, TakeOut::All, STOP_LIMIT));
        match out.collect::<Result<Vec<_>, _>>() {
            Ok(out) if out.iter().all(|stopped| stopped.outcome) => return,
            // A thread may come back to it. It leads nowhere any more.
            Ok(_) => std::thread::sleep(PAUSE),
            Err(error) => log::info!("process {pid}: inline hooks are not taken out yet: {error}"),
        }
    }
    log::info!("process {pid} keeps memory of its inline hooks: a thread may still come back to it");
}
