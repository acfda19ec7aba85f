//! Finds what an earlier run left in a process, whichever step it ended at: in `/proc/PID/maps`, and among open
//! descriptors.

use std::fs;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::maps::{Mapping, Maps, PAGE_BYTES};
use crate::plan::{Kept, MAX_BYTES, MAX_REPLACED_BYTES, NAME_PREFIX};

/// Most blobs of one process that are examined.
const MAX_FOUND: usize = 64;
/// Most runs of pages of one process that are recognised as put back. A blob replaces a few.
const MAX_PUT_BACK: usize = 128;

/// A blob that is mapped into a process.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct FoundBlob {
    /// Name that its plan gave it.
    pub name: String,
    /// Its addresses, including spare places.
    pub range: Range<u64>,
    /// Device of its memfd, as in the maps file.
    pub device: String,
    /// Inode of its memfd.
    pub inode: u64,
    /// Addresses of its text, if that is mapped. Then everything that precedes it is in place.
    pub text: Option<Range<u64>>,
    /// Replaced pages, and where the original ones are kept.
    pub(crate) pages: Vec<Kept>,
    /// Pages that were put back while their spare places are still mapped: the injector may have stopped there.
    pub(crate) put_back: Vec<Kept>,
    /// Memory that can be written.
    pub(crate) data: Option<Range<u64>>,
    /// Whether it is laid out as its name says, so that it can be removed.
    pub(crate) is_sound: bool,
    /// Whether anything is mapped; otherwise only a descriptor of the memfd is open.
    pub(crate) is_mapped: bool,
    /// Whether a descriptor of the memfd is open.
    is_open: bool,
}

impl FoundBlob {
    /// A blob of which only this is known so far.
    fn new(name: String, range: Range<u64>, device: &str, inode: u64) -> Self {
        let device = device.to_owned();
        Self { name, range, device, inode, is_sound: true, is_mapped: true, ..Self::default() }
    }

    /// Bytes of all pages whose originals it has, or had.
    fn kept_bytes(&self) -> u64 {
        self.pages.iter().chain(&self.put_back).map(|kept| kept.bytes).fold(0, u64::saturating_add)
    }

    /// Whether jumps lead into it.
    #[must_use]
    pub fn is_hooked(&self) -> bool {
        !self.pages.is_empty()
    }

    /// Whether it is complete and needs no cleanup: no jump leads to it, and removing the jumps was not interrupted.
    #[must_use]
    pub fn is_inert(&self) -> bool {
        self.is_sound && self.text.is_some() && self.pages.is_empty() && self.put_back.is_empty() && !self.is_open
    }

    /// Link target of descriptors of its memfd.
    pub(crate) fn link(&self) -> String {
        let Range { start, end } = self.range;
        format!("/memfd:{}-{start:x}-{:x} (deleted)", self.name, end - start)
    }

    /// Addresses of the pages that it replaces.
    pub fn replaced(&self) -> impl Iterator<Item = Range<u64>> {
        self.pages.iter().map(|kept| kept.start..kept.start + kept.bytes)
    }
}

/// Name, intended address and length of our memfd, from its path: `/memfd:heapbpf-inline-7f0000000000-6000 (deleted)`.
pub(crate) fn parse_name(path: &str) -> Option<(String, Range<u64>)> {
    let name = path.strip_prefix("/memfd:")?.trim_end_matches(" (deleted)");
    let mut fields = name.rsplitn(3, '-');
    let bytes = u64::from_str_radix(fields.next()?, 16).ok()?;
    let base = u64::from_str_radix(fields.next()?, 16).ok()?;
    let name = fields.next().filter(|name| name.starts_with(NAME_PREFIX))?;
    let is_whole = bytes.is_multiple_of(PAGE_BYTES) && base.is_multiple_of(PAGE_BYTES);
    (is_whole && base != 0 && bytes != 0 && bytes <= MAX_BYTES)
        .then_some(())
        .and_then(|()| Some((name.to_owned(), base..base.checked_add(bytes)?)))
}

/// Where a blob is mapped, including spare places, from its memfd's path in a maps file; `None` if it is not one of
/// ours.
#[must_use]
pub fn blob_range(path: &str) -> Option<Range<u64>> {
    parse_name(path).map(|(_, range)| range)
}

/// Records open descriptors of memfds, given their links, and adds blobs of which nothing else is left.
pub(crate) fn add_open(all: &mut Vec<FoundBlob>, links: impl Iterator<Item = String>) {
    for (name, range) in links.filter_map(|link| parse_name(&link)) {
        if let Some(found) = all.iter_mut().find(|found| found.range == range && found.name == name) {
            found.is_open = true;
        } else if all.len() < MAX_FOUND {
            all.push(FoundBlob { is_mapped: false, is_open: true, ..FoundBlob::new(name, range, "", 0) });
        }
    }
}

/// Finds all blobs of a process. Anything may have made such mappings, so inconsistent ones are marked.
pub(crate) fn find(maps: &Maps) -> Vec<FoundBlob> {
    let mut all: Vec<FoundBlob> = Vec::new();
    for mapping in maps.as_slice() {
        let Some((name, range)) = parse_name(&mapping.name) else { continue };
        let known = |found: &FoundBlob| found.inode == mapping.inode && found.range == range;
        let place = all.iter().position(known).unwrap_or(all.len());
        if place == MAX_FOUND {
            continue;
        }
        if place == all.len() {
            all.push(FoundBlob::new(name, range, &mapping.device, mapping.inode));
        }
        let found = &mut all[place];
        add(found, mapping, maps);
    }
    add_put_back(&mut all, maps);
    for found in &mut all {
        let data = maps.within(&found.range).iter().filter(|it| it.is_writable && !it.is_shared && it.is_anonymous());
        let data = data.map(|mapping| mapping.range.clone());
        found.data = data.reduce(|whole, next| whole.start..if next.start == whole.end { next.end } else { whole.end });
    }
    all
}

/// Adds pages whose spare places are mapped although they are not replaced.
fn add_put_back(all: &mut [FoundBlob], maps: &Maps) {
    let blobs: Vec<_> = all.iter().map(|found| found.range.clone()).collect();
    let is_in_blob = |address| blobs.iter().any(|blob| blob.contains(&address));
    let mut left = MAX_PUT_BACK;
    for found in all {
        for spare in maps.within(&found.range).iter().filter(|mapping| is_original(mapping)) {
            let Range { start, end } = spare.range;
            let replaced = found.pages.iter().map(|kept| {
                let (from, to) = (kept.spare.max(start), (kept.spare + kept.bytes).min(end));
                to.saturating_sub(from)
            });
            let replaced: u64 = replaced.sum();
            if replaced > 0 {
                continue;
            }
            let bytes = found.kept_bytes().saturating_add(spare.bytes());
            if left == 0 || bytes > MAX_REPLACED_BYTES || end > found.range.end {
                return;
            }
            left -= 1;
            let text = maps.as_slice().iter().filter(|mapping| is_original(mapping));
            let mut places = text.filter_map(|mapping| place_in(mapping, spare));
            let kept = places.find(|place| !is_in_blob(*place)).map(|place| Kept {
                start: place,
                spare: start,
                bytes: spare.bytes(),
                offset: spare.offset,
            });
            found.put_back.extend(kept);
        }
    }
}

/// Where this mapping has the content that `other` begins with, if both map the same file.
fn place_in(mapping: &Mapping, other: &Mapping) -> Option<u64> {
    let further = other.offset.checked_sub(mapping.offset).filter(|further| *further < mapping.bytes())?;
    let is_of_file = (mapping.inode, &mapping.device) == (other.inode, &other.device);
    is_of_file.then(|| mapping.range.start + further)
}

fn add(found: &mut FoundBlob, mapping: &Mapping, maps: &Maps) {
    if !found.is_sound {
        return;
    }
    let Range { start, end } = mapping.range;
    let at = found.range.start.checked_add(mapping.offset);
    if found.range.contains(&start) {
        // A copy is mapped behind the place that it is a copy of.
        found.is_sound &=
            end <= found.range.end && at.is_some_and(|at| at == start || mapping.is_executable && at < start);
        if mapping.is_executable && at == Some(start) {
            found.text = Some(mapping.range.clone());
        }
        return;
    }
    let bytes = end - start;
    let kept = at.and_then(|spare| {
        let end = spare.checked_add(bytes).filter(|end| *end <= found.range.end)?;
        let offset = offset_of_text(maps, &(spare..end))?;
        Some(Kept { start, spare, bytes, offset })
    });
    let is_known = |kept: &Kept| found.kept_bytes().saturating_add(kept.bytes) <= MAX_REPLACED_BYTES;
    let kept = kept.filter(is_known);
    found.is_sound &= kept.is_some();
    found.pages.extend(kept);
}

/// File offset of the kept pages, if one mapping of a file other than ours contains all of them.
fn offset_of_text(maps: &Maps, kept: &Range<u64>) -> Option<u64> {
    let mapping = maps.at(kept.start)?;
    (is_original(mapping) && mapping.covers(kept))
        .then(|| mapping.offset.saturating_add(kept.start - mapping.range.start))
}

/// Whether it maps code of a file other than ours, as pages do before they are replaced.
fn is_original(mapping: &Mapping) -> bool {
    mapping.is_text() && parse_name(&mapping.name).is_none()
}

/// Most descriptors of a process that are examined.
const MAX_DESCRIPTORS: usize = 1 << 16;

/// Descriptors of our memfds that a process opened to map them, and their link targets: an injector that died left them
/// open. A process that watches a hooked one also has its memfd open, but read-only.
pub fn left_open(pid: u32) -> impl Iterator<Item = (u64, String)> {
    let list = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().map_while(Result::ok);
    list.take(MAX_DESCRIPTORS).filter_map(move |entry| {
        let fd = entry.file_name().to_str()?.parse().ok()?;
        Some((fd, link_left_open(pid, fd)?))
    })
}

/// The link target of one such descriptor; `None` if it is anything else.
pub(crate) fn link_left_open(pid: u32, fd: u64) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?.into_os_string().into_string().ok()?;
    parse_name(&link)?;
    let says = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}")).ok()?;
    is_writable(&says).then_some(link)
}

/// Whether a file of `/proc/PID/fdinfo` describes a descriptor that is open for reading and writing.
fn is_writable(says: &str) -> bool {
    let flags = says.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "/memfd:heapbpf-inline-7e0000000000-6000 (deleted)";

    fn found(lines: &[&str]) -> Vec<FoundBlob> {
        find(&Maps::parse(&lines.join("\n").replace("NAME", NAME), 0))
    }

    #[test]
    fn names_say_where_a_blob_is() {
        let range = 0x7e00_0000_0000..0x7e00_0000_6000;
        assert_eq!(FoundBlob::new("heapbpf-inline".into(), range.clone(), "", 0).link(), NAME);
        assert_eq!(parse_name(NAME), Some(("heapbpf-inline".into(), range)));
        for bad in [
            "heapbpf-a-1000-1000",
            "/memfd:other-1000-1000",
            "/memfd:heapbpf--1000",
            "/memfd:heapbpf-a-1001-1000",
            "/memfd:heapbpf-a-0-1000",
            "/memfd:heapbpf-a-1000-0",
            "/memfd:heapbpf-a-1000-40001000",
            "/memfd:heapbpf-a-fffffffffffff000-2000",
            "/memfd:heapbpf-a-10000000000000000-2000",
        ] {
            assert_eq!(parse_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_hooked_process_is_recognised() {
        let all = found(&[
            "7e0000000000-7e0000001000 r-xp 00000000 00:01 5 NAME",
            "7e0000001000-7e0000002000 rw-p 00000000 00:00 0",
            "7e0000002000-7e0000004000 ---p 00002000 00:01 5 NAME",
            "7e0000004000-7e0000006000 r-xp 00028000 fe:00 9 /lib/libc.so.6",
            "7f0000000000-7f0000001000 r-xp 00005000 00:01 5 NAME",
        ]);
        assert_eq!(all.len(), 1);
        let kept = Kept { start: 0x7f00_0000_0000, spare: 0x7e00_0000_5000, bytes: 0x1000, offset: 0x29000 };
        assert_eq!((all[0].pages.as_slice(), all[0].is_sound, all[0].is_hooked()), (&[kept][..], true, true));
        assert_eq!(all[0].text, Some(0x7e00_0000_0000..0x7e00_0000_1000));
        assert!(all[0].replaced().eq(std::iter::once(0x7f00_0000_0000..0x7f00_0000_1000)));
    }

    #[test]
    fn what_is_whole_and_let_go_is_inert_once_its_descriptor_is_closed() {
        let mut all = found(&[
            "7e0000000000-7e0000001000 r-xp 00000000 00:01 5 NAME",
            "7e0000001000-7e0000002000 rw-p 00000000 00:00 0",
            "7e0000003000-7e0000004000 r-xp 00002000 00:01 5 NAME",
        ]);
        assert!(all[0].is_inert() && !all[0].is_hooked(), "the copy is behind its place");
        assert_eq!(all[0].data, Some(0x7e00_0000_1000..0x7e00_0000_2000));
        add_open(&mut all, [NAME.to_owned()].into_iter());
        assert!(all.len() == 1 && !all[0].is_inert());
        assert!(!found(&["7e0000003000-7e0000004000 r-xp 00002000 00:01 5 NAME"])[0].is_inert(), "without text");
        assert!(!found(&["7e0000003000-7e0000004000 r-xp 00004000 00:01 5 NAME"])[0].is_sound, "before its place");
    }

    #[test]
    fn pages_that_were_put_back_are_known_by_their_spare_places() {
        let blob = [
            "7e0000000000-7e0000001000 r-xp 00000000 00:01 5 NAME",
            "7e0000002000-7e0000003000 ---p 00002000 00:01 5 NAME",
            "7e0000003000-7e0000005000 r-xp 00028000 fe:00 9 /lib/libc.so.6",
        ];
        let kept = |start| Kept { start, spare: 0x7e00_0000_3000, bytes: 0x2000, offset: 0x28000 };
        let put_back = |lines: &[&str]| {
            let all = found(&[&blob[..], lines].concat());
            assert!(all.len() == 1 && all[0].is_sound);
            all[0].put_back.clone()
        };
        // In one piece, beside another file's text; in three; and not at all.
        let (before, whole) = (
            "7d0000000000-7d0000029000 r-xp 00000000 fe:01 9 /lib/other.so",
            "7f0000000000-7f0000040000 r-xp 00010000 fe:00 9 /lib/libc.so.6",
        );
        assert_eq!(put_back(&[before, whole]), [kept(0x7f00_0001_8000)]);
        let parts = [
            "7f0000000000-7f0000018000 r-xp 00010000 fe:00 9 /lib/libc.so.6",
            "7f0000018000-7f0000019000 r-xp 00028000 fe:00 9 /lib/libc.so.6",
            "7f0000019000-7f0000040000 r-xp 00029000 fe:00 9 /lib/libc.so.6",
        ];
        assert_eq!(put_back(&parts), [kept(0x7f00_0001_8000)]);
        assert_eq!(put_back(&parts[..1]), []);
        assert_eq!(put_back(&["7f0000018000-7f000001a000 rw-p 00028000 fe:00 9 /lib/libc.so.6"]), []);
        // While they are replaced, another mapping of the file is not one of ours.
        assert_eq!(put_back(&["7f0000018000-7f000001a000 r-xp 00003000 00:01 5 NAME", whole]), []);
    }

    #[test]
    fn a_blob_that_replaces_too_much_is_marked() {
        let lines = |bytes: u64| {
            let (name, spare) = ("/memfd:heapbpf-inline-7e0000000000-20000000 (deleted)", 0x7e00_0000_1000_u64);
            [
                format!("7e0000000000-7e0000001000 r-xp 00000000 00:01 5 {name}"),
                format!("{spare:x}-{:x} r-xp 00000000 fe:00 9 /lib/libc.so.6", spare + bytes),
                format!("7f0000000000-{:x} r-xp 00001000 00:01 5 {name}", 0x7f00_0000_0000 + bytes),
            ]
            .join("\n")
        };
        let is_sound = |bytes| find(&Maps::parse(&lines(bytes), 0)).iter().all(|found| found.is_sound);
        assert!(is_sound(MAX_REPLACED_BYTES) && !is_sound(MAX_REPLACED_BYTES + PAGE_BYTES));
    }

    #[test]
    fn what_a_killed_injector_left_is_inert() {
        let all = found(&["7e0000000000-7e0000006000 ---p 00000000 00:01 5 NAME"]);
        assert!(all.len() == 1 && all[0].is_sound && !all[0].is_hooked() && all[0].text.is_none());
    }

    #[test]
    fn a_descriptor_alone_is_found_once() {
        let mut all = found(&["7e0000000000-7e0000006000 ---p 00000000 00:01 5 NAME"]);
        let links = [NAME, "/dev/null", "/memfd:heapbpf-inline-7d0000000000-6000 (deleted)", NAME].map(str::to_owned);
        add_open(&mut all, links.iter().cloned());
        add_open(&mut all, links.into_iter());
        let seen: Vec<_> = all.iter().map(|found| (found.range.start, found.is_mapped)).collect();
        assert_eq!(seen, [(0x7e00_0000_0000, true), (0x7d00_0000_0000, false)]);
    }

    #[test]
    fn mappings_that_only_pretend_are_marked() {
        for lines in [
            // A spare place that holds no text of a file.
            [
                "7e0000000000-7e0000006000 ---p 00000000 00:01 5 NAME",
                "7f0000000000-7f0000001000 r-xp 00005000 00:01 5 NAME",
            ],
            // Not where its name says.
            ["7e0000000000-7e0000006000 ---p 00001000 00:01 5 NAME", ""],
            ["7e0000000000-7e0000007000 ---p 00000000 00:01 5 NAME", ""],
            // An offset beyond the end.
            [
                "7e0000000000-7e0000006000 r-xp 00000000 fe:00 5 /a",
                "7f0000000000-7f0000001000 r-xp ffffffffffffe000 00:01 5 NAME",
            ],
        ] {
            assert!(found(&lines).iter().all(|found| !found.is_sound), "{lines:?}");
        }
        assert_eq!(found(&["7f0000000000-7f0000001000 r-xp 00005000 00:01 5 /memfd:mine"]), []);
    }
}

#[cfg(test)]
mod descriptor_tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, FromRawFd as _};

    #[test]
    fn a_memfd_is_left_open_where_it_was_made_and_not_where_it_is_read() {
        let name = c"heapbpf-inline-7f0000000000-1000";
        // SAFETY: the name is a string that ends with NUL, and the flags are valid.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: the descriptor was just made, and nobody else has it.
        let made = unsafe { File::from_raw_fd(fd) };
        let own = || left_open(std::process::id()).map(|(fd, _)| fd).collect::<Vec<_>>();
        let number = u64::try_from(fd).expect("positive");
        assert_eq!(own(), [number]);
        let link = "/memfd:heapbpf-inline-7f0000000000-1000 (deleted)";
        assert_eq!(link_left_open(std::process::id(), number).as_deref(), Some(link));
        let read = File::open(format!("/proc/self/fd/{}", made.as_raw_fd())).expect("our own file");
        drop(made);
        assert_eq!(own(), [0_u64; 0]);
        assert_eq!(link_left_open(std::process::id(), number), None, "the number may be another file's by now");
        drop(read);
    }

    #[test]
    fn the_access_mode_is_in_octal() {
        assert!(is_writable("pos:\t0\nflags:\t0100002\nmnt_id:\t1\n"));
        assert!(!is_writable("pos:\t0\nflags:\t02100000\n") && !is_writable("flags:\tx\n") && !is_writable(""));
    }
}
