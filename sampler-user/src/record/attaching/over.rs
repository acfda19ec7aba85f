//! Processes that probes count and that go over to inline hooks while they run.

use std::sync::Arc;

use heapbpf_probes::ProbeKind;
use sampler_ebpf::abi::{ProcessKey, Site};

use super::probes::Attaching;
use crate::attach::files::{ExaminedFile, FileKey};
use crate::attach::inline::{FromProbes, Refused, Wanted};
use crate::host::Host;

/// What came of an attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::record) enum GoneOver {
    /// All its allocators are hooked inline.
    Yes,
    /// Not now. Another attempt may succeed; if it is the last one, this is the reason.
    NotYet(String),
    /// It stays on probes, for this reason.
    Never(String),
}

impl Attaching {
    /// Whether processes are hooked inline while they run: where shared links count them.
    pub(in crate::record) const fn hooks_the_hot(&self) -> bool {
        self.shares && self.inline.is_some()
    }

    /// Has a process go over to inline hooks that probes have counted so far.
    pub(in crate::record) fn go_over(
        &mut self,
        host: &mut Host,
        process: ProcessKey,
        from: &mut FromProbes<'_>,
    ) -> GoneOver {
        let pid = process.tgid;
        let keys = self.allocators_of(host, pid);
        if keys.is_empty() {
            return GoneOver::NotYet("its allocator is not known yet".to_owned());
        }
        if self.own.contains(&pid) {
            return GoneOver::Never("it has probes of its own".to_owned());
        }
        // It stays a target whatever its name becomes: its own counts do not ask for that.
        if !self.is_listed_by_all()
            && let Err(error) = self.list(pid)
        {
            return GoneOver::NotYet(error.to_string());
        }
        for key in keys {
            match self.go_over_with(host, process, key, from) {
                Ok(()) => {}
                Err(refused) if refused.may_pass() => return GoneOver::NotYet(refused.to_string()),
                Err(refused) => return GoneOver::Never(refused.to_string()),
            }
        }
        GoneOver::Yes
    }

    fn go_over_with(
        &mut self,
        host: &mut Host,
        process: ProcessKey,
        key: FileKey,
        from: &mut FromProbes<'_>,
    ) -> Result<(), Refused> {
        if self.inline.as_ref().is_none_or(|inline| inline.has_hooked(process, key)) {
            return Ok(());
        }
        let objects = self.objects_above(host, process.tgid, key);
        let Self { inline: Some(inline), hooks, control, standing, .. } = self else { return Ok(()) };
        let Some(ExaminedFile { path, file: Some(file), plan: Ok(plan), .. }) = hooks.files.get(key) else {
            return Ok(());
        };
        let (path, file, sites) = (path.clone(), Arc::clone(file), plan.sites.clone());
        let table = hooks.files.table().clone();
        let mut add_sites = |sites: &[Site]| hooks.add_sites(sites, control);
        let wanted = Wanted { table: &table, sampled: &[], objects: &objects };
        inline.go_over((process, key), (&path, &file), (wanted, &sites), from, &mut add_sites)?;
        standing.note(process.tgid, Ok(()));
        self.note_led(process.tgid);
        Ok(())
    }

    /// A process that was to go over stays with its probes.
    pub(in crate::record) fn stays_on_probes(&mut self, pid: u32, why: &str) {
        self.standing.note(pid, Err(why.to_owned()));
        if self.inline_is_asked {
            self.refuse(format!("process {pid} is not hooked inline: {why}"));
        }
    }

    /// Kinds of the probed instructions in the files that a process maps: of freeing functions if `frees`, of allocating ones
    /// otherwise. None if it has ended.
    pub(in crate::record) fn kinds_in(&self, host: &Host, pid: u32, frees: bool) -> Vec<ProbeKind> {
        self.allocators_of(host, pid).into_iter().flat_map(|key| self.hooks.kinds_in(key, frees)).collect()
    }

    /// Notes children that have the hooks of their parents.
    pub(in crate::record) fn note_heirs(&mut self) {
        for pid in self.inline.iter_mut().flat_map(|inline| inline.look_for_heirs()).collect::<Vec<_>>() {
            self.standing.note(pid, Ok(()));
        }
    }
}
