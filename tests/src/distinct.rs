//! Short programs that are all different: copies of `/bin/true` with different bytes appended.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use tempfile::TempDir;

use crate::descriptors::open_paths;
use crate::scrape::get;
use crate::target::until;

/// Sizes of tables of a serving heapbpf.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// Number of known modules.
    pub modules: u64,
    /// Number of open module files.
    pub open: u64,
    /// Bytes of resident memory.
    pub resident: f64,
}

impl Tables {
    /// The current sizes.
    ///
    /// # Panics
    /// If heapbpf does not answer.
    pub fn of(address: SocketAddr) -> Self {
        let metrics = get(address, "/metrics");
        let metric = |name: &str| metrics.metric(name).unwrap_or_else(|| panic!("no {name} in {}", metrics.text()));
        Self {
            modules: metric("heapbpf_modules") as u64,
            open: metric("heapbpf_modules_open") as u64,
            resident: metric("heapbpf_daemon_resident_bytes"),
        }
    }
}

/// A generator of such programs.
pub struct Distinct {
    dir: TempDir,
    content: Vec<u8>,
    made: u64,
}

impl Distinct {
    /// Has made no program yet.
    ///
    /// # Panics
    /// If there is no `/bin/true`.
    #[allow(clippy::new_without_default, reason = "it reads a file")]
    pub fn new() -> Self {
        let dir = TempDir::with_prefix("heapbpf-distinct-").expect("a temporary directory");
        Self { dir, content: fs::read("/bin/true").expect("it is there"), made: 0 }
    }

    /// Makes, runs and deletes `count` programs.
    ///
    /// # Panics
    /// If one fails.
    pub fn run(&mut self, count: u64) {
        let length = self.content.len();
        for _ in 0..count {
            self.made += 1;
            self.content.truncate(length);
            self.content.extend(self.made.to_le_bytes());
            let path = self.dir.path().join(format!("program-{}", self.made));
            fs::copy("/bin/true", &path).and_then(|_| fs::write(&path, &self.content)).expect("there is space");
            assert!(Command::new(&path).status().expect("it runs").success());
            fs::remove_file(&path).expect("our own file");
        }
    }

    /// Sizes of the tables once most of the programs are forgotten: there are at most `most` modules.
    pub fn settled(&self, address: SocketAddr, most: u64) -> Tables {
        let mut tables = Tables::of(address);
        until("modules are forgotten", || {
            tables = Tables::of(address);
            tables.modules <= most
        });
        tables
    }

    /// How many of the programs a process has open.
    pub fn open_in(&self, pid: u32) -> usize {
        let ours = self.dir.path().to_string_lossy().into_owned();
        open_paths(pid).iter().filter(|path| path.to_string_lossy().starts_with(&ours)).count()
    }
}
