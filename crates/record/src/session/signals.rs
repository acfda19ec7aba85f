//! Signals to heapbpf: they end the recording, or are passed on to its command.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::attaching::command::Process;

/// Signals that are passed on to a command. Without a command only the first [`ENDING`] are handled: they end the
/// recording.
const PASSED_ON: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// How many signals end a recording. The last of these, SIGHUP, comes when a terminal or a connection is lost.
const ENDING: usize = 3;

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// The recording ends.
    Stop,
    /// The command gets the signal, and the recording ends when the command does.
    PassOn,
    /// Nothing to do: the signal concerns only the command, and the terminal has sent it there.
    Nothing,
}

/// The signals that heapbpf handles.
pub struct Signals {
    streams: Vec<(libc::c_int, Signal)>,
    /// The command that signals are passed on to, until it ends.
    pub command: Option<Process>,
    /// Whether the end was requested before: the next signal that requests it ends the recording.
    asked: bool,
}

impl Signals {
    /// Starts listening, also for the command's signals if there is a command.
    ///
    /// # Errors
    /// The kernel refuses a signal handler.
    pub fn listen(command: Option<Process>) -> io::Result<Self> {
        let streams = listened_to(command.is_some(), is_ignored(libc::SIGHUP))
            .map(|number| Ok((number, signal(SignalKind::from_raw(number))?)))
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

    /// Handles a signal. Returns whether the recording ends now.
    pub fn stops(&mut self, number: libc::c_int) -> bool {
        let meaning = meaning(number, self.command.is_some(), self.asked, terminal_is_ours());
        if let (Meaning::PassOn, Some(command)) = (meaning, &self.command)
            && let Err(error) = command.signal(number)
        {
            log::debug!("signal {number} is not passed on: {error}");
        }
        self.asked |= matches!(number, libc::SIGINT | libc::SIGTERM | libc::SIGHUP);
        meaning == Meaning::Stop
    }
}

/// The signals to handle. `nohup`: SIGHUP was ignored when heapbpf was started, so heapbpf outlives its terminal.
fn listened_to(command: bool, nohup: bool) -> impl Iterator<Item = libc::c_int> {
    let wanted = if command { PASSED_ON.len() } else { ENDING };
    PASSED_ON.into_iter().take(wanted).filter(move |number| !(nohup && *number == libc::SIGHUP))
}

/// Whether this process ignores a signal.
fn is_ignored(number: libc::c_int) -> bool {
    // SAFETY: `sigaction` is plain integers, for which zero is a valid value.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: without a new action nothing is changed, and `now` outlives the call.
    let status = unsafe { libc::sigaction(number, std::ptr::null(), &raw mut now) };
    status == 0 && now.sa_sigaction == libc::SIG_IGN
}

/// What a signal means. `asked`: the end was requested before. `terminal`: Ctrl-C at our terminal reaches both us and
/// the command.
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

/// Whether we are in the foreground process group of a terminal, which receives Ctrl-C as a whole.
fn terminal_is_ours() -> bool {
    let Ok(terminal) = std::fs::File::open("/dev/tty") else { return false };
    // Each is 0 if that group is of another PID namespace. rustix's process ids cannot be 0.
    // SAFETY: `terminal` stays open during the call, and neither function takes a pointer.
    unsafe { libc::tcgetpgrp(std::os::fd::AsRawFd::as_raw_fd(&terminal)) == libc::getpgrp() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_command_signals_end_the_recording() {
        for number in listened_to(false, false) {
            assert_eq!(meaning(number, false, false, true), Meaning::Stop);
        }
    }

    #[test]
    fn a_lost_terminal_ends_a_recording_unless_nohup_said_otherwise() {
        assert!(listened_to(false, false).eq([libc::SIGINT, libc::SIGTERM, libc::SIGHUP]));
        assert!(listened_to(false, true).eq([libc::SIGINT, libc::SIGTERM]));
        assert!(listened_to(true, false).eq(PASSED_ON));
        assert!(!listened_to(true, true).any(|number| number == libc::SIGHUP));
        // The Rust runtime ignores this one in every program.
        assert!(is_ignored(libc::SIGPIPE) && !is_ignored(libc::SIGSEGV));
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
