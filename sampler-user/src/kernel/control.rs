//! The control maps, through which the daemon controls the running programs: sites, code ranges, targets, sampling
//! interval.

use aya::maps::{Array, HashMap, MapData};
use sampler_ebpf::abi::{Control, FileRanges, ProcessKey, Site};
use sampler_ebpf::geometric::DrawConstants;
use sampler_ebpf::trials::TrialTable;

use super::KernelError;
use super::abi_value::Abi;
use super::loader::Loader;

/// The writing end of the control maps.
pub struct ControlMaps<M = KernelMaps> {
    maps: M,
    control: Control,
    sites_used: u32,
    files_used: u32,
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
    fn insert_target(&mut self, pid: u32) -> Result<(), KernelError>;

    /// Removes a process from `TARGETS`, if it is there.
    fn remove_target(&mut self, pid: u32);

    /// Sets an element of `TRIALS`.
    ///
    /// # Errors
    /// The map cannot be written.
    fn set_trials(&mut self, class: u32, trials: u64) -> Result<(), KernelError>;

    /// Sets how many bytes of stack are copied where the top is not known; `None` removes what was set.
    ///
    /// # Errors
    /// The map is full.
    fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError>;

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
}

/// The maps in the kernel.
pub struct KernelMaps {
    sites: Array<MapData, Abi<Site>>,
    files: Array<MapData, Abi<FileRanges>>,
    targets: HashMap<MapData, u32, u32>,
    trials: Array<MapData, u64>,
    stack_limits: HashMap<MapData, Abi<ProcessKey>, u64>,
    sleep: Array<MapData, u32>,
    control: Array<MapData, Abi<Control>>,
}

fn failed(error: impl std::fmt::Display) -> KernelError {
    KernelError::Object(error.to_string())
}

fn no_room(what: &str) -> KernelError {
    KernelError::Object(format!("no room for more {what} in the kernel's map"))
}

impl Maps for KernelMaps {
    fn set_file(&mut self, index: u32, ranges: &FileRanges) -> Result<(), KernelError> {
        self.files.set(index, Abi(*ranges), 0).map_err(|_| no_room("files"))
    }

    fn set_site(&mut self, index: u32, site: &Site) -> Result<(), KernelError> {
        self.sites.set(index, Abi(*site), 0).map_err(|_| no_room("probe sites"))
    }

    fn insert_target(&mut self, pid: u32) -> Result<(), KernelError> {
        self.targets.insert(pid, 1, 0).map_err(|_| no_room("targets"))
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
        self.stack_limits.insert(Abi(process), bytes, 0).map_err(|_| no_room("limits of stack copies"))
    }

    fn set_sleep(&mut self, sleeps: u32) -> Result<(), KernelError> {
        self.sleep.set(0, sleeps, 0).map_err(failed)
    }

    fn set_control(&mut self, control: &Control) -> Result<(), KernelError> {
        self.control.set(0, Abi(*control), 0).map_err(failed)
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
            sleep: Array::try_from(loader.typed_map("SLEEP")?).map_err(failed)?,
            control: Array::try_from(loader.typed_map("CONTROL")?).map_err(failed)?,
        }))
    }
}

impl<M: Maps> ControlMaps<M> {
    fn new(maps: M) -> Self {
        Self { maps, control: Control::default(), sites_used: 0, files_used: 0 }
    }

    /// Adds a file's ranges and sites. Returns the index of the first site.
    ///
    /// # Errors
    /// There is no room for more.
    pub fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        let file = self.files_used;
        self.maps.set_file(file, ranges)?;
        let first = self.sites_used;
        for (index, site) in (first..).zip(sites) {
            self.maps.set_site(index, &Site { file, ..*site })?;
        }
        self.files_used += 1;
        self.sites_used += sites.len() as u32;
        Ok(first)
    }

    /// Makes a process a target.
    ///
    /// # Errors
    /// There is no room for more.
    pub fn add_target(&mut self, pid: u32) -> Result<(), KernelError> {
        self.maps.insert_target(pid)?;
        self.look_again()
    }

    /// Has threads that were found not to belong to a target looked at again: their process may have got another name or
    /// cgroup since.
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
    /// # Errors
    /// The map cannot be written.
    pub fn set_draw(&mut self, draw: DrawConstants) -> Result<(), KernelError> {
        self.control.draw = draw;
        self.maps.set_control(&self.control)
    }

    /// Sets the number of trials per allocation for each size class.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_trials(&mut self, table: &TrialTable) -> Result<(), KernelError> {
        (0..).zip(table).try_for_each(|(class, trials)| self.maps.set_trials(class, *trials))
    }

    /// Sets how many bytes of stack are copied of a process where the top is not known; `None` for the usual number.
    ///
    /// # Errors
    /// There is no room for more processes.
    pub fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
        self.maps.set_stack_limit(process, bytes)
    }

    /// Tells the programs whether the daemon sleeps, so that the next event wakes it.
    ///
    /// # Errors
    /// The map cannot be written.
    pub fn set_sleeping(&mut self, sleeps: bool) -> Result<(), KernelError> {
        self.maps.set_sleep(u32::from(sleeps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sampler_ebpf::trials::SIZE_CLASSES;

    /// Maps in memory with room for the given numbers of files, sites and targets.
    #[derive(Default)]
    struct Memory {
        room: usize,
        files: Vec<FileRanges>,
        sites: Vec<Site>,
        targets: Vec<u32>,
        trials: Vec<u64>,
        stack_limits: Vec<(ProcessKey, u64)>,
        sleep: u32,
        control: Vec<Control>,
    }

    impl Memory {
        /// Sets an existing element, or appends one.
        fn set<T: Copy>(room: usize, elements: &mut Vec<T>, index: u32, value: T) -> Result<(), KernelError> {
            let index = index as usize;
            assert!(index <= elements.len(), "no element is left out");
            if index >= room {
                return Err(no_room("of this"));
            }
            elements.truncate(index);
            elements.push(value);
            Ok(())
        }
    }

    impl Maps for Memory {
        fn set_file(&mut self, index: u32, ranges: &FileRanges) -> Result<(), KernelError> {
            Self::set(self.room, &mut self.files, index, *ranges)
        }

        fn set_site(&mut self, index: u32, site: &Site) -> Result<(), KernelError> {
            Self::set(self.room, &mut self.sites, index, *site)
        }

        fn insert_target(&mut self, pid: u32) -> Result<(), KernelError> {
            let end = self.targets.len() as u32;
            Self::set(self.room, &mut self.targets, end, pid)
        }

        fn remove_target(&mut self, pid: u32) {
            self.targets.retain(|target| *target != pid);
        }

        fn set_trials(&mut self, class: u32, trials: u64) -> Result<(), KernelError> {
            Self::set(SIZE_CLASSES, &mut self.trials, class, trials)
        }

        fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
            self.stack_limits.retain(|(known, _)| *known != process);
            self.stack_limits.extend(bytes.map(|bytes| (process, bytes)));
            Ok(())
        }

        fn set_sleep(&mut self, sleeps: u32) -> Result<(), KernelError> {
            self.sleep = sleeps;
            Ok(())
        }

        fn set_control(&mut self, control: &Control) -> Result<(), KernelError> {
            self.control.push(*control);
            Ok(())
        }
    }

    fn with_room(room: usize) -> ControlMaps<Memory> {
        ControlMaps::new(Memory { room, ..Memory::default() })
    }

    fn site(offset: u64) -> Site {
        Site { offset, ..Site::default() }
    }

    #[test]
    fn files_and_their_sites_are_numbered_in_turn() {
        let mut maps = with_room(8);
        assert_eq!(maps.add_file(&FileRanges::default(), &[site(10), site(11)]).unwrap(), 0);
        assert_eq!(maps.add_file(&FileRanges { count: 1, ..FileRanges::default() }, &[]).unwrap(), 2);
        assert_eq!(maps.add_file(&FileRanges::default(), &[site(12)]).unwrap(), 2);
        let placed: Vec<_> = maps.maps.sites.iter().map(|site| (site.offset, site.file)).collect();
        assert_eq!(placed, [(10, 0), (11, 0), (12, 2)]);
        assert_eq!(maps.maps.files.iter().map(|ranges| ranges.count).collect::<Vec<_>>(), [0, 1, 0]);
    }

    #[test]
    fn a_file_that_does_not_fit_leaves_its_numbers_to_the_next() {
        let mut maps = with_room(2);
        assert_eq!(maps.add_file(&FileRanges::default(), &[site(10)]).unwrap(), 0);
        let error = maps.add_file(&FileRanges::default(), &[site(20), site(21)]).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
        assert_eq!(maps.add_file(&FileRanges::default(), &[site(30)]).unwrap(), 1);
        assert_eq!(maps.maps.sites.iter().map(|site| site.offset).collect::<Vec<_>>(), [10, 30]);
    }

    #[test]
    fn a_new_target_has_refused_threads_looked_at_again_and_keeps_the_interval() {
        let mut maps = with_room(1);
        let draw = DrawConstants { interval: 7, ..DrawConstants::default() };
        maps.set_draw(draw).unwrap();
        maps.add_target(1).unwrap();
        assert!(maps.add_target(2).is_err(), "no room");
        maps.remove_target(1);
        maps.add_target(2).unwrap();
        maps.look_again().unwrap();
        let written: Vec<_> =
            maps.maps.control.iter().map(|control| (control.draw, control.targets_generation)).collect();
        assert_eq!(written, [(draw, 0), (draw, 1), (draw, 2), (draw, 3)]);
        assert_eq!(maps.maps.targets, [2]);
    }

    #[test]
    fn every_size_class_and_the_daemons_sleep_are_written() {
        let mut maps = with_room(0);
        let mut table = [1; SIZE_CLASSES];
        (table[0], table[SIZE_CLASSES - 1]) = (5, 9);
        maps.set_trials(&table).unwrap();
        assert_eq!(maps.maps.trials, table);
        maps.set_sleeping(true).unwrap();
        assert_eq!(maps.maps.sleep, 1);
        maps.set_sleeping(false).unwrap();
        assert_eq!(maps.maps.sleep, 0);
    }
}
