//! The life of a recording: probes in, events and requests taken as they come, the profile at the end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};

use super::files::{SnapshotFiles, resolve_outputs, write_outputs};
use super::requests::Recording;
use super::session::Session;
use super::signals::Signals;
use super::status_line::StatusLine;
use super::triggers::Triggers;
use super::{command, notify, show_report, write_stats};
use crate::cli::plan::RecordPlan;
use crate::host::limits;
use crate::serve::Server;
use crate::serve::push::Pusher;

/// Time between looks at the rings while events come: a look costs some 50 µs, whatever it finds, and rings that fill
/// up, forks and new mappings wake us before.
const AWAKE_PAUSE: Duration = Duration::from_millis(40);
/// Time between looks while nothing happens; an event wakes us before.
const SLEEP_PAUSE: Duration = Duration::from_secs(1);

/// Runs a recording.
pub async fn run(mut plan: RecordPlan) -> anyhow::Result<u8> {
    if let Err(error) = limits::raise() {
        log::warn!("cannot raise resource limits: {error}");
    }
    let (listen, push) = (plan.listen.take(), plan.push.take());
    let mut session = Session::new(plan)?;
    let held = match session.plan.targets.command.as_slice() {
        [] => None,
        words => Some(command::hold(words).context("cannot start a process for the command")?),
    };
    session.attaching.start(&session.plan, held.as_ref().map(|held| held.pid), &mut session.host)?;
    session.recorder.set_functions(session.attaching.hooks.functions());
    let first = session.first_target(held.as_ref().map(|held| held.pid));
    let outputs = resolve_outputs(&session.plan, first.as_ref().map(|(comm, pid)| (comm.as_str(), *pid)));
    let mut files = SnapshotFiles::new(&outputs, session.plan.write, session.plan.keep);

    // Ctrl-C belongs to us from here on: probes are in place and a profile is owed.
    let mut signals = Signals::listen(held.as_ref().map(|held| held.pid))?;
    let mut snapshot_wanted = signal(SignalKind::user_defined1())?;
    let (recording, mut requests) = Recording::new();
    let pusher =
        push.map(|push| Pusher::start(push, recording.clone())).transpose().context("cannot start a thread")?;
    let statuses = pusher.as_ref().map(Pusher::statuses).unwrap_or_default();
    let server = listen.map(|listen| Server::start(listen, recording, statuses)).transpose();
    let server = server.context("cannot start a thread")?;
    session.begin();
    let begun = Instant::now();
    eprintln!("heapbpf: recording {}", session.describe_targets());
    if let Some(server) = &server {
        eprintln!("heapbpf: listening on http://{}", server.address());
    }
    notify::ready();
    let (status_sender, mut status) = tokio::sync::oneshot::channel::<ExitStatus>();
    let mut command_running = false;
    if let Some(held) = held {
        let program = session.plan.targets.command[0].to_string_lossy().into_owned();
        let mut child = held.release().with_context(|| format!("cannot execute {program}"))?;
        command_running = true;
        std::thread::spawn(move || child.wait().map(|status| status_sender.send(status)));
    }

    let events_fd = watch(session.events.as_fd())?;
    let stacks_fd = watch(session.stacks.as_fd())?;
    let host_fd = session.host.as_raw_fd();
    // SAFETY: the descriptor is open for as long as the host, which outlives this call.
    let host_fd = watch(unsafe { std::os::fd::BorrowedFd::borrow_raw(host_fd) })?;
    let mut triggers = Triggers::new(session.plan.triggers, begun);
    let mut exit_code = 0;
    let mut line = StatusLine::new(&session.plan);
    loop {
        let mut active = session.cycle()? > 0;
        session.last_moments();
        if session.all_ended() && !command_running || session.has_ended() {
            break;
        }
        if let Some(why) = triggers.due(&session, Instant::now()) {
            files.ask(why);
        }
        session.write_snapshot(&mut files)?;
        session.govern()?;
        line.show(&session, begun.elapsed());
        if !active {
            // Said before the last look: what comes after it wakes us.
            session.attaching.steering.set_sleeping(true)?;
            active = session.cycle()? > 0;
        }
        let pause = match (session.recorder.is_behind(), active) {
            (true, _) => Duration::ZERO,
            (false, true) => AWAKE_PAUSE,
            (false, false) => SLEEP_PAUSE,
        };
        let until_trigger = triggers.next_look().map(|at| at.saturating_duration_since(Instant::now()));
        let pause = [session.until_end(), session.until_last_moments(), until_trigger]
            .into_iter()
            .flatten()
            .fold(pause, Duration::min)
            .min(session.until_look());
        tokio::select! {
            // However much there is to do, signals are heard.
            biased;
            number = signals.next() => if signals.stops(number) {
                break;
            },
            ended = &mut status, if command_running => {
                command_running = false;
                signals.command_ended();
                exit_code = ended.map_or(1, command::exit_code);
            }
            Some(request) = requests.recv() => session.answer(request)?,
            // A command that runs gets its signals itself.
            _ = snapshot_wanted.recv(), if !command_running => files.ask("as asked by a signal".into()),
            () = files.done() => {}
            guard = events_fd.readable() => guard?.clear_ready(),
            guard = stacks_fd.readable() => guard?.clear_ready(),
            guard = host_fd.readable() => guard?.clear_ready(),
            () = tokio::time::sleep(pause) => {}
        }
        session.attaching.steering.set_sleeping(false)?;
    }
    // Who still waits for an answer hears that the recording ends.
    drop(requests);

    let finished = session.finish(|what| line.finishing(what));
    line.clear();
    let made = finished?;
    drop(server);
    // A service has been asked for its profiles; a file of the last one is for who named it.
    let is_wanted = !session.plan.serves || !session.plan.outputs.is_empty();
    let outputs_if_wanted = if is_wanted { &outputs[..] } else { &[] };
    // A file that cannot be written takes nothing else with it: the recording cannot be had again.
    let (closing, written) =
        write_outputs(outputs_if_wanted, &made.profile, &session.plan.write, |it| line.writing(it));
    line.clear();
    let accounted =
        session.plan.stats.as_ref().map_or(Ok(()), |path| write_stats(path, session.plan.force, &made.stats));
    show_report(&made.profile, &session.plan, &outputs, closing, files.written());
    if let Some(pusher) = pusher {
        pusher.finish(made);
    }
    written?;
    accounted?;
    Ok(exit_code)
}

/// Registers a descriptor of our own with the reactor: it must not close the ring's.
fn watch(fd: std::os::fd::BorrowedFd<'_>) -> std::io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned by the result and closed with it, after it has left the reactor.
    unsafe { AsyncFd::register(fd.try_clone_to_owned()?) }.map_err(Into::into)
}
