//! Decides who owns what an earlier run left in a process, and whether it may be removed.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use heapbpf_host::in_root::open_own;
use heapbpf_inline::ForeignBlob;
use heapbpf_inline::abi::{CONTROL, CONTROL_BYTES, TEXT_BYTES};
use heapbpf_inline::read;
use heapbpf_remote::{FoundBlob, Target, blob_range, left_open};

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// It belongs to a running heapbpf.
    InUse,
    /// It is ours, and nothing uses it.
    Abandoned,
    /// It must not be touched.
    Foreign(ForeignBlob),
}

/// Opens the file that is mapped at exactly these addresses.
pub(super) fn open_mapped(pid: u32, range: &Range<u64>) -> io::Result<File> {
    open_own(format!("/proc/{pid}/map_files/{:x}-{:x}", range.start, range.end).as_ref())
}

/// A claim on something abandoned, held by whoever is removing it. Until it is dropped, nothing starts to use it;
/// others may remove it, too.
pub struct Claim(#[expect(dead_code, reason = "they hold the locks")] Vec<File>);

/// Claims a blob that was found in a process.
///
/// # Errors
/// The blob is in use or not ours, as [`judge`] reports.
pub fn claim(pid: u32, found: &FoundBlob) -> Result<Claim, Left> {
    // The heapbpf that uses it holds an exclusive lock. A heapbpf that has mapped it, but not locked it yet, finds it
    // locked from here on.
    let lock = |file: File| match file.try_lock_shared() {
        Err(std::fs::TryLockError::WouldBlock) => Err(Left::InUse),
        _ => Ok(file),
    };
    // If the text is missing, the mapping was interrupted early, and no jump leads to the blob.
    let Some(text) = &found.text else {
        let open = left_open(pid).filter(|(_, link)| blob_range(link).as_ref() == Some(&found.range));
        let files = open.filter_map(|(fd, _)| open_own(format!("/proc/{pid}/fd/{fd}").as_ref()).ok());
        return files.map(lock).collect::<Result<_, _>>().map(Claim);
    };
    let file = open_mapped(pid, text).map_err(|_| Left::Foreign(ForeignBlob::Truncated)).and_then(lock)?;
    check(pid, found.range.start, &file).map_err(Left::Foreign)?;
    Ok(Claim(vec![file]))
}

/// Finds the unused blobs that earlier recordings of this build left in a process, each with its memfd. Until the memfd
/// is closed, nothing else uses the blob.
pub(super) fn unused(target: &Target) -> impl Iterator<Item = (FoundBlob, File, read::CheckedBlob)> {
    let pid = target.pid().unsigned_abs();
    target.found().into_iter().filter(FoundBlob::is_inert).filter_map(move |found| {
        let text = open_mapped(pid, found.text.as_ref()?).ok().filter(|text| text.try_lock().is_ok())?;
        let code = check(pid, found.range.start, &text).ok()?;
        Some((found, text, code))
    })
}

/// Judges a blob that was found in a process.
pub fn judge(pid: u32, found: &FoundBlob) -> Left {
    claim(pid, found).map_or_else(|left| left, |_| Left::Abandoned)
}

/// Reads a blob, and checks that it is one of this build.
pub(super) fn blob_in(file: &File) -> Result<read::CheckedBlob, ForeignBlob> {
    let code = heapbpf_inline_blob::code().ok_or(ForeignBlob::OtherCode)?;
    let mut text = vec![0; TEXT_BYTES as usize];
    file.read_exact_at(&mut text, 0).map_err(|_| ForeignBlob::Truncated)?;
    read::CheckedBlob::check(&text, &code)
}

/// The same for a blob in a process, with a valid control page.
fn check(pid: u32, base: u64, file: &File) -> Result<read::CheckedBlob, ForeignBlob> {
    let found = blob_in(file)?;
    let mut control = vec![0; CONTROL_BYTES as usize];
    let memory = File::open(format!("/proc/{pid}/mem"));
    let is_read = memory.and_then(|memory| memory.read_exact_at(&mut control, base + CONTROL));
    is_read.map_err(|_| ForeignBlob::Truncated)?;
    read::control(&control).map(|_| found)
}
