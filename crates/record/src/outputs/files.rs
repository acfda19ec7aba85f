//! The files of a recording: the profile at its end, and numbered snapshots before it.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use tokio::sync::Notify;

use crate::output::{self, Output, OutputError};
use crate::plan::OutputPlan;

/// Where snapshots go: beside the outputs; if there are none and a signal asks for a snapshot, to files with a default
/// name.
pub fn snapshot_outputs(plan: &OutputPlan, first: Option<(&str, u32)>) -> Vec<Output> {
    if !plan.files.is_empty() {
        return plan.files.clone();
    }
    let path = output::default_path(std::path::Path::new("."), first, plan.default_format);
    vec![Output::new(path, plan.default_format, false)]
}

/// Files, each with the command that opens it.
pub type Written = Vec<(String, String)>;

/// Writes a profile to all outputs, even if one of them fails. Calls `before` for each. Returns the written files, and
/// the first failure.
pub fn write_outputs(
    outputs: &[Output],
    profile: &Profile,
    options: &WriteOptions,
    mut before: impl FnMut(&Output),
) -> (Written, Result<(), OutputError>) {
    let (mut written, mut result) = (Vec::new(), Ok(()));
    for output in outputs {
        before(output);
        match output.write(profile, options) {
            Ok(paths) => written.extend(paths.into_iter().map(|path| {
                let path = path.display().to_string();
                let how_to_open = output.format.how_to_open(&path);
                (path, how_to_open)
            })),
            Err(error) => result = result.and(Err(error)),
        }
    }
    (written, result)
}

/// Numbered snapshots: `name.0001.pb.gz`, ….
pub struct SnapshotFiles {
    shared: Arc<Shared>,
    number: u32,
    /// Why the next snapshot is wanted, if it is. All requests that arrive while one is being written lead to a single
    /// snapshot after it.
    wanted: Option<String>,
}

struct Shared {
    outputs: Vec<Output>,
    options: WriteOptions,
    /// How many snapshots stay on disk; older ones are removed.
    keep: Option<usize>,
    written: Mutex<VecDeque<Vec<PathBuf>>>,
    /// Snapshots of this recording that were written completely.
    whole: AtomicU64,
    busy: AtomicBool,
    done: Notify,
}

/// A permit to write one snapshot, from any thread. There is no other permit until it has been used or dropped.
pub struct SnapshotTurn {
    shared: Arc<Shared>,
    number: u32,
}

impl SnapshotFiles {
    /// Starts without snapshots. Numbers continue after those that earlier recordings wrote under the same names.
    pub fn new(outputs: &[Output], options: WriteOptions, keep: Option<usize>) -> Self {
        let outputs: Vec<Output> = outputs.iter().filter(|output| output.takes_snapshots()).cloned().collect();
        let earlier = earlier(&outputs);
        let number = earlier.last_key_value().map_or(0, |(number, _)| *number);
        let written = Mutex::new(earlier.into_values().collect());
        let (busy, done, whole) = Default::default();
        let shared = Shared { outputs, options, keep, written, whole, busy, done };
        Self { shared: Arc::new(shared), number, wanted: None }
    }

    /// Asks for a snapshot. If several triggers fire before it is taken, only the last is reported.
    pub fn ask(&mut self, why: String) {
        self.wanted = Some(why);
    }

    /// The permit for a wanted snapshot, and why it is wanted. `None` while the previous one is still being written.
    pub fn next(&mut self) -> Option<(SnapshotTurn, String)> {
        if self.shared.outputs.is_empty() {
            self.wanted = None;
        }
        if self.wanted.is_none() || self.shared.busy.swap(true, Ordering::AcqRel) {
            return None;
        }
        self.number = self.number.saturating_add(1);
        let turn = SnapshotTurn { shared: Arc::clone(&self.shared), number: self.number };
        self.wanted.take().map(|why| (turn, why))
    }

    /// Puts back a snapshot that could not be taken. It is still wanted.
    pub fn put_back(&mut self, turn: SnapshotTurn, why: String) {
        self.number = turn.number.saturating_sub(1);
        self.wanted.get_or_insert(why);
    }

    /// How many snapshots were written, and where the last one is.
    pub fn written(&self) -> Option<(u64, PathBuf)> {
        let whole = self.shared.whole.load(Ordering::Acquire);
        let written = self.shared.written.lock().unwrap_or_else(PoisonError::into_inner);
        let last = written.iter().rev().find_map(|paths| paths.first())?;
        (whole > 0).then(|| (whole, last.clone()))
    }

    /// Waits until the snapshot that is being written is done.
    pub async fn done(&self) {
        self.shared.done.notified().await;
    }
}

/// Snapshots that earlier recordings left behind, by number.
fn earlier(outputs: &[Output]) -> BTreeMap<u32, Vec<PathBuf>> {
    let mut found: BTreeMap<u32, Vec<PathBuf>> = BTreeMap::new();
    for output in outputs {
        let entries = std::fs::read_dir(output::dir_of(output.path())).into_iter().flatten().flatten();
        for entry in entries {
            let path = entry.path();
            let name = path.file_name().and_then(OsStr::to_str);
            let number = name.and_then(|name| output::snapshot_number(output.path(), output.format, name));
            if let Some(number) = number {
                let paths = found.entry(number).or_default();
                // Only regular files are removed as snapshots. The numbers of other files are not reused either.
                if entry.file_type().is_ok_and(|kind| kind.is_file()) {
                    paths.push(path);
                }
            }
        }
    }
    found
}

impl SnapshotTurn {
    /// Writes the snapshot, and removes the oldest ones beyond the number to keep.
    ///
    /// # Errors
    /// The first file that could not be written; the number counts as used.
    pub fn write(self, profile: &Profile) -> Result<(), OutputError> {
        let Shared { outputs, options, keep, written, whole, .. } = &*self.shared;
        let mut paths = Vec::new();
        let mut result = Ok(());
        for output in outputs {
            match output.numbered(self.number).write(profile, options) {
                Ok(files) => paths.extend(files),
                Err(error) => result = result.and(Err(error)),
            }
        }
        whole.fetch_add(u64::from(result.is_ok()), Ordering::AcqRel);
        let mut written = written.lock().unwrap_or_else(PoisonError::into_inner);
        written.push_back(paths);
        while keep.is_some_and(|keep| written.len() > keep) {
            for path in written.pop_front().unwrap_or_default() {
                if let Err(error) = std::fs::remove_file(&path) {
                    log::warn!("cannot remove {}: {error}", path.display());
                }
            }
        }
        result
    }
}

impl Drop for SnapshotTurn {
    fn drop(&mut self) {
        self.shared.busy.store(false, Ordering::Release);
        self.shared.done.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::formats;
    use heapbpf_profile::testing;

    use super::*;

    fn names(dir: &std::path::Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_that_cannot_be_written_takes_no_other_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = ["gone/a.json", "b.folded"].map(|name| {
            let path = dir.path().join(name);
            Output::new(path.clone(), formats::by_extension(&path).unwrap(), false)
        });
        let mut reported = Vec::new();
        let report = |output: &Output| reported.push(output.path().to_owned());
        let (written, result) = write_outputs(&outputs, &testing::small(), &WriteOptions::default(), report);
        assert!(reported.iter().eq(outputs.iter().map(Output::path)));
        assert!(result.unwrap_err().to_string().contains("a.json"));
        assert_eq!(written.len(), 1);
        assert_eq!(names(dir.path()), ["b.folded"]);
    }

    #[test]
    fn the_oldest_snapshots_make_way_and_one_is_written_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let outputs = ["a.json", "b.folded"].map(|name| {
            let path = dir.path().join(name);
            Output::new(path.clone(), formats::by_extension(&path).unwrap(), false)
        });
        let mut files = SnapshotFiles::new(&outputs, WriteOptions::default(), Some(2));
        assert!(files.next().is_none(), "nobody has asked");
        files.ask("first".into());
        for number in 0..4 {
            let (turn, why) = files.next().unwrap();
            assert_eq!(why, if number == 0 { "first" } else { "while another was written" });
            files.ask("soon overtaken".into());
            files.ask("while another was written".into());
            assert!(files.next().is_none(), "the one before is not written yet");
            turn.write(&testing::small()).unwrap();
        }
        assert_eq!(names(dir.path()), ["a.0003.json", "a.0004.json", "b.0003.folded", "b.0004.folded"]);
        assert_eq!(files.written(), Some((4, dir.path().join("a.0004.json"))));
        // The next recording continues the numbers.
        let mut files = SnapshotFiles::new(&outputs, WriteOptions::default(), Some(2));
        assert_eq!(files.written(), None, "those are another's");
        files.ask("again".into());
        files.next().unwrap().0.write(&testing::small()).unwrap();
        assert_eq!(names(dir.path()), ["a.0004.json", "a.0005.json", "b.0004.folded", "b.0005.folded"]);
    }

    #[test]
    fn what_is_no_file_has_no_snapshots_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let listener = |name: &str| std::os::unix::net::UnixListener::bind(dir.path().join(name)).unwrap();
        let output = |name: &str| {
            let path = dir.path().join(name);
            Output::new(path.clone(), formats::by_extension(&path).unwrap(), false)
        };
        let _listeners = ["special.json", "a.0003.json"].map(listener);
        let mut none = SnapshotFiles::new(&[output("special.json")], WriteOptions::default(), Some(1));
        none.ask("nothing to write".into());
        assert!(none.next().is_none());
        // A number whose name is taken is skipped.
        let mut files =
            SnapshotFiles::new(&[output("special.json"), output("a.json")], WriteOptions::default(), Some(1));
        for _ in 0..2 {
            files.ask("asked for".into());
            files.next().unwrap().0.write(&testing::small()).unwrap();
        }
        assert_eq!(names(dir.path()), ["a.0003.json", "a.0005.json", "special.json"]);
    }
}
