//! Tests with maps in memory.

use sampler_ebpf::trials::SIZE_CLASSES;

use super::*;

/// Maps in memory with space for this many files, sites and targets.
#[derive(Default)]
struct Memory {
    capacity: usize,
    files: Vec<FileRanges>,
    sites: Vec<Site>,
    targets: Vec<(u32, u32)>,
    trials: Vec<u64>,
    stack_limits: Vec<(ProcessKey, u64)>,
    pythons: Vec<u32>,
    sleep: u32,
    control: Vec<Control>,
    draws: Vec<DrawConstants>,
}

impl Memory {
    /// Sets an existing element, or appends a new one.
    fn set<T: Copy>(capacity: usize, elements: &mut Vec<T>, index: u32, value: T) -> Result<(), KernelError> {
        let index = index as usize;
        assert!(index <= elements.len(), "no element is left out");
        if index >= capacity {
            return Err(no_space("of this"));
        }
        match elements.get_mut(index) {
            Some(element) => *element = value,
            None => elements.push(value),
        }
        Ok(())
    }
}

impl Maps for Memory {
    fn set_file(&mut self, index: u32, ranges: &FileRanges) -> Result<(), KernelError> {
        Self::set(self.capacity, &mut self.files, index, *ranges)
    }

    fn set_site(&mut self, index: u32, site: &Site) -> Result<(), KernelError> {
        Self::set(self.capacity, &mut self.sites, index, *site)
    }

    fn insert_target(&mut self, pid: u32, kind: u32) -> Result<(), KernelError> {
        let end = self.targets.len() as u32;
        Self::set(self.capacity, &mut self.targets, end, (pid, kind))
    }

    fn target(&self, pid: u32) -> Option<u32> {
        self.targets.iter().find(|(target, _)| *target == pid).map(|(_, kind)| *kind)
    }

    fn remove_target(&mut self, pid: u32) {
        self.targets.retain(|(target, _)| *target != pid);
    }

    fn set_trials(&mut self, class: u32, trials: u64) -> Result<(), KernelError> {
        Self::set(SIZE_CLASSES, &mut self.trials, class, trials)
    }

    fn set_stack_limit(&mut self, process: ProcessKey, bytes: Option<u64>) -> Result<(), KernelError> {
        self.stack_limits.retain(|(known, _)| *known != process);
        self.stack_limits.extend(bytes.map(|bytes| (process, bytes)));
        Ok(())
    }

    fn set_outer_frames(&mut self, _: StackKey, _: Option<&OuterFrames>) -> Result<(), KernelError> {
        Ok(())
    }

    fn set_python(&mut self, pid: u32, _: &PythonProcess) -> Result<(), KernelError> {
        self.pythons.push(pid);
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

    fn set_draw(&mut self, index: u32, draw: &DrawConstants) -> Result<(), KernelError> {
        let current = self.control.last().map(|control| control.draw);
        assert!(current != Some(u64::from(index)), "the programs are reading it");
        self.draws.resize(DRAWS as usize, DrawConstants::default());
        self.draws[index as usize] = *draw;
        Ok(())
    }
}

fn with_capacity(capacity: usize) -> ControlMaps<Memory> {
    ControlMaps::new(Memory { capacity, ..Memory::default() })
}

fn site(offset: u64) -> Site {
    Site { offset, ..Site::default() }
}

#[test]
fn files_and_their_sites_are_numbered_in_turn() {
    let mut maps = with_capacity(8);
    assert_eq!(maps.add_file(&FileRanges::default(), &[site(10), site(11)]).unwrap(), 0);
    assert_eq!(maps.add_file(&FileRanges { count: 1, ..FileRanges::default() }, &[]).unwrap(), 2);
    assert_eq!(maps.add_file(&FileRanges::default(), &[site(12)]).unwrap(), 2);
    let placed: Vec<_> = maps.maps.sites.iter().map(|site| (site.offset, site.file)).collect();
    assert_eq!(placed, [(10, 0), (11, 0), (12, 2)]);
    assert_eq!(maps.maps.files.iter().map(|ranges| ranges.count).collect::<Vec<_>>(), [0, 1, 0]);
}

#[test]
fn a_file_that_does_not_fit_leaves_its_numbers_to_the_next() {
    let mut maps = with_capacity(2);
    assert_eq!(maps.add_file(&FileRanges::default(), &[site(10)]).unwrap(), 0);
    let error = maps.add_file(&FileRanges::default(), &[site(20), site(21)]).unwrap_err();
    assert!(error.to_string().contains("no space"), "{error}");
    assert_eq!(maps.add_file(&FileRanges::default(), &[site(30)]).unwrap(), 1);
    assert_eq!(maps.maps.sites.iter().map(|site| site.offset).collect::<Vec<_>>(), [10, 30]);
}

#[test]
fn places_of_files_that_were_removed_are_used_again() {
    let mut maps = with_capacity(4);
    let add = |maps: &mut ControlMaps<Memory>, sites: &[Site]| maps.add_file(&FileRanges::default(), sites);
    assert_eq!(add(&mut maps, &[site(1), site(2)]).unwrap(), 0);
    assert_eq!(add(&mut maps, &[site(3)]).unwrap(), 2);
    maps.remove_file(0);
    assert_eq!(add(&mut maps, &[site(4), site(5), site(6)]).ok(), None, "they are too few, and there is no space");
    for round in 0..10 {
        assert_eq!(add(&mut maps, &[site(round)]).unwrap(), 0);
        maps.remove_file(0);
    }
    assert_eq!(add(&mut maps, &[site(7), site(8)]).unwrap(), 0, "all of the place");
    let placed: Vec<_> = maps.maps.sites.iter().take(3).map(|site| (site.offset, site.file)).collect();
    assert_eq!(placed, [(7, 0), (8, 0), (3, 1)]);
}

#[test]
fn a_new_target_has_refused_threads_looked_at_again_and_keeps_the_interval() {
    let mut maps = with_capacity(1);
    maps.set_draw(draw(6)).unwrap();
    maps.set_draw(draw(7)).unwrap();
    maps.add_target(1, CountedBy::SharedLinks).unwrap();
    assert!(maps.add_target(2, CountedBy::SharedLinks).is_err(), "no space");
    maps.remove_target(1);
    maps.add_target(2, CountedBy::OwnLinks).unwrap();
    assert_eq!((maps.counted_by(2), maps.counted_by(1)), (Some(CountedBy::OwnLinks), None));
    maps.look_again().unwrap();
    let written: Vec<_> = maps.maps.control.iter().map(|control| (control.draw, control.targets_generation)).collect();
    assert_eq!(written, [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]);
    assert_eq!(maps.maps.targets, [(2, link_kind::OWN)]);
}

fn draw(interval: u64) -> DrawConstants {
    DrawConstants { interval, ..DrawConstants::default() }
}

#[test]
fn the_constants_of_an_interval_stay_until_many_others_were_in_use() {
    let mut maps = with_capacity(0);
    let (most, in_use) = (u64::from(DRAWS), |maps: &ControlMaps<Memory>| maps.control.draw as usize);
    for interval in 1..=most {
        maps.set_draw(draw(interval)).unwrap();
        assert_eq!(maps.maps.draws[in_use(&maps)], draw(interval));
    }
    assert!((1..=most).zip(&maps.maps.draws).all(|(interval, there)| *there == draw(interval)));
    // An interval that is used again is no longer the oldest.
    maps.set_draw(draw(1)).unwrap();
    assert_eq!(in_use(&maps), 0);
    maps.set_draw(draw(most + 1)).unwrap();
    assert_eq!(in_use(&maps), 1);
    for interval in 2..most {
        maps.set_draw(draw(most + interval)).unwrap();
        assert_eq!(maps.maps.draws[in_use(&maps)], draw(most + interval));
    }
    assert_eq!(maps.maps.draws[0], draw(1));
    maps.set_draw(draw(7 * most)).unwrap();
    assert_eq!((in_use(&maps), maps.maps.draws[0]), (0, draw(7 * most)));
}

#[test]
fn every_size_class_and_the_daemons_sleep_are_written() {
    let mut maps = with_capacity(0);
    let mut table = [1; SIZE_CLASSES];
    (table[0], table[SIZE_CLASSES - 1]) = (5, 9);
    maps.set_trials(&table).unwrap();
    assert_eq!(maps.maps.trials, table);
    maps.set_sleeping(true).unwrap();
    assert_eq!(maps.maps.sleep, 1);
    maps.set_sleeping(false).unwrap();
    assert_eq!(maps.maps.sleep, 0);
}
