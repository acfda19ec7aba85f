//! Processes go over from probes to inline hooks while they run.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use heapbpf_probes::PlannedSite;
use heapbpf_remote::{Busy, Error as Remote};
use sampler_ebpf::abi::{ProcessKey, Site};

use super::handover::{Boundary, FromProbes, Noted, is_moment};
use super::refused::Refused;
use super::removal::take_out;
use super::{InlineHooks, Prepared, Service, Wanted, memory};
use crate::attach::files::FileKey;
use crate::attach::stop_limit;
use crate::kernel::KernelError;

/// How often a process is stopped in a row to go over from probes, until none of its calls is in progress.
const HANDOVER_STOPS: u32 = 6;
/// How often the live map is read for it, until the blocks that come meanwhile fit into the programs' list.
const HANDOVER_ROUNDS: usize = 3;
/// For how long it runs after the first of these; twice as long after each further one. On a busy host, a thread that is at a probe may get
/// no CPU before it is stopped again.
const HANDOVER_PAUSE: Duration = Duration::from_millis(1);

impl InlineHooks {
    /// Has a process go over that probes have counted so far, while it runs: they sampled blocks of it, and its calls may be in
    /// progress. `sites` are the probes. If it cannot go over, it runs on as before.
    ///
    /// # Errors
    /// It cannot be hooked inline, or not now.
    pub fn go_over(
        &mut self,
        (process, key): (ProcessKey, FileKey),
        file: (&str, &File),
        (wanted, sites): (Wanted<'_>, &[PlannedSite]),
        from: &mut FromProbes<'_>,
        add_sites: &mut dyn FnMut(&[Site]) -> Result<u32, KernelError>,
    ) -> Result<(), Refused> {
        if !self.incarnations.lives(process) {
            return Err(Refused::Replaced);
        }
        let prepared = self.prepare((process.tgid, key), file, wanted, add_sites)?;
        let gone = self.hand_over(process, &prepared, sites, from);
        // What it cannot take back costs the programs no more than an entry in a list.
        let _ = from.handover.list_blocks_of(0);
        match gone {
            Ok(()) => {
                self.counted.add(process, prepared.linked);
                self.lead(process.tgid, &prepared.leads);
                self.decided.insert((process.tgid, key), (process, Service::Inline));
                Ok(())
            }
            Err(Refused::Hook(error @ Remote::Busy { why: Busy::Late, .. })) => {
                log::warn!("process {}: calls may not have been counted for a moment: {error}", process.tgid);
                self.late += 1;
                drop(prepared);
                take_out(process.tgid);
                Err(error.into())
            }
            Err(refused) => {
                prepared.undo();
                Err(refused)
            }
        }
    }

    /// Stops a process until it can go over.
    fn hand_over(
        &mut self,
        process: ProcessKey,
        prepared: &Prepared,
        sites: &[PlannedSite],
        from: &mut FromProbes<'_>,
    ) -> Result<(), Refused> {
        let failed = |source| Refused::Read { what: "the target's memory", source };
        let Prepared { target, plan, mapped, linked, place, functions, .. } = prepared;
        let boundary = Arc::new(Boundary::new(functions, sites, place, plan.draft())?);
        let base = linked.base;
        let seen = from.handover.seen();
        let noted = Arc::new(Mutex::new(Noted::new(memory::open(process.tgid).map_err(failed)?, base)));
        let add = |blocks: &[u64]| lock(&noted).add(blocks);
        let mut listed = None;
        // A later round notes only what is new, so it is shorter.
        for _ in 0..HANDOVER_ROUNDS {
            add(&from.blocks_of(process)?)?;
            listed = seen.blocks();
            if listed.is_some() {
                break;
            }
        }
        add(&listed.ok_or(Refused::Fast)?)?;
        let mut stops = 0;
        loop {
            // All but the last ones are noted before the stop.
            add(&seen.blocks().ok_or(Refused::Fast)?)?;
            self.counted.list(process, base)?;
            let question = (Arc::clone(&boundary), Arc::clone(&noted), Arc::clone(&seen));
            let incarnations = Arc::clone(&self.incarnations);
            let is_now = move |positions: &[(i32, u64)]| {
                let (boundary, noted, seen) = &question;
                incarnations.lives_alone(process)
                    && is_moment(process, seen.as_ref(), boundary, positions, &mut lock(noted))
            };
            stops += 1;
            let error = match target.replace_if(plan, mapped, stop_limit(), is_now) {
                Ok(stopped) => {
                    log::info!("process {}: hooked inline in mid-run, stopped for {:?}", process.tgid, stopped.time);
                    return Ok(());
                }
                Err(error) => error,
            };
            self.counted.unlist(process, base);
            let may_pass = matches!(error, Remote::Busy { why: Busy::NotNow | Busy::Position | Busy::Slow, .. });
            if !may_pass || stops == HANDOVER_STOPS {
                return Err(error.into());
            }
            if !self.incarnations.lives(process) {
                return Err(Refused::Replaced);
            }
            std::thread::sleep(HANDOVER_PAUSE * (1 << (stops - 1)));
        }
    }
}

/// What was noted when a thread panicked is of no use, and of no harm: the process does not go over.
fn lock(noted: &Mutex<Noted>) -> MutexGuard<'_, Noted> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}
