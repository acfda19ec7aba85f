//! Puts probes where targets allocate: at the start, and as processes fork, exec and map new files.

mod looks;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::sync::Arc;

use anyhow::bail;
use sampler_ebpf::abi::ProcessKey;

use super::targets::{Missed, TargetSet, Tracked};
use crate::attach::arch::Machine;
use crate::attach::audit::FileAudit;
use crate::attach::hooks::{FileKey, HookError, Hooked, Hooks, Served};
use crate::attach::{CustomAllocator, KernelRules, Missing, Table};
use crate::cli::plan::{PlanError, RecordPlan};
use crate::host::Host;
use crate::host::events::monotonic_ns;
use crate::host::limits::Limits;
use crate::host::lives::{HostChange, Life as HostLife, LifeId};
use crate::host::mappings::{MAX_MAPPINGS, ModuleId};
use crate::host::process::Target;
use crate::kernel::mappings::MappingProbes;
use crate::kernel::programs::Programs;
use crate::kernel::steering::Steering;

/// Most remarks about files that could not be hooked.
const MOST_REMARKS: usize = 8;

/// Changes of the host that there is room for while nothing much happens.
const ROOM_FOR_CHANGES: usize = 256;

/// What the profile says of `--mmap`.
const MAPPINGS_NOTE: &str = "anonymous mappings are included (functions mmap, mremap and brk), but for those that an \
                             allocator makes for itself: no byte counts twice";

/// What a module was found to be.
enum Look {
    /// A file to hook.
    Hook(FileKey),
    /// Nothing is missed there.
    Nothing,
    /// Not hooked, and why.
    Refused(Missing),
}

impl Look {
    fn file(&self) -> Option<FileKey> {
        if let Self::Hook(key) = self { Some(*key) } else { None }
    }
}

/// Why a module is not hooked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unhooked {
    /// It has no allocator, or what it lacks is told.
    Known,
    /// It could not be looked at any more.
    Gone,
    /// It has an allocator, but its process ended before the links.
    TooLate,
}

/// What is hooked in a process, and what is not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Audit {
    /// Allocators found, hooked in time or not.
    pub allocators: Vec<String>,
    /// Hooked files that it maps.
    pub files: Vec<Arc<FileAudit>>,
    /// What else of its files is not hooked, and why.
    pub missing: Vec<Missing>,
}

/// The probes of a recording.
pub struct Attaching {
    /// Programs that they run.
    pub programs: Programs,
    /// What the programs are told.
    pub steering: Steering,
    /// Hooked files.
    pub hooks: Hooks,
    /// Who is profiled.
    pub targets: TargetSet,
    /// Probes are for every process that maps a file, not for named ones.
    global: bool,
    modules: HashMap<ModuleId, Look>,
    refused: BTreeSet<String>,
    /// Why the kernel refused links to a file that has an allocator.
    refused_by_kernel: Option<String>,
    custom: Vec<CustomAllocator>,
    rules: Vec<Target>,
    missed: Missed,
    /// Targets that replaced their program: the `exec_id` of the life that ended last.
    last_exec: HashMap<u32, u32>,
    changes: Vec<HostChange>,
    until_ns: u64,
}

impl Attaching {
    /// Nothing is attached yet.
    pub fn new(plan: &RecordPlan, programs: Programs, steering: Steering, mappings: Option<MappingProbes>) -> Self {
        let version = Limits::read().version.map_or((0, 0), |version| (version.major.into(), version.minor.into()));
        // Built for another machine, nothing of the kernel side would have loaded.
        let rules = KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), version);
        Self {
            programs,
            steering,
            hooks: Hooks::new(rules, Table::new(&plan.targets.allocators), plan.live).with_mappings(mappings),
            targets: TargetSet::default(),
            global: !plan.targets.are_named(),
            modules: HashMap::new(),
            refused: BTreeSet::new(),
            refused_by_kernel: None,
            custom: plan.targets.allocators.clone(),
            rules: plan.targets.rules.clone(),
            missed: Missed::default(),
            last_exec: HashMap::new(),
            changes: Vec::new(),
            until_ns: u64::MAX,
        }
    }

    /// From that time on (CLOCK_MONOTONIC) nothing is hooked or released any more: that takes milliseconds each time.
    pub fn set_end(&mut self, until_ns: u64) {
        self.until_ns = until_ns;
    }

    fn is_over(&self) -> bool {
        monotonic_ns() >= self.until_ns
    }

    /// Attaches to everything that is there.
    ///
    /// # Errors
    /// No named target has an allocator that can be hooked, or a custom one is not as described; nothing stays attached
    /// then.
    pub fn start(&mut self, plan: &RecordPlan, command: Option<u32>, host: &mut Host) -> anyhow::Result<()> {
        let now = monotonic_ns();
        let named = plan.targets.running.iter().map(|process| process.pid);
        for pid in named.chain(command) {
            self.targets.begin(pid, now);
            if !self.global || command == Some(pid) {
                self.targets.awaited.insert(pid);
                self.steering.add_target(pid)?;
            }
        }
        host.lives_mut().drain_changes(&mut self.changes);
        self.changes.clear();
        if self.global {
            let modules: Vec<ModuleId> = host.modules().iter().map(|(id, _)| id).collect();
            self.plan_all(host, &modules);
            for module in modules {
                // What is not hooked is in the audit.
                let _ = self.hook_module(host, module, None);
            }
        } else {
            self.expect_users(plan, host);
        }
        let mut without = Vec::new();
        for process in &plan.targets.running {
            let modules = modules_of(host, process.pid);
            let mut hooked = false;
            for module in modules {
                hooked |= self.hook_module(host, module, (!self.global).then_some(process.pid)).is_ok();
            }
            self.check_custom()?;
            if hooked {
                self.targets.hooked(process.pid, 0, 0);
            } else if !self.global {
                without.push(self.no_allocator(process.pid, &process.comm));
            }
        }
        // One that cannot be hooked does not stop the others.
        if !without.is_empty() && without.len() == plan.targets.running.len() && command.is_none() {
            bail!(without.swap_remove(0));
        }
        without.into_iter().for_each(|reason| self.refuse(reason));
        if let Some(pid) = command {
            self.hook_before_exec(plan, pid)?;
        }
        self.check_custom()?;
        Ok(self.hooks.follow_mappings()?)
    }

    /// A custom allocator that lacks a function in a file that is there already is a mistake of whoever described it.
    fn check_custom(&self) -> anyhow::Result<()> {
        match self.hooks.misdescribed() {
            Some(reason) => Err(PlanError::Usage(format!("--alloc: {reason}")).into()),
            None => Ok(()),
        }
    }

    /// Attaches to the allocators that a command will most likely use, before it has mapped them.
    fn hook_before_exec(&mut self, plan: &RecordPlan, pid: u32) -> anyhow::Result<()> {
        for path in crate::attach::libraries::expected(&plan.targets.command) {
            let Ok(file) = File::open(&path) else { continue };
            let path = path.to_string_lossy().into_owned();
            if let Ok((key, true)) = self.hooks.look_at(&path, &Arc::new(file)) {
                self.hooks.hook(key, Some(pid), &self.programs, &mut self.steering)?;
            }
        }
        Ok(())
    }

    fn no_allocator(&self, pid: u32, comm: &str) -> String {
        if let Some(reason) = &self.refused_by_kernel {
            return format!("process {pid} ({comm}) cannot be profiled: {reason}");
        }
        let reasons = if self.refused.is_empty() {
            String::new()
        } else {
            format!(" ({})", self.refused.iter().take(3).cloned().collect::<Vec<_>>().join("; "))
        };
        format!(
            "process {pid} ({comm}) has no allocator that heapbpf knows: neither its program nor its libraries define \
             malloc{reasons}; looked for {}; name another one with \
             --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
            self.hooks.looked_for()
        )
    }

    /// Hooks a module if it has an allocator.
    fn hook_module(&mut self, host: &mut Host, module: ModuleId, pid: Option<u32>) -> Result<Hooked, Unhooked> {
        let Some(key) = self.file_of(host, module) else {
            return Err(if self.modules.contains_key(&module) { Unhooked::Known } else { Unhooked::Gone });
        };
        match self.hooks.hook(key, pid, &self.programs, &mut self.steering) {
            Ok(hooked) => {
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
                    self.refuse(format!("{path}: in a process that ended before it could be hooked"));
                }
                Err(Unhooked::TooLate)
            }
            Err(error) => {
                if matches!(error, HookError::Kernel { .. }) {
                    self.refused_by_kernel = Some(error.to_string());
                }
                self.refuse(error.to_string());
                Err(Unhooked::Known)
            }
        }
    }

    /// Attaches to what has been mapped since the last call. Whether there was something new to hook.
    pub fn follow(&mut self, host: &mut Host) -> bool {
        let before = self.hooks.hooked_files();
        let mut changes = std::mem::take(&mut self.changes);
        host.drain_changes(&mut changes);
        for change in changes.drain(..) {
            match change {
                HostChange::Mapped { .. } if self.is_over() => {}
                HostChange::Mapped { life, module, .. } => {
                    let pid = life.pid;
                    if !self.global && !self.targets.awaited.contains(&pid) {
                        // Of a target that has ended meanwhile there is nothing to hook; what it had is told.
                        if self.targets.tracked.contains_key(&pid)
                            && !self.modules.contains_key(&module)
                            && let Ok(look) = self.look_at(host, module)
                        {
                            self.modules.insert(module, look);
                        }
                        continue;
                    }
                    let had_ns = mapped_since(host, pid, module);
                    if let Some(life) = host.lives().get(life) {
                        self.targets.lives_since(pid, life.since_ns);
                    }
                    match self.hook_module(host, module, (!self.global).then_some(pid)) {
                        Ok(Hooked::Now) => {
                            self.targets.hooked(pid, had_ns, monotonic_ns());
                            self.too_late_for(host, life);
                        }
                        // What was hooked before it was mapped here leaves no gap. But another process may have
                        // mapped the file just after this one, or have been heard of first.
                        Ok(Hooked::Already) => {
                            let since_ns = self.hooked_since(module).filter(|_| self.global).unwrap_or(0);
                            self.targets.hooked(pid, had_ns, had_ns.max(since_ns));
                            if since_ns > had_ns {
                                self.too_late_for(host, life);
                            } else if self.global {
                                self.missed.forget(pid);
                            }
                        }
                        // Its C library may be hooked, but this is what it allocates with.
                        Err(Unhooked::TooLate) => self.note_missed(host, life),
                        Err(Unhooked::Gone) => self.too_late_for(host, life),
                        Err(Unhooked::Known) => {}
                    }
                }
                HostChange::Started(life) if self.global => {
                    let since = host.lives().get(life).map_or(0, |life| life.since_ns);
                    if !self.targets.is_running(life.pid) {
                        self.targets.begin(life.pid, since);
                    }
                }
                HostChange::Ended(life) if self.global => {
                    self.note_late(host, life);
                    self.targets.end(life.pid, monotonic_ns());
                }
                _ => {}
            }
        }
        changes.shrink_to(ROOM_FOR_CHANGES);
        self.changes = changes;
        self.hooks.hooked_files() != before
    }

    /// When the file that a module is of was first hooked.
    fn hooked_since(&self, module: ModuleId) -> Option<u64> {
        self.hooks.hooked_since(self.modules.get(&module)?.file()?)
    }

    /// A process ended that was hooked late: all of it was missed, unless figures of it come yet.
    fn note_late(&mut self, host: &mut Host, life: LifeId) {
        if self.targets.tracked.get(&life.pid).is_some_and(|it| it.hooked && it.uncovered_ns > 0) {
            self.note_missed(host, life);
        }
    }

    fn note_missed(&mut self, host: &mut Host, life: LifeId) {
        // What an exec maps may be reported before the exec: then the life is the next one.
        let last = host.lives().at(life.pid, u64::MAX).map(|last| last.id);
        for life in [Some(life), last].into_iter().flatten() {
            let Some(info) = host.describe(life) else { continue };
            if !self.global || self.rules.iter().any(|rule| rule.matches(&info)) {
                self.missed.note(life.pid, info.comm.clone());
            }
        }
    }

    /// Figures of a process have come.
    pub fn has_figures(&mut self, process: ProcessKey) {
        if self.is_last_life(process) {
            self.missed.forget(process.tgid);
        }
    }

    /// A target replaced its program: what it was till then has ended.
    pub fn replaced(&mut self, ended: ProcessKey) {
        self.last_exec.insert(ended.tgid, ended.exec_id);
    }

    /// Whether a process has not replaced its program since.
    pub fn is_last_life(&self, process: ProcessKey) -> bool {
        self.last_exec.get(&process.tgid).is_none_or(|ended| *ended < process.exec_id)
    }

    /// Forgets processes that ended before that time.
    pub fn forget_ended(&mut self, before_ns: u64) {
        self.targets.forget(before_ns);
        self.last_exec.retain(|pid, _| self.targets.tracked.contains_key(pid));
        self.last_exec.shrink_to(2 * self.last_exec.len());
    }

    /// Takes note of a target that ended before it could be hooked.
    fn too_late_for(&mut self, host: &mut Host, life: LifeId) {
        // Another allocator of its own may have been hooked all the time.
        let covered = self.targets.tracked.get(&life.pid).is_some_and(|it| it.hooked && it.uncovered_ns == 0);
        if covered || is_alive(life.pid) {
            return;
        }
        self.note_missed(host, life);
    }

    /// A named target forked: its child gets links of its own.
    pub fn forked(&mut self, parent: u32, child: u32, time_ns: u64, host: &Host) {
        if self.global {
            return;
        }
        self.targets.begin(child, time_ns);
        self.targets.awaited.insert(child);
        // The child has what its parent has; what it maps later is followed like everything else.
        let mut modules = modules_of(host, child);
        modules.extend(modules_of(host, parent));
        modules.sort_unstable();
        modules.dedup();
        for module in modules {
            let Some(key) = self.modules.get(&module).and_then(Look::file) else { continue };
            if self.is_over() {
                return;
            }
            if self.hooks.hook(key, Some(child), &self.programs, &mut self.steering).is_ok() {
                self.targets.hooked(child, time_ns, monotonic_ns());
            }
        }
    }

    /// Probes were away for so long: that much of the targets' lives is not covered.
    pub fn uncovered(&mut self, ns: u64, now_ns: u64) {
        for tracked in self.targets.tracked.values_mut().filter(|tracked| tracked.until_ns.is_none()) {
            tracked.uncovered_ns += ns.min(now_ns.saturating_sub(tracked.since_ns));
        }
    }

    /// A process ended.
    pub fn ended(&mut self, pid: u32, now_ns: u64, host: &Host) {
        let awaited = self.targets.awaited.contains(&pid);
        let late = |tracked: &Tracked| !tracked.hooked || tracked.uncovered_ns > 0;
        if !self.global && awaited && self.targets.tracked.get(&pid).is_some_and(late) {
            let life = host.lives().at(pid, now_ns);
            self.missed.note(pid, life.map_or_else(|| "".into(), |life| life.info.comm.clone()));
        }
        self.targets.end(pid, now_ns);
        // All are released soon.
        if !self.is_over() {
            self.hooks.release(pid);
        }
    }

    /// Ends of targets that were not reported (their record was lost, or they never allocated) are found here.
    pub fn check_awaited(&mut self, now_ns: u64, host: &Host) {
        let gone: Vec<u32> = self.targets.awaited.iter().copied().filter(|pid| !is_alive(*pid)).collect();
        for pid in gone {
            self.steering.remove_target(pid);
            self.ended(pid, now_ns, host);
        }
    }

    /// What is hooked in a process, as it is now or was at its end.
    pub fn audit(&self, life: &HostLife) -> Audit {
        let modules: BTreeSet<ModuleId> = life.space.current().iter().map(|mapping| mapping.module).collect();
        let mut audit = Audit::default();
        for look in modules.iter().filter_map(|module| self.modules.get(module)) {
            match look {
                Look::Hook(key) => {
                    let found = self.hooks.planned(*key).map(|planned| &planned.allocator);
                    audit.allocators.extend(found.filter(|name| !audit.allocators.contains(name)).cloned());
                    audit.files.extend(self.hooks.audited(*key).cloned());
                }
                Look::Nothing => {}
                Look::Refused(missing) => audit.missing.push(missing.clone()),
            }
        }
        if life.space.dropped() > 0 {
            let why = format!("more than the {MAX_MAPPINGS} that are kept: stacks can end where one was forgotten");
            audit.missing.push(Missing::new("executable mappings", &why));
        }
        // One file may be mapped under two names.
        let mut known = HashSet::new();
        audit.files.retain(|file| known.insert(Arc::as_ptr(file)));
        audit
    }

    /// The links that serve a process, as it is now or was at its end.
    pub fn serving(&self, life: &HostLife) -> BTreeSet<Served> {
        let modules: BTreeSet<ModuleId> = life.space.current().iter().map(|mapping| mapping.module).collect();
        let files = modules.iter().filter_map(|module| self.modules.get(module)?.file());
        files.filter_map(|key| self.hooks.serving(key, (!self.global).then_some(life.id.pid))).collect()
    }

    /// Whether frees of a process were given up, so that nothing is known of what it has in use.
    pub fn gave_up_frees_of(&self, life: &HostLife) -> bool {
        self.hooks.follows_some_frees() && self.serving(life).into_iter().any(|it| self.hooks.gave_up_frees_of(it))
    }

    /// What could not be hooked; `seen` are the processes that have a line in the profile.
    pub fn remarks(&self, seen: &HashSet<u32>) -> impl Iterator<Item = String> + '_ {
        let unseen = self.custom.iter().filter(|custom| !self.hooks.has_seen(|path| custom.is_for(path)));
        let unseen = unseen.map(|custom| format!("--alloc: no target mapped a file {}", custom.file));
        let mappings = self.hooks.has_mappings().then(|| MAPPINGS_NOTE.to_owned());
        self.refused
            .iter()
            .map(|reason| format!("not hooked: {reason}"))
            .chain(unseen)
            .chain(self.missed.remark(seen))
            .chain(mappings)
    }
}

/// Modules that a process has mapped.
fn modules_of(host: &Host, pid: u32) -> Vec<ModuleId> {
    host.lives()
        .current(pid)
        .map(|life| life.space.current().iter().map(|mapping| mapping.module).collect())
        .unwrap_or_default()
}

/// CLOCK_MONOTONIC when a process mapped a module.
fn mapped_since(host: &Host, pid: u32, module: ModuleId) -> u64 {
    let life = host.lives().current(pid);
    let mapping = life.and_then(|life| life.space.current().iter().find(|mapping| mapping.module == module));
    mapping.map_or_else(monotonic_ns, |mapping| mapping.since_ns)
}

fn is_alive(pid: u32) -> bool {
    crate::host::process::Stat::read(pid).is_ok_and(|stat| !(stat.without_memory && stat.threads <= 1))
}
