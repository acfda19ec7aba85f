//! A cgroup that tests put targets into.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// A cgroup. One made by [`Cgroup::new`] has a child, `below`. Removed when dropped.
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates a cgroup and its child. Returns `None` if there is no writable cgroup2 mount.
    pub fn new() -> Option<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let group = Self::named(&format!("heapbpf-test-{}-{number}", std::process::id()))?;
        std::fs::create_dir_all(group.0.join("below")).ok()?;
        Some(group)
    }

    /// Creates a cgroup with this name. Returns `None` if there is no writable cgroup2 mount.
    pub fn named(name: &str) -> Option<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?.split(' ').nth(1)?;
        let path = Path::new(mount).join(name);
        std::fs::create_dir_all(&path).ok()?;
        Some(Self(path))
    }

    /// The cgroup's directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Moves a process into the cgroup, or into its child.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn take(&self, below: &str, pid: u32) {
        std::fs::write(self.0.join(below).join("cgroup.procs"), pid.to_string()).expect("root may move processes");
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        for path in [self.0.join("below"), self.0.clone()] {
            let _ = std::fs::remove_dir(path);
        }
    }
}
