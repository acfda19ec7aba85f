//! When a recording began, and when it ends: by its duration, or by signals to heapbpf. If it has a command, they are
//! passed on to that.

use std::future::poll_fn;
use std::io;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::priority::RaisedPriority;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::attaching::command::Process;

/// How long before its end a recording raises its scheduling priority.
const LAST_MOMENTS: Duration = Duration::from_millis(50);
/// Longest time to hook or release a process. It took up to 110 ms on two busy CPUs, and must not make a recording
/// longer.
const LONGEST_HOOKING: Duration = Duration::from_millis(150);

/// The times of a recording. Those in nanoseconds are CLOCK_MONOTONIC.
pub(super) struct Schedule {
    /// Wall clock at its start.
    pub(super) started: SystemTime,
    /// The same moment in nanoseconds.
    pub(super) started_ns: u64,
    /// When it ends, if known.
    pub(super) ends_ns: Option<u64>,
    /// The raised priority of the last moments, so that the recording ends on time.
    pub(super) last_moments: Option<RaisedPriority>,
}

impl Schedule {
    /// A recording that begins now and whose end is unknown.
    pub(super) fn begin() -> Self {
        Self { started: SystemTime::now(), started_ns: monotonic_ns(), ends_ns: None, last_moments: None }
    }

    /// Sets the start to now, and the end if there is a duration.
    pub(super) fn restart(&mut self, duration: Option<Duration>) {
        (self.started, self.started_ns) = (SystemTime::now(), monotonic_ns());
        self.ends_ns = duration.map(|duration| self.started_ns.saturating_add(duration.as_nanos() as u64));
    }

    /// When hooking and releasing stop, if the recording ends at a set time.
    pub(super) fn last_hooking_ns(&self) -> Option<u64> {
        let ends_ns = self.ends_ns?;
        let duration = Duration::from_nanos(ends_ns.saturating_sub(self.started_ns));
        let before = LONGEST_HOOKING.min(duration / 10);
        Some(ends_ns.saturating_sub(before.as_nanos() as u64))
    }

    /// Time until the recording ends, if known; zero if it has ended.
    pub(super) fn until_end(&self, now_ns: u64) -> Option<Duration> {
        self.ends_ns.map(|ends_ns| Duration::from_nanos(ends_ns.saturating_sub(now_ns)))
    }

    /// Whether the recording's time is over.
    pub(super) fn has_ended(&self, now_ns: u64) -> bool {
        self.until_end(now_ns).is_some_and(|left| left.is_zero())
    }

    /// Time until the recording's last moments, if known and if they have not begun.
    pub(super) fn until_last_moments(&self, now_ns: u64) -> Option<Duration> {
        let left = self.until_end(now_ns).filter(|_| self.last_moments.is_none());
        left.map(|left| left.saturating_sub(LAST_MOMENTS))
    }

    /// Raises this thread's priority if the recording ends soon, so that it also ends on time on a busy host.
    pub(super) fn note_last_moments(&mut self, now_ns: u64) {
        if self.until_last_moments(now_ns).is_some_and(|left| left.is_zero()) {
            self.last_moments = Some(RaisedPriority::begin());
        }
    }
}

/// Signals that are passed on to a command. Without a command only the first [`ENDING`] are handled: they end the
/// recording.
const PASSED_ON: [libc::c_int; 6] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// How many signals end a recording. The last of these, SIGHUP, comes when a terminal or a connection is lost.
const ENDING: usize = 3;

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
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

    const SECOND_NS: u64 = 1_000_000_000;

    fn schedule(duration: Option<Duration>) -> Schedule {
        let started_ns = 7 * SECOND_NS;
        let ends_ns = duration.map(|duration| started_ns + duration.as_nanos() as u64);
        Schedule { started: SystemTime::UNIX_EPOCH, started_ns, ends_ns, last_moments: None }
    }

    #[test]
    fn the_end_is_counted_down_and_stays_reached() {
        let schedule = schedule(Some(Duration::from_secs(2)));
        assert_eq!(schedule.until_end(8 * SECOND_NS), Some(Duration::from_secs(1)));
        assert!(!schedule.has_ended(9 * SECOND_NS - 1));
        for now_ns in [9 * SECOND_NS, 20 * SECOND_NS] {
            assert_eq!(schedule.until_end(now_ns), Some(Duration::ZERO));
            assert!(schedule.has_ended(now_ns));
        }
    }

    #[test]
    fn without_a_duration_nothing_ends() {
        let mut schedule = schedule(None);
        assert_eq!((schedule.until_end(u64::MAX), schedule.until_last_moments(u64::MAX)), (None, None));
        assert_eq!(schedule.last_hooking_ns(), None);
        schedule.note_last_moments(u64::MAX);
        assert!(!schedule.has_ended(u64::MAX) && schedule.last_moments.is_none());
    }

    #[test]
    fn the_last_moments_come_once() {
        let mut schedule = schedule(Some(Duration::from_secs(2)));
        let before_ns = 9 * SECOND_NS - LAST_MOMENTS.as_nanos() as u64 - 1;
        assert_eq!(schedule.until_last_moments(before_ns), Some(Duration::from_nanos(1)));
        schedule.note_last_moments(before_ns);
        assert!(schedule.last_moments.is_none());
        schedule.note_last_moments(before_ns + 1);
        assert!(schedule.last_moments.is_some());
        assert_eq!(schedule.until_last_moments(before_ns + 1), None, "nothing to wait for any more");
    }

    #[test]
    fn nothing_is_hooked_right_before_the_end_of_a_short_recording_either() {
        let until_ns = |duration| schedule(Some(duration)).last_hooking_ns().map(|at| at - 7 * SECOND_NS);
        assert_eq!(until_ns(Duration::from_secs(10)), Some(9_850_000_000));
        assert_eq!(until_ns(Duration::from_millis(100)), Some(90_000_000));
    }

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
