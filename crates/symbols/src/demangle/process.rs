//! The demangling process. It has a second process do the work, and restarts that one after the kernel has ended it.
//!
//! The second process, the *worker*, may use 50 ms of processor time per name and 256 MiB of memory. It has no
//! capabilities and almost no system calls. The first process reads nothing. Both have the same standard input and
//! output, and the first one answers only for a worker that was ended.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use heapbpf_host::independent::independent_of;
use heapbpf_host::privileges::{hide_memory, restrict_demangler, restrict_to_demangling};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, Rlimit, setrlimit};

use super::demangler::WORD;
use super::messages::Message;
use super::names::demangle;

/// Processor time that a name may take. None of 556,952 names in a machine's libraries took 0.3 ms.
const MOST_TIME: Duration = Duration::from_millis(50);
/// Memory that the worker may have, including its program.
const MOST_MEMORY_BYTES: u64 = 256 << 20;
/// Exit status of a program that panicked.
const PANICKED: i32 = 101;
/// Argument of the worker.
const WORK: &str = "work";

/// What the process was started to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// Have a worker demangle for the process with this PID.
    Serve(i32),
    /// Demangle.
    Work,
}

/// Returns the task, if the arguments ask for one.
pub fn asked_for(arguments: impl Iterator<Item = OsString>) -> Option<Task> {
    let mut arguments = arguments.skip(1);
    let argument = arguments.next().filter(|word| word == WORD).and(arguments.next())?;
    let argument = argument.to_str()?;
    if argument == WORK { Some(Task::Work) } else { argument.parse().ok().map(Task::Serve) }
}

/// Demangles names from standard input to standard output, until the input ends.
///
/// # Errors
/// The kernel's, or the input contains something other than names.
pub fn run(task: Task) -> io::Result<()> {
    match task {
        Task::Serve(asking) => serve(asking),
        Task::Work => work(),
    }
}

fn serve(asking: i32) -> io::Result<()> {
    independent_of(asking, c"hb-demangler")?;
    restrict_demangler();
    let input = io::stdin();
    loop {
        // Start no worker before there is a name.
        poll(&mut [PollFd::new(&input, PollFlags::IN)], None)?;
        let mut command = Command::new("/proc/self/exe");
        let status = command.args([WORD, WORK]).stderr(Stdio::null()).status()?;
        if status.signal().is_none() && status.code() != Some(PANICKED) {
            // The input has ended, or the worker could not start.
            return if status.success() { Ok(()) } else { Err(io::Error::other("its worker failed")) };
        }
        Message { number: 0, text: None }.send(&mut Unbuffered)?;
    }
}

fn work() -> io::Result<()> {
    hide_memory();
    let limit = |most| Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::As, limit(MOST_MEMORY_BYTES))?;
    setrlimit(Resource::Core, limit(0))?;
    restrict_to_demangling();
    let mut input = Unbuffered;
    while let Some(request) = Message::receive(&mut input)? {
        end_after(MOST_TIME)?;
        let text = request.text.as_deref().and_then(demangle);
        end_after(Duration::ZERO)?;
        Message { number: request.number, text }.send(&mut Unbuffered)?;
    }
    Ok(())
}

/// Has the kernel end this process (SIGPROF) after it has used this much processor time. Zero cancels that.
fn end_after(time: Duration) -> io::Result<()> {
    let value = libc::timeval { tv_sec: 0, tv_usec: time.subsec_micros().into() };
    let timer = libc::itimerval { it_interval: libc::timeval { tv_sec: 0, tv_usec: 0 }, it_value: value };
    // SAFETY: the call only reads a local value, and no handler is installed.
    let done = unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, std::ptr::null_mut()) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The standard streams without the library's buffers. What an ended worker has not read is left for the next one.
struct Unbuffered;

impl io::Read for Unbuffered {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(rustix::stdio::stdin(), buffer)?)
    }
}

impl io::Write for Unbuffered {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stdout(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_arguments_make_a_demangler() {
        let asked = |words: &[&str]| asked_for(words.iter().map(OsString::from));
        assert_eq!(asked(&["x", WORD, "12"]), Some(Task::Serve(12)));
        assert_eq!(asked(&["x", WORD, WORK]), Some(Task::Work));
        for none in [&["x"][..], &["x", WORD], &["x", WORD, "y"], &["x", "--pid", "12"], &[WORD, "12"]] {
            assert_eq!(asked(none), None, "{none:?}");
        }
    }
}
