//! `heapbpf top` in a real terminal (tmux): what it shows, how it ends, and what it does without one.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::guardian;
use heapbpf_tests::kernel;
use heapbpf_tests::program::program;
use heapbpf_tests::pty::SlowTerminal;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::token_file;
use heapbpf_tests::target::{Target, children_of, cpu_time, state_of, until};
use heapbpf_tests::tmux::Tmux;

/// A program that grows by two blocks of 1,000 bytes a millisecond and frees nine times as much.
fn growing() -> Target {
    let mut target = Target::start(&program("growing"), ["100000000", "20000"]);
    target.go();
    target
}

/// A command line that runs `heapbpf top` and then prints the terminal's settings and the exit status. The exit status
/// comes last: once it is on the screen, the settings are there, too.
fn top(arguments: &str) -> String {
    format!("{} top {arguments}; status=$?; stty -a; echo \"exit $status\"; sleep 600", heapbpf().display())
}

fn is_running(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z')
}

/// The BPF links of a running `top`.
fn links(pid: u32) -> BTreeSet<u32> {
    let links = kernel::links_of(pid);
    assert!(!links.is_empty(), "it has probes");
    links
}

#[test]
fn top_shows_a_program_live_and_leaves_the_terminal_as_it_was() {
    let case = "top_shows_a_program_live_and_leaves_the_terminal_as_it_was";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    let command = top(&format!("--pid {} -i 4096", target.pid()));
    let Some(tmux) = Tmux::run(&command, 80, 24) else { return skipped(case, "there is no tmux") };
    let screen = tmux.await_text("site_01");
    assert!(screen.contains(&format!("growing ({})", target.pid())) && screen.contains("LIVE"), "{screen}");
    assert!(screen.contains("IN USE") && screen.contains('[') && screen.contains("q quit"), "{screen}");
    assert_eq!(screen.lines().count(), 24, "{screen}");
    let colors = tmux.styled();
    assert!(colors.contains("\x1b[36m") && !colors.contains("38;2"), "names have one of sixteen colours: {colors:?}");
    let links = links(tmux.program());
    // One level down: the stacks through a function, with its source line.
    tmux.press(&["/", "s", "i", "t", "e", "_", "0", "0", "Enter", "Enter"]);
    tmux.await_text("site_00 growing.c:5");
    tmux.press(&["t"]);
    tmux.await_text("calls, outermost first");
    tmux.press(&["F"]);
    tmux.await_text("flame");
    for outside in ["calls, outermost first", "› stacks", "› functions"] {
        tmux.press(&["Escape"]);
        tmux.await_text(outside);
    }
    tmux.press(&["m"]);
    tmux.await_text("SINCE MARK");
    tmux.await_text(": significant");
    tmux.press(&["?"]);
    tmux.await_text("this help; quit");
    tmux.press(&["x", "Space"]);
    tmux.await_text("FROZEN");
    tmux.press(&["w"]);
    tmux.await_text("wrote ./heapbpf-growing");
    tmux.resize(120, 40);
    let screen = tmux.await_text("LAST MINUTE");
    assert_eq!(screen.lines().count(), 40, "{screen}");
    // Any key removes the message and shows the keys again.
    tmux.press(&["x"]);
    tmux.resize(40, 10);
    until("the keys at the bottom of the small window", || {
        tmux.screen().lines().last().is_some_and(|line| line.contains("q quit"))
    });
    tmux.resize(120, 40);
    tmux.press(&["q"]);
    let screen = tmux.await_text("exit 0");
    assert!(screen.contains(" icanon") && screen.contains(" echo ") && !screen.contains("IN USE"), "{screen}");
    assert!(kernel::links_that_stay(&links).is_empty());
    let written = tmux.dir().join(format!("heapbpf-growing-{}.json.gz", target.pid()));
    let report = Command::new(heapbpf()).arg("report").arg(&written).output().expect("it runs");
    assert!(String::from_utf8_lossy(&report.stdout).contains("site_00"), "{report:?}");
}

/// While a window's edge is dragged, resizes arrive all the time. A key pressed then takes effect at once, not with the
/// next key.
#[test]
fn keys_that_come_with_resizes_are_obeyed() {
    let case = "keys_that_come_with_resizes_are_obeyed";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    let command = top(&format!("--pid {} -i 4096", target.pid()));
    let Some(tmux) = Tmux::run(&command, 80, 24) else { return skipped(case, "there is no tmux") };
    tmux.await_text("LIVE");
    let pid = tmux.program();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ends = Ends(&is_over);
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                guardian::signal(libc::SIGWINCH, [pid]);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        for state in ["FROZEN", "LIVE", "FROZEN", "LIVE"] {
            tmux.press(&["Space"]);
            tmux.await_text(state);
        }
    });
    tmux.resize(120, 40);
    tmux.await_text("LAST MINUTE");
    tmux.press(&["q"]);
    tmux.await_text("exit 0");
}

/// Sets the flag when it is dropped, also on a panic.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn probes_are_gone_when_the_terminal_dies() {
    let case = "probes_are_gone_when_the_terminal_dies";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    // With NO_COLOR, nothing is coloured.
    let command = format!("NO_COLOR=1 {}", top(&format!("--pid {}", target.pid())));
    let Some(tmux) = Tmux::run(&command, 80, 24) else { return skipped(case, "there is no tmux") };
    tmux.await_text("LIVE");
    let styled = tmux.styled();
    let colored = (30..38)
        .chain(40..48)
        .any(|code| styled.contains(&format!("[{code}m")) || styled.contains(&format!(";{code}m")));
    assert!(!colored, "{styled:?}");
    let pid = tmux.program();
    let links = links(pid);
    tmux.kill();
    until("the end of top", || !is_running(pid));
    assert!(kernel::links_that_stay(&links).is_empty());
}

/// On a link of 1,000 bytes a second, drawing waits for the link, so the screen never lags far behind. A key takes
/// effect once the terminal's buffer is transmitted: no screens have queued up.
#[test]
fn a_slow_link_shows_the_newest_and_obeys() {
    const BYTES_A_SECOND: u32 = 1000;
    // A pseudo-terminal buffers 12 KiB, and a screen of 80 × 24 takes some 2 to 3 kB.
    const MOST_BEHIND: usize = 24 << 10;
    let case = "a_slow_link_shows_the_newest_and_obeys";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    let mut command = Command::new(heapbpf());
    command.args(["top", "--refresh", "100ms", "--pid", &target.pid().to_string()]);
    let mut terminal = match SlowTerminal::start(&mut command, BYTES_A_SECOND) {
        Ok(terminal) => terminal,
        Err(error) => return skipped(case, &format!("no pseudo-terminal: {error}")),
    };
    until("it shows the program", || {
        terminal.read_for(Duration::from_secs(1));
        String::from_utf8_lossy(&terminal.shown).contains("growing")
    });
    terminal.read_for(Duration::from_secs(10));
    let links = links(terminal.pid());
    let before = terminal.shown.len();
    terminal.press("q").expect("the terminal is there");
    let status = terminal.end(Duration::from_secs(60)).expect("it obeys");
    let behind = terminal.shown.len() - before;
    println!("{case}: {before} bytes, and {behind} after the key");
    assert!(status.success() && behind < MOST_BEHIND, "{status}: {behind} bytes after the key");
    assert!(kernel::links_that_stay(&links).is_empty());
}

#[test]
fn a_signal_ends_it_and_restores_the_terminal() {
    let case = "a_signal_ends_it_and_restores_the_terminal";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    for signal in [libc::SIGTERM, libc::SIGHUP] {
        let command = top(&format!("--pid {}", target.pid()));
        let Some(tmux) = Tmux::run(&command, 80, 24) else { return skipped(case, "there is no tmux") };
        tmux.await_text("LIVE");
        let pid = tmux.program();
        let links = links(pid);
        guardian::signal(signal, [pid]);
        let screen = tmux.await_text("exit 0");
        assert!(screen.contains(" icanon"), "{screen}");
        assert!(kernel::links_that_stay(&links).is_empty());
    }
}

#[test]
fn a_command_is_shown_and_goes_on_when_the_screen_is_left() {
    let case = "a_command_is_shown_and_goes_on_when_the_screen_is_left";
    let Some(_turn) = turn(case) else { return };
    let command =
        format!("FREE_RUNNING=1 {}", top(&format!("-i 4096 -- {} 100000000 20000", program("growing").display())));
    let Some(tmux) = Tmux::run(&command, 100, 24) else { return skipped(case, "there is no tmux") };
    let screen = tmux.await_text("site_01");
    assert!(screen.contains("growing (") && screen.contains("LIVE") && !screen.contains("READY"), "{screen}");
    let top = tmux.program();
    let links = links(top);
    let growing = child_named(top, "growing");
    for stream in 0..3 {
        let leads_to = std::fs::read_link(format!("/proc/{growing}/fd/{stream}")).expect("an open stream");
        assert_eq!(leads_to, Path::new("/dev/null"), "what it writes is not shown, and it gets no input");
    }
    // The command must not get the screen's keys or signals.
    tmux.press(&["q"]);
    tmux.await_text("exit 0");
    assert!(kernel::links_that_stay(&links).is_empty());
    until("the end of top", || !is_running(top));
    let before = cpu_time(growing);
    until("the command goes on", || cpu_time(growing) > before);
    guardian::kill([growing]);
}

#[test]
fn the_screen_ends_with_its_command() {
    let case = "the_screen_ends_with_its_command";
    let Some(_turn) = turn(case) else { return };
    let growing = program("growing");
    // Long enough to be seen on a busy machine.
    let command = format!("FREE_RUNNING=1 {}", top(&format!("-i 4096 -- {} 160000 20000", growing.display())));
    let Some(tmux) = Tmux::run(&command, 100, 24) else { return skipped(case, "there is no tmux") };
    tmux.await_text("site_01");
    let screen = tmux.await_text("exit 0");
    assert!(screen.contains(" icanon") && screen.contains(" echo ") && !screen.contains("IN USE"), "{screen}");
}

/// The child of process `pid` that has this name.
fn child_named(pid: u32, name: &str) -> u32 {
    let named = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == name);
    children_of(pid).into_iter().find(named).expect("the command runs")
}

#[test]
fn a_service_is_watched_and_may_go_away_for_a_while() {
    let case = "a_service_is_watched_and_may_go_away_for_a_while";
    let Some(_turn) = turn(case) else { return };
    let target = growing();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tokens = token_file(dir.path(), 0o600, "0123456789abcdef\n");
    let service = || Recorder::of(target.pid(), 4096).without_outputs().service().option("--token-file", &tokens);
    let (recording, address) = service().serve();
    let command = top(&format!("http://{address} --token-file {tokens}"));
    let Some(tmux) = Tmux::run(&command, 100, 30) else { return skipped(case, "there is no tmux") };
    let screen = tmux.await_text("site_01");
    assert!(screen.contains(&format!("http://{address}")) && screen.contains(" ["), "with error bars: {screen}");
    recording.stop();
    tmux.await_text("AWAY");
    // Who asks while the service ends may get another reason first.
    let screen = tmux.await_text("does not answer");
    assert!(screen.contains("site_01"), "what it has stays: {screen}");
    let again = service().option("--listen", &address.to_string()).start();
    tmux.await_text("LIVE");
    tmux.press(&["q"]);
    tmux.await_text("exit 0");
    again.stop();
}

/// Measures what `top` costs with a program that has 5,000 stacks and makes 100 samples a second. Prints the figures.
#[test]
#[ignore = "a benchmark: cargo xtask bench top"]
fn cost_of_the_screen() {
    const OVER: Duration = Duration::from_secs(20);
    let share = |pid: u32| {
        let (begun, before) = (Instant::now(), cpu_time(pid));
        std::thread::sleep(OVER);
        (cpu_time(pid) - before).as_secs_f64() / begun.elapsed().as_secs_f64()
    };
    let _turn = turn("cost_of_the_screen").expect("root and BPF");
    let mut target = Target::start(&program("branches"), ["5000", "1000"]);
    let pid = target.pid();
    let command = format!("exec {} -i 1 --pid {pid} -o {{dir}}/x.json", heapbpf().display());
    let dir = tempfile::tempdir().expect("a temporary directory");
    let recording = Tmux::run(&command.replace("{dir}", &dir.path().display().to_string()), 120, 40).expect("tmux");
    recording.await_text("recording");
    target.go();
    // Wait until symbolization, which happens once, is over.
    std::thread::sleep(Duration::from_secs(15));
    println!("a recording without a screen: {:.2} % of a core", 100.0 * share(recording.shell()));
    drop(recording);
    drop(target);
    let said = dir.path().join("said");
    for (width, height) in [(120, 40), (250, 70)] {
        let mut target = Target::start(&program("branches"), ["5000", "1000"]);
        let command = format!("exec {} top -vv -i 1 --pid {} 2> {}", heapbpf().display(), target.pid(), said.display());
        let tmux = Tmux::run(&command, width, height).expect("tmux");
        tmux.await_text("LIVE");
        target.go();
        tmux.await_text("site_00");
        tmux.press(&["Tab"]);
        tmux.await_text("› stacks");
        std::thread::sleep(Duration::from_secs(15));
        let top = tmux.shell();
        let share = share(top);
        println!("top, {width} x {height}: {:.2} % of a core over {OVER:?}", 100.0 * share);
        println!("{}", tmux.screen().lines().take(5).collect::<Vec<_>>().join("\n"));
        tmux.press(&["q"]);
        until("the end of top", || !is_running(top));
        let messages = std::fs::read_to_string(&said).expect("our own file");
        messages.lines().filter(|line| line.contains("profiles were shown")).for_each(|line| println!("{line}"));
        std::fs::remove_file(&said).expect("our own file");
    }
}
