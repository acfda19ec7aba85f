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
use super::loader::{Abi, Loader};

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
pub struct ControlMaps {
    sites: Array<MapData, Abi<Site>>,
    files: Array<MapData, Abi<FileRanges>>,
    targets: HashMap<MapData, u32, u32>,
    trials: Array<MapData, u64>,
    stack_limits: HashMap<MapData, Abi<ProcessKey>, u64>,
    outer_frames: HashMap<MapData, Abi<StackKey>, Abi<OuterFrames>>,
    python: HashMap<MapData, u32, Abi<PythonProcess>>,
    sleep: Array<MapData, u32>,
    control_map: Array<MapData, Abi<Control>>,
    draw_constants: Array<MapData, Abi<DrawConstants>>,
    control: Control,
    draws: Draws,
    places: Places,
}

/// The elements of `DRAWS` that have been written, oldest first. Writing an element again moves it to the end.
#[derive(Default)]
struct Draws(VecDeque<(u32, DrawConstants)>);

impl Draws {
    /// The element that has these constants, after `write` has written it if none had. It is then the latest.
    fn index_of(
        &mut self,
        draw: DrawConstants,
        write: impl FnOnce(u32) -> Result<(), KernelError>,
    ) -> Result<u32, KernelError> {
        let known = self.0.iter().position(|(_, known)| *known == draw);
        let index = match known.and_then(|at| self.0.remove(at)) {
            Some((index, _)) => index,
            None => {
                let unused = self.0.len() as u32;
                let index = if unused < DRAWS { unused } else { self.0.pop_front().map_or(0, |(index, _)| index) };
                write(index)?;
                index
            }
        };
        self.0.push_back((index, draw));
        Ok(index)
    }
}

/// A file's part of the tables.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: u32,
    first: u32,
    sites: usize,
}

/// The places of files in the tables.
#[derive(Default)]
struct Places {
    sites_used: u32,
    files_used: u32,
    /// Those in use, by the index of the first site.
    used: BTreeMap<u32, Place>,
    /// Those of files that were removed.
    free: Vec<Place>,
}

impl Places {
    /// Gives a file with this many sites a place, which `write` fills. Returns the index of the first site.
    fn add(&mut self, sites: usize, write: impl FnOnce(Place) -> Result<(), KernelError>) -> Result<u32, KernelError> {
        let new = Place { file: self.files_used, first: self.sites_used, sites };
        let fits = self.free.iter().position(|free| free.sites >= sites);
        let place = fits.map_or(new, |free| self.free[free]);
        write(place)?;
        match fits {
            Some(free) => drop(self.free.swap_remove(free)),
            None => (self.files_used, self.sites_used) = (new.file + 1, new.first + sites as u32),
        }
        // A file without sites is left out, because its index is not its own.
        self.used.extend((sites > 0).then_some((place.first, place)));
        Ok(place.first)
    }

    fn remove(&mut self, first_site: u32) {
        self.free.extend(self.used.remove(&first_site));
    }
}

fn no_space(what: &str) -> KernelError {
    KernelError::Object(format!("no space for more {what} in the kernel's map"))
}

impl ControlMaps {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks a map.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        Ok(Self {
            sites: loader.typed_map("SITES")?,
            files: loader.typed_map("FILES")?,
            targets: loader.typed_map("TARGETS")?,
            trials: loader.typed_map("TRIALS")?,
            stack_limits: loader.typed_map("STACK_LIMITS")?,
            outer_frames: loader.typed_map("OUTER_FRAMES")?,
            python: loader.typed_map("PYTHON")?,
            sleep: loader.typed_map("SLEEP")?,
            control_map: loader.typed_map("CONTROL")?,
            draw_constants: loader.typed_map("DRAWS")?,
            control: Control::default(),
            draws: Draws::default(),
            places: Places::default(),
        })
    }

    /// Adds a file's ranges and sites. Returns the index of the first site.
    ///
    /// # Errors
    /// There is no space for more.
    pub fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        let (file_map, site_map) = (&mut self.files, &mut self.sites);
        self.places.add(sites.len(), |Place { file, first, .. }| {
            file_map.set(file, Abi(*ranges), 0).map_err(|_| no_space("files"))?;
            (first..).zip(sites).try_for_each(|(index, site)| {
                site_map.set(index, Abi(Site { file, ..*site }), 0).map_err(|_| no_space("probe sites"))
            })
        })
    }

    /// Frees the places of the file with this first site for files that are added later. No call on it may be in
    /// progress.
    pub fn remove_file(&mut self, first_site: u32) {
        self.places.remove(first_site);
    }

    /// Makes a process a target.
    ///
    /// # Errors
    /// There is no space for more.
    pub fn add_target(&mut self, pid: u32, counted_by: CountedBy) -> Result<(), KernelError> {
        self.targets.insert(pid, counted_by.code(), 0).map_err(|_| no_space("targets"))?;
        self.look_again()
    }

    /// Which links count the calls of a process now. `None` if it is not listed. After an exec by a thread other than
    /// the first, its own links no longer do.
    pub fn counted_by(&self, pid: u32) -> Option<CountedBy> {
        let code = self.targets.get(&pid, 0).ok()?;
        let others = [CountedBy::OwnLinks, CountedBy::AwaitedLinks, CountedBy::Announcements];
        Some(others.into_iter().find(|other| other.code() == code).unwrap_or(CountedBy::SharedLinks))
    }

    /// Whether a listed process inherited inline hooks from its parent, and has run no other program since.
    pub fn has_inherited_hooks(&self, pid: u32) -> bool {
        self.targets.get(&pid, 0).is_ok_and(|kind| kind == link_kind::INHERITED_HOOKS)
    }

    /// Makes the programs check those threads again that were found not to belong to a target. Their process may have a
    /// different name or cgroup by now.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn look_again(&mut self) -> Result<(), KernelError> {
        self.control.targets_generation += 1;
        self.write_control()
    }

    fn write_control(&mut self) -> Result<(), KernelError> {
        Ok(self.control_map.set(0, Abi(self.control), 0)?)
    }

    /// Removes a target, if it is listed.
    pub fn remove_target(&mut self, pid: u32) {
        let _ = self.targets.remove(&pid);
    }

    /// Sets the sampling interval. Each thread uses it from its next draw on.
    ///
    /// The programs may read the constants at any time. So an element of `DRAWS` is written before the programs are
    /// pointed to it, and is not written again until as many other intervals have been used as there are elements.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_draw(&mut self, draw: DrawConstants) -> Result<(), KernelError> {
        let map = &mut self.draw_constants;
        let index = self.draws.index_of(draw, |index| map.set(index, Abi(draw), 0).map_err(KernelError::from))?;
        self.control.draw = u64::from(index);
        self.write_control()
    }

    /// Sets the number of trials per allocation for each size class.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_trials(&mut self, table: &TrialTable) -> Result<(), KernelError> {
        (0..).zip(table).try_for_each(|(class, trials)| self.trials.set(class, *trials, 0).map_err(KernelError::from))
    }

    /// Sets how many bytes of stack are copied for a process if the top of the stack is not known. `None` selects the
    /// usual number.
    ///
    /// # Errors
    /// There is no space for more processes.
    pub fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
        let Some(bytes) = bytes else {
            let _ = self.stack_limits.remove(&Abi(process));
            return Ok(());
        };
        self.stack_limits.insert(Abi(process), bytes, 0).map_err(|_| no_space("limits of stack copies"))
    }

    /// Sets what is copied of a stack's outer frames. `None` selects everything.
    ///
    /// # Errors
    /// There is no space for more stacks.
    pub fn set_outer_frames(&mut self, stack: StackKey, outer: Option<&OuterFrames>) -> Result<(), KernelError> {
        let Some(outer) = outer else {
            let _ = self.outer_frames.remove(&Abi(stack));
            return Ok(());
        };
        self.outer_frames.insert(Abi(stack), Abi(*outer), 0).map_err(|_| no_space("outer frames"))
    }

    /// Sets where the interpreter of a process keeps its frames. The programs pass it on to children, and forget it
    /// when the process ends or replaces its program.
    ///
    /// # Errors
    /// There is no space for more processes.
    pub fn set_python(&mut self, pid: u32, python: &PythonProcess) -> Result<(), KernelError> {
        self.python.insert(pid, Abi(*python), 0).map_err(|_| no_space("Python processes"))
    }

    /// Tells the programs whether the daemon is sleeping, so that the next event wakes it.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_sleeping(&mut self, sleeps: bool) -> Result<(), KernelError> {
        Ok(self.sleep.set(0, u32::from(sleeps), 0)?)
    }
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
