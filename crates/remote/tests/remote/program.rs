//! Target programs, and a patch that counts calls of their hooked function.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use heapbpf_remote::{
    Busy, Data, Displaced, Draft, FoundBlob, Hooked, PAGE_BYTES, Pages, Plan, STOP_LIMIT, Stopped, Target,
    reserved_bytes,
};

/// Bytes of replaced pages: the function's page, and the next.
pub const REPLACED: u64 = 2 * PAGE_BYTES;
/// Offset of the data in the blob, and of the counter in it.
const DATA: u64 = PAGE_BYTES;
/// The memory that is freed: all of it.
pub const EMPTIED: std::ops::Range<u64> = DATA..DATA + PAGE_BYTES;
/// The hooked function's first instructions: `rdtsc; push; mov`, and where the second and the third begin.
const DISPLACED: [u8; 6] = [0x0f, 0x31, 0x55, 0x48, 0x89, 0xe5];
const STARTS: [u64; 2] = [2, 3];
/// Length of `lock inc`, which precedes the copy.
const COUNT_BYTES: u64 = 8;

/// Takes the lock under which tests run one at a time, because they measure and load the machine. Returns `None`, and
/// reports that the test is skipped, if processes may not be traced here.
pub fn turn() -> Option<MutexGuard<'static, ()>> {
    static TURN: Mutex<()> = Mutex::new(());
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        heapbpf_testing::skipped("tracing processes and looking at their mapped files needs root");
        return None;
    }
    Some(TURN.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether this is the long set.
pub static IS_LONG: AtomicBool = AtomicBool::new(false);

/// How long a case is repeated that takes `seconds` in the long set.
pub fn repeated(seconds: u64) -> Duration {
    Duration::from_secs(seconds) / if IS_LONG.load(Relaxed) { 1 } else { 4 }
}

/// Runs this in a thread without CAP_SYS_ADMIN, which reading seccomp filters needs.
pub fn without_admin(run: impl FnOnce() + Send) {
    const VERSION: u32 = 0x2008_0522;
    const ADMIN: u32 = 21;
    let drop_admin = || {
        let mut thread = [VERSION, 0];
        // Effective, permitted and inheritable capabilities up to number 31, and from there on.
        let mut sets = [0_u32; 6];
        // SAFETY: both have the layout that the kernel reads and writes. Only this thread is affected.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_capget, thread.as_mut_ptr(), sets.as_mut_ptr()), 0);
            sets[0] &= !(1 << ADMIN);
            assert_eq!(libc::syscall(libc::SYS_capset, thread.as_mut_ptr(), sets.as_ptr()), 0);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            drop_admin();
            run();
        });
    });
}

/// Compiles a program of `tests/programs`, once.
pub fn compiled(name: &str) -> PathBuf {
    compiled_with(name, &[])
}

/// The same with these compiler options.
pub fn compiled_with(name: &str, options: &[&str]) -> PathBuf {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| tempfile::tempdir().expect("a temporary directory can be made"));
    let path = dir.path().join([&[name], options].concat().concat());
    if !path.exists() {
        let source = format!("{}/tests/programs/{name}.c", env!("CARGO_MANIFEST_DIR"));
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let status =
            Command::new(compiler).args(["-O2", "-w", "-pthread", "-o"]).arg(&path).args(options).arg(source).status();
        assert!(status.expect("a C compiler is installed").success(), "{name}.c does not compile");
    }
    path
}

/// A running program. It is killed when this goes out of scope.
pub struct Program {
    child: Child,
    output: BufReader<ChildStdout>,
    /// Address of the hooked function.
    pub hooked: u64,
}

/// Makes sure that the program does not survive a failing test.
pub fn ends_with_us(command: &mut Command) {
    // SAFETY: prctl is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
}

impl Program {
    pub fn start(name: &str, arguments: &[&str]) -> Self {
        Self::run(Command::new(compiled(name)).args(arguments))
    }

    /// Starts the program, and waits until it is ready.
    pub fn run(command: &mut Command) -> Self {
        ends_with_us(command);
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut program = Self { child, output, hooked: 0 };
        let line = program.line();
        let address = line.strip_prefix("READY ").unwrap_or_else(|| panic!("not ready: {line:?}"));
        program.hooked = u64::from_str_radix(address.trim(), 16).expect("an address");
        program
    }

    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("it can be read");
        line
    }

    /// Writes to the program's standard input, which is piped.
    pub fn send(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().expect("it is piped");
        input.write_all(line.as_bytes()).expect("it reads");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: no pointers; the child has not been waited for.
        unsafe { libc::kill(self.pid().cast_signed(), signal) };
    }

    /// Ends the program `blocking` and returns its last output. After a stop that came too late, a call may return
    /// EINTR (README.md, Limits). Fails if more calls did than there were such stops, or if the program was harmed.
    pub fn finish_after(self, late: usize) -> String {
        let (status, said) = self.end();
        let early: Option<usize> = said.strip_prefix("EARLY ").and_then(|calls| calls.trim().parse().ok());
        let is_well = status.success() && said.starts_with("OK") || early.is_some_and(|early| early <= late);
        assert!(is_well, "{status} (signal {:?}), {late} stops came too late: {said}", status.signal());
        said
    }

    /// Ends the program and returns its last output. Fails if the program was harmed.
    pub fn finish(self) -> String {
        let (status, said) = self.end();
        assert!(status.success() && said.starts_with("OK"), "{status} (signal {:?}): {said}", status.signal());
        said
    }

    fn end(mut self) -> (ExitStatus, String) {
        self.signal(libc::SIGTERM);
        let mut said = String::new();
        self.output.read_to_string(&mut said).expect("it can be read");
        (self.child.wait().expect("it can be waited for"), said)
    }

    /// Fails if the program ended by itself. ([`Child::try_wait`] takes a stop for an end if another thread traces the
    /// child.)
    pub fn assert_runs(&self) {
        let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
        // SAFETY: the kernel writes the information, for which all zeros are a valid value. The field exists for a
        // child that ended.
        let ended = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            assert_eq!(libc::waitid(libc::P_PID, self.pid(), &raw mut info, flags), 0, "it is our child");
            info.si_pid()
        };
        assert_eq!(ended, 0, "it ended");
    }

    /// IDs of the program's threads.
    pub fn threads(&self) -> Vec<i32> {
        let list = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("it runs").flatten();
        list.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// The state letter: R, S, T and so on.
    pub fn state(&self) -> String {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).expect("it runs");
        stat[stat.rfind(')').expect("a name") + 2..][..1].to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A plan that counts calls of the function at this address. It reuses what earlier plans left.
pub fn plan(target: &Target, hooked: u64) -> Plan {
    let again = target.found().into_iter().find_map(|found| {
        let text = found.text.clone()?;
        let file = format!("/proc/{}/map_files/{:x}-{:x}", target.pid(), text.start, text.end);
        let file = std::fs::File::open(file).expect("the memfd can be read");
        let read = |offset, bytes: &mut [u8]| file.read_exact_at(bytes, offset).is_ok();
        Plan::again(draft(target, hooked, text.start), target.maps(), &found, read)
    });
    again.unwrap_or_else(|| {
        let page = hooked & !(PAGE_BYTES - 1);
        let mapping = target.maps().at(page).expect("the function is mapped");
        let base = target.maps().gap(&mapping.range, reserved_bytes(2 * PAGE_BYTES, REPLACED, 1)).expect("a gap");
        Plan::new(draft(target, hooked, base), target.maps()).expect("the draft fits")
    })
}

fn draft(target: &Target, hooked: u64, base: u64) -> Draft {
    let page = hooked & !(PAGE_BYTES - 1);
    let mapping = target.maps().at(page).expect("the function is mapped");
    let file = format!("/proc/{}/map_files/{:x}-{:x}", target.pid(), mapping.range.start, mapping.range.end);
    let mut original = vec![0; REPLACED as usize];
    let file = std::fs::File::open(file).expect("the program can be read");
    file.read_exact_at(&mut original, page - mapping.range.start + mapping.offset).expect("the pages can be read");
    let mut edited = original.clone();
    let at = (hooked - page) as usize;
    assert_eq!(original[at..at + 6], DISPLACED);
    let jump = jump(hooked, base);
    edited[at..at + 5].copy_from_slice(&jump);
    // Nothing may run into this byte.
    edited[at + 5..at + 6].fill(0xcc);
    let after = DISPLACED.len() as u64;
    let mut text = vec![0xf0, 0x48, 0xff, 0x05];
    text.extend(((DATA - COUNT_BYTES) as u32).to_le_bytes());
    text.extend(DISPLACED);
    text.extend(self::jump(base + COUNT_BYTES + after, hooked + after));
    text.resize(PAGE_BYTES as usize, 0xcc);
    let copies = STARTS.map(|start| (hooked + start, base + COUNT_BYTES + start)).to_vec();
    Draft {
        name: "heapbpf-test".into(),
        base,
        bytes: 2 * PAGE_BYTES,
        text,
        data: vec![Data { range: DATA..DATA + PAGE_BYTES, is_wiped_on_fork: true, initial: vec![0; 16] }],
        pages: vec![Pages { start: page, original, edited }],
        displaced: vec![Displaced { range: hooked..hooked + after, copies }],
    }
}

fn jump(from: u64, to: u64) -> [u8; 5] {
    let distance = i32::try_from(to.wrapping_sub(from + 5).cast_signed()).expect("it is in reach");
    let [a, b, c, d] = distance.to_le_bytes();
    [0xe9, a, b, c, d]
}

/// Hooks the program in its current state, and retries while it is busy.
pub fn hook(pid: u32, hooked: u64) -> Stopped<Hooked> {
    again(|| {
        let target = Target::look(pid)?;
        // Remains of an attempt that ran into its limit.
        for found in target.found() {
            target.take_out(&found, &EMPTIED, STOP_LIMIT)?;
        }
        let target = Target::look(pid)?;
        target.hook(&plan(&target, hooked), STOP_LIMIT)
    })
}

/// Removes everything that is found.
pub fn take_out(pid: u32) -> Stopped<()> {
    take_out_within(pid, STOP_LIMIT)
}

/// The same, with this limit for each attempt.
pub fn take_out_within(pid: u32, limit: Duration) -> Stopped<()> {
    again(|| {
        let target = Target::look(pid)?;
        let mut all = Stopped { time: Duration::ZERO, threads: 0, outcome: () };
        for found in target.found() {
            let one = target.take_out(&found, &EMPTIED, limit)?;
            all = Stopped { time: all.time.max(one.time), ..one };
        }
        Ok(all)
    })
}

fn again<T>(mut attempt: impl FnMut() -> Result<T, heapbpf_remote::Error>) -> T {
    for tries in 0.. {
        match attempt() {
            Ok(done) => return done,
            Err(heapbpf_remote::Error::Busy { why, stopped }) if tries < 500 => {
                AGAIN.lock().unwrap_or_else(PoisonError::into_inner).push((why, stopped));
                std::thread::sleep(Duration::from_millis(5));
            }
            // The program's own thread may be finishing a call of a killed injector while its mappings are read.
            Err(heapbpf_remote::Error::Damaged(_)) if tries < 500 => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => panic!("{error}"),
        }
    }
    unreachable!("it returns or panics")
}

/// The only blob of a process.
pub fn found(pid: u32) -> FoundBlob {
    let mut found = Target::look(pid).expect("it can be looked at").found();
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Number of calls that the patch counted.
pub fn counted(pid: u32) -> u64 {
    let memory = std::fs::File::open(format!("/proc/{pid}/mem")).expect("it can be opened");
    let mut word = [0; 8];
    memory.read_exact_at(&mut word, found(pid).range.start + DATA).expect("the data is mapped");
    u64::from_le_bytes(word)
}

/// Waits until the patch has counted more calls than that. The program may get a processor late.
pub fn await_more_than(program: &Program, calls: u64) {
    while counted(program.pid()) <= calls {
        program.assert_runs();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lines of the maps file, and descriptors, that belong to us.
pub fn traces(pid: u32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let links = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let links = links.map(|link| link.display().to_string());
    maps.lines().map(str::to_owned).chain(links).filter(|line| line.contains("heapbpf-")).collect()
}

/// Checks that no jump leads to what is mapped, which is at most one blob, and that no descriptor is open.
pub fn assert_inert(pid: u32) {
    let (found, traces) = (Target::look(pid).expect("it can be looked at").found(), traces(pid));
    assert!(found.len() <= 1 && found.iter().all(FoundBlob::is_inert), "{found:?}");
    assert!(traces.iter().all(|line| !line.starts_with("/memfd")), "{traces:?}");
}

/// Futile stops, with their durations.
static AGAIN: Mutex<Vec<(Busy, Duration)>> = Mutex::new(Vec::new());

/// Reports futile stops. Returns how many came too late to stop the process.
pub fn report_futile() -> usize {
    let vain = std::mem::take(&mut *AGAIN.lock().unwrap_or_else(PoisonError::into_inner));
    let count = |why| vain.iter().filter(|(other, _)| *other == why).count();
    eprintln!("in vain: {} came too late to stop, {} to do everything", count(Busy::Slow), count(Busy::Late));
    let late = count(Busy::Slow);
    report("in vain", vain.into_iter().map(|(_, time)| time).collect());
    late
}

/// Makes a thread wait for a processor three quarters of the time, until told that it is over.
pub fn starve(tid: i32, is_over: &AtomicBool) {
    // SAFETY: the kernel reads the structs, for which all zeros are valid: no processor, and priority 0.
    unsafe {
        let (mut first, none): (libc::cpu_set_t, libc::sched_param) = std::mem::zeroed();
        libc::CPU_SET(0, &mut first);
        for it in [0, tid] {
            assert_eq!(libc::sched_setaffinity(it, size_of_val(&first), &raw const first), 0, "there is a processor 0");
        }
        assert_eq!(libc::sched_setscheduler(tid, libc::SCHED_IDLE, &raw const none), 0, "it runs");
    }
    while !is_over.load(Relaxed) {
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(60) {}
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Reports median, 99th percentile and maximum.
pub fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    if let Some(longest) = times.last() {
        let (median, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
        eprintln!("{what}: {} stops, median {median:?}, p99 {p99:?}, longest {longest:?}", times.len());
    }
}
