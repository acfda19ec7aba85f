//! Modules that targets map: which have an allocator to hook, and why the others are not hooked.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Instant;

use heapbpf_attach::files::{ExaminedFile, FileKey};
use heapbpf_attach::hooks::{HookError, Hooked};
use heapbpf_attach::inline::preview::preview;
use heapbpf_attach::inline::{HookRequest, Refused, Service};
use heapbpf_attach::rules;
use heapbpf_audit::Missing;
use heapbpf_host::Host;
use heapbpf_host::breakpoints;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::{ModuleKind, ModuleSource, ModuleTable};
use heapbpf_host::open::Unreadable;
use heapbpf_host::own_memory::give_memory_back;
use heapbpf_inline::abi::MEMFD_NAME;
use heapbpf_kernel::totals;
use heapbpf_probes::{Runtime, Table, examine};
use heapbpf_unwind::mapping::Mapping;
use sampler_ebpf::abi::Site;

use super::probes::{Attaching, Look};
use super::runtimes::{file_of_module, modules_of};

/// Maximum number of remarks about files that could not be hooked.
const MOST_REMARKS: usize = 8;

/// Why a module is not hooked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unhooked {
    /// It has no allocator, or the reason is in the remarks.
    Known,
    /// It can no longer be examined.
    Gone,
    /// It has an allocator, but its process ended before the links were attached.
    TooLate,
    /// Its process is to be hooked inline, which has not been possible yet, or its links are being made.
    Waits,
}

/// Where calls of an allocator may lead; the outermost allocator comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Nesting {
    /// To another file's allocator.
    Wraps,
    /// To the allocator of a file that is loaded earlier, if there is one: a C library's `reallocarray` calls its
    /// `realloc`.
    Interposed,
    /// Nowhere else.
    Ends,
}

/// Whether a file is the code that a heapbpf mapped into a process.
fn is_ours(path: &str) -> bool {
    path.strip_prefix("/memfd:").is_some_and(|name| name.starts_with(MEMFD_NAME))
}

impl Attaching {
    /// Hooks a module in a process, if it has an allocator: inline if that is wanted and possible, otherwise by the
    /// links that serve the process.
    pub(super) fn hook_module_in(&mut self, host: &mut Host, module: ModuleId, pid: u32) -> Result<Hooked, Unhooked> {
        let link = self.link_for(pid);
        let key = self.file_of(host, module);
        if let Some(Look::Announces(key)) = self.modules.get(&module) {
            return self.follow_announcements(host, *key, pid);
        }
        if self.standing.announces_for_lack_of_allocator(pid) {
            // Its allocations are counted already.
            if link.is_none() {
                let _ = self.hook_module(host, module, None);
            }
            return Err(Unhooked::Known);
        }
        match key.map_or(Service::Probes, |key| self.hook_inline(host, pid, key, None)) {
            Service::Waits { .. } => Err(Unhooked::Waits),
            Service::Inline => Ok(Hooked::Already),
            Service::Probes if key.is_some_and(|key| self.would_count_twice(pid, key)) => Err(Unhooked::Known),
            Service::Probes => {
                if let Some(Err(why)) = key.map(|key| self.may_have_own_links(pid, key)) {
                    self.refuse(format!("process {pid} cannot be probed: {why}"));
                    return Err(Unhooked::Known);
                }
                self.hook_module(host, module, link)
            }
        }
    }

    /// Hooks a module by probes, if it has an allocator.
    pub(super) fn hook_module(
        &mut self,
        host: &mut Host,
        module: ModuleId,
        pid: Option<u32>,
    ) -> Result<Hooked, Unhooked> {
        let Some(key) = self.file_of(host, module) else {
            return Err(if self.modules.contains_key(&module) { Unhooked::Known } else { Unhooked::Gone });
        };
        self.avoid_breakpoints(host, module, key, pid);
        match self.link(key, pid) {
            Err(HookError::UnderWay { .. }) => Err(Unhooked::Waits),
            Ok(hooked) => {
                pid.into_iter().for_each(|pid| self.own_links_are_made(pid));
                if hooked == Hooked::Now
                    && let Some(audit) = self.hooks.audited(key).cloned()
                {
                    for Missing { what, why } in &audit.missing {
                        self.refuse(format!("{}: {what}: {why}", audit.file));
                    }
                }
                Ok(hooked)
            }
            Err(error) if error.is_too_late() => {
                if let Some(module) = host.modules().get(module) {
                    let path = module.path.clone();
                    self.refuse(format!("{path}: the process ended before it could be counted"));
                }
                Err(Unhooked::TooLate)
            }
            Err(error) => {
                if matches!(error, HookError::Kernel { .. }) {
                    self.refused_by_kernel = Some(error.to_string());
                }
                let why = error.to_string();
                if self.takes_in() && matches!(error, HookError::MustBeShared { .. }) {
                    log::warn!("not counted: {why}");
                }
                self.refuse(why);
                Err(Unhooked::Known)
            }
        }
    }

    /// Hooks a process inline that waits at its entry point. Probes have counted its libraries' calls so far and
    /// sampled `blocks`.
    pub(crate) fn hook_at_entry(&mut self, host: &mut Host, pid: u32, blocks: &[u64]) {
        self.hook_all_inline(host, pid, Some(blocks));
        let keys = self.allocators_of(host, pid);
        self.has_hooks(host, pid, monotonic_ns());
        let is_inline = |key: &FileKey| self.inline.as_ref().is_some_and(|inline| inline.has_hooked(pid, *key));
        if keys.iter().all(is_inline) {
            self.no_longer_needs_links(pid);
        }
    }

    /// Hooks all allocators of a process inline, as [`hook_inline`](Self::hook_inline) does each.
    pub(super) fn hook_all_inline(&mut self, host: &mut Host, pid: u32, sampled: Option<&[u64]>) {
        for module in modules_of(host, pid) {
            let _ = self.file_of(host, module);
        }
        for key in self.allocators_of(host, pid) {
            self.hook_inline(host, pid, key, sampled);
        }
    }

    /// Notes that a process that should be hooked inline keeps its probes.
    pub(crate) fn stays_probed(&mut self, pid: u32, why: &str) {
        self.standing.note(pid, Err(why.to_owned()));
        if self.inline_is_asked {
            log::info!("process {pid} is not counted from inside: {why}");
            self.refusals.note(pid, why);
        }
    }

    /// Warns about processes that should be hooked inline and are not, once per reason.
    pub(crate) fn log_refusals(&mut self) {
        self.refusals.take().iter().for_each(|line| log::warn!("{line}"));
    }

    /// Handles a process that is not hooked inline: it keeps its probes, if these see anything of it.
    fn is_refused(&mut self, pid: u32, refused: &Refused) {
        if refused.blinds_probes() {
            let since_ns = if self.is_starting { 0 } else { monotonic_ns() };
            self.standing.note(pid, Err(refused.to_string()));
            self.note_unseen(pid, since_ns, "it is not recorded: ", refused);
        } else {
            self.stays_probed(pid, &refused.to_string());
        }
    }

    /// Hooks a process inline, if that is wanted and possible. Otherwise probes follow. Either no links have counted
    /// the process so far, or it is stopped and `sampled` are the blocks that probes sampled.
    pub(super) fn hook_inline(&mut self, host: &mut Host, pid: u32, key: FileKey, sampled: Option<&[u64]>) -> Service {
        let link = self.link_for(pid);
        let is_at_rest = sampled.is_some();
        if self.held == Some(pid) && !is_at_rest {
            return Service::Probes;
        }
        // The recording begins when everything is in place.
        let (is_at_once, is_held) = (self.is_starting || is_at_rest, self.is_held(pid));
        loop {
            let Self { inline: Some(inline), hooks, .. } = self else { return Service::Probes };
            let decided = inline.decided((pid, key), !is_at_rest && hooks.is_served(key, link));
            if let Some(decided) = decided.filter(|decided| !is_at_once || !matches!(decided, Service::Waits { .. })) {
                return decided;
            }
            if let Some(service) = self.unless_outer_are_inline(host, pid, key, sampled) {
                return service;
            }
            let objects = self.objects_above(host, pid, key);
            let Self { inline: Some(inline), hooks, control, programs, .. } = self else { return Service::Probes };
            let Some(ExaminedFile { path, file: Some(file), .. }) = hooks.files.get(key) else {
                return Service::Probes;
            };
            let (path, file) = (path.clone(), Arc::clone(file));
            let table = hooks.files.table.clone();
            let mut add_sites = |sites: &[Site]| hooks.add_sites(sites, control);
            let (service, refused) = match totals::program_of(programs, pid) {
                Ok(Some(process)) => {
                    let sampled = sampled.unwrap_or_default();
                    let wanted = HookRequest { table: &table, sampled, objects: &objects, is_at_once, is_held };
                    inline.attempt((process, key), (&path, &file), wanted, &mut add_sites)
                }
                Ok(None) => (Service::Probes, Some(Refused::Ended)),
                Err(error) => (Service::Probes, Some(error.into())),
            };
            if service == Service::Inline {
                self.standing.note(pid, Ok(()));
                self.hooks.hooked_inline(key, self.programs.kind);
                self.note_led(pid);
            }
            if let Some(refused) = refused {
                self.is_refused(pid, &refused);
            }
            match service {
                Service::Waits { until, .. } if is_at_once => {
                    std::thread::sleep(until.saturating_duration_since(Instant::now()));
                }
                service => return service,
            }
        }
    }

    /// The files with allocators that a process has mapped. Those whose calls may lead to other allocators come first:
    /// as long as probes count such calls, they must count the inner calls, too.
    pub(super) fn allocators_of(&self, host: &Host, pid: u32) -> Vec<FileKey> {
        let modules = modules_of(host, pid);
        let keys: BTreeSet<FileKey> =
            modules.iter().filter_map(|module| self.modules.get(module).and_then(Look::file)).collect();
        let mut keys = Vec::from_iter(keys);
        keys.sort_by_key(|key| self.nesting(*key));
        keys
    }

    /// Where calls of a file's allocator may lead.
    fn nesting(&self, key: FileKey) -> Nesting {
        match self.hooks.files.plan(key) {
            Some(plan) if plan.may_call_out => Nesting::Wraps,
            Some(plan) if plan.may_be_interposed => Nesting::Interposed,
            _ => Nesting::Ends,
        }
    }

    /// How this allocator is counted if another one in the process, whose calls may lead to it, is not hooked inline.
    fn unless_outer_are_inline(
        &mut self,
        host: &mut Host,
        pid: u32,
        key: FileKey,
        sampled: Option<&[u64]>,
    ) -> Option<Service> {
        let nesting = self.nesting(key);
        let mapped = self.allocators_of(host, pid);
        let outer: Vec<FileKey> = mapped.iter().copied().take_while(|key| self.nesting(*key) < nesting).collect();
        let mut services = outer.into_iter().map(|outer| self.hook_inline(host, pid, outer, sampled));
        if let Some(service) = services.find(|service| *service != Service::Inline) {
            return Some(service);
        }
        // After an exec, a preloaded allocator is mapped before the C library, whose earlier links keep counting. A
        // process that waits at its entry point has mapped everything.
        let is_awaited = |key: FileKey| self.nesting(key) == Nesting::Interposed && !mapped.contains(&key);
        let awaits =
            sampled.is_none() && nesting == Nesting::Ends && self.hooks.served(self.link_for(pid)).any(is_awaited);
        awaits.then_some(Service::Probes)
    }

    /// Whether probes in a file would count calls that a process's inline hooks count, too. If so, it is reported.
    /// (Links that serve all processes are made all the same.)
    fn would_count_twice(&mut self, pid: u32, key: FileKey) -> bool {
        // Finding out whether it is hooked inline asks the kernel, and few files call others, so the nesting is checked
        // first.
        if self.nesting(key) != Nesting::Wraps || !self.inline.as_ref().is_some_and(|inline| inline.counts(pid)) {
            return false;
        }
        let file = self.hooks.files.path(key).unwrap_or_default();
        let is_hooked = self.link_for(pid).is_none();
        let outcome = if is_hooked { "such calls count twice" } else { "it is not counted itself" };
        self.refuse(format!(
            "process {pid}: {file} may call another allocator, which is counted from inside: {outcome}"
        ));
        !is_hooked
    }

    /// Whether every allocator of a process could be hooked inline. Does not touch the process.
    pub(crate) fn could_be_hooked_inline(&self, host: &Host, pid: u32) -> bool {
        let keys = self.allocators_of(host, pid);
        let can_be = |key: &FileKey| {
            let Some(ExaminedFile { path, file: Some(file), .. }) = self.hooks.files.get(*key) else { return false };
            preview(pid, (path, file), &self.hooks.files.table).is_ok()
        };
        !keys.is_empty() && keys.iter().all(can_be)
    }

    /// Plans a file that is not hooked yet so that it avoids instructions with a debugger's breakpoints: those in the
    /// process that it is hooked for, or in any process.
    fn avoid_breakpoints(&mut self, host: &Host, module: ModuleId, key: FileKey, pid: Option<u32>) {
        /// Maximum number of times that a file is planned again because the new sites have breakpoints, too.
        const ROUNDS: usize = 4;
        if self.hooks.has_sites(key) {
            return;
        }
        let users = host.processes().iter().filter(|process| pid.is_none_or(|pid| process.id.pid == pid));
        let users: Vec<(u32, Vec<Mapping>)> = users
            .map(|process| (process.id.pid, process.space.current().iter().filter(|map| map.module == module).copied()))
            .map(|(pid, mappings)| (pid, mappings.collect::<Vec<_>>()))
            .filter(|(_, mappings)| !mappings.is_empty())
            .collect();
        let mut avoided = BTreeSet::new();
        for _ in 0..ROUNDS {
            let Some(ExaminedFile { path, file: Some(file), plan: Ok(plan), .. }) = self.hooks.files.get(key) else {
                return;
            };
            let sites: Vec<u64> = plan.sites.iter().map(|site| site.site.offset).collect();
            let before = avoided.len();
            for (pid, mappings) in &users {
                avoided.extend(breakpoints::among(*pid, mappings, file, sites.iter().copied()));
            }
            if avoided.len() == before {
                return;
            }
            log::info!("{path}: avoiding {} breakpoints of a debugger", avoided.len());
            self.hooks.files.avoid(key, &avoided);
        }
    }

    /// The file of a module that has an allocator.
    pub(super) fn file_of(&mut self, host: &mut Host, module: ModuleId) -> Option<FileKey> {
        if let Some(known) = self.modules.get(&module) {
            return known.file();
        }
        let look = self.look_at(host, module).ok()?;
        let key = look.file();
        self.keep_look(module, look);
        key
    }

    /// Keeps the result of examining a module.
    pub(super) fn keep_look(&mut self, module: ModuleId, look: Look) {
        if self.sorts_mappings() {
            self.new_code.push(module);
        }
        self.modules.insert(module, look);
    }

    /// Whether mappings that programs make themselves are told from those of allocators by the stacks of samples:
    /// nothing shows which calls are in flight that inline hooks count.
    pub(crate) const fn sorts_mappings(&self) -> bool {
        self.hooks.mappings.is_some() && self.inline.is_some()
    }

    /// The modules that were examined since the last call, each with the code ranges (file offsets) in which everything
    /// runs for an allocator, and those that must be examined again, with `None`.
    pub(crate) fn take_new_code(&mut self, host: &mut Host) -> Vec<(ModuleId, Option<Vec<[u64; 2]>>)> {
        let new = std::mem::take(&mut self.new_code).into_iter();
        let mut code =
            |module: ModuleId| self.modules.contains_key(&module).then(|| self.code_of_allocators(host, module));
        new.map(|module| (module, code(module))).collect()
    }

    fn code_of_allocators(&self, host: &mut Host, module: ModuleId) -> Vec<[u64; 2]> {
        let key = self.modules.get(&module).and_then(Look::file);
        let plan = key.and_then(|key| self.hooks.files.plan(key));
        let mut code = plan.map_or_else(Vec::new, |plan| plan.own.clone());
        if self.counts_objects_inside
            && self.runtime_of(module) == Some(Runtime::Python)
            && let Some((path, file)) = file_of_module(host, module)
        {
            let rules = rules::of_this_kernel(Some(&self.programs));
            let objects = examine(&*file, &path, &rules, &Table::default().with_objects(true));
            code.extend(objects.map_or_else(|_| Vec::new(), |plan| plan.own));
        }
        code
    }

    /// Examines many modules at once, before they are hooked one by one.
    pub(super) fn plan_all(&mut self, host: &mut Host, modules: &[ModuleId]) {
        let mut files = Vec::new();
        for &module in modules {
            let file = host.modules().get(module).filter(|module| module.kind == ModuleKind::File);
            let Some(path) = file.map(|module| module.path.to_string()) else { continue };
            if let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) {
                files.push((path, file));
            }
        }
        if self.hooks.files.examine_all(files) {
            give_memory_back();
        }
    }

    /// Forgets modules that the host has forgotten, and releases their files.
    pub(crate) fn forget_modules(&mut self, known: &ModuleTable) {
        let is_known = |module: &ModuleId| known.get(*module).is_some();
        self.modules.retain(|module, _| is_known(module));
        self.interpreters.known.retain(|module, _| is_known(module));
        self.objects.known.retain(|module, _| is_known(module));
        self.jvms.retain(|module, _| is_known(module));
        self.go.known.retain(|module, _| is_known(module));
        let mapped: HashSet<FileKey> = self.modules.values().filter_map(Look::probed_file).collect();
        let is_custom = |path: &str| self.custom.iter().any(|custom| custom.is_for(path));
        let stays = |key: &FileKey, path: &str| mapped.contains(key) || is_custom(path);
        let gone = self.hooks.forget(stays, &mut self.control);
        let sites = self.inline.iter_mut().flat_map(|inline| inline.forget_files(&gone));
        sites.for_each(|first| self.control.remove_file(first));
    }

    /// Takes the probes out of files that are being overwritten in place: the kernel would put them into other code. A
    /// process that maps such a file from now on gets it examined again; processes that had it mapped are no longer
    /// counted by probes.
    pub(super) fn let_go_of_written(&mut self, host: &Host) {
        let written = self.hooks.forget_written(&mut self.control);
        if written.is_empty() {
            return;
        }
        let is_of = |look: &Look| look.probed_file().is_some_and(|key| written.iter().any(|(of, _)| *of == key));
        let gone: HashSet<ModuleId> =
            self.modules.extract_if(|_, look| is_of(look)).map(|(module, _)| module).collect();
        if self.sorts_mappings() {
            self.new_code.extend(&gone);
        }
        let now_ns = monotonic_ns();
        let had_mapped = host
            .processes()
            .iter()
            .filter(|process| process.space.current().iter().any(|mapping| gone.contains(&mapping.module)));
        for pid in had_mapped.map(|process| process.id.pid) {
            if !self.inline.as_ref().is_some_and(|inline| inline.counts(pid)) {
                self.targets.give_up(pid, now_ns);
            }
        }
        for (_, path) in written {
            self.refuse(format!("{path}: it was overwritten while it was probed; its probes were removed"));
        }
    }

    /// Whether another thread is examining a module. Starts that for a new file, so that the recording goes on in the
    /// meantime.
    pub(super) fn is_examined_aside(&mut self, host: &mut Host, module: ModuleId) -> bool {
        // A thread that begins now might keep rights that the recording drops.
        if self.is_starting || self.modules.contains_key(&module) {
            return false;
        }
        let file = host.modules().get(module).filter(|module| module.kind == ModuleKind::File);
        let path = file.map(|module| module.path.clone()).filter(|path| !is_ours(path));
        let Some(path) = path else { return false };
        let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) else { return false };
        self.hooks.files.examine_aside(&path, &file, self.holds_members())
    }

    /// Examines a module. `Err`: not possible now, but perhaps later.
    pub(super) fn look_at(&mut self, host: &mut Host, module: ModuleId) -> Result<Look, ()> {
        let (kind, path) = host.modules().get(module).map(|module| (module.kind, module.path.clone())).ok_or(())?;
        if kind != ModuleKind::File || is_ours(&path) {
            return Ok(Look::Nothing);
        }
        let file = match host.modules_mut().source(module) {
            Ok(ModuleSource::File(file)) => file,
            Ok(ModuleSource::Memory(_)) | Err(Unreadable::NoFile | Unreadable::NotElf) => return Ok(Look::Nothing),
            Err(reason @ (Unreadable::Gone | Unreadable::Replaced)) => {
                log::debug!("{path}: {reason}");
                return Err(());
            }
            Err(reason) => return Ok(self.refused(&path, &reason.to_string())),
        };
        match self.hooks.files.examine(&path, &file) {
            Ok((key, true)) if self.hooks.files.announces(key) => Ok(Look::Announces(key)),
            Ok((key, true)) => Ok(Look::Hook(key)),
            Ok((key, false)) => Ok(match self.hooks.files.refusal(key).map(ToString::to_string) {
                Some(reason) => self.refused(&path, &reason),
                None => self.hooks.files.runtime(key).map_or(Look::Nothing, Look::Runtime),
            }),
            Err(error) => {
                self.refuse(error.to_string());
                Err(())
            }
        }
    }

    pub(super) fn refused(&mut self, path: &str, reason: &str) -> Look {
        self.refuse(format!("{path}: {reason}"));
        Look::Refused(Missing::new(path, reason))
    }

    pub(super) fn refuse(&mut self, reason: String) {
        log::info!("{reason}");
        if self.refused.len() < MOST_REMARKS {
            self.refused.insert(reason);
        }
    }
}
