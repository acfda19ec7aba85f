//! Profiles of a recording in this process.

use std::sync::Arc;

use anyhow::{Context, anyhow};
use heapbpf_host::limits::raise_for_recording;
use heapbpf_host::privileges::{Needs, restrict_daemon};
use heapbpf_profile::Row;
use heapbpf_record::ActiveRecording;
use heapbpf_record::plan::{RecordPlan, Targets};
use heapbpf_record::requests::{Detail, Often, RecordingHandle, Unanswered};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::Look;
use super::feed::{Feed, Got, NoProfile};
use super::screen::show;
use super::standard_streams::Redirected;
use super::terminal::{Leaves, Terminal};

/// Records, and shows the recording until the user quits. Returns the exit status.
///
/// # Errors
/// The recording cannot be made. No probe stays attached.
pub fn live(plan: RecordPlan, look: Look) -> anyhow::Result<u8> {
    raise_for_recording()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, record(plan, look))
}

async fn record(plan: RecordPlan, look: Look) -> anyhow::Result<u8> {
    let source = source(&plan.targets);
    let terminal = Terminal::open().context("the terminal cannot be used")?;
    // A command's standard streams lead to /dev/null from the start.
    let nowhere = if plan.targets.command.is_empty() { None } else { Some(Redirected::nowhere()?) };
    let attached = ActiveRecording::attach(plan);
    drop(nowhere);
    let mut recording = attached?;
    restrict_daemon(Needs { writes_files: true, ..recording.needs() });
    let mut terminal_died = signal(SignalKind::hangup())?;
    let (handle, requests) = RecordingHandle::new();
    recording.begin();
    let said = Redirected::said_to_memory().context("cannot keep messages")?;
    let leaves = Leaves(Arc::clone(&terminal));
    terminal.enter().context("the terminal cannot be used")?;
    let waiting = Arc::clone(&terminal);
    let feed = Arc::new(Feed::notifying(move || waiting.wake()));
    let left = start(&terminal, &feed, handle, source, look)?;
    let ended = tokio::select! {
        ended = recording.run(requests) => ended,
        shown = left => shown.map_err(|_| anyhow!("an internal error ended the screen")).and_then(|shown| {
            shown.map(|()| None).context("the terminal can no longer be used")
        }),
        _ = terminal_died.recv() => Ok(None),
    };
    feed.close();
    // Detach the probes first: the terminal may never accept another byte.
    let finished = recording.finish();
    drop(leaves);
    drop(said);
    if let Some(why) = ended? {
        return Err(anyhow!("the recording ended early: {why}"));
    }
    finished?;
    Ok(0)
}

/// Starts the thread that gets profiles and the one that shows them. The receiver gets the result of the latter.
fn start(
    terminal: &Arc<Terminal>,
    feed: &Arc<Feed>,
    handle: RecordingHandle,
    source: String,
    look: Look,
) -> anyhow::Result<oneshot::Receiver<std::io::Result<()>>> {
    let filled = Arc::clone(feed);
    let fill = move || filled.fill(look.refresh, |detail| profile(&handle, detail, filled.old_rows()));
    std::thread::Builder::new().name("profiles-shown".into()).spawn(fill).context("cannot start a thread")?;
    let (leave, left) = oneshot::channel();
    let (terminal, feed) = (Arc::clone(terminal), Arc::clone(feed));
    let screen = move || drop(leave.send(show(&terminal, &feed, source, look)));
    std::thread::Builder::new().name("screen".into()).spawn(screen).context("cannot start a thread")?;
    Ok(left)
}

fn profile(handle: &RecordingHandle, detail: Detail, old: Vec<Row>) -> Result<Got, NoProfile> {
    // Totals come with resident memory.
    let often = (detail != Detail::Totals).then_some(Often { rows: old });
    match handle.profile_blocking(detail, often) {
        Ok(made) => Ok(Got { profile: Arc::new(made.profile), cost: made.cpu }),
        Err(Unanswered::Ended) => Err(NoProfile::Ended),
        Err(error) => Err(NoProfile::Later(error.to_string())),
    }
}

/// Title of the screen.
fn source(targets: &Targets) -> String {
    if let Some(program) = targets.command.first() {
        return program.to_string_lossy().into_owned();
    }
    match (targets.are_all(), targets.running.as_slice()) {
        (true, _) => "all processes".into(),
        (_, [one]) => format!("{} ({})", one.comm, one.pid),
        (_, some) => format!("{} processes", some.len()),
    }
}
