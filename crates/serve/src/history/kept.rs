//! The history on disk, for later runs: at most one sample a minute, and one at the end, appended to a file. A full file
//! replaces the one before it. Files are read once, at the start, and trusted no more than a target: what is damaged is
//! left out.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::time::{Duration, SystemTime};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use heapbpf_host::privileges::restrict_sender;
use heapbpf_profile::model::{Placement, Process};
use heapbpf_profile::units::unix_ms;
use sampler_ebpf::abi::ProcessKey;
use serde::{Deserialize, Serialize};

use super::super::push::{OwnDir, SpoolError};
use super::{APART_MS, Figures, History, KnownProcess, LONGEST_MS, Sample};

/// The directory in the spool. Those of destinations have other names: they begin with a scheme.
const DIR: &str = "history";
/// The file that is written.
const CURRENT: &str = "totals";
/// The full one before it.
const BEFORE: &str = "totals.before";
/// Maximum size of a file, in bytes.
const MOST_FILE_BYTES: u64 = 16 << 20;
/// Maximum size of a sample's processes in memory, in bytes. Targets choose their names.
const MOST_NAMES_BYTES: usize = 64 << 10;
/// Maximum size of a sample, uncompressed, in bytes. JSON may take six bytes for one of a name.
const MOST_SAMPLE_BYTES: u64 = 512 << 10;
/// Size of all samples that are read, uncompressed, from which on no more are read, in bytes. A day has 1,440 samples,
/// whose processes have at most 90 MiB of names.
const MOST_READ_BYTES: u64 = 256 << 20;
/// Maximum number of samples that wait to be written.
const MOST_WAITING: usize = 4;
/// Maximum time that the end of a run waits until all samples are written.
const WRITE_LIMIT: Duration = Duration::from_secs(1);
/// Bytes before a compressed sample: its size, and its time.
const HEADER: usize = 4 + 8;

/// A sample as it is on disk. Fields may be added.
#[derive(Debug, Serialize, Deserialize)]
struct KeptSample {
    time_ms: u64,
    after_gap: bool,
    lossy: bool,
    more: bool,
    whole: Figures,
    largest: Vec<KeptProcess>,
}

/// A process, with what tokens and filters ask about it.
#[derive(Debug, Serialize, Deserialize)]
struct KeptProcess {
    start_ns: u64,
    tgid: u32,
    exec_id: u32,
    pid: u32,
    comm: String,
    cgroup: String,
    container: String,
    pod: String,
    unit: String,
    figures: Figures,
}

impl KeptSample {
    fn of(sample: &Sample, after_gap: bool) -> Self {
        let mut names = 0;
        let fits = |(known, _): &&(Arc<KnownProcess>, Figures)| {
            names += known.bytes();
            names <= MOST_NAMES_BYTES
        };
        let largest = sample.largest.iter().take_while(fits).map(|(known, figures)| {
            let ProcessKey { start_ns, tgid, exec_id } = known.key;
            let Placement { container, pod, unit } = known.placement.clone();
            let (pid, comm, cgroup) = (known.pid, known.comm.clone(), known.cgroup.clone());
            KeptProcess { start_ns, tgid, exec_id, pid, comm, cgroup, container, pod, unit, figures: *figures }
        });
        let largest: Vec<KeptProcess> = largest.collect();
        let more = sample.more || largest.len() < sample.largest.len();
        let (time_ms, lossy, whole) = (sample.time_ms, sample.lossy, sample.whole);
        Self { time_ms, after_gap, lossy, more, whole, largest }
    }

    /// Adds the sample to a history.
    fn restore(self, history: &mut History) {
        let Self { time_ms, after_gap, lossy, more, whole, largest } = self;
        let known = |it: KeptProcess| {
            let key = ProcessKey { start_ns: it.start_ns, tgid: it.tgid, exec_id: it.exec_id };
            let placement = Placement { container: it.container, pod: it.pod, unit: it.unit };
            let (pid, comm, cgroup) = (it.pid, it.comm, it.cgroup);
            let process = Process { pid, comm, cgroup, placement, ..Process::default() };
            (history.known(key, &process), it.figures)
        };
        let largest = largest.into_iter().map(known).collect();
        history.keep(Sample { time_ms, after_gap, is_earlier: true, lossy, more, whole, largest });
    }

    /// Its record in a file.
    fn record(&self) -> io::Result<Vec<u8>> {
        let json = serde_json::to_vec(self)?;
        if json.len() as u64 > MOST_SAMPLE_BYTES {
            return Err(io::Error::other("the names of its processes are too long"));
        }
        let mut gzip = GzEncoder::new(vec![0_u8; HEADER], Compression::fast());
        gzip.write_all(&json)?;
        let mut record = gzip.finish()?;
        let size = (record.len() - HEADER) as u32;
        record[..4].copy_from_slice(&size.to_le_bytes());
        record[4..HEADER].copy_from_slice(&self.time_ms.to_le_bytes());
        Ok(record)
    }
}

/// Divides records into the first one, its time and compressed sample, and the others.
fn split(records: &[u8]) -> Option<(u64, &[u8], &[u8])> {
    let (size, rest) = records.split_first_chunk::<4>()?;
    let (time_ms, rest) = rest.split_first_chunk::<8>()?;
    let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*size) as usize)?;
    Some((u64::from_le_bytes(*time_ms), record, rest))
}

/// Reads samples into a history.
struct Reader {
    history: History,
    now_ms: u64,
    /// Number of bytes that may still be decompressed.
    left: u64,
}

impl Reader {
    /// Takes in the samples of a file. Returns the size of those at its beginning that are undamaged, in bytes.
    fn read(&mut self, file: &File, named: &Path) -> Result<u64, SpoolError> {
        let mut records = Vec::new();
        let read = file.take(MOST_FILE_BYTES + 1).read_to_end(&mut records);
        read.map_err(|source| SpoolError::Io { dir: named.into(), source })?;
        let mut rest = &records[..];
        while let Some((time_ms, record, after)) = split(rest) {
            // Times to come are those of a clock that was set back since. No sample would be later then.
            let is_wanted = self.left > 0
                && time_ms <= self.now_ms
                && time_ms + LONGEST_MS >= self.now_ms
                && self.history.samples().next_back().is_none_or(|last| last.time_ms < time_ms);
            if is_wanted {
                let Some(sample) = self.sample(record).filter(|sample| sample.time_ms == time_ms) else { break };
                sample.restore(&mut self.history);
            }
            rest = after;
        }
        let undamaged = (records.len() - rest.len()) as u64;
        if self.left == 0 {
            log::warn!("{}: too much to read; the newest totals are not shown", named.display());
        }
        if !rest.is_empty() {
            log::warn!("{}: damaged after {undamaged} bytes; the totals that follow are not shown", named.display());
        }
        Ok(undamaged)
    }

    /// The sample in a record. `None` if it is damaged, or too large.
    fn sample(&mut self, record: &[u8]) -> Option<KeptSample> {
        let mut json = Vec::new();
        // At the end of the record, its checksum is compared.
        GzDecoder::new(record).take(MOST_SAMPLE_BYTES + 1).read_to_end(&mut json).ok()?;
        self.left = self.left.saturating_sub(json.len() as u64);
        if json.len() as u64 > MOST_SAMPLE_BYTES { None } else { serde_json::from_slice(&json).ok() }
    }
}

/// The file that samples are appended to.
#[derive(Debug)]
struct Writer {
    dir: OwnDir,
    file: File,
    bytes: u64,
    most_bytes: u64,
}

impl Writer {
    fn write(&mut self, sample: &KeptSample) -> io::Result<()> {
        let record = sample.record()?;
        if self.bytes > 0 && self.bytes + record.len() as u64 > self.most_bytes {
            let renamed = fs::rename(self.dir.path.join(CURRENT), self.dir.path.join(BEFORE));
            // It is gone if the last attempt ended after this step.
            if let Err(error) = renamed
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
            let new = self.dir.file(CURRENT, true).map_err(io::Error::other)?;
            self.file = new.ok_or(io::ErrorKind::NotFound)?;
            self.bytes = 0;
        }
        if let Err(error) = self.file.write_all(&record) {
            // A part of a record would hide those after it.
            self.file.set_len(self.bytes)?;
            return Err(error);
        }
        self.bytes += record.len() as u64;
        Ok(())
    }

    /// Writes samples as long as there is a history that sends them.
    fn run(mut self, samples: &Receiver<KeptSample>) {
        let mut is_missing = false;
        for mut sample in samples {
            sample.after_gap |= is_missing;
            let written = self.write(&sample);
            if let Err(error) = &written
                && !is_missing
            {
                log::warn!("{}: totals are not kept for the next run: {error}", self.dir.named.display());
            }
            is_missing = written.is_err();
        }
    }
}

/// A history with what earlier runs kept, before its own run begins.
#[derive(Debug)]
pub struct KeptHistory {
    history: History,
    writer: Writer,
}

impl KeptHistory {
    /// Reads what is in the spool's directory.
    ///
    /// # Errors
    /// The directory or a file in it cannot be used, or is not exclusively ours. If a file is damaged, the rest of it is
    /// dropped with a warning.
    pub fn open(spool: &Path) -> Result<Self, SpoolError> {
        Self::open_at(spool, unix_ms(SystemTime::now()))
    }

    fn open_at(spool: &Path, now_ms: u64) -> Result<Self, SpoolError> {
        let dir = OwnDir::open(spool, DIR)?;
        let mut reader = Reader { history: History::default(), now_ms, left: MOST_READ_BYTES };
        if let Some(before) = dir.file(BEFORE, false)? {
            reader.read(&before, &dir.named.join(BEFORE))?;
        }
        let named = dir.named.join(CURRENT);
        let failed = |source| SpoolError::Io { dir: named.clone(), source };
        let file = dir.file(CURRENT, true)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let bytes = reader.read(&file, &named)?;
        file.set_len(bytes).map_err(failed)?;
        let writer = Writer { dir, file, bytes, most_bytes: MOST_FILE_BYTES };
        Ok(Self { history: reader.history, writer })
    }

    /// Returns the history, which keeps its samples from now on.
    ///
    /// # Errors
    /// The system provides no thread.
    pub fn start(self) -> io::Result<History> {
        let (keeper, samples, writing) = Keeper::new();
        let Self { mut history, writer } = self;
        history.keeper = Some(keeper);
        std::thread::Builder::new().name("history".into()).spawn(move || {
            restrict_sender();
            writer.run(&samples);
            drop(writing);
        })?;
        Ok(history)
    }
}

/// Sends samples to the thread that writes them. The server's own threads may not open files.
#[derive(Debug)]
pub(super) struct Keeper {
    samples: SyncSender<KeptSample>,
    /// Disconnected once all samples are written.
    written: Receiver<()>,
    /// Time of the last sample that was sent.
    pub(super) last_ms: Option<u64>,
    /// Whether samples are missing since then.
    after_gap: bool,
}

impl Keeper {
    /// Also returns what the thread that writes gets: the samples, and what it drops after the last one.
    fn new() -> (Self, Receiver<KeptSample>, Sender<()>) {
        let ((samples, received), (writing, written)) = (sync_channel(MOST_WAITING), channel());
        // Nothing of this run is on disk yet.
        (Self { samples, written, last_ms: None, after_gap: true }, received, writing)
    }

    /// Sends a sample, if the last one is a minute old.
    pub(super) fn offer(&mut self, sample: &Sample) {
        self.after_gap |= sample.after_gap;
        if self.last_ms.is_none_or(|last| last + APART_MS <= sample.time_ms) {
            self.last_ms = Some(sample.time_ms);
            // If the disk is too slow, there is a gap.
            self.after_gap = self.samples.try_send(KeptSample::of(sample, self.after_gap)).is_err();
        }
    }

    /// Sends no more samples, and waits until all are written.
    pub(super) fn finish(self) {
        let Self { samples, written, .. } = self;
        drop(samples);
        if written.recv_timeout(WRITE_LIMIT) == Err(RecvTimeoutError::Timeout) {
            log::warn!("the disk is too slow: the last totals may be missing in the next run");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::sync::Mutex;

    use super::super::tests::{everything, keep, made, scoped};
    use super::super::{EVERY, Past, end};
    use super::*;

    const NOW_MS: u64 = 1_000_000;

    /// The sample of a profile at some second, with so many samples in use.
    fn sample(second: u64, samples: u64, after_gap: bool) -> KeptSample {
        let mut history = History::default();
        history.add(&made(second, samples), EVERY);
        KeptSample::of(history.samples().next_back().unwrap(), after_gap)
    }

    /// What is in a spool after samples at these seconds, the first one after a gap.
    fn spool(seconds: &[u64]) -> tempfile::TempDir {
        let spool = tempfile::tempdir().unwrap();
        let mut kept = open(&spool);
        for (number, &second) in (1..).zip(seconds) {
            kept.writer.write(&sample(second, number, number == 1)).unwrap();
        }
        spool
    }

    fn open(spool: &tempfile::TempDir) -> KeptHistory {
        KeptHistory::open_at(spool.path(), NOW_MS).unwrap()
    }

    fn past(kept: &KeptHistory) -> Past {
        kept.history.answer(0, u64::MAX, &everything())
    }

    fn seconds(kept: &KeptHistory) -> Vec<u64> {
        past(kept).time_ms.iter().map(|time_ms| time_ms / 1000).collect()
    }

    #[test]
    fn a_later_run_has_the_figures_and_no_rate_across() {
        let spool = spool(&[100, 160]);
        let mut kept = open(&spool);
        // The next run begins at once: no longer than between two samples.
        kept.history.add(&made(170, 9), EVERY);
        kept.history.add(&made(180, 9), EVERY);
        let mut whole = History::default();
        for (second, samples) in [(100, 1), (160, 2), (170, 9)] {
            whole.add(&made(second, samples), EVERY);
        }
        let (past, whole) = (past(&kept), whole.answer(0, u64::MAX, &everything()));
        assert_eq!(past.time_ms, [100_000, 160_000, 170_000, 180_000]);
        assert_eq!(past.after_gap, [1, 0, 1, 0]);
        assert_eq!(past.alloc_per_second, [None, Some(16_667), None, Some(0)]);
        assert_eq!((&past.inuse[..3], &past.low[..3], &past.high[..3]), (&*whole.inuse, &*whole.low, &*whole.high));
        assert!(past.programs.len() == whole.programs.len() && !past.programs.is_empty());
    }

    #[test]
    fn tokens_see_no_more_of_it_than_of_the_present() {
        let spool = spool(&[100]);
        let mut kept = open(&spool);
        let is_seen = |kept: &KeptHistory, key: &str, value: &str| {
            let seen = kept.history.answer(100_000, 100_000, &scoped(key, value));
            assert_eq!(seen.inuse[0].is_some(), !seen.programs.is_empty());
            seen.inuse[0].is_some()
        };
        assert!(is_seen(&kept, "comm", "server") && !is_seen(&kept, "comm", "nobody"));
        assert!(!is_seen(&kept, "pid", "4242"), "another process may have had it");
        kept.history.add(&made(170, 1), EVERY);
        assert!(is_seen(&kept, "pid", "4242") && !is_seen(&kept, "pid", "1"), "the same process still runs");
    }

    #[test]
    fn damage_hides_what_follows_it_and_no_later_run() {
        let whole = spool(&[100, 160, 220]);
        let bytes = fs::read(whole.path().join(DIR).join(CURRENT)).unwrap();
        let first = bytes.len() - split(&bytes).unwrap().2.len();
        let second = bytes.len() - split(&bytes[first..]).unwrap().2.len();
        let changed = |at: usize| {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            bytes
        };
        let other = KeptSample { time_ms: 161_000, ..sample(160, 1, false) }.record().unwrap();
        let mut lying = [&bytes[..first], &other[..]].concat();
        lying[first + 4..first + HEADER].copy_from_slice(&160_000_u64.to_le_bytes());
        for (damaged, expected) in [
            (changed(first + HEADER + 20), vec![100]),
            (changed(second - 1), vec![100]),
            (bytes[..second - 1].to_vec(), vec![100]),
            ([&bytes[..second], &[0xff; 40][..]].concat(), vec![100, 160]),
            (lying, vec![100]),
            (b"something else entirely".to_vec(), vec![]),
        ] {
            fs::write(whole.path().join(DIR).join(CURRENT), damaged).unwrap();
            let mut kept = open(&whole);
            assert_eq!(seconds(&kept), expected);
            kept.writer.write(&sample(300, 1, true)).unwrap();
            drop(kept);
            assert_eq!(seconds(&open(&whole)), [&expected[..], &[300][..]].concat());
        }
    }

    #[test]
    fn times_to_come_and_times_long_ago_are_left_out() {
        let spool = spool(&[100, 90, 160, 2_000, 220]);
        assert_eq!(seconds(&open(&spool)), [100, 160, 220]);
        let later = KeptHistory::open_at(spool.path(), 160_000 + LONGEST_MS).unwrap();
        assert_eq!(seconds(&later), [160, 2_000]);
    }

    #[test]
    fn a_record_cannot_take_more_memory_than_a_sample() {
        let spool = tempfile::tempdir().unwrap();
        let dir = OwnDir::open(spool.path(), DIR).unwrap();
        let mut file = dir.file(CURRENT, true).unwrap().unwrap();
        let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
        gzip.write_all(&vec![b' '; MOST_SAMPLE_BYTES as usize + 1]).unwrap();
        let spaces = gzip.finish().unwrap();
        let header = [&(spaces.len() as u32).to_le_bytes()[..], &100_000_u64.to_le_bytes()].concat();
        file.write_all(&[header, spaces].concat()).unwrap();
        drop(dir);
        let kept = open(&spool);
        assert_eq!((seconds(&kept), kept.writer.bytes), (vec![], 0));
    }

    #[test]
    fn long_names_leave_out_the_smallest_processes() {
        let mut history = History::default();
        let processes: Vec<_> = (0..100).map(|pid| (pid, 1.0, 1.0)).collect();
        keep(&mut history, 100, true, &processes, &"\u{1}".repeat(4000));
        let sample = KeptSample::of(history.samples().next_back().unwrap(), true);
        assert!(sample.more && (1..100).contains(&sample.largest.len()), "{}", sample.largest.len());
        assert!(split(&sample.record().unwrap()).is_some());
    }

    #[test]
    fn disk_is_bounded_and_the_newest_stay() {
        let spool = tempfile::tempdir().unwrap();
        let mut kept = open(&spool);
        let size = sample(100, 1, false).record().unwrap().len() as u64;
        kept.writer.most_bytes = 3 * size + size / 2;
        for second in 0..20 {
            kept.writer.write(&sample(100 + second * 60, 1, false)).unwrap();
            let files = [CURRENT, BEFORE].map(|name| spool.path().join(DIR).join(name).metadata());
            let sizes = files.map(|file| file.map_or(0, |about| about.len()));
            assert!(sizes.iter().all(|bytes| *bytes <= kept.writer.most_bytes), "{sizes:?}");
        }
        drop(kept);
        let kept = KeptHistory::open_at(spool.path(), 2 * NOW_MS).unwrap();
        let seconds = seconds(&kept);
        assert!((4..=6).contains(&seconds.len()) && seconds.last() == Some(&1240), "{seconds:?}");
    }

    #[test]
    fn files_that_are_not_ours_are_refused_and_not_followed() {
        let spool = tempfile::tempdir().unwrap();
        let victim = spool.path().join("victim");
        fs::write(&victim, "secret").unwrap();
        drop(open(&spool));
        for name in [CURRENT, BEFORE] {
            let path = spool.path().join(DIR).join(name);
            let refused = || {
                let error = KeptHistory::open_at(spool.path(), NOW_MS).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("regular file") && error.contains("--spool"), "{error}");
            };
            let _ = fs::remove_file(&path);
            symlink(&victim, &path).unwrap();
            refused();
            fs::remove_file(&path).unwrap();
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
            refused();
            fs::remove_file(&path).unwrap();
        }
        assert_eq!(fs::read_to_string(&victim).unwrap(), "secret");
        let used = open(&spool);
        assert!(KeptHistory::open_at(spool.path(), NOW_MS).unwrap_err().to_string().contains("another heapbpf"));
        drop(used);
    }

    #[test]
    fn a_short_run_leaves_its_first_figures_and_its_last() {
        let spool = tempfile::tempdir().unwrap();
        let history = Mutex::new(open(&spool).start().unwrap());
        let mut empty = made(100, 1);
        empty.profile.rows.clear();
        for made in [empty, made(110, 2), made(120, 3)] {
            history.lock().unwrap().add(&made, EVERY);
        }
        end(&history, &made(125, 4), EVERY);
        // The directory is in use until all is written.
        let kept = loop {
            match KeptHistory::open_at(spool.path(), NOW_MS) {
                Ok(kept) => break kept,
                Err(_) => std::thread::yield_now(),
            }
        };
        let past = past(&kept);
        assert_eq!((&*past.time_ms, &*past.after_gap), (&[110_000, 125_000][..], &[1, 0][..]));
        assert!(past.inuse[0].is_some() && past.inuse[0] < past.inuse[1], "{past:?}");
    }

    #[test]
    fn a_sample_a_minute_is_written_and_gaps_between_them_stay() {
        let (keeper, samples, _writing) = Keeper::new();
        let mut history = History { keeper: Some(keeper), ..History::default() };
        for second in [100, 110, 160, 190, 200, 210, 220] {
            history.add(&made(second, 1), EVERY);
        }
        let sent = |samples: &Receiver<KeptSample>| -> Vec<(u64, bool)> {
            samples.try_iter().map(|sample| (sample.time_ms / 1000, sample.after_gap)).collect()
        };
        assert_eq!(sent(&samples), [(100, true), (160, true), (220, true)], "160 and 190 follow a gap");
        // Nobody takes them.
        (300..300 + 60 * 10).step_by(10).for_each(|second| history.add(&made(second, 1), EVERY));
        assert_eq!(sent(&samples), [(300, true), (360, false), (420, false), (480, false)]);
        (900..=960).step_by(10).for_each(|second| history.add(&made(second, 1), EVERY));
        assert_eq!(sent(&samples), [(900, true), (960, false)]);
    }
}
