//! The environment of the tests: the binary under test, what the machine allows, and a lock that makes the tests of
//! `alone` run one at a time.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use procfs::process::{MMapPath, Process};

/// Held by the running test of the test program `alone`.
static TURN: Mutex<()> = Mutex::new(());

/// A test's turn. In the test program `alone`, the next test waits until it is dropped.
pub struct Turn(#[expect(dead_code, reason = "held until it is dropped")] Option<MutexGuard<'static, ()>>);

/// Whether tests of this test program run in parallel (`company`) rather than one at a time (`alone`).
pub fn has_company() -> bool {
    let test = std::env::current_exe().unwrap_or_default();
    test.file_name().is_some_and(|name| name.to_string_lossy().starts_with("company-"))
}

/// A variable for heapbpf, if tests share two CPUs: a stop takes longer there than the 20 ms that users are promised.
pub fn stop_limit() -> Option<(&'static str, &'static str)> {
    has_company().then_some(("HEAPBPF_STOP_LIMIT_MS", "500"))
}

/// Waits for this test's turn. Returns `None` and logs the reason if the test has to be skipped.
///
/// # Panics
/// If the binary under test was not built, which is a mistake and no reason to skip.
pub fn turn(case: &str) -> Option<Turn> {
    if let Err(why) = may_record() {
        skipped(case, why);
        return None;
    }
    let binary = heapbpf();
    assert!(binary.exists(), "no {}: run `cargo xtask build`, or set HEAPBPF_BIN", binary.display());
    Some(Turn((!has_company()).then(|| TURN.lock().unwrap_or_else(PoisonError::into_inner))))
}

/// Reports that a test did not run, and why.
pub fn skipped(case: &str, why: &str) {
    heapbpf_testing::skipped_case(case, why);
}

/// Whether BPF programs can be loaded here.
fn may_record() -> Result<(), &'static str> {
    if !is_root() {
        return Err("needs root (CAP_BPF, CAP_PERFMON) to load BPF programs");
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err("this kernel has no BTF (/sys/kernel/btf/vmlinux)");
    }
    if !crate::kernel::maps_can_be_created() {
        return Err("the kernel refuses bpf(2) here (a container without CAP_BPF, or lockdown)");
    }
    Ok(())
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The binary under test: `HEAPBPF_BIN`, or the workspace's release build by default.
pub fn heapbpf() -> PathBuf {
    std::env::var_os("HEAPBPF_BIN").map_or_else(|| target_dir().join("release/heapbpf"), PathBuf::from)
}

/// Cargo's target directory of this build. The test binary is in `<target>/<profile>/deps`.
pub fn target_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a running test has a file");
    test.ancestors().nth(3).expect("cargo puts tests three directories deep").to_path_buf()
}

/// `tests/programs`, with the sources of the target programs.
pub fn programs_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("programs")
}

/// `tests/fixtures`, with inputs for third-party programs.
pub fn fixtures_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// The distribution's tool of this name, not one that a version manager put earlier in PATH.
pub fn tool(name: &str) -> Option<PathBuf> {
    let candidates =
        [format!("/usr/bin/{name}"), format!("/usr/local/bin/{name}"), format!("/usr/local/go/bin/{name}")];
    candidates.into_iter().map(PathBuf::from).find(|path| path.exists())
}

/// Path of this process's C library.
pub fn libc_file() -> Option<PathBuf> {
    let maps = Process::myself().and_then(|process| process.maps());
    maps.into_iter().flatten().find_map(|map| match map.pathname {
        MMapPath::Path(path) if path.ends_with("libc.so.6") => Some(path),
        _ => None,
    })
}

/// The distribution's tool of this name. If it is missing, its package is installed (as root, on Debian). Returns
/// `None` if that is not possible.
pub fn tool_or_install(name: &str, package: &str) -> Option<PathBuf> {
    if let Some(found) = tool(name) {
        return Some(found);
    }
    if is_root() && tool("apt-get").is_some() {
        println!("installing {package}, which has {name}");
        let _ = Command::new("apt-get").args(["install", "-y", "--no-install-recommends", package]).output();
    }
    tool(name)
}

/// A number among the kernel's settings (`/proc/sys`), raised. It is restored when dropped.
pub struct Setting {
    file: &'static str,
    before: String,
}

impl Setting {
    /// Raises a setting to at least this number; `None` if it cannot be changed here.
    pub fn raise(file: &'static str, least: u64) -> Option<Self> {
        let before = std::fs::read_to_string(file).ok()?;
        let known: u64 = before.trim().parse().ok()?;
        std::fs::write(file, known.max(least).to_string()).ok()?;
        Some(Self { file, before })
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        if let Err(error) = std::fs::write(self.file, self.before.trim()) {
            eprintln!("{} stays raised: {error}", self.file);
        }
    }
}
