//! The unit of `packaging/` under systemd: it becomes ready with all its restrictions, sees what it needs, and stops
//! cleanly.

use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::environment::{fixtures_dir, heapbpf, skipped, tool, turn};
use heapbpf_tests::guardian::{guardians_of, kill, leaks, threads_of};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::program::program;
use heapbpf_tests::scrape::get;
use heapbpf_tests::target::{Target, until};
use tempfile::TempDir;

fn unit() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/heapbpf.service")
}

/// Bits of the capabilities that the unit grants: DAC_OVERRIDE, SYS_PTRACE, PERFMON, BPF, CHECKPOINT_RESTORE.
const GRANTED: u64 = 1 << 1 | 1 << 19 | 1 << 38 | 1 << 39 | 1 << 40;

/// A service started from the unit, under its own systemd manager.
struct Service {
    /// The manager's script, which waits for lines on standard input.
    script: Target,
    port: u16,
    dir: TempDir,
}

impl Service {
    /// Starts the service and waits until it has reported to systemd that it is ready. Returns `None` and logs a skip
    /// where that is not possible.
    fn start(case: &str) -> Option<Self> {
        if !Path::new("/lib/systemd/systemd").exists() || tool("systemctl").is_none() {
            skipped(case, "no systemd (Debian: systemd)");
            return None;
        }
        if Path::new("/run/systemd/system").exists() {
            let why = "systemd is the first process here: a second manager by root would meddle with its cgroups";
            skipped(case, why);
            return None;
        }
        let dir = tempfile::tempdir().expect("a temporary directory");
        let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port").port();
        let (script, unit) = (fixtures_dir().join("unit.sh"), unit());
        let (binary, number) = (heapbpf().canonicalize().expect("it was built"), port.to_string());
        let words: [&OsStr; 4] = [dir.path().as_ref(), unit.as_ref(), binary.as_ref(), number.as_ref()];
        let mut command = Command::new("bash");
        command.arg(script).args(words);
        Some(Self { script: Target::start_command(&mut command), port, dir })
    }
}

#[test]
fn the_unit_runs_under_systemd_with_all_its_restrictions() {
    let case = "the_unit_runs_under_systemd_with_all_its_restrictions";
    let Some(_turn) = turn(case) else { return };
    let mut known = Target::start(&program("confined"), ["plain", "1000000000"]);
    let Some(Service { script: mut service, port, dir }) = Service::start(case) else { return };
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    known.go();
    until("hooks", || is_hooked(known.pid()));
    let of_known = format!("heapbpf_process_alloc_bytes_total{{pid=\"{}\"", known.pid());
    until("figures of a process of the host", || get(address, "/metrics").text().contains(&of_known));
    // A process has its counts before its first sample.
    until("its profile", || {
        let profile = get(address, &format!("/debug/pprof/heap?pid={}", known.pid()));
        profile.status == 200 && profile.body.len() > 500
    });

    let main = service_pid(port);
    let status = fs::read_to_string(format!("/proc/{main}/status")).expect("it runs");
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).expect("there").trim().to_owned();
    let bounding = u64::from_str_radix(&field("CapBnd:"), 16).expect("bits");
    assert_eq!(bounding, GRANTED, "{bounding:x}");
    assert_eq!((field("NoNewPrivs:"), field("Seccomp:")), ("1".into(), "2".into()));
    assert!(field("Seccomp_filters:").parse::<u32>().is_ok_and(|filters| filters > 10), "the unit's filters: {status}");
    let mounts = fs::read_to_string(format!("/proc/{main}/mountinfo")).expect("it runs");
    assert!(mounts.lines().any(|line| line.contains(" / / ro,")), "ProtectSystem=strict:\n{mounts}");
    println!("capabilities {bounding:#x}, {} filters of system calls", field("Seccomp_filters:"));

    service.go();
    let ended = service.line();
    assert_eq!(ended.trim(), "success exited 0", "SIGTERM ends it with its profile");
    let last = dir.path().join("config/heapbpf/last.pb.gz");
    assert!(fs::metadata(&last).is_ok_and(|file| file.len() > 500), "no last profile");
    assert!(service.end().success());
}

/// systemd does not interrupt the guardian of a killed daemon. A second SIGKILL would keep it from removing probes, as
/// it does the daemon.
#[test]
fn a_service_that_is_killed_leaves_no_probe() {
    let case = "a_service_that_is_killed_leaves_no_probe";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("forking"), [""; 0]);
    let Some(Service { script: mut service, port, dir: _dir }) = Service::start(case) else { return };
    let main = service_pid(port);
    until("hooks", || is_hooked(target.pid()));
    let guarding: Vec<u32> = guardians_of(main).into_iter().flat_map(threads_of).collect();
    assert!(!guarding.is_empty());
    kill([main]);
    until("the end of the guardian", || guardians_of(main).is_empty());
    until("a target without hooks", || !is_hooked(target.pid()));
    assert_eq!(leaks(&guarding.into_iter().chain([main]).collect()), Vec::<String>::new());
    service.go();
    assert_eq!(service.line().trim(), "signal killed KILL");
    assert!(service.end().success());
    target.go();
    assert_eq!(target.line(), "all children ended well");
    assert!(target.end().success());
}

/// The heapbpf process that has this port on its command line.
fn service_pid(port: u16) -> u32 {
    let wanted = format!("127.0.0.1:{port}");
    let is_it = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        words.next().is_some_and(|first| first.ends_with(b"/heapbpf")) && words.any(|word| word == wanted.as_bytes())
    };
    let pids = fs::read_dir("/proc").expect("processes").flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_it).expect("the service runs")
}

/// What systemd itself says about the unit.
#[test]
fn systemd_finds_nothing_wrong_with_the_unit() {
    let case = "systemd_finds_nothing_wrong_with_the_unit";
    let Some(analyze) = tool("systemd-analyze") else { return skipped(case, "no systemd-analyze (Debian: systemd)") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    // systemd-analyze checks that the program exists, but it need not be installed here.
    let text = fs::read_to_string(unit()).expect("ours").replace("/usr/local/bin/heapbpf", "/bin/true");
    let copy = dir.path().join("heapbpf.service");
    fs::write(&copy, text).expect("our own directory");
    let output = Command::new(analyze).args(["verify", "--man=no"]).arg(&copy).output().expect("it runs");
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    let of_ours: Vec<&str> = said.lines().filter(|line| line.contains("heapbpf.service")).collect();
    assert!(output.status.success() && of_ours.is_empty(), "{said}");
}
