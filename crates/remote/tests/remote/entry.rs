//! A process is held at its entry point by an observer of its exec, and goes on as if nothing had happened.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use heapbpf_remote::{Exec, NotHeld, Raised, Waiting};

use crate::program;

const VARIABLE: &str = "HEAPBPF_TEST_HOLDER";
/// The program's output.
const SAID: &str = "2 word 0\nEND\n";
/// How long a process waits by itself if nothing releases it.
const LONG: Duration = Duration::from_secs(600);
const SHORT: Duration = Duration::from_millis(200);
/// The time within which a started program is mapped.
const EXEC_LIMIT: Duration = Duration::from_millis(100);
/// Pause between two checks: polling without one, at a real-time priority, would keep the process from its exec.
const PAUSE: Duration = Duration::from_micros(15);
/// The time within which a held process gets to its entry point.
const ARRIVAL: Duration = Duration::from_secs(30);

/// Starts a program, and tries to hold it. The calling thread gets a higher priority, so that it is not late.
fn started(path: &Path, output: Stdio, limit: Duration) -> (Child, Result<Waiting, NotHeld>) {
    started_and_held_after(Duration::ZERO, path, output, limit)
}

fn started_and_held_after(
    delay: Duration,
    path: &Path,
    output: Stdio,
    limit: Duration,
) -> (Child, Result<Waiting, NotHeld>) {
    let raised = Raised::begin();
    let mut command = Command::new(path);
    command.arg("word").stdout(output);
    // SAFETY: the calls are async-signal-safe. The program runs at normal priority.
    unsafe {
        command.pre_exec(|| {
            libc::sched_setscheduler(0, libc::SCHED_OTHER, &libc::sched_param { sched_priority: 0 });
            libc::setpriority(libc::PRIO_PROCESS, 0, 0);
            Ok(())
        });
    }
    // This returns in the middle of the exec.
    let child = command.spawn().expect("it starts");
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
    let held = held_soon(&child, limit);
    drop(raised);
    (child, held)
}

/// Holds a program that may not be mapped yet.
fn held_soon(child: &Child, limit: Duration) -> Result<Waiting, NotHeld> {
    let since = Instant::now();
    loop {
        match Waiting::at_entry_of(child.id(), limit) {
            Err(NotHeld::Gone) if since.elapsed() < EXEC_LIMIT => std::thread::sleep(PAUSE),
            // On a busy machine it may get no processor for longer.
            Err(NotHeld::Gone) if since.elapsed() < ARRIVAL && !has_ended(child) => std::thread::sleep(PAUSE),
            held => return held,
        }
    }
}

/// Whether the process has ended. It is not waited for.
fn has_ended(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("it is not waited for");
    stat.contains(") Z ")
}

/// Whether the process gets to where it waits. If it was caught too late, it does not, and ends.
fn arrives(child: &Child, waiting: &Waiting) -> bool {
    let since = Instant::now();
    while !waiting.is_there() {
        if has_ended(child) {
            return false;
        }
        assert!(since.elapsed() < ARRIVAL, "it neither waits nor ends");
        std::thread::sleep(PAUSE);
    }
    true
}

fn assert_ran(child: Child) {
    let output = child.wait_with_output().expect("it can be waited for");
    assert_eq!((String::from_utf8_lossy(&output.stdout).as_ref(), output.status.code()), (SAID, Some(7)), "{output:?}");
}

/// Starts a program `times` times. Returns how often it was held.
fn held_of(path: &Path, times: u32) -> u32 {
    let mut held = 0;
    for _ in 0..times {
        let (child, waiting) = started(path, Stdio::piped(), LONG);
        let waiting = match waiting {
            Ok(waiting) => Some(waiting).filter(|waiting| arrives(&child, waiting)),
            Err(NotHeld::Gone) => None,
            Err(why) => panic!("{why}"),
        };
        held += u32::from(waiting.is_some());
        drop(waiting);
        assert_ran(child);
    }
    held
}

#[test]
fn programs_of_all_kinds_go_on_after_they_were_held() {
    let Some(_turn) = program::turn() else { return };
    // Without a real-time priority, the program may have ended before its exec is noticed.
    let raised = Raised::begin();
    // SAFETY: no pointers; 0 is the calling thread.
    let is_real_time = unsafe { libc::sched_getscheduler(0) & !libc::SCHED_RESET_ON_FORK == libc::SCHED_FIFO };
    drop(raised);
    let least = if is_real_time { 90 } else { 1 };
    for (options, least) in [(&["-pie"][..], least), (&["-no-pie"], least), (&["-static"], 0), (&["-static-pie"], 0)] {
        let held = held_of(&program::compiled_with("arrives", options), 100);
        eprintln!("{options:?}: {held} of 100 held");
        assert!(held >= least, "{options:?}: {held} of 100 held");
    }
}

#[test]
pub fn whenever_it_comes_to_hold_it_nothing_happens_to_the_program() {
    let Some(_turn) = program::turn() else { return };
    let path = program::compiled_with("arrives", &["-pie"]);
    let (since, mut held, mut times) = (Instant::now(), 0, 0_u32);
    while since.elapsed() < program::repeated(8) {
        times += 1;
        // The process gets to its entry point within this time.
        let delay = Duration::from_micros(u64::from(times) * 7 % 1500);
        let (child, waiting) = started_and_held_after(delay, &path, Stdio::piped(), LONG);
        let waiting = waiting.ok().filter(|waiting| arrives(&child, waiting));
        held += u32::from(waiting.is_some());
        drop(waiting);
        assert_ran(child);
    }
    eprintln!("{held} of {times} held");
}

#[test]
fn the_text_is_as_before_once_it_waits() {
    let Some(_turn) = program::turn() else { return };
    let path = program::compiled_with("arrives", &["-no-pie"]);
    let file = std::fs::read(&path).expect("it can be read");
    let entry = u64::from_le_bytes(file[24..32].try_into().expect("eight bytes"));
    let mut seen = 0;
    for _ in 0..20 {
        let (child, waiting) = started(&path, Stdio::piped(), LONG);
        if let Some(waiting) = waiting.ok().filter(|waiting| arrives(&child, waiting)) {
            let memory = std::fs::File::open(format!("/proc/{}/mem", child.id())).expect("it runs");
            let mut bytes = [0; 128];
            memory.read_exact_at(&mut bytes, entry).expect("its text is mapped");
            // The first program segment of such a program is at 4 MiB.
            let at = (entry - 0x40_0000) as usize;
            assert_eq!(bytes, file[at..at + 128]);
            seen += 1;
            drop(waiting);
        }
        assert_ran(child);
    }
    assert!(seen > 0, "none was held");
}

#[test]
fn what_is_held_by_nobody_goes_on_after_the_limit() {
    let Some(_turn) = program::turn() else { return };
    let (child, waiting) = started(&program::compiled_with("arrives", &["-pie"]), Stdio::piped(), SHORT);
    // The process is never released.
    std::mem::forget(waiting);
    assert_ran(child);
}

#[test]
fn one_that_is_traced_or_has_ended_or_runs_other_code_is_refused() {
    let Some(_turn) = program::turn() else { return };
    assert!(matches!(Waiting::at_entry_of(u32::MAX, LONG), Err(NotHeld::Gone)));
    assert!(matches!(Waiting::at_entry_of(2, LONG), Err(NotHeld::Gone)), "kthreadd has no memory");
    let mut child = Command::new("sleep").arg("60").spawn().expect("it starts");
    let pid = child.id().cast_signed();
    // SAFETY: seizing takes numbers only.
    let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) };
    assert_eq!(seized, 0, "it can be traced");
    let held = held_soon(&child, LONG);
    assert!(matches!(held, Err(NotHeld::Traced(_))), "{held:?}");
    child.kill().expect("it runs");
    child.wait().expect("it is our child");
}

/// Has the kernel end this process, and all programs that it will execute, for nanosleep(2).
fn forbid_nanosleep() -> std::io::Result<()> {
    let instruction = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let filter = [
        instruction(0x20, 0, 0),
        instruction(0x15, 1, libc::SYS_nanosleep as u32),
        instruction(0x06, 0, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(0x06, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: no pointers; then the kernel reads the program.
    let failed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    };
    if failed == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The filter would end it for the call that it waits in.
#[test]
fn a_program_under_a_seccomp_filter_is_not_held() {
    let Some(_turn) = program::turn() else { return };
    // A shell that executes the program when it is told to.
    let mut command = Command::new("sh");
    command.args(["-c", "read line; exec \"$0\" word"]).arg(program::compiled_with("arrives", &["-pie"]));
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    // SAFETY: the calls are async-signal-safe.
    unsafe { command.pre_exec(forbid_nanosleep) };
    let mut child = command.spawn().expect("it starts");
    let held = held_soon(&child, LONG);
    assert!(matches!(held, Err(NotHeld::Filtered)), "{held:?}");
    let exec = Exec::of(child.id()).expect("it can be traced");
    child.stdin.take().expect("it is piped").write_all(b"\n").expect("it reads");
    let held = exec.wait();
    assert!(matches!(held, Err(NotHeld::Filtered)), "{held:?}");
    assert_ran(child);
}

/// Not a test: the program that the test below starts and kills. Holds a program that writes to the standard output.
#[test]
fn as_the_holder() {
    let Some(path) = std::env::var_os(VARIABLE) else { return };
    let (child, waiting) = started(Path::new(&path), Stdio::inherit(), SHORT);
    let is_there = waiting.as_ref().is_ok_and(|waiting| arrives(&child, waiting));
    let mut output = std::io::stdout();
    output.write_all(if is_there { b"HELD\n" } else { b"LATE\n" }).and_then(|()| output.flush()).expect("it is read");
    // Until it is killed.
    loop {
        std::thread::park();
    }
}

#[test]
fn a_program_goes_on_by_itself_when_its_holder_is_killed() {
    let Some(_turn) = program::turn() else { return };
    let path = program::compiled_with("arrives", &["-pie"]);
    let mut held = 0;
    for _ in 0..10 {
        let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
        command.args(["--exact", "entry::as_the_holder", "--nocapture"]).env(VARIABLE, &path);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        program::ends_with_us(&mut command);
        let mut holder = command.spawn().expect("it starts");
        let mut output = BufReader::new(holder.stdout.take().expect("it is piped"));
        let mut line = String::new();
        while !line.ends_with("HELD\n") && !line.ends_with("LATE\n") {
            assert_ne!(output.read_line(&mut line).expect("it can be read"), 0, "{line}");
        }
        holder.kill().expect("it runs");
        holder.wait().expect("it is our child");
        // If the holder got no processor for longer than it holds, the program has ended before.
        let is_held = line.ends_with("HELD\n") && !line.contains(SAID);
        held += u32::from(is_held);
        // This ends once the program has ended, which holds the other copy of the pipe.
        output.read_to_string(&mut line).expect("it can be read");
        let is_right = if is_held { line.ends_with(&format!("HELD\n{SAID}")) } else { line.contains(SAID) };
        assert!(is_right, "{line}");
    }
    assert!(held > 0, "none was held");
}
