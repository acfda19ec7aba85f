//! `/etc/heapbpf.conf`: programs that the host's administrator forbids to hook inline. Each heapbpf here sees its own
//! file at that path.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::inline::{is_hooked, mapped};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use serde_json::Value;
use tempfile::TempDir;

/// Runs a command line with another /etc: the host's files, and our own heapbpf.conf.
const SCRIPT: &str = "set -e; dir=$1; shift; mount --bind /etc $dir/host; mount -t tmpfs tmpfs /etc; \
                      ln -s $dir/host/* /etc/; rm -f /etc/heapbpf.conf; cp $dir/rules /etc/heapbpf.conf; exec \"$@\"";

/// A host with rules.
struct Rules {
    dir: TempDir,
    unshare: PathBuf,
}

impl Rules {
    fn new(unshare: PathBuf, rules: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("host")).expect("our own directory");
        std::fs::write(dir.path().join("rules"), rules).expect("our own directory");
        Self { dir, unshare }
    }

    /// The words that start a command line on this host.
    fn words(&self) -> Vec<&OsStr> {
        let [unshare, dir] = [self.unshare.as_path(), self.dir.path()].map(Path::as_os_str);
        [&[unshare][..], &["--mount", "sh", "-c", SCRIPT, "sh"].map(OsStr::new), &[dir]].concat()
    }
}

#[test]
fn rules_that_cannot_be_followed_let_nothing_be_recorded() {
    let case = "rules_that_cannot_be_followed_let_nothing_be_recorded";
    let Some(_turn) = turn(case) else { return };
    let Some(unshare) = tool("unshare") else { return skipped(case, "no unshare (Debian: util-linux)") };
    let rules = Rules::new(unshare, "# databases\nnever-inline exe\n");
    let target = Target::start(&program("pairs"), ["500"]);
    let place = "/etc/heapbpf.conf, line 2, column 17: never-inline exe needs a value";
    for hook in ["auto", "probe", "inline"] {
        let refused = Recorder::of(target.pid(), 1).option("--hook", hook).through(&rules.words()).refused();
        refused.check(1, &[place]);
    }
    let words = rules.words();
    let mut doctor = Command::new(words[0]);
    let output = doctor.args(&words[1..]).arg(heapbpf()).arg("doctor").output().expect("unshare runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains(place), "{said}");
}

#[test]
fn a_program_that_a_rule_names_is_probed_whatever_is_asked() {
    let case = "a_program_that_a_rule_names_is_probed_whatever_is_asked";
    let Some(_turn) = turn(case) else { return };
    let Some(unshare) = tool("unshare") else { return skipped(case, "no unshare (Debian: util-linux)") };
    let rule = format!("never-inline exe {}", program("mix").canonicalize().expect("it is there").display());
    let rules = Rules::new(unshare, &format!("\n  {rule}\n"));
    let mut forbidden = Target::start(&program("mix"), ["20000"]);
    let forbidden_too = Target::start(&program("mix"), ["20000"]);
    let mut other = Target::start(&program("pairs"), ["500"]);
    let pid = forbidden.pid();
    let why = format!("/etc/heapbpf.conf, line 2, forbids it: {rule}");

    let words = rules.words();
    let mut doctor = Command::new(words[0]);
    doctor.args(&words[1..]).arg(heapbpf()).args(["doctor", "--json", "--pid", &pid.to_string()]);
    let output = doctor.output().expect("unshare runs");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["processes"][0]["inline"][0]["why_not"], why.as_str(), "{found}");
    let checks = found["kernel"]["checks"].to_string();
    assert!(checks.contains(&rule) && checks.contains(&format!("({pid})")), "who has it: {checks}");

    let recorder = Recorder::of(pid, 1).pid(forbidden_too.pid()).pid(other.pid());
    let recorder = recorder.option("--hook", "inline").flag("--no-follow");
    let recording = recorder.through(&words).start();
    assert!(mapped(pid).is_empty());
    assert!(is_hooked(other.pid()), "{}", recording.said());
    let mut pids = [pid, forbidden_too.pid()];
    pids.sort_unstable();
    let warning = format!("2 processes ({}, {}) use probes: {why}", pids[0], pids[1]);
    assert_eq!(recording.said().matches("use probes: ").count(), 1, "{}", recording.said());
    assert!(recording.said().contains(&warning), "{}", recording.said());
    let truths = [forbidden.run(), other.run()];
    let (profile, _) = recording.stop().results();
    for truth in &truths {
        checks::sites_of(&profile, truth.sites[0].pid, truth, 1, Compare::All);
    }
}
