//! Control groups, version 2, including hybrid hierarchies where version 1 is mounted as well.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A version 2 control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroup {
    /// Path in the hierarchy, `/` for its root.
    pub path: String,
    /// Its directory.
    pub directory: PathBuf,
    /// The kernel's id of the group, which BPF helpers compare.
    pub id: u64,
}

/// Why a control group cannot be a target.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No version 2 hierarchy is mounted.
    #[error("control groups version 2 are not mounted: `mount -t cgroup2 none /sys/fs/cgroup/unified`")]
    NotMounted,
    /// There is no such group.
    #[error("no control group {directory}: {source}; `systemd-cgls` or `find {mount} -type d` lists them")]
    Missing {
        /// Where it was looked for.
        directory: PathBuf,
        /// Where the hierarchy is mounted.
        mount: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
}

impl Cgroup {
    /// Finds a group by its path, given as in `/proc/PID/cgroup` (`/system.slice/x.service`) or as a directory.
    ///
    /// # Errors
    /// If there is no version 2 hierarchy or no such group.
    pub fn find(named: &str) -> Result<Self, CgroupError> {
        let mount = mount_point().ok_or(CgroupError::NotMounted)?;
        let relative = Path::new(named).strip_prefix(&mount).unwrap_or(Path::new(named));
        let relative = relative.strip_prefix("/").unwrap_or(relative);
        let missing = |directory: &Path, source| CgroupError::Missing {
            directory: directory.to_path_buf(),
            mount: mount.clone(),
            source,
        };
        let joined = mount.join(relative);
        let directory = joined.canonicalize().map_err(|source| missing(&joined, source))?;
        let metadata = directory.metadata().map_err(|source| missing(&directory, source))?;
        let inside = directory.strip_prefix(&mount).ok().filter(|_| metadata.is_dir());
        let Some(inside) = inside else {
            return Err(missing(&directory, io::ErrorKind::NotADirectory.into()));
        };
        Ok(Self { path: format!("/{}", inside.display()), id: metadata.ino(), directory })
    }

    /// Whether `path` is this group or one below it.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        // `Path` compares whole components: `/a/bc` is not below `/a/b`.
        Path::new(path).starts_with(&self.path)
    }
}

/// Version 2 path of a process's group, from the text of its `/proc/PID/cgroup`.
#[must_use]
pub fn parse(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(path.strip_suffix(" (deleted)").unwrap_or(path))
}

/// Where version 2 is mounted in heapbpf's mount namespace.
#[must_use]
pub fn mount_point() -> Option<PathBuf> {
    parse_mounts(&fs::read_to_string("/proc/self/mountinfo").ok()?)
}

fn parse_mounts(table: &str) -> Option<PathBuf> {
    table.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        (file_system.split(' ').next()? == "cgroup2").then_some(())?;
        let point = mount.split(' ').nth(4)?;
        Some(PathBuf::from(point.replace("\\040", " ").replace("\\134", "\\")))
    })
}

#[cfg(test)]
mod tests {
    use heapbpf_testing::skipped;

    use super::*;

    #[test]
    fn pure_and_hybrid_hierarchies() {
        assert_eq!(parse("0::/user.slice/a b.scope\n"), Some("/user.slice/a b.scope"));
        assert_eq!(parse("9:name=systemd:/x\n4:memory:/y\n0::/z\n"), Some("/z"));
        assert_eq!(parse("0::/gone (deleted)\n"), Some("/gone"));
        assert_eq!(parse("4:memory:/y\n"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn mounts() {
        let hybrid = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:3 - cgroup2 cgroup2 rw\n";
        assert_eq!(parse_mounts(hybrid), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(parse_mounts("41 31 0:38 / /a\\040b rw - cgroup2 x rw"), Some(PathBuf::from("/a b")));
        assert_eq!(parse_mounts("40 31 0:37 / /sys rw - cgroup cgroup rw"), None);
    }

    #[test]
    fn children_are_included_neighbours_are_not() {
        let group = |path: &str| Cgroup { path: path.into(), directory: PathBuf::new(), id: 0 };
        assert!(group("/a/b").contains("/a/b") && group("/a/b").contains("/a/b/c"));
        assert!(!group("/a/b").contains("/a/bc") && !group("/a/b").contains("/a"));
        assert!(group("/").contains("/anything") && group("/").contains("/"));
    }

    #[test]
    fn found_by_path_and_by_directory() {
        let Some(mount) = mount_point() else {
            skipped("no cgroup2 mount");
            return;
        };
        let root = Cgroup::find("/").expect("the root is there");
        assert_eq!((root.path.as_str(), &root.directory), ("/", &mount));
        assert_eq!(Cgroup::find(&mount.display().to_string()).expect("by directory"), root);
        assert!(matches!(Cgroup::find("/no/such/group"), Err(CgroupError::Missing { .. })));
        assert!(matches!(Cgroup::find("/../../../proc"), Err(CgroupError::Missing { .. })));
    }
}
