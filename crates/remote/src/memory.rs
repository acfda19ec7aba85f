//! The memory that a process has while it runs one program.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Where no program has memory: above all addresses that user space can have on x86-64.
const NOWHERE: u64 = 0x7fff_ffff_ffff_f000;

/// The memory of a process as of when this was opened. An exec gives the process another one, perhaps with the same code at the same
/// addresses.
#[derive(Debug)]
pub(crate) struct Memory(File);

impl Memory {
    /// That of the program that the process runs now.
    pub(crate) fn open(pid: i32) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/mem")).map(Self)
    }

    /// The same, to be written as well.
    pub(crate) fn open_to_write(pid: i32) -> io::Result<Self> {
        File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).map(Self)
    }

    /// Writes memory of the program, and of no other.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, address)
    }

    /// Whether the process still runs the program. A read finds no address space once the last thread has left it (`mem_rw`); else it
    /// finds nothing at this address.
    pub(crate) fn is_there(&self) -> bool {
        !matches!(self.0.read_at(&mut [0], NOWHERE), Ok(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    #[test]
    fn after_an_exec_there_is_none() {
        assert!(Memory::open(std::process::id().cast_signed()).expect("it is ours").is_there());
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", "read line; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut shell = shell.spawn().expect("there is a shell");
        let mut input = shell.stdin.take().expect("it is piped");
        let program = || std::fs::read_link(format!("/proc/{}/exe", shell.id())).expect("it runs");
        // The child is ours for a moment before it is the shell.
        let own = std::env::current_exe().expect("it runs");
        until(|| program() != own);
        let (memory, before) = (Memory::open(shell.id().cast_signed()).expect("it is ours"), program());
        assert!(memory.is_there());
        io::Write::write_all(&mut input, b"\n").expect("it reads");
        until(|| program() != before);
        assert!(!memory.is_there());
        drop(input);
        shell.wait().expect("it ends");
    }

    fn until(is_so: impl Fn() -> bool) {
        let since = Instant::now();
        while !is_so() {
            assert!(since.elapsed() < Duration::from_secs(60), "it did not happen");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
