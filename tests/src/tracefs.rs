//! A uprobe as people register it by hand, in tracefs, and as older tools do.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

/// Name of the event in its group.
const EVENT: &str = "hit";

/// tracefs, mounted at a place of its own.
pub struct Tracefs(TempDir);

impl Tracefs {
    /// Mounts it.
    ///
    /// # Errors
    /// Why it cannot be had, or has no uprobes.
    pub fn mount() -> Result<Self, String> {
        let folder = TempDir::new().map_err(|error| error.to_string())?;
        let mounted = Command::new("mount").args(["-t", "tracefs", "nodev"]).arg(folder.path()).output();
        let mounted = mounted.map_err(|error| format!("no mount: {error}"))?;
        if !mounted.status.success() {
            return Err(String::from_utf8_lossy(&mounted.stderr).trim().to_owned());
        }
        let it = Self(folder);
        if it.0.path().join("uprobe_events").exists() { Ok(it) } else { Err("it has no uprobe_events".into()) }
    }

    /// Registers a uprobe at a file offset, and traces the hits of one thread.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn trace(&self, path: &Path, offset: u64, tid: u32) -> TraceEvent {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let group = format!("heapbpf_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let instance = self.0.path().join("instances").join(&group);
        std::fs::create_dir(&instance).expect("tracefs makes an instance");
        let event = TraceEvent { definitions: self.0.path().join("uprobe_events"), instance, group };
        append(&event.definitions, &format!("p:{}/{EVENT} {}:{offset:#x}", event.group, path.display()));
        append(&event.control("filter"), &format!("common_pid == {tid}"));
        append(&event.control("enable"), "1");
        event
    }
}

impl Drop for Tracefs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

/// A uprobe, which is removed when dropped.
pub struct TraceEvent {
    definitions: PathBuf,
    instance: PathBuf,
    group: String,
}

impl TraceEvent {
    fn control(&self, name: &str) -> PathBuf {
        self.instance.join("events").join(&self.group).join(EVENT).join(name)
    }

    /// How often it was hit.
    ///
    /// # Panics
    /// If the kernel does not say, or has dropped some.
    pub fn hits(&self) -> u64 {
        let trace = std::fs::read_to_string(self.instance.join("trace")).expect("an instance has one");
        assert!(!trace.contains("LOST"), "its buffer was large enough: {trace}");
        trace.lines().filter(|line| !line.starts_with('#') && line.contains(&format!("{EVENT}:"))).count() as u64
    }
}

impl Drop for TraceEvent {
    fn drop(&mut self) {
        // An event that is enabled, or an instance's, cannot be removed.
        let disabled = std::fs::write(self.control("enable"), "0");
        let _ = std::fs::remove_dir(&self.instance);
        if disabled.is_ok() {
            append(&self.definitions, &format!("-:{}/{EVENT}", self.group));
        }
    }
}

/// Writes a line to a control file, without taking away what is there.
fn append(file: &Path, line: &str) {
    let opened = std::fs::OpenOptions::new().append(true).open(file);
    // By one call: each is a command.
    let written = opened.and_then(|mut opened| opened.write_all(format!("{line}\n").as_bytes()));
    written.unwrap_or_else(|error| panic!("{line} to {}: {error}", file.display()));
}
