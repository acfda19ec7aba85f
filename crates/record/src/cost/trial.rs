//! Attaches BPF programs to a process's allocator and detaches them again, to measure what they add.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use heapbpf_attach::files::FileKey;
use heapbpf_attach::hooks::Hooks;
use heapbpf_attach::inline::Refused;
use heapbpf_attach::inline::preview::Trial as InlineTrial;
use heapbpf_attach::rules;
use heapbpf_kernel::control::{ControlMaps, CountedBy};
use heapbpf_kernel::guardian::{Guardian, ProbeLink};
use heapbpf_kernel::loader::{Loader, MapSizes, ProgramKind};
use heapbpf_kernel::programs::{LinkKind, Programs, When};
use heapbpf_kernel::ring_maps::RingId;
use heapbpf_kernel::rings::Ring;
use heapbpf_kernel::{KernelError, sys};
use heapbpf_probes::Table;
use sampler_ebpf::abi::{Config, stack_kind};
use sampler_ebpf::constants::draw_constants;

/// Smallest ring, bytes; the loader rounds it up to a page.
const LEAST: u32 = 4096;

/// The functions that a recording probes. Fewer are faster to remove, which matters for perf links.
const FUNCTIONS: [&str; 2] = ["malloc", "free"];

/// The allocator file of a process, and where heapbpf would probe it.
pub struct Allocator {
    /// Path of the file.
    pub path: CString,
    file: Arc<File>,
    name: String,
    /// Probed instructions: file offset, whether the function only frees, how the kernel executes it, and the function.
    pub sites: Vec<(u64, bool, String, String)>,
}

impl Allocator {
    /// The first file of a process that has an allocator.
    ///
    /// # Errors
    /// The process has none that can be probed.
    pub fn of_process(pid: u32) -> anyhow::Result<Self> {
        Self::find(pid, |_| true)
    }

    /// The library with this file name.
    ///
    /// # Errors
    /// The process has no such library, or it is not an allocator that can be probed.
    pub fn in_library(pid: u32, name: &str) -> anyhow::Result<Self> {
        Self::find(pid, |path| path.file_name().is_some_and(|file| file == name))
    }

    fn find(pid: u32, wanted: impl Fn(&Path) -> bool) -> anyhow::Result<Self> {
        let maps = procfs::process::Process::new(pid.cast_signed())?.maps()?;
        let files: BTreeMap<(i32, i32, u64), String> = maps
            .iter()
            .filter(|map| map.perms.contains(procfs::process::MMPermissions::EXECUTE) && map.inode != 0)
            .filter(|map| matches!(&map.pathname, procfs::process::MMapPath::Path(path) if wanted(path)))
            .map(|map| {
                let (start, end) = map.address;
                ((map.dev.0, map.dev.1, map.inode), format!("/proc/{pid}/map_files/{start:x}-{end:x}"))
            })
            .collect();
        for path in files.into_values() {
            let Ok(file) = File::open(&path) else { continue };
            let file = Arc::new(file);
            let mut hooks = hooks(true, None);
            let Ok((key, true)) = hooks.files.examine(&path, &file) else { continue };
            let Some(planned) = hooks.files.plan(key) else { continue };
            let sites = planned
                .sites
                .iter()
                .map(|site| (site.site.offset, !site.return_needed, site.kind.to_string(), site.function.clone()))
                .collect();
            let name = planned.allocator.clone();
            let path = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
            return Ok(Self { path, file, name, sites });
        }
        anyhow::bail!("process {pid} has no allocator to measure with")
    }

    /// Hooks the allocator inline in a process that maps it. Nothing is sampled.
    ///
    /// # Errors
    /// It cannot be hooked inline.
    pub fn hook_inline(&self, pid: u32) -> Result<InlineTrial, Refused> {
        let path = self.path.to_string_lossy();
        InlineTrial::begin(pid, (&path, &self.file), &Table::default())
    }

    /// Name and version of the allocator.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How the kernel executes the instruction at which a function is probed.
    pub fn kind(&self, function: &str) -> Option<&str> {
        self.sites.iter().find(|(_, _, _, name)| name == function).map(|(_, _, kind, _)| kind.as_str())
    }
}

fn hooks(live: bool, programs: Option<&Programs>) -> Hooks {
    Hooks::new(rules::of_this_kernel(programs), Table::default(), live)
}

/// heapbpf's BPF programs, set up as in a recording of one process.
pub struct Recording {
    programs: Programs,
    control: ControlMaps,
    hooks: Hooks,
    key: FileKey,
    /// The ring of small records.
    pub events: Ring,
    /// The ring of stack copies.
    pub stacks: Ring,
    pid: u32,
}

/// Settings of a [`Recording`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Sampling interval R, bytes.
    pub interval: u64,
    /// Whether frees are tracked.
    pub live: bool,
    /// Kind of link; `None`: the best that works.
    pub link: Option<LinkKind>,
    /// One of `abi::stack_kind`.
    pub stack_kind: u32,
    /// Maximum number of stack bytes copied per sample.
    pub stack_bytes: u64,
    /// Size of the events ring, bytes. It is not read during a slice. The stacks ring is four times as large.
    pub events_bytes: u32,
}

impl Setting {
    /// The defaults of the command line for a named target, except that only malloc and free are probed.
    pub const DEFAULT: Self = Self {
        interval: 512 << 10,
        live: true,
        link: None,
        stack_kind: stack_kind::COPIED,
        stack_bytes: 64 << 10,
        events_bytes: 16 << 20,
    };
}

impl Recording {
    /// Loads the programs of a BPF object, without attaching any probe.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn load(
        object: &[u8],
        setting: Setting,
        allocator: &Allocator,
        pid: u32,
        guardian: &Guardian,
    ) -> anyhow::Result<Self> {
        let config = Config {
            live: u32::from(setting.live),
            stack_kind: setting.stack_kind,
            stack_bytes: setting.stack_bytes,
            self_tgid: std::process::id(),
            ..Config::default()
        };
        // Without samples there are no records, so the smallest rings are enough.
        let events_bytes = if setting.interval == 0 { LEAST } else { setting.events_bytes };
        let sizes =
            MapSizes { events_bytes, stacks_bytes: 4 * events_bytes, live_max: 1 << 20, stack_traces_max: 1024 };
        let loader = Arc::new(Loader::new(object, &config, &sizes)?);
        let mut control = ControlMaps::open(&loader)?;
        control.set_draw(draw_constants(setting.interval).context("the interval is too large")?)?;
        let programs = Programs::load(&loader, (setting.live, When::AtOnce), setting.link, guardian)?;
        let mut hooks = hooks(setting.live, Some(&programs));
        hooks.only = Some(&FUNCTIONS);
        let (key, _) = hooks.files.examine(&allocator.path.to_string_lossy(), &allocator.file)?;
        let (events, stacks) = (Ring::open(&loader, RingId::Events)?, Ring::open(&loader, RingId::Stacks)?);
        Ok(Self { programs, control, hooks, key, events, stacks, pid })
    }

    /// Attaches the probes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on(&mut self) -> anyhow::Result<()> {
        let own = self.programs.links_one_process;
        self.control.add_target(self.pid, if own { CountedBy::OwnLinks } else { CountedBy::SharedLinks })?;
        self.hooks.hook(self.key, own.then_some(self.pid), &self.programs, &mut self.control)?;
        Ok(())
    }

    /// Detaches the probes and empties the rings. Returns the number of reported samples and frees.
    pub fn off(&mut self) -> usize {
        self.hooks.release_all();
        let mut records = 0;
        loop {
            let count = self.events.drain(|_| ());
            if count == 0 {
                break;
            }
            records += count;
        }
        while self.stacks.drain(|_| ()) > 0 {}
        records
    }
}

/// The no-op baseline: BPF programs that do nothing, on exactly the instructions that heapbpf probes.
pub struct Baseline {
    multi: Option<OwnedFd>,
    perf: OwnedFd,
    links: Vec<ProbeLink>,
    guardian: Guardian,
}

impl Baseline {
    /// Loads the program.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn load(object: &[u8], guardian: &Guardian) -> Result<Self, KernelError> {
        let sizes = MapSizes { events_bytes: LEAST, stacks_bytes: LEAST, live_max: 1, stack_traces_max: 1 };
        let loader = Loader::new(object, &Config::default(), &sizes)?;
        Ok(Self {
            multi: loader.program("nothing", ProgramKind::UprobeMulti).ok(),
            perf: loader.program("nothing", ProgramKind::UprobePerf)?,
            links: Vec::new(),
            guardian: guardian.clone(),
        })
    }

    /// Attaches it to one instruction of heapbpf's own executable ([`heapbpf_kernel::own_location`]), in a process that
    /// runs heapbpf.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on_own(&mut self, (path, offset): &(CString, u64), pid: u32) -> std::io::Result<()> {
        self.link((path, &[*offset]), pid, false, false)
    }

    /// Attaches it to instructions of a file, given by their file offsets, or to the returns of these functions: with
    /// multi links if the kernel has them, unless `perf` is set.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn link(
        &mut self,
        (path, offsets): (&CStr, &[u64]),
        pid: u32,
        on_return: bool,
        perf: bool,
    ) -> std::io::Result<()> {
        let (program, how) = match self.multi.as_ref().filter(|_| !perf) {
            Some(program) => (program, sys::How::multi(on_return)),
            None => (&self.perf, sys::How::perf(on_return)?),
        };
        let cookies = vec![0; offsets.len()];
        let target = sys::UprobeTarget { path, offsets, cookies: &cookies, semaphores: &[], pid: Some(pid) };
        for part in target.parts(how) {
            self.links.push(self.guardian.link_uprobe(program.as_fd(), how, &part)?);
        }
        Ok(())
    }

    /// Detaches it.
    pub fn off(&mut self) {
        self.links.clear();
    }
}
