//! Attaches probes as targets fork, exec, map new files and end.

use heapbpf_attach::hooks::{HookError, Hooked};
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::processes::{GenerationId, HostChange, starts_agree};
use heapbpf_kernel::totals;

use super::modules::Unhooked;
use super::probes::{Attaching, Look, Spent, UnderWay, is_alive};
use super::runtimes::{mapped_since, modules_of};

/// Capacity that the list of host changes keeps while few occur.
const CHANGES_CAPACITY: usize = 256;

/// Whether the recording may be missing everything that a process allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missed {
    /// Nothing new is known.
    Unchanged,
    /// Not everything is missing.
    No,
    /// Everything is missing if the process has ended by now.
    IfEnded,
    /// Everything is missing: the process ended before it could be hooked.
    Yes,
}

/// What an attempt to hook a module means for the process that mapped it: from when on the module's allocator is hooked
/// (CLOCK_MONOTONIC), and whether anything was missed. `shared`: links serve every process that maps the file; `had_ns`:
/// when the process mapped it; `file_ns`: when the file was first hooked for every process; `now_ns`: a time after the
/// attempt.
fn outcome(
    attempt: Result<Hooked, Unhooked>,
    shared: bool,
    had_ns: u64,
    file_ns: u64,
    now_ns: u64,
) -> (Option<u64>, Missed) {
    match attempt {
        Ok(Hooked::Now) => (Some(now_ns), Missed::IfEnded),
        // A file that was hooked before the process mapped it leaves no gap. But another process may have mapped it
        // just after this one, or its mapping may have been reported first.
        Ok(Hooked::Already) => {
            let since_ns = if shared { file_ns } else { 0 };
            let missed = match since_ns > had_ns {
                true => Missed::IfEnded,
                false if shared => Missed::No,
                false => Missed::Unchanged,
            };
            (Some(had_ns.max(since_ns)), missed)
        }
        // Its C library may be hooked, but it allocates with this module.
        Err(Unhooked::TooLate) => (None, Missed::Yes),
        Err(Unhooked::Gone) => (None, Missed::IfEnded),
        Err(Unhooked::Known | Unhooked::Waits) => (None, Missed::Unchanged),
    }
}

impl Attaching {
    /// Attaches to everything mapped since the last call. Returns whether new files were hooked.
    pub fn follow(&mut self, host: &mut Host) -> bool {
        let before = self.hooks.functions.len();
        self.look_at_links();
        for under_way in std::mem::take(&mut self.under_way) {
            if !self.is_over() {
                self.mapped(host, under_way, true);
            }
        }
        let mut changes = std::mem::take(&mut self.changes);
        host.drain_changes(&mut changes);
        self.let_go_of_written(host);
        for change in changes.drain(..) {
            // Each change may take long.
            self.let_go_of_written(host);
            if let HostChange::Ended(ended) | HostChange::Replaced(ended, _) = change {
                let until_ns = host.processes().get(ended).and_then(|ended| ended.until_ns);
                self.detours.forget(ended.pid);
                self.objects.young.remove(&ended.pid);
                let until_ns = until_ns.unwrap_or_else(monotonic_ns);
                self.heard_ends.push((ended.pid, until_ns));
                if matches!(change, HostChange::Ended(_)) {
                    self.standing.ended(ended.pid, until_ns);
                }
            }
            if let HostChange::Started(began) = change {
                let since_ns = host.processes().get(began).map_or(0, |began| began.since_ns);
                self.standing.began(began.pid, since_ns);
            }
            if let HostChange::Replaced(_, next) = change {
                self.note_exec(next.pid);
            }
            if let HostChange::Ended(it) | HostChange::Replaced(it, _) = change {
                self.had_targets = self.had_targets || self.is_target(host, it);
            }
            self.note_announcing(host, &change);
            match change {
                HostChange::Mapped { .. } if self.is_over() => {}
                HostChange::Mapped { generation, module, .. } => {
                    self.note_others_hooks(host, generation, module);
                    self.mapped(host, UnderWay { generation, module, began: None, forked_ns: None }, false);
                }
                HostChange::Started(generation) if !self.global => self.started(host, generation),
                HostChange::Started(generation) => {
                    let since = host.processes().get(generation).map_or(0, |generation| generation.since_ns);
                    if !self.targets.is_running(generation.pid) {
                        self.targets.begin(generation.pid, since);
                    }
                    if let Some(child) = host.processes().get(generation) {
                        self.inherit_others_hooks(child.info.parent_pid, generation.pid, since);
                    }
                }
                HostChange::Replaced(before, _) => self.member_replaced(before),
                HostChange::Ended(generation) if self.global => {
                    self.note_late(host, generation);
                    self.targets.end(generation.pid, monotonic_ns());
                    self.member_replaced(generation);
                }
                _ => {}
            }
        }
        self.take_in_members(host);
        self.lead_late_ones(host);
        self.lead_anew();
        self.release_left();
        changes.shrink_to(CHANGES_CAPACITY);
        self.changes = changes;
        self.hooks.functions.len() != before
    }

    /// Handles the modules that other threads are still examining, and waits for them.
    pub fn finish_examining(&mut self, host: &mut Host) {
        if self.is_over() {
            return;
        }
        for under_way in std::mem::take(&mut self.under_way) {
            if !self.modules.contains_key(&under_way.module)
                && let Ok(look) = self.look_at(host, under_way.module)
            {
                self.keep_look(under_way.module, look);
            }
            self.mapped(host, under_way, true);
        }
        // Processes that still wait for their inline hooks will not get them any more.
        for under_way in std::mem::take(&mut self.under_way) {
            if under_way.forked_ns.is_none() {
                self.too_late_for(host, under_way.generation);
            }
        }
    }

    /// Handles a module that a process mapped. `again`: it was still being examined the last time.
    fn mapped(&mut self, host: &mut Host, mapped: UnderWay, again: bool) {
        let UnderWay { generation, module, began, forked_ns } = mapped;
        let pid = generation.pid;
        if self.takes_in() && self.held != Some(pid) && !self.was_taken_in(generation) {
            let is_named = self.targets.named_alive.contains(&pid);
            // With the whole host as targets, only active processes are taken in.
            if is_named || self.global && !self.is_listed_by_all() && self.is_target(host, generation) {
                self.await_member(pid);
            }
            return;
        }
        // Its hooks or links were removed for good.
        if self.takes_in() && self.targets.is_given_up(pid) {
            return;
        }
        let began = began.or_else(|| self.takes_in().then(|| Spent::now(pid)));
        let under_way = UnderWay { began, ..mapped };
        let known = self.targets.coverages.contains_key(&pid);
        let is_concerned = self.global || known || self.targets.named_alive.contains(&pid);
        // Examining a large file takes seconds, so files of other programs are not examined.
        if is_concerned && self.is_examined_aside(host, module) {
            self.look_later(under_way);
            return;
        }
        self.note_exec(pid);
        let known = self.targets.coverages.contains_key(&pid);
        // Shared links are worth making even if the target has ended: other processes may map the file, too.
        let can_be_hooked = self.global || self.targets.named_alive.contains(&pid) || self.shares && known;
        if !can_be_hooked {
            // A target that has ended cannot get links of its own; the module is only examined for the audit.
            if known
                && !self.modules.contains_key(&module)
                && let Ok(look) = self.look_at(host, module)
            {
                self.keep_look(module, look);
            }
            if again && known && self.modules.get(&module).is_some_and(|look| look.file().is_some()) {
                self.note_missed(host, generation);
            }
            return;
        }
        let had_ns = forked_ns.unwrap_or_else(|| mapped_since(host, generation, module));
        if let Some(generation) = host.processes().get(generation) {
            self.targets.generation_began(pid, generation.since_ns);
        }
        let link = self.link_for(pid);
        let was_inline = self.is_hooked_inline(module, pid);
        let attempt = self.hook_module_in(host, module, pid);
        if attempt == Err(Unhooked::Waits) {
            self.look_later(under_way);
            return;
        }
        if attempt.is_ok() {
            host.note_allocator(pid, module);
        }
        self.note_runtime(host, generation, module);
        let file_ns = self.shared_since(module).unwrap_or(0);
        let (hooked_ns, missed) = outcome(attempt, link.is_none(), had_ns, file_ns, monotonic_ns());
        // A library that was loaded while the process ran: its first calls were not counted.
        let is_late = !was_inline && self.is_hooked_inline(module, pid);
        if let Some(hooked_ns) = hooked_ns {
            let hooked_ns = if is_late { monotonic_ns() } else { hooked_ns };
            self.targets.hooked(pid, had_ns, hooked_ns);
            if let Some(began) = began.filter(|_| hooked_ns > had_ns) {
                self.note_lacked(pid, (had_ns, hooked_ns), began);
            }
            // Unless it has executed another program since.
            let is_fork = self.targets.coverages.get(&pid).is_some_and(|it| Some(it.since_ns) == forked_ns);
            if is_fork && hooked_ns > had_ns {
                self.note_late_fork(pid, (had_ns, hooked_ns));
            }
        }
        match missed {
            // Another remark tells it.
            _ if forked_ns.is_some() => {}
            Missed::Unchanged => {}
            Missed::No => self.missed.has_one_hooked(pid),
            Missed::IfEnded => self.too_late_for(host, generation),
            Missed::Yes => self.note_missed(host, generation),
        }
    }

    /// Notes that calls of an allocator in a process were not counted between two times (CLOCK_MONOTONIC). `began`:
    /// when the allocator's file was first looked at.
    fn note_lacked(&mut self, pid: u32, (had_ns, hooked_ns): (u64, u64), began: Spent) {
        let had_ns = had_ns.max(self.targets.coverages.get(&pid).map_or(0, |coverage| coverage.since_ns));
        let gap_ms = hooked_ns.saturating_sub(had_ns) as f64 * 1e-6;
        log::info!("process {pid}: calls of an allocator are counted from {gap_ms:.1} ms after it was mapped");
        // What it used until then is not known. One thread cannot have used more than the time that passed.
        let before_ns = began.at_ns.saturating_sub(had_ns);
        let since_ns = Spent::now(pid).cpu_ns.saturating_sub(began.cpu_ns);
        let program = totals::program_of(&self.programs, pid).ok().flatten();
        if let Some((activity, program)) = self.activity.as_mut().zip(program) {
            activity.lacked(program, before_ns.saturating_add(since_ns));
        }
    }

    /// Handles the end of an exec, which dropped what was noted about a process: that it announces its samples, or
    /// where its interpreter is. The new program's mappings may have been reported before that, so what they showed is
    /// noted again.
    pub fn note_anew(&mut self, pid: u32, host: &mut Host) {
        if self.is_over() {
            return;
        }
        self.standing.note_announcing(pid, false);
        let Some(generation) = host.processes().current(pid).map(|generation| generation.id) else { return };
        for module in modules_of(host, pid) {
            self.mapped(host, UnderWay { generation, module, began: None, forked_ns: None }, false);
        }
    }

    /// When the file of a module was first hooked for every process (CLOCK_MONOTONIC).
    fn shared_since(&self, module: ModuleId) -> Option<u64> {
        self.hooks.shared_since(self.modules.get(&module)?.probed_file()?)
    }

    /// Notes an ended process as missed if it was hooked late. Its figures may still arrive later.
    fn note_late(&mut self, host: &mut Host, generation: GenerationId) {
        if self.targets.coverages.get(&generation.pid).is_some_and(|it| it.hooked && it.uncovered_ns > 0) {
            self.note_missed(host, generation);
        }
    }

    fn note_missed(&mut self, host: &mut Host, generation: GenerationId) {
        // Mappings of an exec may be reported before the exec itself; then they belong to the next process generation.
        let last = host.processes().at(generation.pid, u64::MAX).map(|last| last.id);
        for generation in [Some(generation), last].into_iter().flatten() {
            let Some(info) = host.describe(generation) else { continue };
            let is_target = !self.global
                || self.followed.contains(&generation.pid)
                || self.rules.iter().any(|rule| rule.matches(&info));
            if is_target {
                self.missed.note_certain(generation.pid, info.comm.clone());
            }
        }
    }

    /// Notes a target that ended before one of its allocators could be hooked. If another allocator was hooked and
    /// counted something, the target has a line in the profile and gets no remark.
    fn too_late_for(&mut self, host: &mut Host, generation: GenerationId) {
        if !is_alive(generation.pid) {
            self.note_missed(host, generation);
        }
    }

    /// Handles a process that the host reports: the child of a target. The record of its fork may come later, or be
    /// lost.
    fn started(&mut self, host: &Host, generation: GenerationId) {
        let Some(child) = host.processes().get(generation) else { return };
        let pid = generation.pid;
        let runs = host.processes().current(pid).is_some_and(|it| starts_agree(it.info.start_ns, child.info.start_ns));
        if !self.follows {
            return;
        }
        if runs && self.control.counted_by(pid).is_some() {
            // If its parent had lost its hooks by its fork, it may be listed as an heir and have none.
            let has_hooks = || self.inline.as_ref().is_some_and(|inline| inline.counted.all_heirs().contains(&pid));
            let is_heir = self.control.has_inherited_hooks(pid);
            let is_any_without = self.members.let_go > 0 || self.tripped.is_some();
            let is_inline = is_heir && (!is_any_without || has_hooks());
            self.forked(child.info.parent_pid, pid, is_inline, child.since_ns, host);
        } else if !runs && self.targets.coverages.contains_key(&child.info.parent_pid) {
            // What it mapped is examined although it has ended: other processes may map it, too.
            self.targets.note(pid, child.since_ns);
        }
    }

    /// Handles the fork of a target. Shared links count the child; if there are none yet, they are made. A second
    /// report of the same fork is ignored. `is_inline`: the child started with its parent's inline hooks.
    pub fn forked(&mut self, parent: u32, child: u32, is_inline: bool, time_ns: u64, host: &Host) {
        self.standing.began(child, time_ns);
        self.inherit_announcing(parent, child, time_ns);
        self.detours.inherit(parent, child);
        self.standing.inherit_objects(parent, child);
        if self.global {
            self.followed.insert(child);
            if is_inline {
                self.inherits_hooks(host, child, time_ns);
            }
            return;
        }
        if self.targets.named_alive.contains(&child) {
            return;
        }
        self.targets.begin(child, time_ns);
        self.targets.named_alive.insert(child);
        self.inherit_others_hooks(parent, child, time_ns);
        if self.takes_in() {
            if is_inline {
                self.inherits_hooks(host, child, time_ns);
            } else {
                self.await_member(child);
            }
            return;
        }
        self.shares = true;
        // The child starts with its parent's mappings; what it maps later is followed as for any process.
        let mut modules = modules_of(host, child);
        modules.extend(modules_of(host, parent));
        modules.sort_unstable();
        modules.dedup();
        let is_announcing = self.standing.announces_for_lack_of_allocator(child);
        let mut served_ns = 0;
        for module in modules {
            let Some(key) = self.modules.get(&module).and_then(Look::file) else { continue };
            if self.is_over() {
                return;
            }
            // Without its generation, it cannot be looked at again.
            let generation = host.processes().current(child).map(|generation| generation.id);
            let linked = match generation {
                Some(_) => self.link(key, None),
                // A second set would count every call twice.
                None if self.hooks.is_making(key, None) => {
                    if !is_announcing {
                        self.targets.forked_late(child, None);
                    }
                    continue;
                }
                None => self.hooks.hook(key, None, &*self.programs, &mut self.control),
            };
            if let (Err(HookError::UnderWay { .. }), Some(generation)) = (&linked, generation) {
                self.under_way.push(UnderWay { generation, module, began: None, forked_ns: Some(time_ns) });
                if !is_announcing {
                    self.targets.forked_late(child, None);
                }
            }
            if linked.is_ok() && !is_announcing {
                let hooked_ns = self.shared_since(module).map_or_else(monotonic_ns, |since_ns| since_ns.max(time_ns));
                self.targets.hooked(child, time_ns, hooked_ns);
                served_ns = hooked_ns.max(served_ns);
            }
        }
        if served_ns > time_ns {
            self.note_late_fork(child, (time_ns, served_ns));
        }
    }

    /// Notes a child that has had its parent's inline hooks since its fork (CLOCK_MONOTONIC).
    fn inherits_hooks(&mut self, host: &Host, child: u32, forked_ns: u64) {
        self.targets.hooked(child, forked_ns, forked_ns);
        self.standing.note(child, Ok(()));
        self.has_hooks(host, child, forked_ns);
        // It may have been forked before the hooks were taken out, or by a process that still has them. Another program
        // that it has executed since has none.
        let began = host.processes().at(child, forked_ns).map(|generation| generation.id);
        let current = host.processes().current(child).map(|generation| generation.id);
        if let Some(tripped) = &self.tripped
            && (current.is_none() || current == began)
        {
            self.targets.give_up(child, tripped.at_ns);
        }
    }

    /// Notes that links have served a process only since some time after its fork (both CLOCK_MONOTONIC).
    fn note_late_fork(&mut self, child: u32, (forked_ns, served_ns): (u64, u64)) {
        let Spent { at_ns, cpu_ns } = Spent::now(child);
        // It has used the rest since then.
        let share = served_ns.saturating_sub(forked_ns) as f64 / at_ns.saturating_sub(forked_ns).max(1) as f64;
        let missed_ns = (cpu_ns as f64 * share.min(1.0)) as u64;
        self.targets.forked_late(child, is_alive(child).then_some(missed_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HAD_NS: u64 = 100;
    const NOW_NS: u64 = 900;

    fn outcome_of(attempt: Result<Hooked, Unhooked>, global: bool, file_ns: u64) -> (Option<u64>, Missed) {
        outcome(attempt, global, HAD_NS, file_ns, NOW_NS)
    }

    #[test]
    fn a_file_that_was_hooked_before_it_was_mapped_leaves_no_gap() {
        assert_eq!(outcome_of(Ok(Hooked::Already), true, 50), (Some(HAD_NS), Missed::No));
        assert_eq!(outcome_of(Ok(Hooked::Already), true, HAD_NS), (Some(HAD_NS), Missed::No));
        // Links of a named process: when other processes got theirs does not matter.
        assert_eq!(outcome_of(Ok(Hooked::Already), false, 500), (Some(HAD_NS), Missed::Unchanged));
    }

    #[test]
    fn a_file_that_another_process_had_hooked_later_leaves_a_gap_up_to_then() {
        assert_eq!(outcome_of(Ok(Hooked::Already), true, 500), (Some(500), Missed::IfEnded));
    }

    #[test]
    fn what_is_hooked_now_was_missed_until_now_and_all_of_it_if_the_process_has_ended() {
        for global in [false, true] {
            assert_eq!(outcome_of(Ok(Hooked::Now), global, 50), (Some(NOW_NS), Missed::IfEnded));
        }
    }

    #[test]
    fn what_cannot_be_hooked_is_missed_only_if_it_has_an_allocator() {
        assert_eq!(outcome_of(Err(Unhooked::TooLate), true, 0), (None, Missed::Yes));
        assert_eq!(outcome_of(Err(Unhooked::Gone), true, 0), (None, Missed::IfEnded));
        assert_eq!(outcome_of(Err(Unhooked::Known), true, 0), (None, Missed::Unchanged));
    }
}
