//! Version 2 control groups, also in hybrid hierarchies where version 1 is mounted as well.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use super::placement;

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
    /// No such group exists.
    #[error("no control group {directory}: {source}; `systemd-cgls` or `find {mount} -type d` lists them")]
    Missing {
        /// The directory that was tried.
        directory: PathBuf,
        /// Where the hierarchy is mounted.
        mount: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The text cannot be the beginning of a container ID.
    #[error(
        "--container {0}: this needs the ID of a container, or its beginning; `docker ps`, `podman ps` or `crictl \
         ps` show it"
    )]
    NoId(String),
    /// No running container has this ID.
    #[error("no container has an ID that begins with {id}; {}", known(.running))]
    NoContainer {
        /// As given.
        id: String,
        /// IDs of the running containers.
        running: Vec<String>,
    },
    /// The IDs of several containers begin this way.
    #[error("{} containers have IDs that begin with {id}: {}", .running.len(), shortened(.running))]
    Ambiguous {
        /// As given.
        id: String,
        /// Their IDs.
        running: Vec<String>,
    },
}

/// Maximum number of containers to name in a message.
const MOST_NAMED: usize = 5;
/// Number of characters of an ID that container engines show.
const SHOWN_OF_ID: usize = 12;

fn known(running: &[String]) -> String {
    if running.is_empty() { "no container is running".into() } else { format!("running: {}", shortened(running)) }
}

fn shortened(ids: &[String]) -> String {
    let mut names: Vec<&str> = ids.iter().take(MOST_NAMED).map(|id| id.get(..SHOWN_OF_ID).unwrap_or(id)).collect();
    if ids.len() > MOST_NAMED {
        names.push("…");
    }
    names.join(", ")
}

impl Cgroup {
    /// Finds a group by its path, either as in `/proc/PID/cgroup` (`/system.slice/x.service`) or as a directory.
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

    /// Memory that the kernel charges to a group and to the groups below it, in bytes. `None` if the memory controller
    /// does not count it, as in the root.
    pub fn memory_bytes(path: &str) -> Option<u64> {
        let relative = Path::new(path).strip_prefix("/").ok()?;
        let is_plain = relative.components().all(|part| matches!(part, std::path::Component::Normal(_)));
        let file = mount_point().filter(|_| is_plain)?.join(relative).join("memory.current");
        fs::read_to_string(file).ok()?.trim().parse().ok()
    }

    /// Finds the group of a running container by its ID or the beginning of its ID.
    ///
    /// # Errors
    /// If there is no version 2 hierarchy, or not exactly one container matches.
    pub fn of_container(id: &str) -> Result<Self, CgroupError> {
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-') {
            return Err(CgroupError::NoId(id.into()));
        }
        let mount = mount_point().ok_or(CgroupError::NotMounted)?;
        let path = choose(containers(&mount), id)?;
        Self::find(&path.to_string_lossy())
    }

    /// Whether `path` is this group or one below it.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        // `Path` compares whole components: `/a/bc` is not below `/a/b`.
        Path::new(path).starts_with(&self.path)
    }
}

/// Maximum number of groups to search for containers. Hosts have a few thousand, but every user of a delegated group
/// can create more.
const MOST_GROUPS: usize = 1 << 17;

/// Finds the groups of containers below a directory. Returns their IDs and directories, outer groups first.
fn containers(mount: &Path) -> Vec<(String, PathBuf)> {
    let mut waiting = VecDeque::from([mount.to_path_buf()]);
    let mut found = Vec::new();
    let mut looked_at = 0;
    while let Some(directory) = waiting.pop_front() {
        let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = directory.parent().map(name).unwrap_or_default();
        if let Some(id) = placement::container(&name(&directory), &parent) {
            found.push((id.to_owned(), directory.clone()));
        }
        let Ok(entries) = fs::read_dir(&directory) else { continue };
        let below = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        waiting.extend(below.map(|entry| entry.path()).take(MOST_GROUPS.saturating_sub(looked_at + waiting.len())));
        looked_at += 1;
    }
    found
}

/// The directory of the only container whose ID begins with `id`.
fn choose(found: Vec<(String, PathBuf)>, id: &str) -> Result<PathBuf, CgroupError> {
    // A container's group can occur again inside itself, if an engine inside the container uses the same name.
    let mut groups: BTreeMap<String, PathBuf> = BTreeMap::new();
    for (container, directory) in found {
        groups.entry(container).or_insert(directory);
    }
    let (id, running) = (id.to_owned(), groups.keys().cloned().collect());
    let mut fitting: Vec<(String, PathBuf)> = groups.into_iter().filter(|(it, _)| it.starts_with(&id)).collect();
    match fitting.len() {
        0 => Err(CgroupError::NoContainer { id, running }),
        1 => Ok(fitting.swap_remove(0).1),
        _ => Err(CgroupError::Ambiguous { id, running: fitting.into_iter().map(|(it, _)| it).collect() }),
    }
}

/// Version 2 path of a process's group, from the text of its `/proc/PID/cgroup`.
#[must_use]
pub fn parse(text: &str) -> Option<&str> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(path.strip_suffix(" (deleted)").unwrap_or(path))
}

/// Where version 2 is mounted, in heapbpf's own mount namespace.
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
    fn a_container_is_found_by_the_beginning_of_its_id() {
        let [one, two] = ["a".repeat(64), format!("ab{}", "0".repeat(62))];
        let dir = tempfile::tempdir().expect("a directory");
        let at = |path: &str| dir.path().join(path);
        let scope = format!("kubepods.slice/crio-{two}.scope");
        for path in [&format!("docker/{one}/docker/{one}"), &scope, &format!("x/crio-conmon-{two}.scope")] {
            fs::create_dir_all(at(path)).expect("a directory");
        }
        let chosen = |id: &str| choose(containers(dir.path()), id);
        assert_eq!(chosen("aa").expect("one"), at(&format!("docker/{one}")));
        assert_eq!(chosen(&two).expect("the other"), at(&scope));
        assert_eq!(
            chosen("a").unwrap_err().to_string(),
            "2 containers have IDs that begin with a: aaaaaaaaaaaa, ab0000000000"
        );
        let none = chosen("b").unwrap_err().to_string();
        assert_eq!(none, "no container has an ID that begins with b; running: aaaaaaaaaaaa, ab0000000000");
        assert!(choose(Vec::new(), "b").unwrap_err().to_string().ends_with("no container is running"));
        for bad in ["", "../..", "web", "a/b"] {
            assert!(matches!(Cgroup::of_container(bad), Err(CgroupError::NoId(_))), "{bad:?}");
        }
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
