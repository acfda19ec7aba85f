//! The overflow bucket: allocations of exited processes and the memory they held at exit, merged by program. With it,
//! totals never decrease and memory stays bounded, even if processes come and go for weeks.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use heapbpf_audit::{Hook, Missing};
use heapbpf_profile::model::{Frame, Losses, Process, Row, RowKey, SharedFrames, Stack};
use heapbpf_statistics::sums::SampleSums;

/// Maximum number of rows with a stack of their own. Beyond it, new stacks share one row per program and interval.
const MOST_ROWS: usize = 100_000;

/// Maximum number of distinct programs. Beyond it, new programs share one process without a name.
const MOST_PROGRAMS: usize = 1_000;

/// Maximum number of allocators, and of audits of files, that are listed for a program. Beyond it, allocators are
/// [`OTHERS`], and audits are left out.
const MOST_FILES: usize = 32;

/// Stands for all further allocators of a program.
const OTHERS: &str = "others";

/// A stack identified by its code locations, independent of load addresses.
#[derive(Clone, Debug, PartialEq)]
pub struct Code(Arc<Stack>);

impl Code {
    /// Removes the addresses from a stack, as these differ between processes.
    pub fn of(stack: &Stack, frames: &mut SharedFrames) -> Self {
        Self(Arc::new(stack.with_frames(frames, |frame| frame.address = 0)))
    }
}

impl Eq for Code {}

impl Hash for Code {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.frames.iter().for_each(|frame| frame.hash(state));
    }
}

/// Identity of a program: command name, executable, cgroup. Processes with uncounted allocations are kept apart, so
/// that the others keep their exact counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Program {
    comm: String,
    exe: String,
    cgroup: String,
    uncounted: bool,
}

/// Whether a process makes allocations that are not counted: those that it does not announce, if it announces its
/// samples, those made while it was not seen, or mappings that are not told from an allocator's.
pub fn is_uncounted(process: &Process) -> bool {
    process.hook == Some(Hook::Usdt) || process.was_unseen() || process.lacks_exact_mappings()
}

/// What an exited process hands over besides rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandedOver {
    /// Its exact counts.
    Counts,
    /// The fact that it is complete. There are no exact counts.
    Uncounted,
    /// Nothing: its counts come with its last rows, or came with earlier ones.
    Nothing,
}

impl HandedOver {
    /// What `process` hands over. `held`: it still has rows that come later.
    pub fn of(process: &Process, held: bool) -> Self {
        if held {
            Self::Nothing
        } else if is_uncounted(process) {
            Self::Uncounted
        } else if process.exact_alloc_bytes.is_some() {
            Self::Counts
        } else {
            Self::Nothing
        }
    }
}

/// Identity of a row of the bucket. The shared row for stacks beyond the limit has no code.
type Key = RowKey<usize, Arc<str>, Option<Code>>;

/// Sums of one row of exited processes.
#[derive(Debug, Default)]
struct Sums {
    alloc: SampleSums,
    /// Blocks held at exit; `None` for most rows, which held nothing.
    at_exit: Option<Box<SampleSums>>,
}

impl Sums {
    fn add(&mut self, row: &Row) {
        self.alloc.add(&row.alloc);
        if row.at_exit != SampleSums::default() {
            self.at_exit.get_or_insert_default().add(&row.at_exit);
        }
    }

    /// Blocks held at exit; zero unless frees were tracked (`live`).
    fn at_exit(&self, live: bool) -> SampleSums {
        self.at_exit.as_deref().copied().filter(|_| live).unwrap_or_default()
    }
}

/// Allocations of exited processes, merged by program.
#[derive(Debug, Default)]
pub struct OverflowBucket {
    programs: HashMap<Program, usize>,
    processes: Vec<Process>,
    rows: HashMap<Key, Sums>,
    /// Sums by program and interval.
    totals: HashMap<(usize, u64), Sums>,
    /// Frames of its stacks.
    pub frames: SharedFrames,
}

impl OverflowBucket {
    /// Index of the bucket's process that stands for the program of an exited process. It has process ID 0 and the
    /// program's name.
    pub fn program(&mut self, process: &Process) -> usize {
        let full = self.processes.len() >= MOST_PROGRAMS;
        let uncounted = is_uncounted(process);
        let program =
            Program { comm: process.comm.clone(), exe: process.exe.clone(), cgroup: process.cgroup.clone(), uncounted };
        let program = match full && !self.programs.contains_key(&program) {
            true => Program { uncounted, ..Program::default() },
            false => program,
        };
        let index = *self.programs.entry(program.clone()).or_insert_with(|| {
            let Program { comm, exe, cgroup, .. } = program;
            let counts = (!uncounted).then_some(0);
            self.processes.push(Process {
                placement: process.placement.clone(),
                comm,
                exe,
                cgroup,
                coverage: 1.0,
                ended: true,
                hook: process.hook,
                exact_alloc_bytes: counts,
                exact_alloc_objects: counts,
                ..Process::default()
            });
            self.processes.len() - 1
        });
        // With cgroup version 1 alone, processes of different containers may have paths that do not distinguish them.
        self.processes[index].placement.keep_common(&process.placement);
        index
    }

    /// Adds what is known about an exited process besides its rows: the counts that are `handed_over`, and the rest.
    pub fn add_counts(&mut self, program: usize, process: &Process, handed_over: HandedOver) {
        let total = &mut self.processes[program];
        // What it held at exit consists of blocks allocated since then.
        total.inuse_since = total.inuse_since.max(process.inuse_since);
        if handed_over == HandedOver::Counts {
            for (sum, more) in [
                (&mut total.exact_alloc_bytes, process.exact_alloc_bytes),
                (&mut total.exact_alloc_objects, process.exact_alloc_objects),
            ] {
                *sum = sum.zip(more).map(|(sum, more)| sum.saturating_add(more));
            }
        }
        if handed_over != HandedOver::Nothing {
            total.hook = total.hook.filter(|hook| process.hook == Some(*hook));
            total.stands_for += 1;
        }
        if process.was_unseen() && !total.was_unseen() {
            total.missing.push(Missing::unseen());
        }
        if process.lacks_exact_mappings() && !total.lacks_exact_mappings() {
            total.missing.push(Missing::exact_mappings());
        }
        total.coverage = total.coverage.min(process.coverage);
        // Bounds on their memory in use now apply to what they held at exit. The bucket has no peak.
        total.losses.add(&Losses { peak_unknown: false, ..process.losses });
        for allocator in &process.allocators {
            let is_listed = |name: &str| total.allocators.iter().any(|known| known == name);
            if is_listed(allocator) || is_listed(OTHERS) {
                continue;
            }
            let is_full = total.allocators.len() >= MOST_FILES;
            total.allocators.push(if is_full { OTHERS.to_owned() } else { allocator.clone() });
        }
        for file in &process.audit {
            if total.audit.len() < MOST_FILES && !total.audit.contains(file) {
                total.audit.push(Arc::clone(file));
            }
        }
    }

    /// Adds a row of an exited process.
    pub fn add_row(&mut self, program: usize, row: &Row) {
        // A total of lost samples stays separate: it is not mixed with samples.
        let interval = if row.is_of_lost_samples() { 0 } else { row.key.interval };
        self.totals.entry((program, interval)).or_default().add(row);
        let mut key = row.key.with(program, Some(Code::of(&row.key.stack, &mut self.frames)));
        if self.rows.len() >= MOST_ROWS && !row.is_of_lost_samples() && !self.rows.contains_key(&key) {
            key = RowKey::total(program, key.interval, None);
        }
        self.rows.entry(key).or_default().add(row);
    }

    /// Processes of the bucket, one per program.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// Rows of the bucket. Their processes are numbered from `first_process`. `live`: whether frees are tracked.
    pub fn rows(&self, first_process: usize, live: bool) -> impl Iterator<Item = Row> {
        let beyond = beyond();
        self.rows.iter().map(move |(key, sums)| {
            let stack = Arc::clone(key.stack.as_ref().map_or(&beyond, |code| &code.0));
            Row {
                alloc: sums.alloc,
                at_exit: sums.at_exit(live),
                peak: live.then(SampleSums::default),
                ..Row::new(key.with(first_process + key.process, stack))
            }
        })
    }

    /// Totals: one row per program and interval, without a stack.
    pub fn totals(&self, first_process: usize, live: bool) -> impl Iterator<Item = Row> {
        self.totals.iter().map(move |((process, interval), sums)| Row {
            alloc: sums.alloc,
            at_exit: sums.at_exit(live),
            ..Row::new(RowKey::total(first_process + process, *interval, Arc::default()))
        })
    }
}

/// The stack shown for rows beyond the limit.
fn beyond() -> Arc<Stack> {
    let name = Some("[ended processes: too many distinct stacks]".into());
    Arc::new(Stack {
        frames: vec![Arc::new(Frame { function: name, ..Frame::default() })],
        unwinder: "caller",
        cut: Some("merged with others".into()),
    })
}

#[cfg(test)]
mod tests {
    use heapbpf_audit::{FileAudit, FileKind};
    use heapbpf_profile::model::LossBound;

    use super::*;

    fn process(pid: u32, comm: &str, bytes: u64) -> Process {
        Process { pid, comm: comm.into(), exact_alloc_bytes: Some(bytes), ..Process::default() }
    }

    fn row(address: u64, file_offset: u64, bytes: u64) -> Row {
        let frame = Frame { address, file_offset: Some(file_offset), module: Some(0), ..Frame::default() };
        let mut alloc = SampleSums::default();
        alloc.record(bytes, bytes, 0, 1);
        Row {
            alloc,
            ..Row::new(RowKey {
                process: 0,
                thread: "t".into(),
                function: "malloc".into(),
                interval: 1,
                stack: Arc::new(Stack { frames: vec![Arc::new(frame)], unwinder: "dwarf", cut: None }),
            })
        }
    }

    fn add(bucket: &mut OverflowBucket, process: &Process, rows: &[Row]) {
        let program = bucket.program(process);
        bucket.add_counts(program, process, HandedOver::of(process, false));
        rows.iter().for_each(|row| bucket.add_row(program, row));
    }

    #[test]
    fn processes_of_one_program_are_one_wherever_its_code_was_mapped() {
        let mut bucket = OverflowBucket::default();
        add(&mut bucket, &process(1, "a", 10), &[row(0x5000, 64, 10)]);
        add(&mut bucket, &process(2, "a", 20), &[row(0x9000, 64, 20), row(0x9100, 320, 5)]);
        add(&mut bucket, &process(3, "b", 7), &[row(0x5000, 64, 7)]);
        let comms: Vec<_> = bucket.processes().iter().map(|p| (p.pid, p.comm.as_str(), p.exact_alloc_bytes)).collect();
        assert_eq!(comms, [(0, "a", Some(30)), (0, "b", Some(7))]);
        let mut sums: Vec<_> = bucket.rows(5, true).map(|row| (row.key.process, row.alloc.bytes)).collect();
        sums.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert_eq!(sums, [(5, 5.0), (5, 30.0), (6, 7.0)]);
        let mut totals: Vec<_> = bucket.totals(0, true).map(|row| (row.key.process, row.alloc.bytes)).collect();
        totals.sort_by(|a, b| a.partial_cmp(b).unwrap());
        assert_eq!(totals, [(0, 35.0), (1, 7.0)]);
    }

    /// Allocations of a process that announces its samples are not counted. Its line has no exact counts, in whatever
    /// order its rows come, and the counts of the program's other processes stay exact.
    #[test]
    fn processes_that_nobody_counts_are_not_counted_as_nothing() {
        let announcing = |pid| Process { exact_alloc_bytes: None, hook: Some(Hook::Usdt), ..process(pid, "a", 0) };
        let probed = |pid, bytes| Process { hook: Some(Hook::Probe), ..process(pid, "a", bytes) };
        let mut bucket = OverflowBucket::default();
        add(&mut bucket, &probed(1, 10), &[]);
        let held = bucket.program(&announcing(2));
        bucket.add_counts(held, &announcing(2), HandedOver::of(&announcing(2), true));
        let lines = |bucket: &OverflowBucket| -> Vec<_> {
            bucket.processes().iter().map(|it| (it.exact_alloc_bytes, it.stands_for, it.hook)).collect()
        };
        assert_eq!(lines(&bucket), [(Some(10), 1, Some(Hook::Probe)), (None, 0, Some(Hook::Usdt))]);
        add(&mut bucket, &announcing(2), &[]);
        add(&mut bucket, &announcing(3), &[]);
        add(&mut bucket, &Process { hook: Some(Hook::Inline), ..probed(4, 5) }, &[]);
        assert_eq!(lines(&bucket), [(Some(15), 2, None), (None, 2, Some(Hook::Usdt))]);
        // A process that was not seen for a while has no exact counts either.
        let missing = vec![Missing::unseen()];
        add(&mut bucket, &Process { exact_alloc_bytes: None, missing, ..process(5, "b", 0) }, &[]);
        assert_eq!(lines(&bucket)[2], (None, 1, None));
        assert!(bucket.processes()[2].was_unseen() && !bucket.processes()[1].was_unseen());
        // The same is true of a process whose mappings are not all told apart.
        let missing = vec![Missing::exact_mappings()];
        add(&mut bucket, &Process { exact_alloc_bytes: None, missing, ..process(6, "c", 0) }, &[]);
        assert_eq!(lines(&bucket)[3], (None, 1, None));
        assert!(is_uncounted(&bucket.processes()[3]) && bucket.processes()[3].lacks_exact_mappings());
    }

    /// Counts come with the last rows; later rows, from records that were found afterwards, change nothing.
    #[test]
    fn counts_are_handed_over_once() {
        let mut bucket = OverflowBucket::default();
        let program = bucket.program(&process(1, "a", 7));
        for (process, held) in [
            (process(1, "a", 7), true),
            (process(1, "a", 7), false),
            (Process { exact_alloc_bytes: None, ..process(1, "a", 0) }, false),
        ] {
            bucket.add_counts(program, &process, HandedOver::of(&process, held));
        }
        assert_eq!((bucket.processes()[0].exact_alloc_bytes, bucket.processes()[0].stands_for), (Some(7), 1));
    }

    /// Processes held memory at exit. Moving them to the bucket keeps the sums at exit, of each row and in total, even
    /// beyond the row limit.
    #[test]
    fn what_was_held_at_exit_stays_when_its_process_goes() {
        let held = |offset, bytes| {
            let mut at_exit = SampleSums::default();
            at_exit.record(bytes, bytes, 0, 1);
            Row { at_exit, ..row(0x5000, offset, 2 * bytes) }
        };
        let mut bucket = OverflowBucket::default();
        add(&mut bucket, &process(1, "a", 0), &[held(64, 100), row(0x5000, 65, 7)]);
        add(&mut bucket, &process(2, "a", 0), &[held(64, 11), held(66, 1)]);
        let of = |rows: Vec<Row>| {
            let mut sums: Vec<_> = rows.iter().map(|row| (row.alloc.bytes, row.at_exit.bytes)).collect();
            sums.sort_by(|a, b| a.partial_cmp(b).unwrap());
            sums
        };
        assert_eq!(of(bucket.rows(0, true).collect()), [(2.0, 1.0), (7.0, 0.0), (222.0, 111.0)]);
        assert_eq!(of(bucket.totals(0, true).collect()), [(231.0, 112.0)]);
        assert_eq!(bucket.rows(0, true).map(|row| row.at_exit.samples).sum::<u64>(), 3);
        assert!(bucket.rows(0, false).chain(bucket.totals(0, false)).all(|row| row.at_exit.samples == 0));
        let many: Vec<Row> = (0..MOST_ROWS as u64 + 10).map(|offset| held(1_000 + offset, 3)).collect();
        add(&mut bucket, &process(3, "b", 0), &many);
        let total: f64 = bucket.rows(0, true).map(|row| row.at_exit.bytes).sum();
        assert_eq!(total, 112.0 + 3.0 * many.len() as f64);
        assert_eq!(bucket.totals(0, true).map(|row| row.at_exit.bytes).sum::<f64>(), total);
    }

    #[test]
    fn what_ended_processes_lost_is_kept() {
        let mut bucket = OverflowBucket::default();
        let bound = LossBound { samples: 2, sampled_bytes: 20 };
        let losses = Losses { alloc: bound, inuse_missing: bound, peak_unknown: true, ..Losses::default() };
        for pid in [1, 2] {
            add(&mut bucket, &Process { losses, slack: bound, ..process(pid, "a", 10) }, &[]);
        }
        let sum = LossBound { samples: 4, sampled_bytes: 40 };
        let losses = Losses { alloc: sum, inuse_missing: sum, ..Losses::default() };
        assert_eq!(bucket.processes()[0].losses, losses);
        assert!(bucket.processes()[0].slack.is_none());
    }

    /// Programs of many kinds share the process without a name.
    #[test]
    fn allocators_and_files_of_a_program_are_bounded() {
        let audit = |number: usize| FileAudit {
            file: format!("/{number}.so"),
            allocator: format!("allocator {number}"),
            kind: FileKind::Library,
            build_id: String::new(),
            attach: Vec::new(),
            covered: Vec::new(),
            missing: Vec::new(),
            limits: Vec::new(),
        };
        let mut bucket = OverflowBucket::default();
        // The first file is seen again and again.
        for number in [0; MOST_FILES].into_iter().chain(0..3 * MOST_FILES).chain(0..3) {
            let audit = Arc::new(audit(number));
            let allocators = vec![audit.allocator.clone()];
            add(&mut bucket, &Process { allocators, audit: vec![audit], ..process(1, "a", 1) }, &[]);
        }
        let Process { allocators, audit, .. } = &bucket.processes()[0];
        assert_eq!((audit.len(), allocators.len()), (MOST_FILES, MOST_FILES + 1));
        assert_eq!(audit[MOST_FILES - 1].file, "/31.so");
        assert_eq!((&*allocators[MOST_FILES - 1], &*allocators[MOST_FILES]), ("allocator 31", OTHERS));
    }

    #[test]
    fn beyond_the_limits_sums_stay_and_detail_goes() {
        let mut bucket = OverflowBucket::default();
        let one = process(1, "a", 1);
        let rows: Vec<Row> = (0..MOST_ROWS as u64 + 500).map(|offset| row(1, offset, 2)).collect();
        add(&mut bucket, &one, &rows);
        assert_eq!(bucket.rows.len(), MOST_ROWS + 1);
        let total: f64 = bucket.rows(0, true).map(|row| row.alloc.bytes).sum();
        assert_eq!(total, 2.0 * rows.len() as f64);
        for number in 0..MOST_PROGRAMS + 50 {
            add(&mut bucket, &process(1, &number.to_string(), 3), &[]);
        }
        assert_eq!(bucket.processes().len(), MOST_PROGRAMS + 1);
        let bytes: u64 = bucket.processes().iter().filter_map(|process| process.exact_alloc_bytes).sum();
        assert_eq!(bytes, 1 + 3 * (MOST_PROGRAMS as u64 + 50));
    }
}
