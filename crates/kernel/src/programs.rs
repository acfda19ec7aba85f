//! The BPF programs, loaded for the best kind of link that this kernel supports.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

pub use heapbpf_audit::LinkKind;
use heapbpf_host::side_by_side::on_all_processors;
use sampler_ebpf::abi::Cookie;

use super::control::CountedBy;
use super::exec_watch::ExecRing;
use super::guardian::{Guardian, ProbeLink};
use super::lifecycle::Lifecycle;
use super::loader::{Loader, NamedProgram, ProgramKind};
use super::sys::How;
use super::{KernelError, is_of_an_instruction, sys, trial};

/// The programs. Those that only a few targets need are loaded for the first of these: the verifier takes a tenth of a
/// second for each.
pub struct Programs {
    loader: Arc<Loader>,
    guardian: Guardian,
    /// How uprobes are linked.
    pub kind: LinkKind,
    /// Whether a link to one process runs the programs for all its threads. If not, a file must be linked once for all
    /// processes that map it, and the programs themselves select the targets.
    pub links_one_process: bool,
    allocation: Program,
    allocation_return: Option<Program>,
    /// For the entry of functions whose return address must stay where it is, if `allocation` is a session. Whenever
    /// the kernel runs a session in a process other than the one that it was made for, it replaces the return address
    /// of the call.
    allocation_without_return: Option<Program>,
    /// For the return sites of these functions.
    return_site: Program,
    free: Option<Program>,
    /// For samples that programs announce themselves, and their frees.
    announcements: Option<Announcements>,
    pub(super) iterator: OwnedFd,
    process_iterator: OwnedFd,
    /// The programs that follow forks, execs and exits.
    pub lifecycle: Lifecycle,
    /// The better kinds of link that this kernel refused, with the reasons.
    pub refusals: Vec<(LinkKind, String)>,
}

/// When to load the programs for probes in allocators. The verifier takes longest for these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// All at once, because files that are not known yet are to be linked while the recording runs.
    Ahead,
    /// Those that most files need at once, the others for the first file that needs them.
    AtOnce,
    /// For the first file that needs them. Most likely there is none.
    IfNeeded,
}

/// The programs for announcements.
struct Announcements {
    /// Whether they count for listed processes only.
    of_listed: bool,
    alloc: Program,
    free: Option<Program>,
}

/// A program that is loaded when it is first needed.
struct Program {
    wanted: NamedProgram,
    loaded: OnceLock<OwnedFd>,
}

impl Program {
    const fn new(name: &'static str, kind: ProgramKind) -> Self {
        Self { wanted: (name, kind), loaded: OnceLock::new() }
    }

    fn loaded(&self, loader: &Loader) -> Result<&OwnedFd, KernelError> {
        if let Some(program) = self.loaded.get() {
            return Ok(program);
        }
        let program = loader.program(self.wanted.0, self.wanted.1)?;
        Ok(self.loaded.get_or_init(|| program))
    }
}

impl Programs {
    /// Loads what a recording needs. Tries the kinds of link from best to worst (each is loaded **and** linked), unless
    /// one is forced.
    ///
    /// # Errors
    /// The reason why the last kind that was tried does not work.
    pub fn load(
        loader: &Arc<Loader>,
        (live, probes): (bool, When),
        forced: Option<LinkKind>,
        guardian: &Guardian,
    ) -> Result<Self, KernelError> {
        let all = [LinkKind::Session, LinkKind::Multi, LinkKind::Perf];
        let candidates: Vec<LinkKind> = forced.map_or_else(|| all.to_vec(), |kind| vec![kind]);
        let mut refusals = Vec::new();
        let last = candidates.len() - 1;
        for (i, kind) in candidates.into_iter().enumerate() {
            match Self::load_kind(loader, (live, probes), kind, guardian) {
                Ok(mut programs) => {
                    programs.refusals = refusals;
                    return Ok(programs);
                }
                Err(error @ KernelError::Permission) => return Err(error),
                Err(error) if i == last => return Err(error),
                Err(error) => refusals.push((kind, error.to_string())),
            }
        }
        Err(KernelError::Object("no kind of link was tried".into()))
    }

    /// The kind of link that a recording will most likely use.
    pub const fn likely_kind(loader: &Loader, forced: Option<LinkKind>) -> LinkKind {
        match forced {
            Some(kind) => kind,
            None if loader.knows_sessions() => LinkKind::Session,
            None if loader.knows_multi_links => LinkKind::Multi,
            None => LinkKind::Perf,
        }
    }

    /// The programs that [`Self::load`] loads for a kind of link. With [`When::Ahead`], this includes those for
    /// functions that C++ and Python programs have.
    pub fn wanted(kind: LinkKind, live: bool, probes: When) -> Vec<NamedProgram> {
        let (entry, rest) = entry_and_rest(kind);
        let mut wanted =
            vec![("read_threads", ProgramKind::TaskIterator), ("read_processes", ProgramKind::TaskIterator)];
        wanted.extend(Lifecycle::wanted());
        if probes == When::IfNeeded {
            return wanted;
        }
        if probes == When::Ahead {
            wanted.push(("allocation_end", rest));
            wanted.extend((kind == LinkKind::Session).then_some(("allocation_entry", rest)));
        }
        wanted.push(entry);
        wanted.extend((kind != LinkKind::Session).then_some(("allocation_return", rest)));
        wanted.extend(live.then_some(("free_entry", rest)));
        wanted
    }

    /// Adds the programs for samples that programs announce themselves. With `of_listed` they count only processes that
    /// are listed as such ([`CountedBy::Announcements`]), otherwise all targets.
    ///
    /// # Errors
    /// They do not exist for this machine.
    pub fn follow_announcements(&mut self, live: bool, of_listed: bool) -> Result<(), KernelError> {
        let program = |name| {
            let program = Program::new(name, single_kind(self.kind));
            self.loader
                .has(name)
                .then_some(program)
                .ok_or_else(|| KernelError::Object(format!("it has no program {name}")))
        };
        let (alloc, free) = (program("usdt_alloc")?, live.then(|| program("usdt_free")).transpose()?);
        self.announcements = Some(Announcements { of_listed, alloc, free });
        Ok(())
    }

    /// Makes the ring in which execs of targets are reported from now on.
    ///
    /// # Errors
    /// As for [`ExecRing::new`].
    pub fn exec_ring(&self) -> Result<ExecRing, KernelError> {
        ExecRing::new(&self.loader)
    }

    /// Loads what is not loaded yet.
    ///
    /// # Errors
    /// The kernel refuses a program.
    pub fn load_rest(&self) -> Result<(), KernelError> {
        let announced = self.announcements.iter().flat_map(|it| [Some(&it.alloc), it.free.as_ref()]).flatten();
        let mut rest = self.allocation_without_return.iter().chain([&self.return_site]).chain(announced);
        rest.try_for_each(|program| program.loaded(&self.loader).map(drop))
    }

    fn load_kind(
        loader: &Arc<Loader>,
        (live, probes): (bool, When),
        kind: LinkKind,
        guardian: &Guardian,
    ) -> Result<Self, KernelError> {
        let ((entry_name, entry_kind), rest_kind) = entry_and_rest(kind);
        let is_session = kind == LinkKind::Session;
        let mut programs = Self {
            loader: Arc::clone(loader),
            guardian: guardian.clone(),
            kind,
            links_one_process: true,
            allocation: Program::new(entry_name, entry_kind),
            allocation_return: (!is_session).then(|| Program::new("allocation_return", rest_kind)),
            allocation_without_return: is_session.then(|| Program::new("allocation_entry", rest_kind)),
            return_site: Program::new("allocation_end", rest_kind),
            free: live.then(|| Program::new("free_entry", rest_kind)),
            announcements: None,
            iterator: Self::iterator(loader, "read_threads")?,
            process_iterator: Self::iterator(loader, "read_processes")?,
            lifecycle: Lifecycle::link(loader)?,
            refusals: Vec::new(),
        };
        if probes != When::IfNeeded {
            for program in [&programs.allocation].into_iter().chain(&programs.allocation_return).chain(&programs.free) {
                program.loaded(loader)?;
            }
        }
        if kind == LinkKind::Perf {
            programs.try_link(&trial::location()?)?;
        } else {
            programs.check_link_type()?;
        }
        // Sessions were added after multi links were fixed, and perf links never had the bug.
        if kind == LinkKind::Multi {
            programs.links_one_process = trial::sees_all_threads(loader, guardian)?;
        }
        Ok(programs)
    }

    fn iterator(loader: &Loader, name: &str) -> Result<OwnedFd, KernelError> {
        let program = loader.program(name, ProgramKind::TaskIterator)?;
        sys::link_iterator(program.as_fd())
            .map_err(|source| KernelError::Link { what: "the task iterator".into(), source })
    }

    /// Links a program that does nothing to an instruction of this process, in the same way as the program at the entry
    /// of an allocation function: some kernels load programs that they cannot link.
    ///
    /// # Errors
    /// The kernel refuses the program or the link.
    pub fn try_link(&self, (path, offset): &(CString, u64)) -> Result<Links, KernelError> {
        let program = self.loader.program("nothing", self.allocation.wanted.1)?;
        let point = ProbePoint { offset: *offset, cookie: u64::MAX, role: Role::Allocates };
        let mut links = Links::default();
        let place = (path, Some(std::process::id()));
        self.link(&mut links, &program, place, (&[point], CountedBy::OwnLinks), (self.entry_type(), 0))
            .map_err(|source| KernelError::Link { what: path.to_string_lossy().into_owned(), source })?;
        Ok(links)
    }

    /// Checks whether the kernel supports the type of link: some kernels load programs that they cannot link. A kernel
    /// that supports it reports that a directory cannot be probed (`EBADF`). Making a real link and closing it again
    /// would take grace periods.
    fn check_link_type(&self) -> Result<(), KernelError> {
        let program = self.loader.program("nothing", self.allocation.wanted.1)?;
        let target = sys::UprobeTarget { path: c"/", offsets: &[1], cookies: &[0], semaphores: &[], pid: None };
        let how = How::Multi { attach_type: self.entry_type(), flags: 0 };
        match sys::link_uprobe(program.as_fd(), how, &target) {
            Err(source) if source.raw_os_error() != Some(libc::EBADF) => {
                Err(KernelError::Link { what: "a probe".into(), source })
            }
            _ => Ok(()),
        }
    }

    /// How the program at the entry of an allocation function is linked.
    fn entry_type(&self) -> u32 {
        if self.kind == LinkKind::Session { sys::ATTACH_UPROBE_SESSION } else { sys::ATTACH_UPROBE_MULTI }
    }

    /// Attaches to the given instructions of a file, in one process or in all that map the file. Each link counts the
    /// calls of the targets that are listed for its kind ([`CountedBy`]).
    ///
    /// # Errors
    /// The kernel refuses to attach to the file. In that case nothing stays attached.
    pub fn attach(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> Result<Links, KernelError> {
        let refused = |source| KernelError::Link { what: path.to_string_lossy().into_owned(), source };
        let announcements = self.announcements.as_ref();
        // A file where a program announces samples has no other points.
        let announces =
            points.iter().any(|point| matches!(point.role, Role::AnnouncesFree { .. } | Role::Announces { .. }));
        let counted_by = match pid {
            _ if announces && announcements.is_some_and(|it| it.of_listed) => CountedBy::Announcements,
            Some(_) => CountedBy::OwnLinks,
            None => CountedBy::SharedLinks,
        };
        let with = |is_wanted: fn(Role) -> bool| -> Vec<ProbePoint> {
            points.iter().filter(|point| is_wanted(point.role)).copied().collect()
        };
        let allocates = with(|role| role == Role::Allocates);
        let announced = |role: Role| matches!(role, Role::Announces { .. });
        let free_is_announced = |role: Role| matches!(role, Role::AnnouncesFree { .. });
        let multi = (sys::ATTACH_UPROBE_MULTI, 0);
        let entry = (self.entry_type(), 0);
        let without_return = self.allocation_without_return.as_ref().unwrap_or(&self.allocation);
        // The order matters: probes that end a call are attached before probes that begin one.
        let parts = [
            (self.free.as_ref(), with(|role| role == Role::Frees), multi),
            (announcements.and_then(|it| it.free.as_ref()), with(free_is_announced), multi),
            (Some(&self.return_site), with(|role| role == Role::ReturnSite), multi),
            (self.allocation_return.as_ref(), allocates.clone(), (sys::ATTACH_UPROBE_MULTI, sys::MULTI_RETURN)),
            (Some(without_return), with(|role| role == Role::AllocatesWithoutReturn), multi),
            (Some(&self.allocation), allocates, entry),
            (announcements.map(|it| &it.alloc), with(announced), multi),
        ];
        // Programs that are not loaded yet are loaded side by side. If the kernel refuses one, that is reported below.
        let needed = parts.iter().filter(|(_, points, _)| !points.is_empty()).filter_map(|(program, ..)| *program);
        on_all_processors(needed.collect(), |program| drop(program.loaded(&self.loader)));
        let mut links = Links::default();
        for (part, (program, points, (attach_type, flags))) in parts.into_iter().enumerate() {
            if part == 2 {
                links.frees = links.links.len();
            }
            let Some(program) = program.filter(|_| !points.is_empty()) else { continue };
            let program = program.loaded(&self.loader)?;
            self.link(&mut links, program, (path, pid), (&points, counted_by), (attach_type, flags))
                .map_err(refused)?;
        }
        Ok(links)
    }

    /// Adds links from a program to instructions of a file: one multi link, or one perf event each.
    fn link(
        &self,
        links: &mut Links,
        program: &OwnedFd,
        (path, pid): (&CString, Option<u32>),
        (points, counted_by): (&[ProbePoint], CountedBy),
        (attach_type, flags): (u32, u32),
    ) -> std::io::Result<()> {
        let cookie = |point: &ProbePoint| Cookie(point.cookie).of_kind(counted_by.code()).0;
        let how = match self.kind {
            LinkKind::Perf => How::perf(flags == sys::MULTI_RETURN)?,
            LinkKind::Session | LinkKind::Multi => How::Multi { attach_type, flags },
        };
        let offsets: Vec<u64> = points.iter().map(|point| point.offset).collect();
        let cookies: Vec<u64> = points.iter().map(cookie).collect();
        let have_semaphores = points.iter().any(|point| point.role.semaphore() != 0);
        let semaphores: Vec<u64> =
            points.iter().filter(|_| have_semaphores).map(|point| point.role.semaphore()).collect();
        let target = sys::UprobeTarget { path, offsets: &offsets, cookies: &cookies, semaphores: &semaphores, pid };
        for part in target.parts(how) {
            links.links.push(with_retries(|| self.guardian.link_uprobe(program.as_fd(), how, &part))?);
        }
        Ok(())
    }

    /// Attaches to each instruction separately. Instructions that the kernel refuses are skipped, and returned with
    /// their errors.
    ///
    /// # Errors
    /// The kernel refuses the file or the process. In that case nothing stays attached.
    pub fn attach_each(
        &self,
        path: &CString,
        points: &[ProbePoint],
        pid: Option<u32>,
    ) -> Result<(Links, Vec<(u64, String)>), KernelError> {
        let mut all = Links::default();
        let mut refused = Vec::new();
        let mut points = points.to_vec();
        points.sort_by_key(|point| point.role);
        for point in &points {
            match self.attach(path, std::slice::from_ref(point), pid) {
                Ok(links) => all.take_in(links),
                Err(KernelError::Link { source, .. }) if is_of_an_instruction(&source) => {
                    refused.push((point.offset, source.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
        Ok((all, refused))
    }

    /// The link of the process iterator.
    pub fn process_iterator_link(&self) -> BorrowedFd<'_> {
        self.process_iterator.as_fd()
    }
}

/// The program at the entry of an allocation function, and how the others are attached.
const fn entry_and_rest(kind: LinkKind) -> (NamedProgram, ProgramKind) {
    match kind {
        LinkKind::Session => (("allocation_session", ProgramKind::UprobeSession), ProgramKind::UprobeMulti),
        LinkKind::Multi => (("allocation_entry", ProgramKind::UprobeMulti), ProgramKind::UprobeMulti),
        LinkKind::Perf => (("allocation_entry", ProgramKind::UprobePerf), ProgramKind::UprobePerf),
    }
}

/// How the programs for announcements and inline hooks are attached. They handle no returns.
pub(super) const fn single_kind(kind: LinkKind) -> ProgramKind {
    match kind {
        LinkKind::Perf => ProgramKind::UprobePerf,
        LinkKind::Session | LinkKind::Multi => ProgramKind::UprobeMulti,
    }
}

/// An instruction to attach to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbePoint {
    /// File offset.
    pub offset: u64,
    /// Cookie that identifies the site.
    pub cookie: u64,
    /// The role of the instruction.
    pub role: Role,
}

/// The role of a probed instruction. Probes are placed in the order of the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// In a function that only frees.
    Frees,
    /// A return site of such a function: a return instruction, or one that leads to a return.
    ReturnSite,
    /// In a function that allocates.
    Allocates,
    /// In a function that allocates and whose return address must stay where it is, so it gets no return probe.
    AllocatesWithoutReturn,
    /// A program announces here that it frees a sample.
    AnnouncesFree {
        /// File offset of the counter of listeners, or 0.
        semaphore: u64,
    },
    /// A program announces a sample here.
    Announces {
        /// File offset of the counter of listeners, or 0.
        semaphore: u64,
    },
}

impl Role {
    const fn semaphore(self) -> u64 {
        match self {
            Self::AnnouncesFree { semaphore } | Self::Announces { semaphore } => semaphore,
            _ => 0,
        }
    }
}

/// Links to one file. Dropping them removes the probes in reverse order: frees are tracked from before the first
/// allocation until after the last one, so no freed block counts as live because its free was missed.
#[derive(Debug, Default)]
pub struct Links {
    links: Vec<ProbeLink>,
    /// Number of leading links that belong to functions that free.
    frees: usize,
}

impl Drop for Links {
    fn drop(&mut self) {
        while let Some(link) = self.links.pop() {
            drop(link);
        }
    }
}

impl Links {
    /// Stops tracking frees: removes the probes on functions that free. The other probes stay and miss nothing.
    pub fn stop_tracking_frees(&mut self) {
        self.links.drain(..std::mem::take(&mut self.frees));
    }

    /// Removes the probes in reverse order, a few at a time.
    pub fn close(links: impl Iterator<Item = Self>) {
        let mut links: Vec<ProbeLink> = links.flat_map(|mut it| std::mem::take(&mut it.links)).collect();
        ProbeLink::close_by_guardian(&mut links);
    }

    /// Appends links to other instructions. Links to functions that free must be added first.
    fn take_in(&mut self, mut other: Self) {
        self.frees += other.frees;
        self.links.append(&mut other.links);
    }
}

/// Retries an attach. If another tracer has registered the same instruction with a reference counter, the kernel
/// returns EINVAL until that tracer's probe is gone, which takes a moment after the tracer exits.
fn with_retries<T>(mut attach: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    const PAUSE: std::time::Duration = std::time::Duration::from_millis(20);
    for _ in 0..2 {
        match attach() {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EINTR | libc::EAGAIN)) => {
                std::thread::sleep(PAUSE);
            }
            other => return other,
        }
    }
    attach()
}

#[cfg(test)]
mod tests {
    use heapbpf_testing::{programs_to_load, skipped};
    use sampler_ebpf::abi::{Config, SMALLEST_STACK_COPY, stack_kind};

    use super::*;
    use crate::loader::MapSizes;

    #[test]
    fn every_kind_of_link_loads_with_every_kind_of_stack() {
        let Some(object) = programs_to_load() else { return };
        let object = crate::object::aligned(&object);
        let sizes = MapSizes { events_bytes: 1 << 16, stacks_bytes: 1 << 21, live_max: 1024, stack_traces_max: 1024 };
        let (none, walked, copied) = (stack_kind::NONE, stack_kind::FRAME_POINTERS, stack_kind::COPIED);
        for (stack_kind, stack_bytes) in
            [(none, 0), (walked, 0), (copied, SMALLEST_STACK_COPY), (copied, 65536), (copied, 1 << 20)]
        {
            for live in [0, 1] {
                let config = Config { live, stack_kind, stack_bytes, ..Config::default() };
                let loader = Arc::new(Loader::new(object, &config, &sizes).unwrap());
                for kind in [LinkKind::Session, LinkKind::Multi, LinkKind::Perf] {
                    match Programs::load(&loader, (live == 1, When::Ahead), Some(kind), &Guardian::default()) {
                        Ok(mut programs) => {
                            assert_eq!(programs.kind, kind);
                            if cfg!(target_arch = "x86_64") {
                                programs.follow_announcements(live == 1, false).unwrap();
                            }
                            programs.load_rest().unwrap();
                        }
                        Err(error) if kind == LinkKind::Session && !loader.knows_sessions() => {
                            skipped(error);
                        }
                        Err(error) => panic!("{kind}, stacks {stack_kind}, live {live}: {error}"),
                    }
                }
            }
        }
    }
}
