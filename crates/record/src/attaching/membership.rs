//! Which processes are targets, which of them count as named because they descend from a named one, and which links
//! count the calls of named processes.

use std::collections::{BTreeSet, HashSet};

use heapbpf_attach::files::FileKey;
use heapbpf_attach::hooks::MOST_OWN_LINKS;
use heapbpf_attach::linker::Linker as _;
use heapbpf_host::Host;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::process::{ProcessInfo, Stat, Target, descendants};
use heapbpf_host::processes::GenerationId;
use heapbpf_kernel::control::CountedBy;

use super::probes::Attaching;
use super::runtimes::modules_of;
use crate::plan::Targets;

/// Maximum number of rounds when searching for descendants. A descendant that forks is listed within a round, and its
/// later children are listed when they are forked.
const ROUNDS: usize = 16;

/// What decides which links count the calls of the named processes.
#[derive(Clone, Copy, Debug)]
struct Named {
    /// Whether links to one process see all its threads.
    links_one_process: bool,
    /// Largest number of named processes that map the same file with an allocator.
    users: usize,
    /// Whether one of them maps a file whose links must serve every process.
    must_share: bool,
    /// Whether children are expected: a command is started, or a process has or had children.
    have_children: bool,
    /// Whether children are targets.
    follow: bool,
}

impl Named {
    /// Links to one process cost other processes nothing, but never see a child: the kernel ignores the child's hits,
    /// and links made for a short-lived child come too late. Where children are expected, links for every process are
    /// made in advance.
    const fn counted_by(self) -> CountedBy {
        let have_children = self.follow && self.have_children;
        let own = self.links_one_process && self.users <= MOST_OWN_LINKS && !have_children && !self.must_share;
        if own { CountedBy::OwnLinks } else { CountedBy::SharedLinks }
    }
}

impl Attaching {
    /// Decides which links count the calls of the named processes.
    pub(super) fn decide_links(&mut self, targets: &Targets, command: Option<u32>, host: &mut Host) {
        if self.global {
            return;
        }
        if self.standing.all_announce {
            // Announcements are rare: links that serve every process cost the others next to nothing, and miss no
            // child.
            self.shares = true;
            return;
        }
        if self.takes_in() {
            // The command's own links count it up to its entry point.
            self.own.extend(command);
            return;
        }
        let pids: Vec<u32> = targets.running.iter().map(|process| process.pid).collect();
        let have_children = command.is_some()
            || targets.from_first_call
            || pids.iter().any(|pid| Stat::read(*pid).is_ok_and(|stat| stat.had_children))
            || descendants(&pids).is_ok_and(|descendants| !descendants.is_empty());
        let links_one_process = self.programs.links_one_process;
        let users = self.most_users(targets, host);
        let kind = self.programs.kind();
        let keys: Vec<FileKey> = pids.iter().flat_map(|pid| self.allocators_of(host, *pid)).collect();
        let must_share = keys.into_iter().any(|key| self.hooks.must_be_shared(key, kind));
        let named = Named { links_one_process, users, must_share, have_children, follow: targets.follow };
        match named.counted_by() {
            CountedBy::OwnLinks => self.own.extend(pids.into_iter().chain(command)),
            CountedBy::SharedLinks | CountedBy::AwaitedLinks | CountedBy::Announcements => self.shares = true,
        }
    }

    /// Largest number of named processes that map the same file with an allocator.
    fn most_users(&mut self, targets: &Targets, host: &mut Host) -> usize {
        let mut users = std::collections::HashMap::<ModuleId, usize>::new();
        for process in &targets.running {
            let modules: BTreeSet<ModuleId> = modules_of(host, process.pid).into_iter().collect();
            modules.into_iter().for_each(|module| *users.entry(module).or_default() += 1);
        }
        let with_allocator = users.into_iter().filter(|(module, _)| self.file_of(host, *module).is_some());
        with_allocator.map(|(_, users)| users).max().unwrap_or(0)
    }

    /// Makes a process a target.
    pub(super) fn list(&mut self, pid: u32) -> Result<(), heapbpf_kernel::KernelError> {
        let own = self.own.contains(&pid);
        self.control.add_target(pid, if own { CountedBy::OwnLinks } else { CountedBy::SharedLinks })
    }

    /// Whether every process is a target, so that none needs to be listed.
    pub(super) fn is_listed_by_all(&self) -> bool {
        self.rules.iter().any(|rule| matches!(rule, Target::All))
    }

    /// Whether process events may be taken in a little later: every process is a target and is hooked when it becomes
    /// active, and none is named.
    pub(crate) fn events_may_wait(&self) -> bool {
        self.takes_in() && self.is_listed_by_all() && self.targets.named_alive.is_empty()
    }

    /// Lists running processes that descend from targets. The targets must already be listed: from then on, a fork
    /// lists the child. A descendant that forks during the search is found together with its children, or lists them
    /// itself.
    pub(super) fn list_descendants(&mut self, targets: &Targets) -> Vec<ProcessInfo> {
        let roots: Vec<u32> = targets.running.iter().map(|process| process.pid).collect();
        let mut known: HashSet<u32> = roots.iter().copied().collect();
        let mut listed = Vec::new();
        for _ in 0..ROUNDS {
            let Ok(found) = descendants(&roots) else { break };
            let new: Vec<u32> = found.into_iter().filter(|pid| known.insert(*pid)).collect();
            if new.is_empty() {
                break;
            }
            for pid in new {
                if let Err(error) = self.list(pid) {
                    log::warn!("process {pid}, a descendant of a target, is not recorded: {error}");
                    continue;
                }
                // If it has ended by now, its end may have come before it was listed.
                match ProcessInfo::read(pid) {
                    Ok(process) if !process.without_memory || process.threads > 1 => listed.push(process),
                    _ => self.control.remove_target(pid),
                }
            }
        }
        listed
    }

    /// The process to make links for so that they count this one: the process itself if it has links of its own, or
    /// `None` for every process.
    pub(super) fn link_for(&self, pid: u32) -> Option<u32> {
        (self.takes_in() || self.own.contains(&pid)).then_some(pid)
    }

    /// Switches a process to shared links if its own no longer see it, because a thread other than its first called
    /// exec. Its own links are to be released once the shared ones are in place.
    pub(super) fn note_exec(&mut self, pid: u32) {
        if !self.takes_in() && self.own.contains(&pid) && self.control.counted_by(pid) == Some(CountedBy::SharedLinks) {
            self.own.remove(&pid);
            self.shares = true;
            self.left.push(pid);
        }
    }

    /// Releases the links of processes that shared links count by now.
    pub(super) fn release_left(&mut self) {
        std::mem::take(&mut self.left).into_iter().for_each(|pid| self.hooks.release(pid));
    }

    /// Whether any process is a target, or was one.
    pub(crate) fn has_targets(&self, host: &mut Host) -> bool {
        let living: Vec<GenerationId> = host.processes().iter().map(|generation| generation.id).collect();
        self.had_targets || living.into_iter().any(|generation| self.is_target(host, generation))
    }

    /// Whether a process generation belongs to a target.
    pub(super) fn is_target(&self, host: &mut Host, generation: GenerationId) -> bool {
        if !self.global {
            return self.targets.named_alive.contains(&generation.pid);
        }
        let matches = |host: &mut Host| {
            host.describe(generation).is_some_and(|info| self.rules.iter().any(|rule| rule.matches(&info)))
        };
        self.followed.contains(&generation.pid) || matches(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Named =
        Named { links_one_process: true, users: 1, must_share: false, have_children: false, follow: true };

    #[test]
    fn links_of_its_own_spare_other_processes_unless_there_are_children() {
        assert_eq!(ALONE.counted_by(), CountedBy::OwnLinks);
        assert_eq!(Named { have_children: true, ..ALONE }.counted_by(), CountedBy::SharedLinks);
        assert_eq!(Named { have_children: true, follow: false, ..ALONE }.counted_by(), CountedBy::OwnLinks);
    }

    #[test]
    fn many_processes_of_a_file_share_links() {
        assert_eq!(Named { users: MOST_OWN_LINKS, ..ALONE }.counted_by(), CountedBy::OwnLinks);
        assert_eq!(Named { users: MOST_OWN_LINKS + 1, ..ALONE }.counted_by(), CountedBy::SharedLinks);
        assert_eq!(Named { must_share: true, follow: false, ..ALONE }.counted_by(), CountedBy::SharedLinks);
    }

    #[test]
    fn where_links_to_one_process_miss_threads_links_are_shared() {
        assert_eq!(Named { links_one_process: false, follow: false, ..ALONE }.counted_by(), CountedBy::SharedLinks);
    }
}
