//! The main loop of a recording, and the steps around it: from its first probe to its files.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use heapbpf_attach::inline::InlineHooks;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::limits::links_need_admin;
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_host::privileges::Needs;
use heapbpf_profile::model::{Process, Profile};
use heapbpf_remote::Exec;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;

use super::errors::Step;
use super::schedule::Signals;
use super::state::Session;
use crate::attaching::command::{Held, NotStarted, Running, exit_code, hold, killed_by};
use crate::descriptors::watch;
use crate::outputs::files::{SnapshotFiles, snapshot_outputs, write_outputs};
use crate::outputs::notify;
use crate::outputs::report::{Closing, show_report, write_stats};
use crate::outputs::status_line::StatusLine;
use crate::outputs::triggers::Triggers;
use crate::plan::{Hook, RecordPlan};
use crate::profiles::requests::{FinishedProfile, Request};
use crate::remarks::say;

/// Time between checks of the rings while events arrive. A check costs some 50 µs, whatever it finds. Rings that fill
/// up, forks and new mappings wake the loop earlier; the latter two at once, or soon if nothing depends on them.
const AWAKE_PAUSE: Duration = Duration::from_millis(40);
/// The same while targets may be waiting for their records to be taken in.
const AWAITED_PAUSE: Duration = Duration::from_millis(2);
/// Time between checks while nothing happens; an event wakes the loop earlier.
const SLEEP_PAUSE: Duration = Duration::from_secs(1);
/// How long process events wait for more, where they may: a program that starts and ends soon is a single turn of the
/// loop then, instead of several.
const EVENTS_WAIT: Duration = Duration::from_millis(20);

/// How long housekeeping waits there for another turn, such as that of the budget's check each second: after some
/// seconds, both are done in the same turn.
const HOUSEKEEPING_WAIT: Duration = Duration::from_millis(250);

/// The message at the start if Python's objects are counted.
const OBJECTS_NOTE: &str = "each Python object traps twice when it is allocated and once when it is freed \
                            (--python-objects)";

/// The message at the start if links serve every process.
const BYSTANDERS_NOTE: &str = "probes serve every process of this host that uses the same files: an allocation and its free take 1 µs \
                               longer there, and programs that translate code (valgrind) may be killed by SIGTRAP";

/// A recording with its probes in place.
pub struct ActiveRecording {
    /// Dropped first: a command that is still held has copies of the pipe ends whose closing tells our other processes
    /// to end, and the session waits for these processes.
    command: CommandState,
    session: Session,
    files: SnapshotFiles,
    signals: Signals,
    snapshot_wanted: Signal,
    line: StatusLine,
    begun: Instant,
}

/// The command that a recording starts, if there is one.
struct CommandState {
    held: Option<Held>,
    running: Option<Running>,
    exit_code: u8,
}

impl Drop for CommandState {
    /// A command that is still held never runs: the recording has failed, and says so.
    fn drop(&mut self) {
        if let Some(held) = &self.held {
            // Before its pipe is closed, which would release it. Fails only if the process has ended already.
            let _ = held.process.signal(libc::SIGKILL);
        }
    }
}

impl CommandState {
    /// Starts the command and holds it before its first instruction. Without words, there is no command.
    fn hold(words: &[OsString]) -> std::io::Result<Self> {
        let held = if words.is_empty() { None } else { Some(hold(words)?) };
        Ok(Self { held, running: None, exit_code: 0 })
    }

    /// Waits until the command ends; forever if none runs. Returns heapbpf's exit status for it, and the signal that
    /// killed it.
    async fn ended(&mut self) -> (u8, Option<String>) {
        let Some(running) = &mut self.running else { return std::future::pending().await };
        let ended = running.ended().await.map_or((1, None), |status| (exit_code(status), killed_by(status)));
        self.running = None;
        ended
    }
}

impl ActiveRecording {
    /// Attaches the probes. A command is held before its first instruction.
    ///
    /// # Errors
    /// The error is one sentence that says what to do. No probe stays attached.
    pub fn attach(plan: RecordPlan) -> anyhow::Result<Self> {
        let mut session = Session::new(plan)?;
        // If anything fails from here on, the command is dropped before the session.
        let command =
            CommandState::hold(&session.plan.targets.command).context("cannot start a process for the command")?;
        let command_pid = command.held.as_ref().map(|held| held.pid);
        session.attaching.held = command_pid.filter(|_| session.attaching.inline.is_some());
        let (targets, asking) = (&session.plan.targets, session.plan.asks_for_probes());
        session.attaching.start(targets, asking, command_pid, &mut session.host)?;
        session.recorder.set_functions(&session.attaching.hooks.functions);
        let first = session.first_target(command_pid);
        let plan = &session.plan;
        let outputs = snapshot_outputs(&plan.outputs, first.as_ref().map(|(comm, pid)| (comm.as_str(), *pid)));
        let files = SnapshotFiles::new(&outputs, plan.outputs.write, plan.outputs.keep);
        // From here on we handle Ctrl-C: probes are attached, so the user must get a profile.
        let signals = Signals::listen(command.held.as_ref().map(|held| held.process.try_clone()).transpose()?)?;
        let snapshot_wanted = signal(SignalKind::user_defined1())?;
        let line = StatusLine::new(plan.display);
        Ok(Self { command, session, files, signals, snapshot_wanted, line, begun: Instant::now() })
    }

    /// The privileges that the recording still needs.
    pub fn needs(&self) -> Needs {
        let plan = &self.session.plan;
        Needs {
            writes_files: plan.writes_files(),
            has_command: !plan.targets.command.is_empty(),
            writes_into_processes: plan.hooks_inline(),
            stops_processes: plan.targets.objects.are_probed(plan.hooks_inline()),
            links_as_admin: links_need_admin(Some(self.session.attaching.programs.kind)),
        }
    }

    /// Starts the recording: everything from here on is recorded.
    pub fn begin(&mut self) {
        // Loading the BPF programs and examining files took more memory than the rest will.
        give_memory_back();
        self.session.begin();
        self.begun = Instant::now();
        say(format!("recording {}", self.session.describe_targets()));
        let plan = &self.session.plan;
        let targets = &plan.targets;
        let asking = plan.asks_for_probes();
        let why = asking.map(|option| format!("they do not work with {option}"));
        if plan.kernel.hook == Hook::Auto
            && let Some(why) = plan.kernel.no_inline.map(str::to_owned).or(why)
        {
            say(format!("using probes instead of inline hooks: {why}"));
        }
        if plan.kernel.hook != Hook::Usdt && self.session.attaching.shares {
            let cure = asking.map(|option| format!("; without {option}, others pay nothing"));
            say(format!("{BYSTANDERS_NOTE}{}", cure.unwrap_or_default()));
        }
        if targets.objects.are_probed(plan.hooks_inline()) {
            say(OBJECTS_NOTE);
        }
        if let Some(rules) = targets.rules_to_match().filter(|_| targets.running.is_empty()) {
            say(format!("no running process matches {rules}; waiting for one"));
        }
    }

    /// Records until the end: releases the command and answers `requests`. Clients that still wait for an answer when
    /// this returns learn that the recording has ended. Errors while it runs are counted and reported, and the failed
    /// step is tried again. Returns why the recording could not go on, if it had to end.
    ///
    /// # Errors
    /// The command cannot be executed, or the system provides no descriptors to wait with. Nothing was recorded.
    pub async fn run(&mut self, mut requests: mpsc::Receiver<Request>) -> anyhow::Result<Option<String>> {
        notify::ready();
        self.release_command()?;
        let mut wakers = Wakers::watch(&self.session).context("cannot wait for events")?;
        let mut triggers = Triggers::new(self.session.plan.outputs.triggers, self.begun);
        while let Some(pause) = self.turn(&mut triggers) {
            self.watch_anew(&mut wakers);
            if self.wait(pause, &wakers, &mut requests).await {
                break;
            }
            self.session.set_sleeping(false);
        }
        drop(requests);
        self.session.unfinished.requests.clear();
        self.session.unfinished.ended_early = self.session.must_end();
        Ok(self.session.unfinished.ended_early.clone())
    }

    /// Watches rings that replaced others.
    fn watch_anew(&mut self, wakers: &mut Wakers) {
        let session = &mut self.session;
        if session.may_try(Step::Wake) && std::mem::take(&mut session.kernel.growth.replaced) {
            let anew = Wakers::watch(session);
            match session.errors.note(Step::Wake, anew, monotonic_ns()) {
                Some(anew) => *wakers = anew,
                None => session.kernel.growth.replaced = true,
            }
        }
    }

    fn release_command(&mut self) -> anyhow::Result<()> {
        let Some(held) = self.command.held.take() else { return Ok(()) };
        let program = self.session.plan.targets.command[0].to_string_lossy().into_owned();
        let pid = held.pid;
        // The command waits at its entry point to be hooked.
        let exec = self.session.attaching.held.map(Exec::of);
        self.command.running = Some(held.release().map_err(|source| NotStarted { program, source })?);
        if let Some(exec) = exec {
            self.session.hook_command(pid, exec.and_then(Exec::wait));
        }
        Ok(())
    }

    /// Takes in what has happened and does what is due. Returns how long to wait, or `None` if the recording is over.
    fn turn(&mut self, triggers: &mut Triggers) -> Option<Duration> {
        let session = &mut self.session;
        let mut active = session.cycle() > 0;
        session.schedule.note_last_moments(monotonic_ns());
        // A command may start more targets while it runs.
        let are_over = session.plan.targets.are_named() && session.attaching.targets.named_alive.is_empty();
        let have_ended = are_over && self.command.running.is_none();
        if have_ended || session.schedule.has_ended(monotonic_ns()) || session.must_end().is_some() {
            return None;
        }
        let inuse_bytes = session.recorder.heap.estimated().inuse_bytes;
        if let Some(why) = triggers.due(inuse_bytes, session.target_pids(), Instant::now()) {
            self.files.ask(why);
        }
        session.answer();
        session.write_snapshot(&mut self.files);
        session.take_in_active();
        session.govern();
        session.look_for_slowed();
        self.line.show(|| session.status(self.begun.elapsed()), || session.lost());
        if !active {
            // Set before the last check, so that anything that arrives after it wakes us.
            active = !session.set_sleeping(true) || session.cycle() > 0;
        }
        let now_ns = monotonic_ns();
        let may_wait = session.attaching.events_may_wait();
        let housekeeping_wait = if may_wait { HOUSEKEEPING_WAIT } else { Duration::ZERO };
        let deadlines = [
            session.schedule.until_end(now_ns),
            session.schedule.until_last_moments(now_ns),
            triggers.next_look().map(|at| at.saturating_duration_since(Instant::now())),
            Some(session.until_look()),
            session.until_activity(),
            Some(session.until_look_for_slowed()),
            session.until_answer(),
            Some(session.until_housekeeping(now_ns) + housekeeping_wait),
            session.attaching.until_look(),
            session.attaching.inline.as_ref().is_some_and(InlineHooks::may_wait).then_some(AWAITED_PAUSE),
        ];
        let watches = session.may_try(Step::Wake);
        Some(pause(session.recorder.behind, active || !watches, deadlines))
    }

    /// Waits for something to happen, for at most `pause`. Returns whether the recording should end.
    async fn wait(&mut self, pause: Duration, wakers: &Wakers, requests: &mut mpsc::Receiver<Request>) -> bool {
        let command_runs = self.command.running.is_some();
        let watches = self.session.may_try(Step::Wake);
        let events_wait = self.session.attaching.events_may_wait().then_some(EVENTS_WAIT);
        tokio::select! {
            // Signals come first, however busy the loop is.
            biased;
            number = self.signals.next() => return self.signals.stops(number),
            (exit_code, killed_by) = self.command.ended() => {
                self.signals.command = None;
                self.command.exit_code = exit_code;
                self.session.unfinished.killed_by = killed_by.map(|signal| format!("the command was ended: {signal}"));
            }
            Some(request) = requests.recv() => self.session.unfinished.requests.push_back(request),
            // While a command runs, this signal is passed on to the command.
            _ = self.snapshot_wanted.recv(), if !command_runs => self.files.ask("on request (SIGUSR1)".into()),
            () = self.files.done() => {}
            woken = wakers.next(events_wait), if watches => {
                self.session.errors.note(Step::Wake, woken, monotonic_ns());
            }
            () = tokio::time::sleep(pause) => {}
        }
        false
    }

    /// Makes the last profile, as of now, and removes the probes.
    ///
    /// # Errors
    /// The profile cannot be made. No probe is left behind in that case either.
    pub fn finish(&mut self) -> anyhow::Result<FinishedProfile> {
        let finished = self.session.finish(|what| self.line.say(&what));
        self.line.clear();
        finished
    }

    /// Writes the last profile and the accounting, and shows the closing table. Returns heapbpf's exit status.
    ///
    /// # Errors
    /// A file cannot be written. The other files are still written, because the recording cannot be repeated. Or no
    /// process matched, or nothing was recorded because of another recording, and the recording is no service: then no
    /// file is written.
    pub fn write(&mut self, made: &FinishedProfile) -> anyhow::Result<u8> {
        if let Some(nobody) = self.session.unmatched().filter(|_| !self.session.plan.keeps_running) {
            bail!("{nobody}, and none did so far: no profile is written");
        }
        let may_be_empty = self.session.plan.keeps_running || !self.session.plan.targets.command.is_empty();
        let others = &self.session.attaching.others;
        if !may_be_empty && others.have_hooked && is_unseen(&made.profile) {
            let service = &others.service;
            bail!("nothing was recorded, because another recording counts every target from inside{service}");
        }
        self.report_command();
        let plan = &self.session.plan;
        let outputs = &plan.outputs.files;
        let options = &plan.outputs.write;
        let (files, written) = write_outputs(outputs, &made.profile, options, |it| self.line.writing(it));
        self.line.clear();
        let stats = plan.outputs.stats.as_deref();
        let accounted = stats.map_or(Ok(()), |path| write_stats(path, plan.outputs.force, &made.stats));
        let is_service = plan.keeps_running;
        let said = self.session.unfinished.killed_by.clone();
        let closing = Closing { outputs, stats, files, snapshots: self.files.written(), is_service, said };
        show_report(&made.profile, plan.display, options, closing);
        written?;
        accounted?;
        Ok(self.command.exit_code)
    }

    /// Reports a command that a signal ended, or that runs on.
    fn report_command(&mut self) {
        self.session.unfinished.killed_by.iter().for_each(say);
        if let Some(pid) = self.command.running.as_mut().and_then(Running::still_runs) {
            say(format!("the command is still running (process {pid}); only the recording has ended"));
        }
    }
}

/// Whether nothing was recorded because probes saw no target.
fn is_unseen(profile: &Profile) -> bool {
    // Another recording may have come a moment later than this one.
    let most = |process: &Process| if process.inuse_unknown { 0.01 } else { 0.0 };
    let is_hidden = |process: &Process| process.was_unseen() && process.coverage <= most(process);
    let is_all = !profile.processes.is_empty() && profile.processes.iter().all(is_hidden);
    is_all && profile.rows.is_empty() && profile.idle.is_empty()
}

/// Time until the next turn, unless something wakes the loop earlier. `behind`: the last turn left records in the
/// rings; `active`: it found some; `deadlines`: time until work that must not wait longer.
fn pause(behind: bool, active: bool, deadlines: impl IntoIterator<Item = Option<Duration>>) -> Duration {
    let pause = match (behind, active) {
        (true, _) => Duration::ZERO,
        (false, true) => AWAKE_PAUSE,
        (false, false) => SLEEP_PAUSE,
    };
    deadlines.into_iter().flatten().fold(pause, Duration::min)
}

/// What wakes the loop: rings that fill up, process events of the host, programs that targets execute, and writes to
/// probed files.
struct Wakers {
    always: [AsyncFd<OwnedFd>; 3],
    execs: Option<AsyncFd<OwnedFd>>,
    written: Option<AsyncFd<OwnedFd>>,
}

impl Wakers {
    fn watch(session: &Session) -> std::io::Result<Self> {
        let (kernel, host) = (&session.kernel, session.host.as_raw_fd());
        // SAFETY: `session.host` owns the descriptor and is borrowed until this function returns; `watch` keeps a copy
        // only.
        let host = unsafe { BorrowedFd::borrow_raw(host) };
        let execs = session.attaching.execs.as_ref().map(|execs| watch(execs.as_fd())).transpose()?;
        let written = session.attaching.hooks.written().map(watch).transpose()?;
        Ok(Self {
            always: [watch(kernel.events.as_fd())?, watch(kernel.stacks.as_fd())?, watch(host)?],
            execs,
            written,
        })
    }

    /// Waits until one of them is readable; for process events, `events_wait` more. If this is not waited for, they are
    /// taken in sooner, as in each turn of the loop.
    async fn next(&self, events_wait: Option<Duration>) -> std::io::Result<()> {
        let [events, stacks, host] = &self.always;
        let readable = async |it: &Option<AsyncFd<OwnedFd>>| match it {
            Some(it) => it.readable().await.map(|mut guard| guard.clear_ready()),
            None => std::future::pending().await,
        };
        let process_events = async {
            if let Some(wait) = events_wait {
                host.readable().await?.retain_ready();
                tokio::time::sleep(wait).await;
            }
            // Those that arrived meanwhile are taken in, too.
            host.readable().await?.clear_ready();
            Ok::<(), std::io::Error>(())
        };
        tokio::select! {
            biased;
            done = readable(&self.written) => done?,
            done = readable(&self.execs) => done?,
            guard = events.readable() => guard?.clear_ready(),
            guard = stacks.readable() => guard?.clear_ready(),
            done = process_events => done?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Write as _, pipe};

    use heapbpf_audit::Missing;
    use heapbpf_profile::model::{Criterion, Header};
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn only_a_recording_of_which_probes_see_no_target_is_empty() {
        let missing = vec![Missing::unseen()];
        let hidden = Process { missing, inuse_unknown: true, coverage: 0.0, ..Process::default() };
        let mut profile = Profile::new(Header::new(1, Criterion::Bytes));
        assert!(!is_unseen(&profile), "there are no targets");
        profile.processes.push(hidden.clone());
        assert!(is_unseen(&profile));
        profile.processes.push(Process { coverage: 0.005, ..hidden.clone() });
        assert!(is_unseen(&profile));
        for other in [
            Process { coverage: 0.005, inuse_unknown: false, ..hidden.clone() },
            Process { coverage: 0.5, ..hidden.clone() },
            Process { missing: Vec::new(), ..hidden.clone() },
        ] {
            let mut profile = profile.clone();
            profile.processes.push(other);
            assert!(!is_unseen(&profile), "{:?}", profile.processes);
        }
    }

    #[test]
    fn process_events_that_wait_for_more_delay_nothing_else_and_are_not_forgotten() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let [(events, mut event), (stacks, _stack), (host, mut process)] = [(); 3].map(|()| pipe().unwrap());
            let always = [events.as_fd(), stacks.as_fd(), host.as_fd()].map(|fd| watch(fd).unwrap());
            let wakers = Wakers { always, execs: None, written: None };
            process.write_all(b"a").unwrap();
            wakers.next(None).await.unwrap();
            process.write_all(b"b").unwrap();
            event.write_all(b"c").unwrap();
            wakers.next(Some(Duration::from_secs(3600))).await.unwrap();
            wakers.next(Some(Duration::from_millis(1))).await.unwrap();
        });
    }

    #[test]
    fn a_command_that_is_still_held_never_runs() {
        let dir = tempfile::tempdir().unwrap();
        let witness = dir.path().join("ran");
        let state = CommandState::hold(&["touch".into(), witness.clone().into_os_string()]).unwrap();
        let pid = i32::try_from(state.held.as_ref().unwrap().pid).ok().and_then(Pid::from_raw).unwrap();
        let process = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        drop(state);
        let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&minute)), Ok(1), "it has not ended");
        assert!(!witness.exists());
    }

    #[test]
    fn a_loop_that_is_behind_does_not_wait_and_an_idle_one_sleeps() {
        assert_eq!(pause(true, false, []), Duration::ZERO);
        assert_eq!(pause(false, true, []), AWAKE_PAUSE);
        assert_eq!(pause(false, false, []), SLEEP_PAUSE);
    }

    #[test]
    fn the_nearest_deadline_shortens_the_pause_and_none_lengthens_it() {
        let ms = Duration::from_millis;
        assert_eq!(pause(false, false, [Some(ms(300)), None, Some(ms(20))]), ms(20));
        assert_eq!(pause(false, true, [Some(ms(300))]), AWAKE_PAUSE);
        assert_eq!(pause(false, false, [None, Some(Duration::ZERO)]), Duration::ZERO);
    }
}
