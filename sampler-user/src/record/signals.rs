//! Signals to heapbpf: they end the recording, or are passed on to the command that it started.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Passed on to a command. Of these, the first two end a recording that has none.
const PASSED_ON: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The recording ends.
    Stop,
    /// The command gets it too (or has it already): the recording ends when the command does.
    PassOn,
    /// The command's business alone, and the terminal has seen to it.
    Nothing,
}

/// The signals that heapbpf takes.
pub struct Signals {
    streams: Vec<(libc::c_int, Signal)>,
    command: Option<libc::pid_t>,
    /// One that asks for the end was passed on: the next one of its kind is for us.
    asked: bool,
}

impl Signals {
    /// Listens from here on, for the command of that process id, if there is one.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn listen(command: Option<u32>) -> io::Result<Self> {
        let command = command.and_then(|pid| libc::pid_t::try_from(pid).ok());
        let wanted = if command.is_some() { PASSED_ON.len() } else { 2 };
        let streams = PASSED_ON[..wanted]
            .iter()
            .map(|&number| Ok((number, signal(SignalKind::from_raw(number))?)))
            .collect::<io::Result<_>>()?;
        Ok(Self { streams, command, asked: false })
    }

    /// The next signal.
    pub async fn next(&mut self) -> libc::c_int {
        poll_fn(|context| {
            for (number, stream) in &mut self.streams {
                if stream.poll_recv(context).is_ready() {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The command has ended: signals are for us.
    pub fn command_ended(&mut self) {
        self.command = None;
    }

    /// Acts on a signal. Whether the recording ends now.
    pub fn stops(&mut self, number: libc::c_int) -> bool {
        let meaning = meaning(number, self.command.is_some(), self.asked, terminal_is_ours());
        if let (Meaning::PassOn, Some(pid)) = (meaning, self.command) {
            // SAFETY: a plain system call; the command was not waited for, so the id is still its own.
            unsafe { libc::kill(pid, number) };
        }
        self.asked |= matches!(number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP);
        meaning == Meaning::Stop
    }
}

/// `asked`: the end was asked for before. `terminal`: Ctrl-C at our terminal reaches us, and the command as well.
fn meaning(number: libc::c_int, command: bool, asked: bool, terminal: bool) -> Meaning {
    let ends = matches!(number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP);
    match (command, ends) {
        (false, true) => Meaning::Stop,
        (false, false) => Meaning::Nothing,
        (true, true) if asked => Meaning::Stop,
        (true, _) if terminal && matches!(number, libc::SIGINT | libc::SIGQUIT) => Meaning::Nothing,
        (true, _) => Meaning::PassOn,
    }
}

/// Whether we are in the foreground of a terminal, which then sends Ctrl-C to the whole process group.
fn terminal_is_ours() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    // SAFETY: plain system calls on an open descriptor.
    unsafe { libc::tcgetpgrp(std::os::fd::AsRawFd::as_raw_fd(&terminal)) == libc::getpgrp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_command_signals_end_the_recording() {
        for number in [libc::SIGINT, libc::SIGTERM] {
            assert_eq!(meaning(number, false, false, true), Meaning::Stop);
        }
    }

    #[test]
    fn a_command_gets_them_first_and_once() {
        assert_eq!(meaning(libc::SIGTERM, true, false, false), Meaning::PassOn);
        assert_eq!(meaning(libc::SIGTERM, true, true, false), Meaning::Stop);
        assert_eq!(meaning(libc::SIGINT, true, false, false), Meaning::PassOn);
        assert_eq!(meaning(libc::SIGINT, true, false, true), Meaning::Nothing, "the terminal sends it to both");
        assert_eq!(meaning(libc::SIGTERM, true, false, true), Meaning::PassOn, "the terminal never sends this one");
        assert_eq!(meaning(libc::SIGUSR1, true, true, true), Meaning::PassOn);
    }
}
