//! Attaches the first probes: to files that targets map at the start, and to files that a command is expected to map.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::bail;
use heapbpf_attach::files::{ExaminedFile, FileKey};
use heapbpf_attach::hooks::HookError;
use heapbpf_attach::inline::InlineHooks;
use heapbpf_attach::libraries::{expected, find_program};
use heapbpf_attach::moved_text;
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::{ProcessInfo, Stat};
use heapbpf_host::processes::Generation;
use heapbpf_host::resident;
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::{generations, totals};
use heapbpf_probes::{AttachError, Runtime};
use sampler_ebpf::abi::syscall_work;

use super::probes::{Attaching, is_alive};
use super::runtimes::modules_of;
use super::taking_in::{TakenIn, forbid_probes};
use crate::plan::Targets;

/// The remark about a command that is a Go program.
const GO_AT_THE_END: &str = "a Go program: what it has in use can be read only while it runs, at snapshots (--every, \
                             --listen), not after it has ended";

/// How long a named process may take to get an allocator before it is refused. From an exec to the C library takes
/// about a millisecond, more on a busy machine.
const PATIENCE: Duration = Duration::from_millis(500);
/// Pause between two checks.
const PAUSE: Duration = Duration::from_millis(1);
/// How many processes are prepared together for inline hooks.
const AHEAD: usize = 16;

/// A usage error: a file that exists lacks a function of the allocator that the user described.
#[derive(Debug, thiserror::Error)]
#[error("--alloc: {0}")]
pub struct Misdescribed(pub String);

impl Attaching {
    /// Attaches to what targets have mapped, and to what a command is expected to map. `asking`: the options that ask for
    /// probes.
    ///
    /// # Errors
    /// No named target has an allocator that can be hooked, or a custom allocator is not as described. Nothing stays
    /// attached then.
    pub fn start(
        &mut self,
        targets: &Targets,
        asking: Option<&str>,
        command: Option<u32>,
        host: &mut Host,
    ) -> anyhow::Result<()> {
        let now = monotonic_ns();
        self.decide_links(targets, command, host);
        self.spare_whom_probes_end(targets, asking, host)?;
        let running = targets.running.iter().map(|process| process.pid);
        for pid in running.chain(command) {
            self.targets.begin_running(pid, now, resident::rough(pid).as_ref());
            if command == Some(pid) || targets.name(pid) {
                self.targets.named_alive.insert(pid);
                self.list(pid)?;
            }
        }
        let mut running = targets.running.clone();
        if targets.follow && !targets.are_all() {
            self.list_members(targets);
            running.extend(self.begin_descendants(targets, now));
        }
        host.poll()?;
        host.processes_mut().drain_changes(&mut self.changes);
        self.changes.clear();
        self.take_out_what_was_left(&running, host);
        if self.global && !self.takes_in() {
            let modules: Vec<ModuleId> = host.modules().iter().map(|(id, _)| id).collect();
            self.plan_all(host, &modules);
            for module in modules {
                // The audit reports what is not hooked.
                let _ = self.hook_module(host, module, None);
            }
        }
        if self.global && self.takes_in() {
            // Heaps of Go programs are read whether or not the programs are active.
            let program = |it: &Generation| {
                let is_program =
                    |module: &ModuleId| host.modules().get(*module).is_some_and(|it_is| it_is.path == it.info.exe);
                it.space.modules().find(is_program)
            };
            let programs: BTreeSet<ModuleId> = host.processes().iter().filter_map(program).collect();
            let programs = Vec::from_iter(programs);
            self.plan_all(host, &programs);
            for module in programs {
                let _ = self.file_of(host, module);
            }
        }
        if targets.are_all() && self.takes_in() {
            running.retain(|process| targets.name(process.pid));
        }
        let without = self.hook_all_running(host, &running)?;
        let all = host.processes().iter().map(|generation| generation.id.pid).filter(|_| self.global);
        let pids: BTreeSet<u32> = running.iter().map(|process| process.pid).chain(all).collect();
        self.find_runtimes(host, pids.into_iter());
        let mut without = self.without_heaps(without, host)?;
        // A target that cannot be hooked does not stop the others.
        let others_may_come = self.global || command.is_some();
        if !without.is_empty() && without.len() == running.len() && !others_may_come {
            bail!(without.swap_remove(0));
        }
        without.into_iter().for_each(|reason| self.refuse(reason));
        if let Some(pid) = command {
            self.hook_before_exec(targets, pid)?;
        }
        self.check_custom()?;
        self.is_starting = false;
        self.read_arenas(host, &running);
        self.log_refusals();
        Ok(self.hooks.mappings.as_mut().map_or(Ok(()), MappingProbes::link)?)
    }

    /// Hooks what running processes have mapped. Returns the named ones without an allocator that is hooked.
    fn hook_all_running<'a>(
        &mut self,
        host: &mut Host,
        running: &'a [ProcessInfo],
    ) -> anyhow::Result<Vec<&'a ProcessInfo>> {
        let (mut without, mut promised) = (Vec::new(), HashSet::new());
        for (number, process) in running.iter().enumerate() {
            // The first one adds the sites of its files.
            if number == 1 {
                self.prepare_ahead(host, &running[number..], &mut promised);
            }
            if number % AHEAD == 1 {
                self.prepare_ahead(host, running.get(number + AHEAD..).unwrap_or_default(), &mut promised);
            }
            // It is hooked once it is busy.
            if !self.gets_place(process.pid, &promised) {
                continue;
            }
            let is_hooked = self.hook_running(host, process.pid);
            promised.remove(&process.pid);
            self.check_custom()?;
            if !is_hooked && self.targets.named_alive.contains(&process.pid) {
                without.push(process);
            }
        }
        // Another thread must not keep rights that the recording drops.
        self.inline.iter_mut().for_each(InlineHooks::undo_prepared);
        Ok(without)
    }

    /// Begins to prepare those of the first [`AHEAD`] of these processes that get a place for inline hooks, while
    /// earlier ones are hooked. What was begun before is done when this returns. Adds them to `promised`: nothing else
    /// shows that they have places until they are hooked.
    fn prepare_ahead(&mut self, host: &mut Host, next: &[ProcessInfo], promised: &mut HashSet<u32>) {
        if self.inline.is_none() {
            return;
        }
        let next = next.iter().take(AHEAD).map(|process| process.pid);
        let pids: Vec<u32> = next.filter(|pid| self.gets_place(*pid, promised) && promised.insert(*pid)).collect();
        let living = if pids.is_empty() { Ok(Vec::new()) } else { totals::living(&self.programs) };
        // If the list cannot be read, each process is prepared when it is hooked.
        let living = living.unwrap_or_default();
        let mut allocators = Vec::new();
        for pid in pids {
            let modules = modules_of(host, pid);
            self.plan_all(host, &modules);
            for &module in &modules {
                let _ = self.file_of(host, module);
            }
            // Several allocators are hooked one after the other, and an interpreter's objects with its allocator.
            let is_python = |module: &ModuleId| self.runtime_of(*module) == Some(Runtime::Python);
            let has_objects = self.counts_objects_inside && modules.iter().any(is_python);
            let keys = self.allocators_of(host, pid);
            let process = living.iter().find(|process| process.tgid == pid);
            let ([key], Some(process), false) = (keys.as_slice(), process, has_objects) else { continue };
            if let Some(ExaminedFile { path, file: Some(file), .. }) = self.hooks.files.get(*key) {
                allocators.push((*process, *key, path.clone(), Arc::clone(file)));
            }
        }
        if let Self { inline: Some(inline), hooks, .. } = self {
            inline.begin_ahead(allocators, &hooks.files.table);
        }
    }

    /// Hooks what a running process has mapped. Returns whether it has an allocator that is hooked.
    fn hook_running(&mut self, host: &mut Host, pid: u32) -> bool {
        if self.takes_in() {
            let modules = modules_of(host, pid);
            self.plan_all(host, &modules);
            let mut taken_in = self.take_in(host, pid);
            while taken_in.may_come() && is_alive(pid) {
                std::thread::sleep(PAUSE);
                taken_in = self.take_in(host, pid);
            }
            return taken_in == TakenIn::Counted;
        }
        let mut is_hooked = false;
        for module in modules_of(host, pid) {
            if self.hook_module_in(host, module, pid).is_ok() {
                host.note_allocator(pid, module);
                is_hooked = true;
            }
        }
        if is_hooked {
            self.targets.hooked(pid, 0, 0);
        }
        is_hooked
    }

    /// The reasons why these processes could not be observed. Leaves out processes that run a Go program whose heap can
    /// be read, and those that get an allocator soon.
    fn without_heaps(&mut self, mut processes: Vec<&ProcessInfo>, host: &mut Host) -> anyhow::Result<Vec<String>> {
        let mut reasons = BTreeSet::new();
        processes.retain(|process| match self.runs_readable_go(process.pid) {
            Ok(runs) => !runs,
            Err(why) => {
                reasons.insert(why);
                true
            }
        });
        self.await_allocators(&mut processes, host)?;
        reasons.into_iter().for_each(|why| self.refuse(why));
        Ok(processes.into_iter().map(|process| self.no_allocator(process)).collect())
    }

    /// Checks processes without an allocator again, for at most [`PATIENCE`]: a process in the middle of an exec has
    /// not mapped its C library yet. Removes those that have an allocator by then.
    fn await_allocators(&mut self, processes: &mut Vec<&ProcessInfo>, host: &mut Host) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while processes.iter().any(|process| is_same(process)) && Instant::now() < end {
            std::thread::sleep(PAUSE);
            // The changes are left for `follow`, which handles them like those of any process.
            host.poll()?;
            processes.retain(|process| !self.hook_running(host, process.pid));
            self.check_custom()?;
        }
        Ok(())
    }

    /// Refuses the recording if it would probe a process that probes would kill, or a named target whose tracer they
    /// would harm. Anybody may trace their own processes, so that does not keep others from recording the whole host.
    fn spare_whom_probes_end(&self, targets: &Targets, asking: Option<&str>, host: &Host) -> anyhow::Result<()> {
        if self.takes_in() {
            return Ok(());
        }
        let work = generations::work_at_calls(self.programs.process_iterator_link(), |_| true)?;
        let work_of = |pid: u32| work.get(&pid).copied().unwrap_or(0);
        let mut probed = BTreeMap::new();
        if self.global || self.shares {
            let everyone = host.processes().iter().map(|it| it.id.pid);
            probed.extend(everyone.map(|pid| (pid, work_of(pid) & syscall_work::USER_DISPATCH)));
        }
        probed.extend(targets.running.iter().map(|process| (process.pid, work_of(process.pid))));
        let mut seen = Vec::new();
        for (pid, work) in probed {
            let ignored = if self.global && !targets.name(pid) { syscall_work::TRACED } else { 0 };
            if let Some(why) = forbid_probes(pid, work & !ignored) {
                let cure = asking.map(|options| format!("; without {options}, heapbpf leaves it alone"));
                bail!("process {pid} must not be probed: {why}{}", cure.unwrap_or_default());
            }
            if work & ignored != 0 {
                seen.push(pid.to_string());
            }
        }
        if !seen.is_empty() {
            log::warn!(
                "a tracer sees the system calls of these processes, and will see one that it does not know at each \
                 probed return: {}",
                seen.join(", ")
            );
        }
        Ok(())
    }

    /// Adds running descendants of targets to the recording.
    fn begin_descendants(&mut self, targets: &Targets, now_ns: u64) -> Vec<ProcessInfo> {
        let descendants = self.list_descendants(targets);
        for process in &descendants {
            self.targets.begin_running(process.pid, now_ns, resident::rough(process.pid).as_ref());
            if self.global {
                self.followed.insert(process.pid);
            } else {
                self.targets.named_alive.insert(process.pid);
                self.shares = true;
            }
        }
        descendants
    }

    /// Lists the running processes that match a name or a cgroup: they stay targets whatever they execute later. (The
    /// kernel side lists those that match later.)
    fn list_members(&mut self, targets: &Targets) {
        for process in targets.running.iter().filter(|process| !targets.name(process.pid)) {
            if let Err(error) = self.list(process.pid) {
                log::warn!("process {} is not followed if it executes another program: {error}", process.pid);
            }
            // If it has ended by now, its end may have come before it was listed.
            if !is_same(process) {
                self.control.remove_target(process.pid);
            }
        }
    }

    /// Checks custom allocators. It is a usage error if a file that exists lacks a described function.
    fn check_custom(&self) -> anyhow::Result<()> {
        match self.hooks.files.misdescribed() {
            Some(reason) => Err(Misdescribed(reason.to_string()).into()),
            None => Ok(()),
        }
    }

    /// Attaches to the allocators that a command will most likely use, before it maps them.
    fn hook_before_exec(&mut self, targets: &Targets, pid: u32) -> anyhow::Result<()> {
        let program = targets.command.first().and_then(|word| find_program(word));
        let open = |path: PathBuf| File::open(&path).ok().map(|file| (path, Arc::new(file)));
        let files: Vec<(PathBuf, Arc<File>)> = expected(&targets.command).into_iter().filter_map(open).collect();
        let named = |(path, file): &(PathBuf, Arc<File>)| (path.to_string_lossy().into_owned(), Arc::clone(file));
        self.hooks.files.examine_all(files.iter().map(named).collect());
        let (mut keys, mut hookable) = (Vec::new(), Vec::new());
        for (path, file) in files {
            let is_program = program.as_deref() == Some(&*path);
            let path = path.to_string_lossy().into_owned();
            match self.hooks.files.examine(&path, &file) {
                Ok((key, true)) if self.hooks.files.announces(key) => {}
                Ok((key, true)) => {
                    keys.push(key);
                    hookable.push((path, file));
                }
                Ok((key, false)) if is_program => self.explain(key, &path, pid),
                _ => {}
            }
        }
        let table = self.hooks.files.table.clone();
        let read = self.inline.as_ref().map(|inline| inline.read_ahead(hookable, table));
        std::thread::scope(|scope| {
            // Meanwhile, because the kernel takes long for links.
            let reading = read.and_then(|read| Builder::new().spawn_scoped(scope, read).ok());
            let linked = keys.into_iter().try_for_each(|key| match self.link(key, self.link_for(pid)) {
                Err(error @ HookError::MustBeShared { .. }) => {
                    self.refuse(error.to_string());
                    Ok(())
                }
                hooked => hooked.map(drop),
            });
            // If it panics, that is reported when the file is to be hooked.
            let _ = reading.map(ScopedJoinHandle::join);
            linked
        })?;
        Ok(())
    }

    /// Reports in advance why a static program will not be observed: it may end before it is examined again.
    fn explain(&mut self, key: FileKey, path: &str, pid: u32) {
        let reason = match self.hooks.files.refusal(key) {
            Some(reason @ AttachError::StaticStripped) => reason.to_string(),
            _ if self.hooks.files.runtime(key) == Some(Runtime::Go) => GO_AT_THE_END.to_owned(),
            _ => return,
        };
        self.refuse(format!("{path}: {reason}"));
        self.missed.is_explained(pid);
    }

    fn no_allocator(&self, process: &ProcessInfo) -> String {
        let (pid, comm) = (process.pid, &process.comm);
        if !is_same(process) {
            return format!("process {pid} ({comm}) ended before heapbpf was attached to it");
        }
        if let Some(reason) = &self.refused_by_kernel {
            return format!("process {pid} ({comm}) cannot be profiled: {reason}");
        }
        let reasons = self.refused.iter().take(3).map(|reason| format!(" ({reason})")).collect::<String>();
        if self.standing.all_announce {
            return format!(
                "process {pid} ({comm}) announces no samples: neither its program nor its libraries have USDT probes of \
                 the provider otel_memory{reasons}; leave out --hook usdt to hook its allocator"
            );
        }
        if let Some(why) = moved_text::of_process(pid) {
            return format!("process {pid} ({comm}) cannot be profiled: {why}");
        }
        format!(
            "process {pid} ({comm}) has no allocator that heapbpf knows: neither its program nor its libraries define \
             malloc{reasons}; looked for {}; name another one with \
             --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
            self.hooks.files.table.names()
        )
    }
}

/// Whether a process still runs, whichever program it runs.
fn is_same(process: &ProcessInfo) -> bool {
    Stat::read(process.pid).is_ok_and(|stat| stat.start_ns == process.start_ns && !stat.without_memory)
}
