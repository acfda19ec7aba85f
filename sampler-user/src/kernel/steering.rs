//! Steering: what the running programs are told: sites, code ranges, targets, the interval in force.

use aya::maps::{Array, HashMap, MapData};
use sampler_ebpf::abi::{Control, FileRanges, Site};
use sampler_ebpf::geometric::DrawConstants;

use super::KernelError;
use super::live_map::Abi;
use super::loader::Loader;

/// Writing end of the maps that steer the programs.
pub struct Steering {
    sites: Array<MapData, Abi<Site>>,
    files: Array<MapData, Abi<FileRanges>>,
    targets: HashMap<MapData, u32, u32>,
    trials: Array<MapData, u64>,
    sleep: Array<MapData, u32>,
    map: Array<MapData, Abi<Control>>,
    control: Control,
    sites_used: u32,
    files_used: u32,
}

fn failed(error: impl std::fmt::Display) -> KernelError {
    KernelError::Object(error.to_string())
}

impl Steering {
    /// Opens the maps.
    ///
    /// # Errors
    /// The object lacks one.
    pub fn open(loader: &Loader) -> Result<Self, KernelError> {
        Ok(Self {
            sites: Array::try_from(loader.typed_map("SITES")?).map_err(failed)?,
            files: Array::try_from(loader.typed_map("FILES")?).map_err(failed)?,
            targets: HashMap::try_from(loader.typed_map("TARGETS")?).map_err(failed)?,
            trials: Array::try_from(loader.typed_map("TRIALS")?).map_err(failed)?,
            sleep: Array::try_from(loader.typed_map("SLEEP")?).map_err(failed)?,
            map: Array::try_from(loader.typed_map("CONTROL")?).map_err(failed)?,
            control: Control::default(),
            sites_used: 0,
            files_used: 0,
        })
    }

    /// Adds a file's ranges and sites; returns the index of the first site.
    ///
    /// # Errors
    /// No room for more.
    pub fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        let file = self.files_used;
        self.files.set(file, Abi(*ranges), 0).map_err(|_| no_room("files"))?;
        let first = self.sites_used;
        for (index, site) in (first..).zip(sites) {
            self.sites.set(index, Abi(Site { file, ..*site }), 0).map_err(|_| no_room("probe sites"))?;
        }
        self.files_used += 1;
        self.sites_used += sites.len() as u32;
        Ok(first)
    }

    /// Makes a process a target.
    ///
    /// # Errors
    /// No room for more.
    pub fn add_target(&mut self, pid: u32) -> Result<(), KernelError> {
        self.targets.insert(pid, 1, 0).map_err(|_| no_room("targets"))?;
        self.control.targets_generation += 1;
        self.write_control()
    }

    /// Removes a target.
    pub fn remove_target(&mut self, pid: u32) {
        let _ = self.targets.remove(&pid);
    }

    /// Sets the interval that threads take at their next draw.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_draw(&mut self, draw: DrawConstants) -> Result<(), KernelError> {
        self.control.draw = draw;
        self.write_control()
    }

    /// Sets the trials per allocation of each size class.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_trials(&mut self, table: &sampler_ebpf::trials::TrialTable) -> Result<(), KernelError> {
        for (class, trials) in (0..).zip(table) {
            self.trials.set(class, trials, 0).map_err(failed)?;
        }
        Ok(())
    }

    /// Says whether the daemon sleeps, so that the next event wakes it.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_sleeping(&mut self, sleeps: bool) -> Result<(), KernelError> {
        self.sleep.set(0, u32::from(sleeps), 0).map_err(failed)
    }

    fn write_control(&mut self) -> Result<(), KernelError> {
        self.map.set(0, Abi(self.control), 0).map_err(failed)
    }
}

fn no_room(what: &str) -> KernelError {
    KernelError::Object(format!("no room for more {what} in the kernel's map"))
}
