//! `heapbpf record` and `heapbpf serve`: run a recording and the services that deliver its profiles.

use anyhow::{Context, bail};
use heapbpf_host::limits::raise_for_recording;
use heapbpf_host::privileges::restrict_daemon;
use heapbpf_record::ActiveRecording;
use heapbpf_record::plan::RecordPlan;
use heapbpf_record::progress_line::during;
use heapbpf_record::remarks::say;
use heapbpf_record::requests::RecordingHandle;
use heapbpf_serve::{ServePlan, Services};

/// What to record, and which services to run with it.
pub struct RunPlan {
    /// The recording.
    pub recording: RecordPlan,
    /// Its services.
    pub serving: ServePlan,
}

/// Records, writes the files and shows the table. Returns heapbpf's exit status.
///
/// # Errors
/// A sentence that says what to do. Nothing stays attached, and no half-written file remains.
pub fn run(plan: RunPlan) -> anyhow::Result<u8> {
    raise_for_recording()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime, record(plan))
}

async fn record(plan: RunPlan) -> anyhow::Result<u8> {
    let shows_progress = plan.recording.display.progress;
    let attach = || ActiveRecording::attach(plan.recording);
    let mut recording = if shows_progress { during(|| "attaching".into(), attach) } else { attach() }?;
    restrict_daemon(recording.needs());
    let (handle, requests) = RecordingHandle::new();
    let mut services = Services::start(plan.serving, handle).context("cannot start a thread")?;
    recording.begin();
    if let Some(url) = services.url() {
        say(format!("listening on {url} (web page; /metrics for Prometheus, /debug/pprof/heap for pprof)"));
    }
    let ended_early = recording.run(requests).await?;
    let made = recording.finish()?;
    services.stop_answering(&made);
    let outcome = recording.write(&made);
    services.finish(made);
    if let Some(why) = ended_early {
        bail!("the recording ended early; the profile has what was recorded until then: {why}");
    }
    outcome
}
