//! Carries out a plan while the process is stopped.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::Duration;

use crate::error::{Busy, Failure};
use crate::plan::{Kept, Pages, Part, Step, Undo, Write, writes};
use crate::probes::Spare;
use crate::remote::Remote;
use crate::run::IsMoment;
use crate::same_code::is_same_code;
use crate::stack::{Piece, Words};
use crate::stop::Stop;
use crate::sys::{self, Registers};
use crate::target::Target;
use crate::work::{FileId, Hooked, Mapped, Planned};

const NO_FILE: u64 = u64::MAX;
const PRIVATE_ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
const MOVE_AND_KEEP: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
const READ_AND_RUN: i32 = libc::PROT_READ | libc::PROT_EXEC;

/// Reads the words of a stopped thread's stacks.
pub(crate) fn stack_words(target: &Target, registers: &Registers) -> Words {
    Words::read(registers.rsp, registers.fs_base, |address, bytes| {
        if target.memory.read(address, bytes) {
            return Piece::Held(bytes.len());
        }
        match target.maps().at(address) {
            None => Piece::Held(0),
            Some(mapping) if mapping.is_anonymous() && !target.memory.is_swapped(address) => Piece::Empty,
            Some(_) => Piece::Absent,
        }
    })
}

/// Addresses of words in signal frames that are to be changed, and their content.
type Frames = Vec<(u64, u64)>;

/// A plan that is carried out on a target.
pub(crate) struct Injection<'a> {
    pub(crate) target: &'a Target,
    pub(crate) planned: &'a Planned,
}

/// What was moved away from displaced instructions, and where it was.
#[derive(Default)]
struct Moved {
    threads: Vec<(i32, Registers)>,
    frames: Vec<(u64, u64)>,
    remote: Option<u64>,
}

/// How much longer a process may be stopped once its replacement was agreed to. The caller that counted its calls so
/// far sees none from the first replaced page on, so the process must not be left there.
const AT_MOST_LONGER: Duration = Duration::from_millis(80);

/// Asks the caller whether to replace now, and checks that it is early enough. If so, the calls that the process makes
/// get more time, too.
fn ask(stop: &mut Stop, remote: &mut Remote, is_moment: IsMoment) -> Result<(), Failure> {
    if !is_moment() {
        return Err(Failure::Busy(Busy::NotNow));
    }
    stop.extend(AT_MOST_LONGER)?;
    remote.renew(stop);
    Ok(())
}

impl Injection<'_> {
    /// Maps everything. Nothing leads to it yet.
    pub(crate) fn map(&self, stop: &mut Stop) -> Result<Mapped, Failure> {
        Remote::check_filters(self.target)?;
        stop.stop_all()?;
        if !self.target.is_same_program() {
            return Err(Failure::Busy(Busy::Changed));
        }
        let mut remote = Remote::begin(stop, self.target, |_, _| false)?;
        let mapped = self.run(stop, &mut remote, Part::Map, &[]);
        let left = remote.end(stop);
        mapped?;
        left?;
        self.mapped(stop)
    }

    /// Identifies what is mapped now.
    fn mapped(&self, stop: &Stop) -> Result<Mapped, Failure> {
        FileId::of(stop.pid, &self.planned.plan.text()).map(Mapped).ok_or(Failure::Busy(Busy::Changed))
    }

    /// Does the rest of the plan, or nothing.
    pub(crate) fn replace(
        &self,
        stop: &mut Stop,
        mapped: &Mapped,
        is_moment: Option<IsMoment>,
    ) -> Result<Hooked, Failure> {
        stop.stop_all()?;
        self.check(stop, mapped)?;
        let frames = self.displaced_frames(stop)?;
        let mut remote = Remote::begin(stop, self.target, |_, _| false)?;
        let moved = is_moment
            .map_or(Ok(()), |is_moment| ask(stop, &mut remote, is_moment))
            .and_then(|()| self.run(stop, &mut remote, Part::Replace, &frames));
        // Leaving late harms nothing, so another failure takes precedence.
        let left = remote.end(stop);
        let moved = moved?;
        left?;
        let moved_threads = moved.threads.len() + usize::from(moved.remote.is_some());
        Ok(Hooked { moved_threads, moved_frames: moved.frames.len() })
    }

    /// Does the steps of a part, or nothing. If the time runs out, a call may still be in progress: what was done so
    /// far stays, and changes nothing.
    fn run(&self, stop: &Stop, remote: &mut Remote, part: Part, frames: &[(u64, u64)]) -> Result<Moved, Failure> {
        let mut fd = NO_FILE;
        let mut moved = Moved::default();
        let mut undo = Vec::new();
        for step in self.planned.plan.steps(part) {
            // These may fail halfway; all others are done or not done.
            let is_divisible = matches!(step, Step::MoveThreads | Step::Write);
            if is_divisible {
                undo.extend(self.planned.plan.undo(step));
            }
            let result = match step {
                Step::Create => self.create(stop, remote).map(|made| fd = made),
                Step::MoveThreads => {
                    let is_in_time = stop.check_time(Busy::Late);
                    is_in_time.and_then(|()| self.move_threads(stop, remote, frames, &mut moved))
                }
                Step::Write => write(remote.tid(), &self.planned.plan.jumps()),
                step => self.step(remote, step, fd),
            };
            match result {
                Ok(()) => {}
                Err(Failure::Busy(why @ (Busy::Late | Busy::Slow))) => return Err(Failure::Busy(why)),
                Err(failure) => {
                    self.take_back(remote, undo, fd, &moved);
                    return Err(failure);
                }
            }
            if !is_divisible {
                undo.extend(self.planned.plan.undo(step));
            }
        }
        Ok(moved)
    }

    /// Checks that everything still is as when the plan was made and partly carried out, before anything is touched.
    fn check(&self, stop: &Stop, mapped: &Mapped) -> Result<(), Failure> {
        let changed = Failure::Busy(Busy::Changed);
        let copies = (0..self.planned.plan.draft().pages.len()).map(|at| self.planned.plan.kept(at).copy());
        let mut ours = copies.chain([self.planned.plan.text()]);
        let is_ours = ours.all(|range| FileId::of(stop.pid, &range).as_ref() == Some(&mapped.0));
        if !self.target.is_same_program() || !is_ours {
            return Err(changed);
        }
        let draft = self.planned.plan.draft();
        for ((pages, mapping), file) in draft.pages.iter().zip(self.planned.plan.mappings()).zip(&self.planned.files) {
            let mut memory = vec![0; pages.original.len()];
            let is_read = self.target.memory.read(pages.start, &mut memory);
            if FileId::of(stop.pid, mapping).as_ref() != Some(file)
                || !is_read
                || !is_same_code(&pages.original, &memory)
            {
                return Err(changed);
            }
        }
        Ok(())
    }

    /// Finds signal frames that would return to displaced instructions: the address of the saved address, and the saved
    /// address. If a thread, or code that a signal interrupted, is at an instruction without a copy, the plan cannot be
    /// carried out now.
    fn displaced_frames(&self, stop: &Stop) -> Result<Frames, Failure> {
        let mut frames = Vec::new();
        if self.planned.plan.draft().displaced.is_empty() {
            return Ok(frames);
        }
        for (_, registers) in stop.registers() {
            let position = |_| Failure::Busy(Busy::Position);
            self.planned.plan.moved(registers.rip).map_err(position)?;
            let words = stack_words(self.target, &registers);
            if words.has_gaps {
                return Err(Failure::Busy(Busy::Position));
            }
            for (at, address) in words.resume_addresses() {
                if self.planned.plan.moved(address).map_err(position)?.is_some() {
                    if !self.target.memory.may_write(&(at..at + 8)) {
                        return Err(Failure::Busy(Busy::Position));
                    }
                    frames.push((at, address));
                }
            }
            stop.check_time(Busy::Slow)?;
        }
        Ok(frames)
    }

    /// Has the process create a memfd, fills it, and returns its number. It is the lowest free one, which the process's
    /// own calls may rely on, so it is closed in the same stop.
    fn create(&self, stop: &Stop, remote: &mut Remote) -> Result<u64, Failure> {
        let name = self.planned.plan.memfd_name();
        let at = remote.string(&name)?;
        let arguments = [at, u64::from(self.planned.memfd_flags), 0, 0, 0, 0];
        let fd = remote.call("memfd_create", libc::SYS_memfd_create, arguments)?;
        let filled = self.fill(stop, fd, &name);
        if filled.is_err() {
            let _ = close(remote, fd);
        }
        filled.map(|()| fd)
    }

    fn fill(&self, stop: &Stop, fd: u64, name: &str) -> Result<(), Failure> {
        let trace = |error| Failure::Trace("filling the memfd", error);
        let file = File::from(self.target.take_descriptor(fd).map_err(trace)?);
        // A process that shares the descriptor table may have put another file there.
        if !is_memfd(&file, name) {
            return Err(Failure::Busy(Busy::Changed));
        }
        let plan = self.planned.plan.range();
        file.set_len(2 * (plan.end - plan.start)).map_err(trace)?;
        for (offset, bytes) in self.planned.plan.contents() {
            stop.check_time(Busy::Late)?;
            file.write_all_at(bytes, offset).map_err(trace)?;
        }
        sys::seal(&file).map_err(trace)
    }

    /// Does a step that is one system call of the process, or one write.
    fn step(&self, remote: &mut Remote, step: Step, fd: u64) -> Result<(), Failure> {
        let (draft, range) = (self.planned.plan.draft(), self.planned.plan.range());
        let data = |at: usize| {
            let range = &draft.data[at].range;
            (draft.base + range.start, range.end - range.start)
        };
        match step {
            Step::Reserve => {
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
                let reserved = map(remote, range.start, range.end - range.start, libc::PROT_NONE, flags, fd, 0);
                // Something was mapped there after the plan was made: a call of an abandoned attempt may come late.
                let is_taken = |error: &io::Error| error.raw_os_error() == Some(libc::EEXIST);
                match reserved {
                    Err(Failure::Call(_, error)) if is_taken(&error) => Err(Failure::Busy(Busy::Changed)),
                    reserved => reserved,
                }
            }
            Step::MapData(at) => {
                let range = self.planned.plan.adjacent_data(at);
                let (start, bytes) = (draft.base + range.start, range.end - range.start);
                map(remote, start, bytes, libc::PROT_READ | libc::PROT_WRITE, PRIVATE_ANONYMOUS, NO_FILE, 0)
            }
            Step::WipeOnFork(at) | Step::Empty(at) => {
                let (start, bytes) = data(at);
                let is_wiped = matches!(step, Step::WipeOnFork(_));
                let advice = if is_wiped { libc::MADV_WIPEONFORK } else { libc::MADV_DONTNEED };
                remote.call("madvise", libc::SYS_madvise, [start, bytes, advice as u64, 0, 0, 0]).map(drop)
            }
            Step::FillData(at) => {
                let mut initial = draft.data[at].initial.clone();
                // The rest of the page is zero.
                initial.resize(initial.len().next_multiple_of(8), 0);
                let written = remote.write(data(at).0, &initial);
                written.map_err(|error| Failure::Trace("writing data", error))
            }
            Step::MapCopy(at) => {
                let kept = self.planned.plan.kept(at);
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_POPULATE;
                map(remote, kept.copy().start, kept.bytes, READ_AND_RUN, flags, fd, kept.spare - draft.base)
            }
            Step::MapText => {
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
                map(remote, draft.base, draft.text.len() as u64, READ_AND_RUN, flags, fd, 0)
            }
            Step::SetAside(at) => {
                let Kept { start, spare, bytes, .. } = self.planned.plan.kept(at);
                move_pages(remote, start, spare, bytes)
            }
            Step::Replace(at) => {
                let kept = self.planned.plan.kept(at);
                move_pages(remote, kept.copy().start, kept.start, kept.bytes)
            }
            Step::Close => close(remote, fd),
            Step::Create | Step::MoveThreads | Step::Write => Ok(()),
        }
    }

    /// Moves threads and interrupted code to the copies of their instructions. From there they come back by themselves,
    /// whether the pages are replaced or not.
    fn move_threads(
        &self,
        stop: &Stop,
        remote: &mut Remote,
        frames: &[(u64, u64)],
        moved: &mut Moved,
    ) -> Result<(), Failure> {
        let copy = |address| self.planned.plan.moved(address).ok().flatten();
        let trace = |error| Failure::Trace("moving a thread", error);
        for (tid, registers) in stop.registers().filter(|(tid, _)| *tid != remote.tid()) {
            let Some(rip) = copy(registers.rip) else { continue };
            sys::set_registers(tid, &Registers { rip, ..registers }).map_err(trace)?;
            moved.threads.push((tid, registers));
        }
        let own = remote.registers().rip;
        if let Some(rip) = copy(own) {
            remote.resume_at(rip)?;
            moved.remote = Some(own);
        }
        for (at, address) in frames.iter().filter(|(at, _)| !remote.frame_range().contains(at)) {
            let Some(to) = copy(*address) else { continue };
            remote.write(*at, &to.to_le_bytes()).map_err(trace)?;
            moved.frames.push((*at, *address));
        }
        Ok(())
    }

    /// Undoes what was done, in reverse order.
    fn take_back(&self, remote: &mut Remote, undo: Vec<Undo>, fd: u64, moved: &Moved) {
        for undo in undo.into_iter().rev() {
            let result = match undo {
                Undo::Close => close(remote, fd),
                Undo::Restore => {
                    let pages = &self.planned.plan.draft().pages;
                    let writes = |pages: &Pages| writes(pages.start, &pages.edited, &pages.original);
                    write(remote.tid(), &pages.iter().flat_map(writes).collect::<Vec<_>>())
                }
                Undo::MoveBack => {
                    self.move_back(remote, moved);
                    Ok(())
                }
                Undo::PutBack(kept) => put_back(remote, kept),
                Undo::Unmap => unmap(remote, &self.planned.plan.range()),
            };
            // What cannot be undone stays, and will be found again.
            if result.is_err() {
                break;
            }
        }
    }

    fn move_back(&self, remote: &mut Remote, moved: &Moved) {
        for (tid, registers) in &moved.threads {
            let _ = sys::set_registers(*tid, registers);
        }
        if let Some(rip) = moved.remote {
            let _ = remote.resume_at(rip);
        }
        for (at, address) in &moved.frames {
            let _ = remote.write(*at, &address.to_le_bytes());
        }
    }
}

/// Writes code, while all threads are stopped.
pub(crate) fn write(tid: i32, writes: &[Write]) -> Result<(), Failure> {
    writes.iter().try_for_each(|(address, bytes)| {
        sys::poke(tid, *address, *bytes).map_err(|error| Failure::Trace("writing a jump", error))
    })
}

/// Whether the file is an empty memfd of this name.
fn is_memfd(file: &File, name: &str) -> bool {
    use std::os::fd::AsRawFd as _;
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let is_named = link.is_ok_and(|link| link.as_os_str() == format!("/memfd:{name} (deleted)").as_str());
    is_named && file.metadata().is_ok_and(|data| data.is_file() && data.nlink() == 0 && data.len() == 0)
}

fn map(
    remote: &mut Remote,
    start: u64,
    bytes: u64,
    access: i32,
    flags: i32,
    fd: u64,
    offset: u64,
) -> Result<(), Failure> {
    let arguments = [start, bytes, access as u64, flags as u64, fd, offset];
    remote.call("mmap", libc::SYS_mmap, arguments).map(drop)
}

/// Moves pages with what was written to them. The file's pages stay mapped at the old place, so there is always code
/// there.
fn move_pages(remote: &mut Remote, from: u64, to: u64, bytes: u64) -> Result<(), Failure> {
    remote.call("mremap", libc::SYS_mremap, [from, bytes, bytes, MOVE_AND_KEEP as u64, to, 0]).map(drop)
}

/// Empties a spare place whose pages are back, but keeps it reserved. Until then the pages may need repair.
pub(crate) fn leave_spare(remote: &mut Remote, kept: Kept) -> Result<(), Failure> {
    map(remote, kept.spare, kept.bytes, libc::PROT_NONE, PRIVATE_ANONYMOUS, NO_FILE, 0)
}

/// Moves pages back from their spare place.
pub(crate) fn put_back(remote: &mut Remote, kept: Kept) -> Result<(), Failure> {
    let spare = Spare::empty(remote, kept)?;
    move_pages(remote, kept.spare, kept.start, kept.bytes)?;
    spare.renew(remote)?;
    leave_spare(remote, kept)
}

/// Unmaps everything that was reserved.
pub(crate) fn unmap(remote: &mut Remote, range: &Range<u64>) -> Result<(), Failure> {
    remote.call("munmap", libc::SYS_munmap, [range.start, range.end - range.start, 0, 0, 0, 0]).map(drop)
}

/// Closes a descriptor of the process.
pub(crate) fn close(remote: &mut Remote, fd: u64) -> Result<(), Failure> {
    remote.call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0]).map(drop)
}
