//! Carries out a plan, or takes out what is found, while the process is stopped.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use crate::error::Busy;
use crate::failure::Failure;
use crate::found::Found;
use crate::outcome::{Hooked, Moment, Prevented};
use crate::plan::{Kept, Pages, Plan, Step, Undo, Write, is_same_code, writes};
use crate::remote::Remote;
use crate::stack::Words;
use crate::stop::Stop;
use crate::sys::{self, Registers};
use crate::target::{FileId, Target};

const NO_FILE: u64 = u64::MAX;
const PRIVATE_ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
const MOVE_AND_KEEP: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
const READ_AND_RUN: i32 = libc::PROT_READ | libc::PROT_EXEC;

/// Words of the stacks of a stopped thread.
pub(crate) fn stack_words(stop: &Stop, registers: &Registers) -> Words {
    let read = |address, bytes: &mut [u8]| sys::read_memory(stop.pid, address, bytes).unwrap_or(0);
    Words::read(registers.rsp, registers.fs_base, read)
}

/// What the caller does at a moment.
pub(crate) type At<'a> = dyn FnMut(Moment) -> Result<(), Prevented> + 'a;

/// Has the caller do what it wants to.
fn reached(moment: Moment, at: &mut At<'_>) -> Result<(), Failure> {
    at(moment).map_err(|prevented| match prevented {
        Prevented::NotNow => Failure::Busy(Busy::Prevented),
        Prevented::Failed(error) => Failure::Trace("preparing the hooks", error),
    })
}

/// A plan, and how far it was carried out.
pub(crate) struct Injection<'a> {
    pub(crate) target: &'a Target,
    pub(crate) plan: &'a Plan,
    pub(crate) files: &'a [FileId],
    pub(crate) memfd_flags: u32,
}

/// What was moved from displaced instructions, and where it was.
#[derive(Default)]
struct Moved {
    threads: Vec<(i32, Registers)>,
    frames: Vec<(u64, u64)>,
    remote: Option<u64>,
}

impl Injection<'_> {
    /// Does everything, or nothing.
    pub(crate) fn run(&self, stop: &mut Stop, at: &mut At<'_>) -> Result<Hooked, Failure> {
        let mut remote = Remote::alone(stop, self.target.gadgets, &self.target.threads())?;
        let mut frames = Vec::new();
        let mut descriptor = None;
        let mut moved = Moved::default();
        let mut undo = Vec::new();
        for step in self.plan.steps() {
            // Half of these may be done when they fail; all others are done or not.
            let is_divisible = matches!(step, Step::MoveThreads | Step::Write);
            if is_divisible {
                undo.extend(self.plan.undo(step));
            }
            let result = match step {
                Step::Create => self.create(stop, &mut remote).map(|fd| descriptor = Some(fd)),
                Step::StopAll => {
                    let stopped = self.stop_all(stop, &mut remote).map(|found| frames = found);
                    stopped.and_then(|()| reached(Moment::Stopped, at))
                }
                Step::MapText => {
                    let mapped = self.step(&mut remote, step, descriptor.unwrap_or(NO_FILE));
                    mapped.and_then(|()| reached(Moment::Mapped, at))
                }
                Step::MoveThreads => {
                    let is_in_time = stop.check_time(Busy::Late);
                    is_in_time.and_then(|()| self.move_threads(stop, &mut remote, &frames, &mut moved))
                }
                Step::Write => write(&remote, &self.plan.jumps()).inspect(|()| remote.release_others(stop)),
                step => self.step(&mut remote, step, descriptor.unwrap_or(NO_FILE)),
            };
            match result {
                Ok(()) => {}
                // A call may still be under way, and there is no time to go back. What was done so far changes nothing.
                Err(Failure::Busy(why @ (Busy::Late | Busy::Slow))) => {
                    remote.release_others(stop);
                    let _ = remote.end(stop);
                    return Err(Failure::Busy(why));
                }
                Err(failure) => {
                    self.take_back(&mut remote, undo, descriptor, &moved);
                    let _ = remote.end(stop);
                    return Err(failure);
                }
            }
            if !is_divisible {
                undo.extend(self.plan.undo(step));
            }
        }
        remote.end(stop)?;
        let moved_threads = moved.threads.len() + usize::from(moved.remote.is_some());
        Ok(Hooked { moved_threads, moved_frames: moved.frames.len() })
    }

    /// Stops all threads, and looks whether the plan can be carried out. Signal frames that must be changed.
    fn stop_all(&self, stop: &mut Stop, remote: &mut Remote) -> Result<Vec<(u64, u64)>, Failure> {
        stop.stop_all()?;
        remote.renew(stop);
        let position = |_| Failure::Busy(Busy::Position);
        self.plan.moved(remote.registers().rip).map_err(position)?;
        self.check(stop)?;
        self.displaced_frames(stop)
    }

    /// Whether everything is as it was when the plan was made, before anything is touched.
    fn check(&self, stop: &Stop) -> Result<(), Failure> {
        let changed = Failure::Busy(Busy::Changed);
        if !self.target.is_same_process() {
            return Err(changed);
        }
        let draft = self.plan.draft();
        for ((pages, mapping), file) in draft.pages.iter().zip(self.plan.mappings()).zip(self.files) {
            let mut memory = vec![0; pages.original.len()];
            let is_read = sys::read_memory(stop.pid, pages.start, &mut memory).is_ok_and(|read| read == memory.len());
            if FileId::of(stop.pid, mapping).as_ref() != Some(file)
                || !is_read
                || !is_same_code(&pages.original, &memory)
            {
                return Err(changed);
            }
        }
        Ok(())
    }

    /// Signal frames that would return to displaced instructions: where they hold the address, and that address. A thread, or
    /// code that a signal interrupted, may be at an instruction without a copy: then the plan cannot be carried out now.
    fn displaced_frames(&self, stop: &Stop) -> Result<Vec<(u64, u64)>, Failure> {
        let mut frames = Vec::new();
        if self.plan.draft().displaced.is_empty() {
            return Ok(frames);
        }
        for (_, registers) in stop.registers() {
            let position = |_| Failure::Busy(Busy::Position);
            self.plan.moved(registers.rip).map_err(position)?;
            for (at, address) in stack_words(stop, &registers).resume_addresses() {
                if self.plan.moved(address).map_err(position)?.is_some() {
                    frames.push((at, address));
                }
            }
            stop.check_time(Busy::Late)?;
        }
        Ok(frames)
    }

    /// Has the process make a memfd, and fills it; its number there.
    fn create(&self, stop: &Stop, remote: &mut Remote) -> Result<u64, Failure> {
        let name = self.plan.memfd_name();
        let at = remote.string(&name)?;
        let arguments = [at, u64::from(self.memfd_flags), 0, 0, 0, 0];
        let fd = remote.call("memfd_create", libc::SYS_memfd_create, arguments)?;
        let filled = self.fill(stop, fd, &name);
        if filled.is_err() {
            let _ = remote.call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        }
        filled.map(|()| fd)
    }

    fn fill(&self, stop: &Stop, fd: u64, name: &str) -> Result<(), Failure> {
        let trace = |error| Failure::Trace("filling the memfd", error);
        let file = File::from(self.target.take_descriptor(fd).map_err(trace)?);
        // Whoever shares the table of descriptors may have put another file there.
        if !is_memfd(&file, name) {
            return Err(Failure::Busy(Busy::Changed));
        }
        let plan = self.plan.range();
        file.set_len(plan.end - plan.start).map_err(trace)?;
        for (offset, bytes) in self.plan.contents() {
            stop.check_time(Busy::Late)?;
            file.write_all_at(bytes, offset).map_err(trace)?;
        }
        sys::seal(&file).map_err(trace)
    }

    /// A step that is one system call of the process, or one write.
    fn step(&self, remote: &mut Remote, step: Step, fd: u64) -> Result<(), Failure> {
        let (draft, range) = (self.plan.draft(), self.plan.range());
        let data = |at: usize| {
            let range = &draft.data[at].range;
            (draft.base + range.start, range.end - range.start)
        };
        match step {
            Step::Reserve => {
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED_NOREPLACE;
                map(remote, range.start, range.end - range.start, libc::PROT_NONE, flags, fd, 0)
            }
            Step::MapData(at) => {
                let (start, bytes) = data(at);
                map(remote, start, bytes, libc::PROT_READ | libc::PROT_WRITE, PRIVATE_ANONYMOUS, NO_FILE, 0)
            }
            Step::WipeOnFork(at) => {
                let (start, bytes) = data(at);
                let advice = libc::MADV_WIPEONFORK as u64;
                remote.call("madvise", libc::SYS_madvise, [start, bytes, advice, 0, 0, 0]).map(drop)
            }
            Step::FillData(at) => {
                let written = sys::write_memory(self.target.pid(), data(at).0, &draft.data[at].initial);
                written.map_err(|error| Failure::Trace("writing data", error))
            }
            Step::MapText => {
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
                map(remote, draft.base, draft.text.len() as u64, READ_AND_RUN, flags, fd, 0)
            }
            Step::SetAside(at) => {
                let Kept { start, spare, bytes } = self.plan.kept(at);
                move_pages(remote, start, spare, bytes)
            }
            Step::Replace(at) => {
                let Kept { start, spare, bytes } = self.plan.kept(at);
                let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_POPULATE;
                map(remote, start, bytes, READ_AND_RUN, flags, fd, spare - draft.base)
            }
            Step::Close => remote.call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0]).map(drop),
            Step::Create | Step::StopAll | Step::MoveThreads | Step::Write => Ok(()),
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
        let copy = |address| self.plan.moved(address).ok().flatten();
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
            sys::write_memory(stop.pid, *at, &to.to_le_bytes()).map_err(trace)?;
            moved.frames.push((*at, *address));
        }
        Ok(())
    }

    /// Takes back what was done, last thing first.
    fn take_back(&self, remote: &mut Remote, undo: Vec<Undo>, descriptor: Option<u64>, moved: &Moved) {
        for undo in undo.into_iter().rev() {
            let result = match undo {
                Undo::Close => {
                    let fd = descriptor.unwrap_or(NO_FILE);
                    remote.call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0]).map(drop)
                }
                Undo::Restore => {
                    let pages = &self.plan.draft().pages;
                    let writes = |pages: &Pages| writes(pages.start, &pages.edited, &pages.original);
                    write(remote, &pages.iter().flat_map(writes).collect::<Vec<_>>())
                }
                Undo::MoveBack => {
                    self.move_back(remote, moved);
                    Ok(())
                }
                undo => take_out(remote, undo, &self.plan.range()),
            };
            // What cannot be taken back stays, and is found again.
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
            let _ = sys::write_memory(self.target.pid(), *at, &address.to_le_bytes());
        }
    }
}

/// Writes code, while all threads are stopped.
fn write(remote: &Remote, writes: &[Write]) -> Result<(), Failure> {
    writes.iter().try_for_each(|(address, bytes)| {
        sys::poke(remote.tid(), *address, *bytes).map_err(|error| Failure::Trace("writing a jump", error))
    })
}

/// Whether it is a memfd of this name.
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

/// Moves pages, with what was written to them. Where they were, the file's stay mapped: there is no moment without code.
fn move_pages(remote: &mut Remote, from: u64, to: u64, bytes: u64) -> Result<(), Failure> {
    remote.call("mremap", libc::SYS_mremap, [from, bytes, bytes, MOVE_AND_KEEP as u64, to, 0]).map(drop)
}

fn take_out(remote: &mut Remote, undo: Undo, range: &std::ops::Range<u64>) -> Result<(), Failure> {
    match undo {
        Undo::PutBack(Kept { start, spare, bytes }) => move_pages(remote, spare, start, bytes),
        Undo::Unmap => {
            let arguments = [range.start, range.end - range.start, 0, 0, 0, 0];
            remote.call("munmap", libc::SYS_munmap, arguments).map(drop)
        }
        Undo::Close | Undo::MoveBack | Undo::Restore => Ok(()),
    }
}

/// Takes a blob out. Whether it could be unmapped; else its jumps are gone and it stays, inert, because a thread may come
/// back to it.
pub(crate) fn remove(target: &Target, found: &Found, is_unmapped: bool, stop: &mut Stop) -> Result<bool, Failure> {
    stop.stop_all()?;
    if !target.is_same_process() {
        return Err(Failure::Busy(Busy::Changed));
    }
    let restored =
        found.pages.iter().map(|kept| original_code(stop, found, *kept)).collect::<Result<Vec<_>, _>>()?.concat();
    let is_free = is_unmapped && !is_referenced(stop, found)?;
    let is_awkward = |tid, _: &Registers| target.may_be_filtered(tid);
    let mut remote = Remote::begin(stop, target.gadgets, is_awkward)?;
    let result = (|| {
        write(&remote, &restored)?;
        for kept in &found.pages {
            take_out(&mut remote, Undo::PutBack(*kept), &found.range)?;
        }
        // Nobody can come to the text any more.
        remote.release_others(stop);
        for fd in target.descriptors_of(found) {
            remote.call("close", libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
        }
        if is_free && found.is_mapped {
            take_out(&mut remote, Undo::Unmap, &found.range)?;
        }
        Ok(is_free)
    })();
    remote.end(stop).and(result)
}

/// What to write over the jumps in pages that were replaced: the memfd has the original code.
fn original_code(stop: &Stop, found: &Found, kept: Kept) -> Result<Vec<Write>, Failure> {
    let Kept { start, spare, bytes } = kept;
    let changed = |_| Failure::Busy(Busy::Changed);
    let file = File::open(format!("/proc/{}/map_files/{:x}-{:x}", stop.pid, start, start + bytes)).map_err(changed)?;
    if file.metadata().map_err(changed)?.ino() != found.inode {
        return Err(Failure::Busy(Busy::Changed));
    }
    let (mut original, mut memory) = (vec![0; bytes as usize], vec![0; bytes as usize]);
    file.read_exact_at(&mut original, spare - found.range.start).map_err(changed)?;
    if sys::read_memory(stop.pid, start, &mut memory).map_err(changed)? != memory.len() {
        return Err(Failure::Busy(Busy::Changed));
    }
    Ok(writes(start, &memory, &original))
}

/// Whether a thread may come back to the text: by a register, a word of a stack, or a restartable sequence.
fn is_referenced(stop: &Stop, found: &Found) -> Result<bool, Failure> {
    let Some(text) = &found.text else { return Ok(false) };
    for (tid, registers) in stop.registers() {
        let r = &registers;
        let general = [
            r.rip, r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rbp, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14,
            r.r15,
        ];
        let words = stack_words(stop, r);
        if general.iter().any(|value| text.contains(value)) || !words.is_complete || words.contain(text) {
            return Ok(true);
        }
        let sequence = sys::rseq_area(tid).map(|area| {
            let mut word = [0; 8];
            let read = sys::read_memory(stop.pid, area + 8, &mut word);
            read.map(|_| u64::from_le_bytes(word))
        });
        if sequence.is_some_and(|at| at.map_or(true, |at| found.range.contains(&at))) {
            return Ok(true);
        }
        stop.check_time(Busy::Late)?;
    }
    Ok(false)
}
