//! Programs put on and off one process's allocator, so that what they add can be measured.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use sampler_ebpf::abi::{Config, stack_kind};
use sampler_ebpf::trials::SIZE_CLASSES;

use crate::attach::arch::Machine;
use crate::attach::hooks::{FileKey, Hooks};
use crate::attach::{KernelRules, Table};
use crate::heap::event::decode_stack;
use crate::host::limits::Limits;
use crate::kernel::loader::{Loader, MapSizes, ProgramKind};
use crate::kernel::programs::{LinkKind, Programs};
use crate::kernel::rings::Ring;
use crate::kernel::steering::Steering;
use crate::kernel::{KernelError, sys};
use crate::profile::model::Criterion;
use crate::sampling::constants::draw_constants;
use crate::sampling::size_classes::{CLASS_INTERVAL, class_trials};

/// Room for what samples report while nobody reads it.
const SIZES: MapSizes =
    MapSizes { events_bytes: 16 << 20, stacks_bytes: 64 << 20, live_max: 1 << 20, stack_traces_max: 1024 };

/// Least that a ring takes; the loader makes a page of it.
const LEAST: u32 = 4096;

/// One process's allocator file, and where heapbpf would probe it.
pub struct Allocator {
    path: CString,
    file: Arc<File>,
    name: String,
    /// Probed instructions: file offset, whether the function only frees, what the kernel does with it.
    sites: Vec<(u64, bool, String, String)>,
}

impl Allocator {
    /// Of the file that the process's malloc is in.
    ///
    /// # Errors
    /// The process has none that can be probed.
    pub fn of_process(pid: u32) -> anyhow::Result<Self> {
        Self::find(pid, |_| true)
    }

    /// Of its library of that name.
    ///
    /// # Errors
    /// There is none, or it is no allocator that can be probed.
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
            let mut hooks = hooks(true);
            let Ok((key, true)) = hooks.look_at(&path, &file) else { continue };
            let Some(planned) = hooks.planned(key) else { continue };
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

    /// Its name and version.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the kernel does with the instruction that a function is probed at.
    pub fn kind(&self, function: &str) -> Option<&str> {
        self.sites.iter().find(|(_, _, _, name)| name == function).map(|(_, _, kind, _)| kind.as_str())
    }
}

fn hooks(live: bool) -> Hooks {
    let version = Limits::read().version.map_or((0, 0), |version| (version.major.into(), version.minor.into()));
    let rules = KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), version);
    Hooks::new(rules, Table::default(), live)
}

/// heapbpf's programs, as a recording would use them, for one process.
pub struct Recording {
    programs: Programs,
    steering: Steering,
    hooks: Hooks,
    key: FileKey,
    events: Ring,
    stacks: Ring,
    pids: Vec<u32>,
}

/// What a recording does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Sampling interval R: bytes, or allocations under another criterion; by size class it is that of every class.
    pub interval: u64,
    /// What a trial is.
    pub criterion: Criterion,
    /// Whether frees are followed.
    pub live: bool,
    /// Kind of link; the best if `None`.
    pub link: Option<LinkKind>,
    /// One of `abi::stack_kind`.
    pub stack_kind: u32,
    /// Most bytes of stack that are copied.
    pub stack_bytes: u64,
    /// The functions that are probed; `None`: all that the allocator has. Perf links are slow to take away.
    pub functions: Option<&'static [&'static str]>,
}

impl Setting {
    /// What the command line does by default, for a named target.
    pub const DEFAULT: Self = Self {
        interval: 512 << 10,
        criterion: Criterion::Bytes,
        live: true,
        link: None,
        stack_kind: stack_kind::COPIED,
        stack_bytes: 64 << 10,
        functions: Some(&["malloc", "free"]),
    };
}

impl Recording {
    /// Loads the programs of an object; they are not on yet.
    ///
    /// # Errors
    /// The kernel refuses them.
    pub fn load(object: &[u8], setting: Setting, allocator: &Allocator, pid: u32) -> anyhow::Result<Self> {
        let config = Config {
            live: u32::from(setting.live),
            stack_kind: setting.stack_kind,
            stack_bytes: setting.stack_bytes,
            criterion: setting.criterion.code(),
            self_tgid: std::process::id(),
            events_mark: u64::MAX / 2,
            stacks_mark: u64::MAX / 2,
            ..Config::default()
        };
        // What samples nothing reports nothing: no room is taken for it.
        let sizes =
            if setting.interval == 0 { MapSizes { events_bytes: LEAST, stacks_bytes: LEAST, ..SIZES } } else { SIZES };
        let loader = Loader::new(object, &config, &sizes)?;
        let mut steering = Steering::open(&loader)?;
        let interval = if setting.criterion == Criterion::SizeClass {
            steering.set_trials(&[class_trials(setting.interval as f64); SIZE_CLASSES])?;
            CLASS_INTERVAL
        } else {
            setting.interval
        };
        steering.set_draw(draw_constants(interval).context("the interval is too large")?)?;
        steering.add_target(pid)?;
        let programs = Programs::load(&loader, setting.live, setting.link)?;
        let mut hooks = hooks(setting.live);
        if let Some(functions) = setting.functions {
            hooks = hooks.only(functions);
        }
        let (key, _) = hooks.look_at(&allocator.path.to_string_lossy(), &allocator.file)?;
        let (events, stacks) = (Ring::open(&loader, "EVENTS")?, Ring::open(&loader, "STACKS")?);
        Ok(Self { programs, steering, hooks, key, events, stacks, pids: vec![pid] })
    }

    /// Kind of its links.
    pub const fn link(&self) -> LinkKind {
        self.programs.kind
    }

    /// Puts the probes on.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on(&mut self) -> anyhow::Result<()> {
        self.hooks.expect(self.key, self.pids.len());
        for pid in &self.pids {
            self.hooks.hook(self.key, Some(*pid), &self.programs, &mut self.steering)?;
        }
        Ok(())
    }

    /// From the next time on, they are put on another process with the same allocator file instead.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn only_for(&mut self, pid: u32) -> anyhow::Result<()> {
        self.leave_all();
        self.also(pid)
    }

    /// From the next time on, they are put on no process but those that are named from here on.
    pub fn leave_all(&mut self) {
        self.pids.drain(..).for_each(|pid| self.steering.remove_target(pid));
    }

    /// From the next time on, they are put on another process with the same allocator file, too.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn also(&mut self, pid: u32) -> anyhow::Result<()> {
        self.pids.push(pid);
        Ok(self.steering.add_target(pid)?)
    }

    /// Takes them off and empties the rings. Returns the number of samples and frees that were reported.
    pub fn off(&mut self) -> usize {
        self.hooks.release_all();
        self.drain()
    }

    /// Empties the rings. Returns the number of samples and frees that were reported.
    pub fn drain(&mut self) -> usize {
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

    /// Empties the rings. Returns the number of stack copies, and their bytes.
    pub fn drain_stacks(&mut self) -> (u64, u64) {
        while self.events.drain(|_| ()) > 0 {}
        let (mut copies, mut bytes) = (0, 0);
        loop {
            let count = self.stacks.drain(|record| {
                if let Some((head, _)) = decode_stack(&record) {
                    copies += 1;
                    bytes += u64::from(head.copied_bytes);
                }
            });
            if count == 0 {
                return (copies, bytes);
            }
        }
    }

    /// Changes the interval that threads take at their next draw.
    ///
    /// # Errors
    /// It is too large.
    pub fn set_interval(&mut self, interval: u64) -> anyhow::Result<()> {
        Ok(self.steering.set_draw(draw_constants(interval).context("the interval is too large")?)?)
    }
}

/// Programs that do nothing, at the very instructions that heapbpf probes.
pub struct Floor {
    multi: Option<OwnedFd>,
    perf: OwnedFd,
    links: Vec<OwnedFd>,
}

/// Which of the instructions a floor is put on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// All of them.
    Everywhere,
    /// Those of functions that allocate.
    Allocations,
    /// The entry of allocating functions and their return.
    AllocationsAndReturns,
}

impl Floor {
    /// Loads the program.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub fn load(object: &[u8]) -> Result<Self, KernelError> {
        let sizes = MapSizes { events_bytes: LEAST, stacks_bytes: LEAST, live_max: 1, stack_traces_max: 1 };
        let loader = Loader::new(object, &Config::default(), &sizes)?;
        Ok(Self {
            multi: loader.program("nothing", ProgramKind::UprobeMulti).ok(),
            perf: loader.program("nothing", ProgramKind::UprobePerf)?,
            links: Vec::new(),
        })
    }

    /// Puts it on, with multi links if the kernel has them and `perf` does not say otherwise.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on(&mut self, allocator: &Allocator, pid: u32, place: Where, perf: bool) -> std::io::Result<()> {
        let sites = allocator.sites.iter().filter(|(_, frees, _, _)| place == Where::Everywhere || !frees);
        let offsets: Vec<u64> = sites.map(|(offset, ..)| *offset).collect();
        let returns: &[bool] = if place == Where::AllocationsAndReturns { &[false, true] } else { &[false] };
        for on_return in returns {
            match &self.multi {
                Some(program) if !perf => {
                    let cookies = vec![0; offsets.len()];
                    let target = sys::UprobeTarget {
                        path: &allocator.path,
                        offsets: &offsets,
                        cookies: &cookies,
                        pid: Some(pid),
                    };
                    let flags = if *on_return { sys::MULTI_RETURN } else { 0 };
                    self.links.push(sys::link_uprobe_multi(program.as_fd(), sys::ATTACH_UPROBE_MULTI, &target, flags)?);
                }
                _ => {
                    for offset in &offsets {
                        let path = &allocator.path;
                        let pair = sys::link_uprobe_perf(self.perf.as_fd(), path, *offset, 0, Some(pid), *on_return)?;
                        self.links.extend([pair.0, pair.1]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Puts it on one instruction of heapbpf's own file, in a process that runs heapbpf.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn on_own(&mut self, offset: u64, pid: u32) -> std::io::Result<()> {
        match &self.multi {
            Some(program) => {
                let (offsets, cookies) = ([offset], [0]);
                let path = c"/proc/self/exe";
                let target = sys::UprobeTarget { path, offsets: &offsets, cookies: &cookies, pid: Some(pid) };
                self.links.push(sys::link_uprobe_multi(program.as_fd(), sys::ATTACH_UPROBE_MULTI, &target, 0)?);
            }
            None => {
                let pair = sys::link_uprobe_perf(self.perf.as_fd(), c"/proc/self/exe", offset, 0, Some(pid), false)?;
                self.links.extend([pair.0, pair.1]);
            }
        }
        Ok(())
    }

    /// Takes it off.
    pub fn off(&mut self) {
        self.links.clear();
    }
}
