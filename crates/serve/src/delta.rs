//! The difference between two profiles of one recording: allocations in between, and the change of memory in use.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use heapbpf_access::filter::only;
use heapbpf_profile::model::{ByAddress, Header, Losses, Process, Profile, Row, RowKey, SharedFrames, Stack};
use heapbpf_record::requests::FinishedProfile;
use heapbpf_record::{Code, is_uncounted};
use heapbpf_statistics::sums::SampleSums;
use sampler_ebpf::abi::ProcessKey;

/// The process of a row, identified in both profiles.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Owner {
    /// A process that is running in the later profile.
    Living(ProcessKey),
    /// A program (command name, executable, cgroup, and whether its allocations are not counted). All of its exited
    /// processes count as one.
    Ended(String, String, String, bool),
}

/// The stack of a row, identified in both profiles.
#[derive(PartialEq, Eq, Hash)]
enum Place {
    /// Stack of a running process. It was symbolized once, and both profiles share it.
    Named(ByAddress<Stack>),
    /// Stack of exited processes.
    Code(Code),
}

/// Identifies a row in both profiles.
type Key = RowKey<Owner, Arc<str>, Place>;

struct Owners<'a> {
    later: HashMap<ProcessKey, usize>,
    made: &'a FinishedProfile,
}

impl Owners<'_> {
    /// The owner of process `index` of `made`, according to the later profile.
    fn of(&self, made: &FinishedProfile, index: usize) -> Owner {
        let key = made.keys.get(index).filter(|key| self.later.contains_key(key));
        match (key, made.profile.processes.get(index)) {
            (Some(key), _) => Owner::Living(*key),
            (None, Some(process)) => {
                let Process { comm, exe, cgroup, .. } = process;
                Owner::Ended(comm.clone(), exe.clone(), cgroup.clone(), is_uncounted(process))
            }
            (None, None) => Owner::Ended(String::new(), String::new(), String::new(), false),
        }
    }

    fn key(&self, made: &FinishedProfile, row: &Row, frames: &mut SharedFrames) -> Key {
        let owner = self.of(made, row.key.process);
        let place = match owner {
            Owner::Living(_) => Place::Named(ByAddress(Arc::clone(&row.key.stack))),
            Owner::Ended(..) => Place::Code(Code::of(&row.key.stack, frames)),
        };
        row.key.with(owner, place)
    }
}

/// Which in-use figures a difference contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inuse {
    /// The change between the profiles.
    Change,
    /// The level in the later profile.
    Level,
}

/// Returns `later` − `earlier`, or all of `later` if there is no earlier profile. The result has no error bars, because
/// the error bars of a change need both profiles (`heapbpf diff`).
pub fn difference(earlier: Option<&FinishedProfile>, later: &FinishedProfile, of: Inuse) -> Profile {
    let Some(earlier) = earlier else { return only(&later.profile, &[]) };
    let owners =
        Owners { later: later.keys.iter().enumerate().map(|(index, key)| (*key, index)).collect(), made: later };
    let mut frames = SharedFrames::default();
    let mut before: HashMap<Key, (Sums, &Row)> = HashMap::new();
    for row in &earlier.profile.rows {
        let (sums, _) = before.entry(owners.key(earlier, row, &mut frames)).or_insert_with(|| (Sums::default(), row));
        sums.alloc.add(&row.alloc);
        sums.inuse.add(&row.inuse);
        sums.at_exit.add(&row.at_exit);
    }
    let mut profile = Profile {
        processes: later.profile.processes.clone(),
        header: Header {
            samples_known: false,
            growth_over: None,
            started: later.profile.header.started + earlier.profile.header.duration,
            duration: later.profile.header.duration.saturating_sub(earlier.profile.header.duration),
            ..later.profile.header.clone()
        },
        notes: notes_of_both(&earlier.profile, &later.profile),
        ..later.profile.without_processes()
    };
    if of == Inuse::Change {
        forget_incomparable(&mut profile, earlier, later, &owners);
    }
    for row in &later.profile.rows {
        let before = before.remove(&owners.key(later, row, &mut frames)).map(|(sums, _)| sums).unwrap_or_default();
        let known = profile.knows_inuse(row.key.process);
        let sums = Sums {
            alloc: minus(&row.alloc, &before.alloc),
            inuse: match of {
                Inuse::Level => row.inuse,
                Inuse::Change if known => minus(&row.inuse, &before.inuse),
                Inuse::Change => SampleSums::default(),
            },
            at_exit: if known { minus(&row.at_exit, &before.at_exit) } else { SampleSums::default() },
        };
        push(&mut profile.rows, row, row.key.process, sums);
    }
    if of == Inuse::Level {
        before.clear();
    }
    // The remaining rows belong to processes that had memory in use and have exited since. Their allocations are in the
    // overflow bucket or have not changed.
    let mut programs: HashMap<Owner, usize> =
        (0..profile.processes.len()).map(|index| (owners.of(owners.made, index), index)).collect();
    for (key, (before, row)) in before {
        let process = *programs.entry(key.process).or_insert_with(|| {
            let process = &earlier.profile.processes[row.key.process];
            // The process's allocations, and their losses, are part of another row.
            let Losses { inuse_missing, inuse_stale, interval, .. } = process.losses;
            let losses =
                Losses { inuse_missing: inuse_stale, inuse_stale: inuse_missing, interval, ..Losses::default() };
            profile.processes.push(Process { pid: 0, ended: true, losses, ..process.clone() });
            profile.processes.len() - 1
        });
        if !profile.knows_inuse(process) {
            continue;
        }
        let inuse = minus(&SampleSums::default(), &before.inuse);
        push(&mut profile.rows, row, process, Sums { inuse, ..Sums::default() });
    }
    let known_before = counts_and_losses(earlier, &owners);
    for (index, process) in profile.processes.iter_mut().enumerate() {
        let before = known_before.get(&owners.of(later, index));
        let (bytes, objects) = before.map_or(NOTHING_COUNTED, |(counted, _)| *counted);
        let since = |now: Option<u64>, before: Option<u64>| now.zip(before).map(|(now, it)| now.saturating_sub(it));
        process.exact_alloc_bytes = since(process.exact_alloc_bytes, bytes);
        process.exact_alloc_objects = since(process.exact_alloc_objects, objects);
        let Some((_, before)) = before else { continue };
        process.losses.alloc = process.losses.alloc.without(&before.alloc);
        if of == Inuse::Change {
            // What the earlier profile missed looks like growth in the difference, and the other way round.
            process.losses.inuse_missing.add(&before.inuse_stale);
            process.losses.inuse_stale.add(&before.inuse_missing);
        }
    }
    profile
}

/// The later profile's notes, and those that only the earlier one has: its figures are part of the difference.
fn notes_of_both(earlier: &Profile, later: &Profile) -> Vec<String> {
    let gone = earlier.notes.iter().filter(|note| !later.notes.contains(note));
    later.notes.iter().chain(gone).cloned().collect()
}

/// Marks processes whose in-use figures cover blocks from different times in the two profiles. They cannot be compared.
fn forget_incomparable(profile: &mut Profile, earlier: &FinishedProfile, later: &FinishedProfile, owners: &Owners<'_>) {
    let since = since(earlier, owners);
    for (index, process) in profile.processes.iter_mut().enumerate() {
        let before = since.get(&owners.of(later, index));
        process.inuse_unknown |= before.is_some_and(|before| *before != (process.inuse_unknown, process.inuse_since));
    }
    profile.header.live = profile.knows_some_inuse();
}

/// Returns for each running process whether its memory in use is unknown, and since when it is known.
fn since(made: &FinishedProfile, owners: &Owners<'_>) -> HashMap<Owner, (bool, Option<SystemTime>)> {
    let processes = made.profile.processes.iter().enumerate();
    let living = processes.filter(|(index, _)| matches!(owners.of(made, *index), Owner::Living(_)));
    living.map(|(index, it)| (owners.of(made, index), (it.inuse_unknown, it.inuse_since))).collect()
}

/// Exact counts of bytes and of calls; `None` if they are not known.
type Counted = (Option<u64>, Option<u64>);

const NOTHING_COUNTED: Counted = (Some(0), Some(0));

fn counts_and_losses(made: &FinishedProfile, owners: &Owners<'_>) -> HashMap<Owner, (Counted, Losses)> {
    let mut known: HashMap<Owner, (Counted, Losses)> = HashMap::new();
    let sum = |sum: Option<u64>, more: Option<u64>| sum.zip(more).map(|(sum, more)| sum.saturating_add(more));
    for (index, process) in made.profile.processes.iter().enumerate() {
        let nothing = (NOTHING_COUNTED, Losses::default());
        let ((bytes, objects), losses) = known.entry(owners.of(made, index)).or_insert(nothing);
        *bytes = sum(*bytes, process.exact_alloc_bytes);
        *objects = sum(*objects, process.exact_alloc_objects);
        losses.add(&process.losses);
    }
    known
}

/// The sums of a row.
#[derive(Default)]
struct Sums {
    alloc: SampleSums,
    inuse: SampleSums,
    at_exit: SampleSums,
}

/// Adds a row, unless all of its sums are zero. Sums of allocations and at exit never shrink, so their differences are
/// at least 0.
fn push(rows: &mut Vec<Row>, row: &Row, process: usize, Sums { alloc, inuse, at_exit }: Sums) {
    let grown = |sums: SampleSums| SampleSums { bytes: sums.bytes.max(0.0), objects: sums.objects.max(0.0), ..sums };
    let (alloc, at_exit) = (grown(alloc), grown(at_exit));
    if [alloc, inuse, at_exit].iter().any(|sums| sums.bytes != 0.0 || sums.objects != 0.0) {
        let row = row.clone().with_process(process);
        rows.push(Row { alloc, inuse, at_exit, in_memory: None, peak: None, lifetimes: None, growth: None, ..row });
    }
}

fn minus(later: &SampleSums, earlier: &SampleSums) -> SampleSums {
    SampleSums {
        samples: later.samples.saturating_sub(earlier.samples),
        bytes: later.bytes - earlier.bytes,
        objects: later.objects - earlier.objects,
        ..SampleSums::default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use heapbpf_profile::model::LossBound;
    use heapbpf_profile::testing;

    use super::*;
    use crate::source::tests::{finished, key};

    fn made(profile: Profile, living: usize) -> FinishedProfile {
        let keys = profile.processes[..living].iter().map(|process| key(process.pid)).collect();
        finished(profile, keys)
    }

    fn totals(profile: &Profile) -> (f64, f64) {
        let alloc = profile.rows.iter().map(|row| row.alloc.bytes).sum();
        (alloc, profile.rows.iter().map(|row| row.inuse.bytes).sum())
    }

    #[test]
    fn equal_profiles_differ_by_nothing() {
        let (earlier, later) = (testing::small(), testing::small());
        // Profiles of one recording share their stacks.
        let later = Profile { rows: earlier.rows.clone(), ..later };
        let living = earlier.processes.len();
        let difference = difference(Some(&made(earlier, living)), &made(later, living), Inuse::Change);
        assert!(difference.rows.is_empty(), "{:?}", difference.rows);
    }

    #[test]
    fn growth_is_what_came_in_between() {
        let earlier = testing::small();
        let mut later = earlier.clone();
        later.header.duration = earlier.header.duration + Duration::from_secs(5);
        later.rows[0].alloc.record(1000, 1000, 0, 1);
        later.rows[0].inuse = SampleSums::default();
        let freed = earlier.rows[0].inuse.bytes;
        let living = earlier.processes.len();
        let difference = difference(Some(&made(earlier, living)), &made(later, living), Inuse::Change);
        assert_eq!(difference.rows.len(), 1);
        assert_eq!(difference.header.duration, Duration::from_secs(5));
        let (alloc, inuse) = totals(&difference);
        assert!((alloc - 1000.0).abs() < 1e-6 && (inuse + freed).abs() < 1e-6, "{alloc} {inuse} {freed}");
    }

    #[test]
    fn notes_of_both_profiles_are_kept_once() {
        let [earlier, later] = [["gone", "both"], ["both", "new"]].map(|notes| {
            let notes = notes.map(str::to_owned).into();
            made(Profile { notes, ..testing::small() }, 2)
        });
        assert_eq!(difference(Some(&earlier), &later, Inuse::Change).notes, ["both", "new", "gone"]);
    }

    /// Memory held at exit only grows. A difference contains what the processes that exited in between held, even after
    /// they were retired.
    #[test]
    fn what_was_held_at_exit_is_a_difference() {
        let earlier = testing::ended_apart();
        let mut later = earlier.clone();
        later.rows[0].at_exit = std::mem::take(&mut later.rows[0].inuse);
        let held = later.rows[0].at_exit.bytes;
        later.processes[0].ended = true;
        // Process 1, which had exited before, has moved to the overflow bucket.
        later.processes[1].pid = 0;
        for row in later.rows.iter_mut().filter(|row| row.key.process == 1) {
            let mut stack = Stack::clone(&row.key.stack);
            stack.frames.iter_mut().map(Arc::make_mut).for_each(|frame| frame.address = 0);
            row.key.stack = Arc::new(stack);
        }
        for of in [Inuse::Change, Inuse::Level] {
            let difference = difference(Some(&made(earlier.clone(), 2)), &made(later.clone(), 1), of);
            let grown: f64 = difference.rows.iter().map(|row| row.at_exit.bytes).sum();
            assert!((grown - held).abs() < 1e-6 && held > 0.0, "{grown} {held}");
            assert!(difference.rows.iter().all(|row| row.at_exit.bytes >= 0.0));
        }
    }

    #[test]
    fn of_losses_the_difference_has_what_came_in_between() {
        let bound = |samples| LossBound { samples, sampled_bytes: 10 * samples };
        let mut earlier = testing::small();
        earlier.processes[0].losses =
            Losses { alloc: bound(5), inuse_missing: bound(1), inuse_stale: bound(2), ..Losses::default() };
        let mut later = earlier.clone();
        later.processes[0].losses = Losses { alloc: bound(9), inuse_stale: bound(4), ..Losses::default() };
        let (earlier, later) = (made(earlier, 2), made(later, 2));
        let of = |of| difference(Some(&earlier), &later, of).processes[0].losses;
        let level = Losses { alloc: bound(4), inuse_stale: bound(4), ..Losses::default() };
        assert_eq!(of(Inuse::Level), level);
        let change = Losses { inuse_missing: bound(2), inuse_stale: bound(5), ..level };
        assert_eq!(of(Inuse::Change), change);
    }

    /// One program has two lines: its exited processes that are counted, and those that are not.
    #[test]
    fn lines_of_one_program_are_told_apart() {
        let mut earlier = testing::small();
        let bound = LossBound { samples: 3, sampled_bytes: 30 };
        for process in &mut earlier.processes {
            *process = Process { comm: "a".into(), ended: true, exact_alloc_bytes: Some(7), ..Process::default() };
        }
        let uncounted = &mut earlier.processes[1];
        (uncounted.hook, uncounted.exact_alloc_bytes) = (Some(heapbpf_audit::Hook::Usdt), None);
        uncounted.losses.alloc = bound;
        let mut later = earlier.clone();
        later.processes[0].exact_alloc_bytes = Some(9);
        later.processes[0].losses.alloc = bound;
        let difference = difference(Some(&made(earlier, 0)), &made(later, 0), Inuse::Change);
        let of = |index: usize| &difference.processes[index];
        assert_eq!([of(0), of(1)].map(|it| it.exact_alloc_bytes), [Some(2), None]);
        assert_eq!([of(0), of(1)].map(|it| it.losses.alloc), [bound, LossBound::default()]);
    }

    #[test]
    fn what_was_not_counted_before_is_not_all_new() {
        let mut earlier = testing::small();
        (earlier.processes[0].exact_alloc_bytes, earlier.processes[0].exact_alloc_objects) = (None, Some(9_000));
        let mut later = testing::small();
        later.processes[0].exact_alloc_objects = Some(9_005);
        let difference = difference(Some(&made(earlier, 2)), &made(later, 2), Inuse::Change);
        let process = &difference.processes[0];
        assert_eq!((process.exact_alloc_bytes, process.exact_alloc_objects), (None, Some(5)));
    }

    #[test]
    fn what_is_not_known_any_more_was_not_freed() {
        let earlier = testing::small();
        // Profiles of one recording share their stacks.
        let mut later = Profile { rows: earlier.rows.clone(), ..testing::partly_followed() };
        for row in later.rows.iter_mut().filter(|row| row.key.process == 1) {
            row.inuse = SampleSums::default();
        }
        let difference = difference(Some(&made(earlier, 2)), &made(later, 2), Inuse::Change);
        assert_eq!(totals(&difference), (0.0, 0.0));
    }

    #[test]
    fn what_was_in_use_before_frees_were_followed_again_is_not_compared() {
        let earlier = testing::small();
        let mut later = Profile { rows: earlier.rows.clone(), ..testing::followed_again() };
        later.rows[0].inuse = SampleSums::default();
        let [earlier, later] = [earlier, later].map(|profile| made(profile, 2));
        let change = difference(Some(&earlier), &later, Inuse::Change);
        assert!(change.processes[0].inuse_unknown && !change.processes[1].inuse_unknown);
        assert_eq!(totals(&change), (0.0, 0.0));
        assert!(!difference(Some(&later), &later, Inuse::Change).processes[0].inuse_unknown, "of the same blocks");
        assert!(!difference(Some(&earlier), &later, Inuse::Level).processes[0].inuse_unknown);
    }

    #[test]
    fn a_process_that_ended_in_between_allocated_nothing_more() {
        let earlier = testing::small();
        let mut later = earlier.clone();
        // Process 1 has moved to the overflow bucket: the last process, without a PID, its stacks without addresses.
        let ended = &mut later.processes[1];
        (ended.pid, ended.ended) = (0, true);
        for row in later.rows.iter_mut().filter(|row| row.key.process == 1) {
            let mut stack = Stack::clone(&row.key.stack);
            stack.frames.iter_mut().map(Arc::make_mut).for_each(|frame| frame.address = 0);
            row.key.stack = Arc::new(stack);
            row.inuse = SampleSums::default();
        }
        let gone: f64 = earlier.rows.iter().filter(|row| row.key.process == 1).map(|row| row.inuse.bytes).sum();
        assert_eq!(later.processes.len(), 2);
        let difference = difference(Some(&made(earlier, 2)), &made(later, 1), Inuse::Change);
        let (alloc, inuse) = totals(&difference);
        assert!(alloc.abs() < 1e-6, "{alloc}");
        assert!((inuse + gone).abs() < 1e-6 && gone > 0.0, "{inuse} {gone}");
    }
}
