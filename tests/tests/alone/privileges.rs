//! The capabilities that `packaging/` grants suffice, and each is needed: without it, heapbpf names it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use heapbpf_tests::environment::{heapbpf, skipped, tool, turn};
use heapbpf_tests::inline::is_hooked;
use heapbpf_tests::kernel::linux;
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;
use serde_json::Value;
use tempfile::TempDir;

/// User id without privileges.
const NOBODY: u32 = 65534;

fn packaging(file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The documents of a YAML file, parsed by PyYAML.
fn yaml(case: &str, file: &str) -> Option<Vec<Value>> {
    const SCRIPT: &str = "import json, sys, yaml; json.dump(list(yaml.safe_load_all(open(sys.argv[1]))), sys.stdout)";
    let python = std::env::var_os("HEAPBPF_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(file);
    let read = Command::new(python).args(["-c", SCRIPT]).arg(path).output().expect("python3 runs");
    if String::from_utf8_lossy(&read.stderr).contains("No module named 'yaml'") {
        skipped(case, "python3 has no module yaml");
        return None;
    }
    Some(serde_json::from_slice(&read.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&read.stderr))))
}

/// Capabilities that the systemd unit grants, as `bpf`, `perfmon`, ….
fn granted() -> Vec<String> {
    let unit = packaging("heapbpf.service");
    let line = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).expect("a bounding set");
    line.split_whitespace().map(|name| name.strip_prefix("CAP_").expect("a capability").to_lowercase()).collect()
}

#[test]
fn all_ways_of_installing_grant_the_same() {
    let set = granted();
    assert!(packaging("Containerfile").contains(&format!("--cap-add={} ", set.join(","))));
    let upper = set.join(", ").to_uppercase();
    assert!(packaging("daemonset.yaml").contains(&format!("add: [{upper}]")));
}

/// Other hosts can reach the daemonset only with a token and encrypted. It always has the runtime's system call filter,
/// and the unit's capabilities and no others. Its options look for files where its volumes have them.
#[test]
fn the_daemonset_is_not_open() {
    let text = packaging("daemonset.yaml");
    let Some(documents) = yaml("the_daemonset_is_not_open", "daemonset.yaml") else { return };
    let [daemonset] = documents.as_slice() else { panic!("{} documents", documents.len()) };
    assert_eq!((daemonset["apiVersion"].as_str(), daemonset["kind"].as_str()), (Some("apps/v1"), Some("DaemonSet")));
    let labels = &daemonset["spec"]["template"]["metadata"]["labels"];
    assert_eq!(&daemonset["spec"]["selector"]["matchLabels"], labels, "it selects its own pods");
    let pod = &daemonset["spec"]["template"]["spec"];
    assert_eq!((pod["hostPID"].as_bool(), pod["automountServiceAccountToken"].as_bool()), (Some(true), Some(false)));
    let none = |value: &Value, key: &str| value[key].is_null();
    assert!(none(pod, "hostNetwork") && none(pod, "hostIPC"), "{text}");
    let [container] = &pod["containers"].as_array().expect("containers")[..] else { panic!("one container") };

    let context = &container["securityContext"];
    assert_eq!(context["seccompProfile"]["type"].as_str(), Some("RuntimeDefault"));
    assert_eq!(context["allowPrivilegeEscalation"].as_bool(), Some(false));
    assert_eq!(context["readOnlyRootFilesystem"].as_bool(), Some(true));
    assert!(none(context, "privileged"), "{text}");
    assert_eq!(strings(&context["capabilities"]["drop"]), ["ALL"]);
    let added: Vec<String> = strings(&context["capabilities"]["add"]).iter().map(|name| name.to_lowercase()).collect();
    assert_eq!(added, granted());

    let arguments = strings(&container["args"]);
    let value = |option: &str| {
        let given = arguments.iter().find_map(|argument| argument.strip_prefix(option)?.strip_prefix('='));
        given.unwrap_or_else(|| panic!("{option} is not given: {arguments:?}"))
    };
    assert!(value("--listen").ends_with(":6060"), "the port that is scraped");
    let mounts = container["volumeMounts"].as_array().expect("mounts");
    for option in ["--token-file", "--tls-cert", "--tls-key"] {
        let dir = value(option).rsplit_once('/').expect("a path").0;
        let mount = mounts.iter().find(|mount| mount["mountPath"].as_str() == Some(dir)).expect("a volume is there");
        assert_eq!(mount["readOnly"].as_bool(), Some(true), "{option}");
        let volumes = pod["volumes"].as_array().expect("volumes");
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("it has this name");
        assert!(volume["secret"]["secretName"].as_str().is_some(), "{option} is a secret");
    }
    assert_eq!(container["readinessProbe"]["httpGet"]["scheme"].as_str(), Some("HTTPS"));
}

/// The strings of a sequence.
fn strings(sequence: &Value) -> Vec<&str> {
    sequence.as_array().expect("a sequence").iter().map(|it| it.as_str().expect("text")).collect()
}

/// systemd rates the unit's settings as docs/security.md says.
#[test]
fn the_units_exposure_is_as_documented() {
    let case = "the_units_exposure_is_as_documented";
    let Some(analyze) = tool("systemd-analyze") else { return skipped(case, "no systemd-analyze (Debian: systemd)") };
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/heapbpf.service");
    let output = Command::new(analyze).args(["security", "--offline=true", "--threshold=28"]).arg(unit).output();
    let output = output.expect("systemd-analyze runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "exposure above 2.8: {said}");
}

/// The hardest case: another user's process, whose C library was in that user's private directory and has been deleted.
fn hidden_target(setpriv: &Path) -> Option<(Target, TempDir)> {
    let dir = tempfile::tempdir().expect("a temporary directory");
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("our own directory");
    let (private, binary) = (dir.path().join("private"), dir.path().join("growing"));
    let library = private.join("libc.so.6");
    let copy = |from: &Path, to: &Path| {
        // Another process copies the file, so that no child of this one has it open for writing when it is executed.
        let copied = Command::new("cp").args([from, to]).status();
        assert!(copied.expect("cp runs").success());
        fs::set_permissions(to, Permissions::from_mode(0o755)).expect("our own copy");
    };
    fs::create_dir(&private).expect("our own directory");
    copy(&program("growing"), &binary);
    copy(Path::new("/lib/x86_64-linux-gnu/libc.so.6").canonicalize().ok()?.as_path(), &library);
    for path in [&private, &library] {
        std::os::unix::fs::chown(path, Some(NOBODY), Some(NOBODY)).expect("we are root");
    }
    fs::set_permissions(&private, Permissions::from_mode(0o700)).expect("our own directory");
    let mut command = Command::new(setpriv);
    command.args([format!("--reuid={NOBODY}"), format!("--regid={NOBODY}"), "--clear-groups".into()]);
    command.arg(&binary).arg("20000").env("LD_LIBRARY_PATH", &private);
    let target = Target::start_command(&mut command);
    fs::remove_file(&library).expect("it is there");
    Some((target, dir))
}

/// Starts heapbpf as the unit does: as root with these capabilities and no way to gain more.
fn with(setpriv: &Path, capabilities: &[String], recorder: Recorder) -> Recorder {
    let set: String = capabilities.iter().map(|name| format!(",+{name}")).collect();
    let bounding = format!("--bounding-set=-all{set}");
    recorder.through(&[setpriv.as_os_str(), OsStr::new("--no-new-privs"), OsStr::new(&bounding)])
}

/// `setpriv` and the capabilities, if this kernel needs only those.
fn prepared(case: &str) -> Option<(PathBuf, Vec<String>)> {
    let Some(setpriv) = tool("setpriv") else {
        skipped(case, "no setpriv (Debian: util-linux)");
        return None;
    };
    if linux() < (6, 6) {
        skipped(case, "before Linux 6.6 CAP_SYS_ADMIN is needed as well");
        return None;
    }
    Some((setpriv, granted()))
}

#[test]
fn the_units_capabilities_are_enough() {
    let case = "the_units_capabilities_are_enough";
    let Some(_turn) = turn(case) else { return };
    let Some((setpriv, capabilities)) = prepared(case) else { return };
    let Some((mut target, _dir)) = hidden_target(&setpriv) else {
        return skipped(case, "no libc.so.6 where Debian has it");
    };
    let recorder = with(&setpriv, &capabilities, Recorder::of(target.pid(), 1));
    let recording = recorder.option("--listen", "127.0.0.1:0").start();
    assert_eq!(is_hooked(target.pid()), cfg!(target_arch = "x86_64"), "{}", recording.said());
    target.run();
    let (profile, _) = recording.stop().results();
    let bytes = profile.totals.alloc_bytes.value();
    // Writing the program's report allocates as well.
    assert!((20_000_000.0..20_100_000.0).contains(&bytes), "{bytes}");
    let named = profile
        .stacks
        .iter()
        .filter(|stack| stack.frames.iter().any(|frame| frame.function.as_deref() == Some("main")));
    assert!(named.count() >= 2, "{:?}", profile.stacks);

    let everyone = with(&setpriv, &capabilities, Recorder::new().flag("--all").interval(1 << 20)).start();
    assert!(everyone.stop().results().0.processes.iter().all(|process| process.coverage <= 1.0));
}

#[test]
fn each_of_the_units_capabilities_is_needed_and_named() {
    let case = "each_of_the_units_capabilities_is_needed_and_named";
    let Some(_turn) = turn(case) else { return };
    let Some((setpriv, capabilities)) = prepared(case) else { return };
    let Some((target, _dir)) = hidden_target(&setpriv) else {
        return skipped(case, "no libc.so.6 where Debian has it");
    };
    for missing in &capabilities {
        let left: Vec<String> = capabilities.iter().filter(|name| *name != missing).cloned().collect();
        let recorder = with(&setpriv, &left, Recorder::of(target.pid(), 4096).without_outputs());
        // Without inline hooks, the weaker capability is enough, so heapbpf names that.
        let named = if missing == "dac_override" { "dac_read_search" } else { missing };
        recorder.refused().check(1, &[&format!("CAP_{named}")]);
    }
}

#[test]
fn a_profile_that_may_not_be_read_is_named_with_the_reason() {
    let case = "a_profile_that_may_not_be_read_is_named_with_the_reason";
    let Some(setpriv) = tool("setpriv") else { return skipped(case, "no setpriv (Debian: util-linux)") };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("hidden.json");
    fs::write(&path, "{}").expect("our own directory");
    fs::set_permissions(&path, Permissions::from_mode(0o000)).expect("our own file");
    // Root without capabilities may only read what its own user id may read, which here is nothing.
    let mut command = Command::new(setpriv);
    command.args(["--no-new-privs", "--bounding-set=-all"]).arg(heapbpf()).arg("report").arg(&path);
    let output = command.output().expect("setpriv runs");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("hidden.json") && said.contains("Permission denied"), "{said}");
}
