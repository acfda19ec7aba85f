//! System calls in progress behave as if we had not stopped the process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use heapbpf_remote::{STOP_LIMIT, Target};

use crate::program::{self, Program};

#[test]
pub fn blocking_calls_are_unaffected() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("blocking", &[]);
    let (start, time) = (Instant::now(), program::repeated(8));
    let (mut cycles, mut times) = (0, Vec::new());
    while start.elapsed() < time {
        times.push(program::hook(program.pid(), program.hooked).time);
        // Too frequent stops would keep calls whose time-outs begin anew from ever ending.
        std::thread::sleep(Duration::from_millis(23));
        program::take_out(program.pid());
        std::thread::sleep(Duration::from_millis(7));
        program.assert_runs();
        cycles += 1;
    }
    program::report("hooking blocked threads", times);
    let late = program::report_futile();
    eprintln!("{cycles} cycles: {}", program.finish_after(late).trim());
}

/// Hooks a process again and again while it makes such calls. Returns how many calls came back with a part of their
/// work.
fn parts(kind: &str, tenths: &str, cycle: impl Fn(&Program)) -> u64 {
    let program = Program::start("part", &[kind, tenths]);
    for _ in 0..30 {
        cycle(&program);
        program.assert_runs();
    }
    let said = program.finish();
    let [calls, parts] = ["calls ", "parts "].map(|word| {
        let number = said.split_once(word).and_then(|(_, after)| after.split_ascii_whitespace().next());
        number.and_then(|number| number.parse::<u64>().ok()).expect("it says so")
    });
    assert!(calls > 0, "{said}");
    parts
}

/// A process that is stopped in such a call gets a partial result: no restart can hide that. So it is not stopped then,
/// unless the thread looks as if it ran because it was woken and waits for a CPU: 0 to 3 of 60 stops beside two busy
/// loops on two CPUs.
#[test]
fn calls_that_would_return_a_part_are_spared() {
    let Some(_turn) = program::turn() else { return };
    for kind in ["write", "recv"] {
        let spared = parts(kind, "3", |program| {
            program::hook(program.pid(), program.hooked);
            program::take_out(program.pid());
        });
        let ended = parts(kind, "9", |program| {
            let target = Target::look(program.pid()).expect("it runs").at_any_moment();
            // It may be busy; only the stop matters.
            let _ = target.map(&program::plan(&target, program.hooked), STOP_LIMIT);
        });
        eprintln!("{kind}: {spared} and {ended} calls came back with a part");
        assert!(ended > 5 && 2 * spared < ended, "{kind}: {spared} of 60 stops, {ended} of 30 that spare none");
    }
    program::report_futile();
}

/// The kernel discards signals that a process ignores when they are sent, but not if their receiver is traced
/// (`sig_ignored` in the kernel). Then they wake it, and its calls must not show that.
#[test]
pub fn ignored_signals_end_no_call() {
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("blocking", &[]);
    let (pid, threads) = (program.pid(), program.threads());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // It ends by itself if the test fails.
            let start = Instant::now();
            while !is_over.load(Relaxed) && start.elapsed() < Duration::from_secs(30) {
                for tid in &threads {
                    // SAFETY: no pointers; the process has not been waited for.
                    unsafe { libc::syscall(libc::SYS_tgkill, pid, *tid, libc::SIGURG) };
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        let (start, time) = (Instant::now(), program::repeated(4));
        while start.elapsed() < time {
            program::hook(pid, program.hooked);
            std::thread::sleep(Duration::from_millis(23));
            program::take_out(pid);
            std::thread::sleep(Duration::from_millis(7));
            program.assert_runs();
        }
        is_over.store(true, Relaxed);
    });
    let late = program::report_futile();
    eprintln!("{}", program.finish_after(late).trim());
}

/// Ignored signals to a process wake any of its threads while the first one is traced, so all are traced for as long. A
/// first thread that gets no processor stays traced when the stop has been given up.
#[test]
pub fn all_threads_are_traced_as_long_as_the_first_one() {
    /// Between two stops.
    const PAUSE: Duration = Duration::from_millis(10);
    let Some(_turn) = program::turn() else { return };
    let program = Program::start("blocking", &[]);
    let (pid, first) = (program.pid(), program.pid().cast_signed());
    // A worker of io_uring that has ended since it was listed needs no tracer.
    let is_traced = |tid: i32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"));
        !status.is_ok_and(|status| status.contains("TracerPid:\t0\n"))
    };
    // By its flags: a worker sets its name only once it runs.
    let is_io_worker = |tid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap_or_default();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        fields.get(6).and_then(|flags| flags.parse::<u64>().ok()).is_some_and(|flags| flags & 0x10 != 0)
    };
    let others = || program.threads().into_iter().filter(|tid| *tid != first && !is_io_worker(tid));
    let (is_over, late) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| program::starve(first, &is_over));
        let watch = scope.spawn(|| {
            let mut is_alone = false;
            while !is_over.load(Relaxed) && !is_alone {
                let start = Instant::now();
                let was_traced = is_traced(first);
                let are_traced = others().map(is_traced).fold(true, |all, it| all & it);
                // A slow look may have begun in one stop and ended in the next.
                if was_traced && is_traced(first) && start.elapsed() < PAUSE {
                    is_alone = !are_traced;
                    late.fetch_add(1, Relaxed);
                }
            }
            is_over.store(true, Relaxed);
            is_alone
        });
        let mut in_vain = 0;
        while !is_over.load(Relaxed) && (in_vain < 4 || late.load(Relaxed) < 20) {
            let target = Target::look(pid).expect("it runs");
            in_vain += usize::from(target.write_words(&[], STOP_LIMIT).is_err());
            std::thread::sleep(PAUSE);
        }
        is_over.store(true, Relaxed);
        assert!(!watch.join().expect("it watches"), "only the first thread is traced");
    });
}

/// In every mode in which a filter lets the process live: it refuses calls, logs them, or leaves them to a tracer.
#[test]
fn a_seccomp_filter_that_refuses_our_calls_is_suspended_for_them() {
    let Some(_turn) = program::turn() else { return };
    for mode in ["errno", "log", "trace"] {
        let mut program = Program::start("sandboxed", &[mode]);
        assert_eq!(program.line(), "IN\n", "{mode}");
        assert!(Target::look(program.pid()).expect("it runs").is_filtered());
        for _ in 0..20 {
            program::hook(program.pid(), program.hooked);
            program::take_out(program.pid());
        }
        program.assert_runs();
        program.finish();
    }
}

/// Any stop during a sleep would kill a thread whose filter forgets restart_syscall(2), whether the filter can be read
/// or not.
#[test]
fn a_thread_whose_sleep_must_not_be_restarted_sleeps_anew() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("sandboxed", &["restart"]);
    assert_eq!(program.line(), "IN\n");
    let stop_often = || {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(5));
            program::hook(program.pid(), program.hooked);
            program::take_out(program.pid());
            program.assert_runs();
        }
    };
    stop_often();
    program::without_admin(stop_often);
    program.finish();
}

/// The process confines itself only after it was hooked: jumps are removed without its help, and nothing leads to the
/// rest.
#[test]
fn a_process_that_confined_itself_later_loses_its_jumps() {
    let Some(_turn) = program::turn() else { return };
    let mut program = Program::start("sandboxed", &["later"]);
    let pid = program.pid();
    program::hook(pid, program.hooked);
    program.signal(libc::SIGUSR1);
    assert_eq!(program.line(), "IN\n");
    program::await_more_than(&program, program::counted(pid));
    program::take_out(pid);
    let after = program::counted(pid);
    std::thread::sleep(Duration::from_millis(20));
    // Its only thread may have been about to count, and gets a processor late.
    assert!(program::counted(pid) <= after + 1, "no jump leads there any more");
    program.finish();
}
