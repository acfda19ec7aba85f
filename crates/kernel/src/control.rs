//! The control maps, through which the daemon controls the loaded programs: sites, code ranges, targets, sampling
//! interval.

use std::collections::{BTreeMap, VecDeque};

use aya::maps::{Array, HashMap, MapData};
use sampler_ebpf::abi::{
    Control, DRAWS, FileRanges, OuterFrames, ProcessKey, PythonProcess, Site, StackKey, link_kind,
};
use sampler_ebpf::geometric::DrawConstants;
use sampler_ebpf::trials::TrialTable;

use super::KernelError;
use super::abi_value::Abi;
use super::loader::Loader;

/// Which links count the calls of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedBy {
    /// Links that serve every process that maps a file.
    SharedLinks,
    /// Links to this process alone. Its children are counted by shared links.
    OwnLinks,
    /// The same, but these links are still being made: if the process ends now, it was not counted.
    AwaitedLinks,
    /// Links at the places where programs announce samples themselves.
    Announcements,
}

impl CountedBy {
    pub(super) const fn code(self) -> u32 {
        match self {
            Self::SharedLinks => link_kind::SHARED,
            Self::OwnLinks => link_kind::OWN,
            Self::AwaitedLinks => link_kind::AWAITED,
            Self::Announcements => link_kind::ANNOUNCED,
        }
    }
}

/// The writing end of the control maps.
pub struct ControlMaps<M = KernelMaps> {
    maps: M,
    control: Control,
    /// Elements of `DRAWS` that have been written, oldest first. Writing an element again moves it to the end.
    draws: VecDeque<(u32, DrawConstants)>,
    sites_used: u32,
    files_used: u32,
    /// The places of files, by the index of the first site.
    places: BTreeMap<u32, Place>,
    /// Places of files that were removed.
    free: Vec<Place>,
}

/// A file's part of the tables.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: u32,
    first: u32,
    sites: usize,
}

/// Access to the maps themselves. Tests substitute maps in memory.
pub trait Maps {
    /// Sets an element of `FILES`.
    ///
    /// # Errors
    /// The index is out of range.
    fn set_file(&mut self, index: u32, ranges: &FileRanges) -> Result<(), KernelError>;

    /// Sets an element of `SITES`.
    ///
    /// # Errors
    /// The index is out of range.
    fn set_site(&mut self, index: u32, site: &Site) -> Result<(), KernelError>;

    /// Adds a process to `TARGETS`.
    ///
    /// # Errors
    /// The map is full.
    fn insert_target(&mut self, pid: u32, kind: u32) -> Result<(), KernelError>;

    /// The value of a process in `TARGETS`, if it is listed.
    fn target(&self, pid: u32) -> Option<u32>;

    /// Removes a process from `TARGETS`, if it is listed.
    fn remove_target(&mut self, pid: u32);

    /// Sets an element of `TRIALS`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_trials(&mut self, class: u32, trials: u64) -> Result<(), KernelError>;

    /// Sets how many bytes of stack are copied if the top of the stack is not known. `None` removes the setting.
    ///
    /// # Errors
    /// The map is full.
    fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError>;

    /// Sets what is copied of a stack's outer frames. `None` removes the setting.
    ///
    /// # Errors
    /// The map is full.
    fn set_outer_frames(&mut self, stack: StackKey, outer: Option<&OuterFrames>) -> Result<(), KernelError>;

    /// Sets where the interpreter of a process keeps its frames.
    ///
    /// # Errors
    /// The map is full.
    fn set_python(&mut self, pid: u32, python: &PythonProcess) -> Result<(), KernelError>;

    /// Sets the element of `SLEEP`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_sleep(&mut self, sleeps: u32) -> Result<(), KernelError>;

    /// Sets the element of `CONTROL`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_control(&mut self, control: &Control) -> Result<(), KernelError>;

    /// Sets an element of `DRAWS`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_draw(&mut self, index: u32, draw: &DrawConstants) -> Result<(), KernelError>;
}

/// The maps in the kernel.
pub struct KernelMaps {
    sites: Array<MapData, Abi<Site>>,
    files: Array<MapData, Abi<FileRanges>>,
    targets: HashMap<MapData, u32, u32>,
    trials: Array<MapData, u64>,
    stack_limits: HashMap<MapData, Abi<ProcessKey>, u64>,
    outer_frames: HashMap<MapData, Abi<StackKey>, Abi<OuterFrames>>,
    python: HashMap<MapData, u32, Abi<PythonProcess>>,
    sleep: Array<MapData, u32>,
    control: Array<MapData, Abi<Control>>,
    draws: Array<MapData, Abi<DrawConstants>>,
}

fn failed(error: impl std::fmt::Display) -> KernelError {
    KernelError::Object(error.to_string())
}

fn no_space(what: &str) -> KernelError {
    KernelError::Object(format!("no space for more {what} in the kernel's map"))
}

impl Maps for KernelMaps {
    fn set_file(&mut self, index: u32, ranges: &FileRanges) -> Result<(), KernelError> {
        self.files.set(index, Abi(*ranges), 0).map_err(|_| no_space("files"))
    }

    fn set_site(&mut self, index: u32, site: &Site) -> Result<(), KernelError> {
        self.sites.set(index, Abi(*site), 0).map_err(|_| no_space("probe sites"))
    }

    fn insert_target(&mut self, pid: u32, kind: u32) -> Result<(), KernelError> {
        self.targets.insert(pid, kind, 0).map_err(|_| no_space("targets"))
    }

    fn target(&self, pid: u32) -> Option<u32> {
        self.targets.get(&pid, 0).ok()
    }

    fn remove_target(&mut self, pid: u32) {
        let _ = self.targets.remove(&pid);
    }

    fn set_trials(&mut self, class: u32, trials: u64) -> Result<(), KernelError> {
        self.trials.set(class, trials, 0).map_err(failed)
    }

    fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
        let Some(bytes) = bytes else {
            let _ = self.stack_limits.remove(&Abi(process));
            return Ok(());
        };
        self.stack_limits.insert(Abi(process), bytes, 0).map_err(|_| no_space("limits of stack copies"))
    }

    fn set_outer_frames(&mut self, stack: StackKey, outer: Option<&OuterFrames>) -> Result<(), KernelError> {
        let Some(outer) = outer else {
            let _ = self.outer_frames.remove(&Abi(stack));
            return Ok(());
        };
        self.outer_frames.insert(Abi(stack), Abi(*outer), 0).map_err(|_| no_space("outer frames"))
    }

    fn set_python(&mut self, pid: u32, python: &PythonProcess) -> Result<(), KernelError> {
        self.python.insert(pid, Abi(*python), 0).map_err(|_| no_space("Python processes"))
    }

    fn set_sleep(&mut self, sleeps: u32) -> Result<(), KernelError> {
        self.sleep.set(0, sleeps, 0).map_err(failed)
    }

    fn set_control(&mut self, control: &Control) -> Result<(), KernelError> {
        self.control.set(0, Abi(*control), 0).map_err(failed)
    }

    fn set_draw(&mut self, index: u32, draw: &DrawConstants) -> Result<(), KernelError> {
        self.draws.set(index, Abi(*draw), 0).map_err(failed)
    }
}

impl ControlMaps {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks a map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        Ok(Self::new(KernelMaps {
            sites: Array::try_from(loader.typed_map("SITES")?).map_err(failed)?,
            files: Array::try_from(loader.typed_map("FILES")?).map_err(failed)?,
            targets: HashMap::try_from(loader.typed_map("TARGETS")?).map_err(failed)?,
            trials: Array::try_from(loader.typed_map("TRIALS")?).map_err(failed)?,
            stack_limits: HashMap::try_from(loader.typed_map("STACK_LIMITS")?).map_err(failed)?,
            outer_frames: HashMap::try_from(loader.typed_map("OUTER_FRAMES")?).map_err(failed)?,
            python: HashMap::try_from(loader.typed_map("PYTHON")?).map_err(failed)?,
            sleep: Array::try_from(loader.typed_map("SLEEP")?).map_err(failed)?,
            control: Array::try_from(loader.typed_map("CONTROL")?).map_err(failed)?,
            draws: Array::try_from(loader.typed_map("DRAWS")?).map_err(failed)?,
        }))
    }
}

impl<M: Maps> ControlMaps<M> {
    fn new(maps: M) -> Self {
        Self {
            maps,
            control: Control::default(),
            draws: VecDeque::new(),
            sites_used: 0,
            files_used: 0,
            places: BTreeMap::new(),
            free: Vec::new(),
        }
    }

    /// Adds a file's ranges and sites. Returns the index of the first site.
    ///
    /// # Errors
    /// There is no space for more.
    pub fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        let new = Place { file: self.files_used, first: self.sites_used, sites: sites.len() };
        let fits = self.free.iter().position(|free| free.sites >= sites.len());
        let place = fits.map_or(new, |free| self.free[free]);
        self.maps.set_file(place.file, ranges)?;
        for (index, site) in (place.first..).zip(sites) {
            self.maps.set_site(index, &Site { file: place.file, ..*site })?;
        }
        match fits {
            Some(free) => drop(self.free.swap_remove(free)),
            None => (self.files_used, self.sites_used) = (new.file + 1, new.first + sites.len() as u32),
        }
        // A file without sites is left out, because its index is not its own.
        self.places.extend((!sites.is_empty()).then_some((place.first, place)));
        Ok(place.first)
    }

    /// Frees the places of the file with this first site for files that are added later. No call on it may be in
    /// progress.
    pub fn remove_file(&mut self, first_site: u32) {
        self.free.extend(self.places.remove(&first_site));
    }

    /// Makes a process a target.
    ///
    /// # Errors
    /// There is no space for more.
    pub fn add_target(&mut self, pid: u32, counted_by: CountedBy) -> Result<(), KernelError> {
        self.maps.insert_target(pid, counted_by.code())?;
        self.look_again()
    }

    /// Which links count the calls of a process now. `None` if it is not listed. After an exec by a thread other than
    /// the first, its own links no longer do.
    pub fn counted_by(&self, pid: u32) -> Option<CountedBy> {
        let code = self.maps.target(pid)?;
        let others = [CountedBy::OwnLinks, CountedBy::AwaitedLinks, CountedBy::Announcements];
        Some(others.into_iter().find(|other| other.code() == code).unwrap_or(CountedBy::SharedLinks))
    }

    /// Whether a listed process inherited inline hooks from its parent, and has run no other program since.
    pub fn has_inherited_hooks(&self, pid: u32) -> bool {
        self.maps.target(pid) == Some(link_kind::INHERITED_HOOKS)
    }

    /// Makes the programs check those threads again that were found not to belong to a target. Their process may have a
    /// different name or cgroup by now.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn look_again(&mut self) -> Result<(), KernelError> {
        self.control.targets_generation += 1;
        self.maps.set_control(&self.control)
    }

    /// Removes a target.
    pub fn remove_target(&mut self, pid: u32) {
        self.maps.remove_target(pid);
    }

    /// Sets the sampling interval. Each thread uses it from its next draw on.
    ///
    /// The programs may read the constants at any time. So an element of `DRAWS` is written before the programs are
    /// pointed to it, and is not written again until as many other intervals have been used as there are elements.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_draw(&mut self, draw: DrawConstants) -> Result<(), KernelError> {
        let known = self.draws.iter().position(|(_, known)| *known == draw);
        let index = match known.and_then(|at| self.draws.remove(at)) {
            Some((index, _)) => index,
            None => {
                let unused = self.draws.len() as u32;
                let index = if unused < DRAWS { unused } else { self.draws.pop_front().map_or(0, |(index, _)| index) };
                self.maps.set_draw(index, &draw)?;
                index
            }
        };
        self.draws.push_back((index, draw));
        self.control.draw = u64::from(index);
        self.maps.set_control(&self.control)
    }

    /// Sets the number of trials per allocation for each size class.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_trials(&mut self, table: &TrialTable) -> Result<(), KernelError> {
        (0..).zip(table).try_for_each(|(class, trials)| self.maps.set_trials(class, *trials))
    }

    /// Sets how many bytes of stack are copied for a process if the top of the stack is not known. `None` selects the
    /// usual number.
    ///
    /// # Errors
    /// There is no space for more processes.
    pub fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
        self.maps.set_stack_limit(process, bytes)
    }

    /// Sets what is copied of a stack's outer frames. `None` selects everything.
    ///
    /// # Errors
    /// There is no space for more stacks.
    pub fn set_outer_frames(&mut self, stack: StackKey, outer: Option<&OuterFrames>) -> Result<(), KernelError> {
        self.maps.set_outer_frames(stack, outer)
    }

    /// Sets where the interpreter of a process keeps its frames. The programs pass it on to children, and forget it
    /// when the process ends or replaces its program.
    ///
    /// # Errors
    /// There is no space for more processes.
    pub fn set_python(&mut self, pid: u32, python: &PythonProcess) -> Result<(), KernelError> {
        self.maps.set_python(pid, python)
    }

    /// Tells the programs whether the daemon is sleeping, so that the next event wakes it.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_sleeping(&mut self, sleeps: bool) -> Result<(), KernelError> {
        self.maps.set_sleep(u32::from(sleeps))
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
