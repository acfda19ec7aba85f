//! System calls that a stopped thread makes for us.
//!
//! During all of this the thread has a signal frame on its stack, and all signals are blocked. In whatever state it is
//! released, it returns to where it was (see [`crate::frame`]).

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Busy, Failure, Refusal};
use crate::frame::{CODE_SEGMENT, Frame, Gadgets, SCRATCH_BYTES, SYSTEM_CALL, is_denied_memory, place_of_keys};
use crate::interrupted::{Malformed, SYSCALL_BYTES, abort_address, has_restart_block, restarted_by_hand};
use crate::memory::Memory;
use crate::seccomp::{Answer, Call, Filters};
use crate::status::Status;
use crate::stop::Stop;
use crate::sys::{self, Registers, Report};
use crate::target::Target;

/// Most threads that are tried.
pub(crate) const MAX_TRIES: usize = 16;
/// How often a thread that is late is checked for a frozen control group.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(10);
/// Results from here on are errors.
const FIRST_ERROR: u64 = (-4095i64) as u64;
const ALL_SIGNALS: u64 = u64::MAX;
/// The signals that the kernel removes from any mask.
const UNBLOCKABLE: u64 = 1 << (libc::SIGKILL - 1) | 1 << (libc::SIGSTOP - 1);

/// A system call: its number, and arguments.
type NumberAndArguments = (libc::c_long, [u64; 6]);

/// Name of the call that leaves the signal frame.
const LEAVING: &str = "rt_sigreturn";
/// A plausible address, for calls whose address is not known yet.
const SOME_ADDRESS: u64 = 0x7f00_0000_0000;

/// The calls that a process makes for us, before their addresses are known. [`Remote::call`] checks each one again.
const FIXED_CALLS: [(&str, NumberAndArguments); 11] = {
    const AT: u64 = SOME_ADDRESS;
    const BYTES: u64 = 1 << 20;
    const FD: u64 = 9;
    const fn mmap(access: i32, flags: i32, fd: u64) -> NumberAndArguments {
        (libc::SYS_mmap, [AT, BYTES, access as u64, (flags | libc::MAP_PRIVATE) as u64, fd, 0])
    }
    const DATA: i32 = libc::PROT_READ | libc::PROT_WRITE;
    const TEXT: i32 = libc::PROT_READ | libc::PROT_EXEC;
    const MOVE: i32 = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    [
        (LEAVING, (libc::SYS_rt_sigreturn, [0; 6])),
        ("memfd_create", (libc::SYS_memfd_create, [AT, libc::MFD_CLOEXEC as u64, 0, 0, 0, 0])),
        ("mmap", mmap(libc::PROT_NONE, libc::MAP_FIXED_NOREPLACE, FD)),
        ("mmap", mmap(libc::PROT_NONE, libc::MAP_ANONYMOUS | libc::MAP_FIXED, u64::MAX)),
        ("mmap", mmap(DATA, libc::MAP_ANONYMOUS | libc::MAP_FIXED, u64::MAX)),
        ("mmap", mmap(TEXT, libc::MAP_FIXED, FD)),
        ("mmap", mmap(TEXT, libc::MAP_FIXED | libc::MAP_POPULATE, FD)),
        ("madvise", (libc::SYS_madvise, [AT, BYTES, libc::MADV_WIPEONFORK as u64, 0, 0, 0])),
        ("mremap", (libc::SYS_mremap, [AT, BYTES, BYTES, MOVE as u64, AT, 0])),
        ("munmap", (libc::SYS_munmap, [AT, BYTES, 0, 0, 0, 0])),
        ("close", (libc::SYS_close, [FD, 0, 0, 0, 0, 0])),
    ]
};

/// A call as a filter sees it.
fn call_of(gadgets: &Gadgets, (number, arguments): NumberAndArguments) -> Call {
    let next_instruction = if number == libc::SYS_rt_sigreturn {
        gadgets.behind_the_way_out()
    } else {
        gadgets.system_call + SYSCALL_BYTES
    };
    Call { number: number as u32, next_instruction, arguments }
}

/// Whether a thread must not be asked to make this call. A call that fails does no harm, except the one that leaves the
/// frame.
fn is_refused(name: &str, answer: Answer) -> bool {
    match answer {
        Answer::Made => false,
        Answer::Fails => name == LEAVING,
        Answer::Asks | Answer::Ends => true,
    }
}

/// A thread under its signal frame.
pub(crate) struct Remote {
    pid: i32,
    tid: i32,
    memory: Arc<Memory>,
    gadgets: Gadgets,
    frame: Frame,
    /// The previous content of the frame's memory.
    below: Vec<u8>,
    registers: Registers,
    mask: u64,
    is_stop_wanted: bool,
    filters: Filters,
    stage: Stage,
    /// When to give up waiting for the thread.
    deadline: Option<Instant>,
}

/// What the thread is doing for us.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It is stopped.
    Still,
    /// It runs to the entry of a call.
    Entering,
    /// The same, but it is to stop before the call if it has not begun it yet.
    Recalled,
    /// It runs to the return from a call.
    Returning,
    /// It runs to where its registers can be restored.
    Leaving,
}

impl Remote {
    /// Prepares one of the threads, all of which are stopped and stay so until [`Self::end`]: below its stack pointer
    /// there may be other threads' data if its stack is a local array, as that of a coroutine may be. `is_awkward` says
    /// which threads should rather not be taken.
    ///
    /// A thread that was to make a call for a killed injector may not have got a CPU since. Its call would then come
    /// after those that are made now, so the thread leaves its frame without it.
    pub(crate) fn begin(
        stop: &mut Stop,
        target: &Target,
        is_awkward: impl Fn(i32, &Registers) -> bool,
    ) -> Result<Self, Failure> {
        let gadgets = target.gadgets;
        let has = |address, code: &[u8]| {
            let mut bytes = vec![0; code.len()];
            target.memory.read(address, &mut bytes) && bytes == code
        };
        if !has(gadgets.system_call, SYSTEM_CALL) || !has(gadgets.restorer, gadgets.restorer_code) {
            return Err(Failure::Busy(Busy::Changed));
        }
        let is_due = |tid, registers: &Registers| {
            registers.rip == gadgets.system_call
                && FIXED_CALLS.iter().any(|(_, (number, _))| number.cast_unsigned() == registers.rax)
                && has(registers.rsp, &gadgets.restorer.to_le_bytes())
                && sys::signal_mask(tid).is_ok_and(|mask| mask | UNBLOCKABLE == ALL_SIGNALS)
        };
        stop.skip_calls(is_due)?;
        let mut threads: Vec<_> = stop.registers().filter(|(_, registers)| registers.cs == CODE_SEGMENT).collect();
        threads.sort_by_cached_key(|(tid, registers)| {
            let is_given = target.has_given(*tid, registers, registers.rsp);
            (!is_given, has_restart_block(registers), is_awkward(*tid, registers))
        });
        let mut why = Failure::Busy(Busy::NoThread);
        for (tid, registers) in threads.into_iter().take(MAX_TRIES) {
            match Self::with(stop, target, (tid, registers)) {
                Ok(Some(remote)) => return Ok(remote),
                Ok(None) => {}
                Err(refused @ Failure::Refused(_)) => why = refused,
                Err(failure) => return Err(failure),
            }
        }
        Err(why)
    }

    /// Refuses a process, before it is stopped, if all its threads have filters and this process may not read them.
    pub(crate) fn check_filters(target: &Target) -> Result<(), Failure> {
        let may_read = || Status::read("/proc/thread-self/status").is_ok_and(|own| own.may_read_filters());
        if target.is_filtered() && !may_read() {
            let denied = io::Error::from_raw_os_error(libc::EACCES);
            return Err(Failure::Refused(Refusal::UnknownSeccomp(denied)));
        }
        Ok(())
    }

    /// Suspends the filters of a thread, unless one of them would end the process if we were killed.
    fn suspend_filters(stop: &Stop, gadgets: &Gadgets, tid: i32) -> Result<Filters, Failure> {
        if stop.status(tid).is_some_and(|status| status.seccomp == 0) {
            return Ok(Filters::default());
        }
        let filters = sys::seccomp_filters(tid).map(Filters::new);
        let filters = filters.map_err(|error| Failure::Refused(Refusal::UnknownSeccomp(error)))?;
        let answers = FIXED_CALLS.map(|(name, call)| (name, filters.answer(&call_of(gadgets, call))));
        if let Some((call, answer)) = answers.iter().find(|(name, answer)| is_refused(name, *answer)) {
            return Err(Failure::Refused(Refusal::Seccomp { call: (*call).into(), answer: answer.to_string() }));
        }
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_SUSPEND_SECCOMP;
        // A kernel that cannot suspend filters cannot show them either: it says that there are none.
        let suspended = sys::set_options(tid, options);
        suspended.map_err(|error| Failure::Refused(Refusal::UnknownSeccomp(error)))?;
        Ok(filters)
    }

    /// Puts this thread under a frame; `None` if that is not possible. A thread in a restartable sequence goes on
    /// afterwards as if it had been interrupted there.
    fn with(stop: &Stop, target: &Target, (tid, mut registers): (i32, Registers)) -> Result<Option<Self>, Failure> {
        let gadgets = target.gadgets;
        if let Some(area) = sys::rseq_area(tid) {
            let read = |address, bytes: &mut [u8]| target.memory.read(address, bytes);
            match abort_address(&area, registers.rip, read) {
                Ok(handler) => registers.rip = handler.unwrap_or(registers.rip),
                Err(Malformed) => return Ok(None),
            }
        }
        let (Ok(mask), Ok(state)) = (sys::signal_mask(tid), sys::extended_state(tid)) else { return Ok(None) };
        // The kernel would not read the frame for it.
        if place_of_keys().is_some_and(|place| is_denied_memory(&state, place)) {
            return Err(Failure::Refused(Refusal::ProtectionKeys(tid.unsigned_abs())));
        }
        let frame = Frame::new(&restarted_by_hand(&registers), mask, &state, &gadgets);
        let Some(frame) = frame.filter(|_| !sys::has_system_call_dispatch(tid)) else { return Ok(None) };
        let mut below = vec![0; frame.bytes.len()];
        let covered = frame.address..frame.address + below.len() as u64;
        // Memory below a stack that other processes share may be theirs, and they are not stopped.
        let is_shared = |at: u64| target.maps().at(at).is_some_and(|mapping| mapping.is_shared);
        if is_shared(covered.start) || is_shared(covered.end.saturating_sub(1)) {
            return Ok(None);
        }
        if !target.memory.read(frame.address, &mut below) || !target.memory.may_write(&covered) {
            return Ok(None);
        }
        let filters = Self::suspend_filters(stop, &gadgets, tid)?;
        if sys::write_memory(tid, frame.address, &frame.bytes).is_err() {
            return Ok(None);
        }
        // The registers come before the mask: under the frame the thread gets its mask back by itself.
        let leaving = frame.leaving(&registers, &gadgets);
        let trace = |error| Failure::Trace("preparing a thread", error);
        sys::set_registers(tid, &leaving).map_err(trace)?;
        sys::set_signal_mask(tid, ALL_SIGNALS).map_err(trace)?;
        Ok(Some(Self {
            pid: stop.pid,
            tid,
            memory: Arc::clone(&target.memory),
            gadgets,
            frame,
            below,
            registers,
            mask,
            is_stop_wanted: false,
            filters,
            stage: Stage::Still,
            deadline: stop.deadline(),
        }))
    }

    /// The memory of its process.
    pub(crate) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its process's id.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Its id.
    pub(crate) fn tid(&self) -> i32 {
        self.tid
    }

    /// The registers that it had, and will get back.
    pub(crate) fn registers(&self) -> &Registers {
        &self.registers
    }

    /// Addresses of the frame.
    pub(crate) fn frame_range(&self) -> std::ops::Range<u64> {
        self.frame.address..self.frame.address + self.frame.bytes.len() as u64
    }

    /// Makes the thread go on at this address when all is done.
    pub(crate) fn resume_at(&mut self, address: u64) -> Result<(), Failure> {
        let at = self.frame.resume_address_at();
        self.write(at, &address.to_le_bytes()).map_err(|error| Failure::Trace("moving a thread", error))?;
        self.registers.rip = address;
        Ok(())
    }

    /// Writes to the process's memory.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        sys::write_memory(self.tid, address, bytes)
    }

    /// Writes a string of at most 255 bytes where the thread's calls can read it. Returns its address.
    pub(crate) fn string(&self, text: &str) -> Result<u64, Failure> {
        let mut bytes = text.as_bytes().to_vec();
        bytes.truncate(SCRATCH_BYTES as usize - 1);
        bytes.resize(SCRATCH_BYTES as usize, 0);
        let written = self.write(self.frame.scratch, &bytes);
        written.map_err(|error| Failure::Trace("writing a name", error))?;
        Ok(self.frame.scratch)
    }

    /// Makes the thread do a system call, and returns its result. `name` is for the error.
    pub(crate) fn call(
        &mut self,
        name: &'static str,
        number: libc::c_long,
        arguments: [u64; 6],
    ) -> Result<u64, Failure> {
        let answer = self.filters.answer(&call_of(&self.gadgets, (number, arguments)));
        if is_refused(name, answer) {
            return Err(Failure::Refused(Refusal::Seccomp { call: name.into(), answer: answer.to_string() }));
        }
        let calling = self.frame.calling(&self.registers, &self.gadgets, number.cast_unsigned(), arguments);
        let trace = |error| Failure::Trace("a system call of the process", error);
        self.check()?;
        sys::set_registers(self.tid, &calling).map_err(trace)?;
        self.start(Stage::Entering)?;
        self.come_to_rest()?;
        let result = sys::registers(self.tid).map_err(trace)?.rax;
        if result >= FIRST_ERROR {
            let code = result.cast_signed().unsigned_abs();
            return Err(Failure::Call(name, io::Error::from_raw_os_error(i32::try_from(code).unwrap_or(libc::EIO))));
        }
        Ok(result)
    }

    /// Fails if the process runs another program by now: the id may belong to a thread of that program.
    fn check(&self) -> Result<(), Failure> {
        if self.memory.is_there() { Ok(()) } else { Err(Failure::Busy(Busy::Changed)) }
    }

    /// Lets the thread run.
    fn start(&mut self, stage: Stage) -> Result<(), Failure> {
        self.stage = stage;
        let started = if stage == Stage::Leaving { sys::cont(self.tid, 0) } else { sys::cont_to_system_call(self.tid) };
        started.map_err(|error| Failure::Trace("a system call of the process", error))
    }

    /// Waits until the thread has done what it is doing.
    fn come_to_rest(&mut self) -> Result<(), Failure> {
        let mut since = Instant::now();
        while self.stage != Stage::Still {
            let report = match sys::look(self.tid).map_err(|error| Failure::Trace("waiting", error))? {
                Some((_, report)) => report,
                None if self.deadline.is_some_and(|deadline| Instant::now() > deadline) => {
                    return Err(Failure::Busy(Busy::Late));
                }
                None => {
                    sys::pause(since);
                    continue;
                }
            };
            since = Instant::now();
            match (self.stage, report) {
                (_, Report::Ended) => return Err(Failure::Ended),
                (Stage::Entering | Stage::Recalled, Report::SystemCall) => self.start(Stage::Returning)?,
                (Stage::Returning, Report::SystemCall) | (Stage::Recalled | Stage::Leaving, Report::Interrupted) => {
                    self.stage = Stage::Still
                }
                (stage, report) => {
                    // This signal cannot be blocked; it is sent again at the end.
                    self.is_stop_wanted |= report == Report::Signal(libc::SIGSTOP);
                    self.start(stage)?;
                }
            }
        }
        Ok(())
    }

    /// Takes over the deadline of the stop, which may have changed.
    pub(crate) fn renew(&mut self, stop: &Stop) {
        self.deadline = stop.deadline();
    }

    /// Removes the frame and puts back what was there. If the thread gets no CPU in time, all others wait for it,
    /// because they may use that memory.
    pub(crate) fn end(mut self, stop: &Stop) -> Result<(), Failure> {
        let is_call_late = self.stage != Stage::Still;
        let mut result = self.leave();
        if matches!(result, Err(Failure::Busy(Busy::Late))) {
            let left = self.leave_late(stop);
            // What should have followed a late call was not done, so that error stays. Leaving late harms nothing.
            result = if is_call_late { left.and(result) } else { left };
        }
        // A SIGCONT that came later has undone it, and would be discarded.
        if self.is_stop_wanted && !stop.status(stop.pid).is_some_and(|status| status.is_continued()) {
            sys::kill(stop.pid, libc::SIGSTOP);
        }
        result
    }

    /// Leaves as soon as the thread allows it, until the last deadline. If the control group was frozen (version 2) on
    /// the thread's way to a call, it would not begin that call before the group is thawed. It is recalled then: even
    /// there it stops when it is asked to, and its registers can be restored.
    fn leave_late(&mut self, stop: &Stop) -> Result<(), Failure> {
        let last = stop.last_deadline();
        loop {
            // On that way a thread that is not frozen runs, or waits for a page or a CPU. Any other stop, as for a
            // SIGSTOP, uses up the request, so it is made again.
            let is_on_its_way = matches!(self.stage, Stage::Entering | Stage::Recalled);
            if is_on_its_way && stop.status(self.tid).is_some_and(|status| status.state == 'S') {
                sys::interrupt(self.tid).map_err(|error| Failure::Trace("recalling a thread", error))?;
                self.stage = Stage::Recalled;
            }
            self.deadline = Some(last.min(Instant::now() + LOOK_AGAIN_AFTER));
            match self.leave() {
                Err(Failure::Busy(Busy::Late)) if Instant::now() < last => {}
                left => return left,
            }
        }
    }

    /// Makes the thread pass through the kernel's exit path once more, so that the kernel restarts the call in which we
    /// found it.
    fn leave(&mut self) -> Result<(), Failure> {
        let trace = |error| Failure::Trace("restoring a thread", error);
        self.check()?;
        if self.stage != Stage::Leaving {
            self.come_to_rest()?;
            sys::interrupt(self.tid).map_err(trace)?;
            self.start(Stage::Leaving)?;
        }
        self.come_to_rest()?;
        self.check()?;
        // The mask comes before the registers: until then the frame would restore both.
        sys::set_signal_mask(self.tid, self.mask).map_err(trace)?;
        sys::set_registers(self.tid, &self.registers).map_err(trace)?;
        let _ = self.write(self.frame.address, &self.below);
        Ok(())
    }
}
