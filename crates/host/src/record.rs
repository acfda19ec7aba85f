//! Decodes perf records, as the kernel writes them, into [`HostEvent`]s. Pure and bounded; never panics.

use perf_event_open_sys::bindings::{
    PERF_RECORD_COMM, PERF_RECORD_EXIT, PERF_RECORD_FORK, PERF_RECORD_LOST, PERF_RECORD_MISC_COMM_EXEC,
    PERF_RECORD_MISC_MMAP_BUILD_ID, PERF_RECORD_MMAP2,
};

/// Longest path that the kernel reports.
const MAX_PATH_BYTES: usize = 4096;

/// A block device by number, as in `stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Device {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

/// A process event. PIDs are those of heapbpf's PID namespace; times are CLOCK_MONOTONIC in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostEvent {
    /// A thread was created, in a new process if `pid` differs from `parent_pid`.
    Fork {
        /// When.
        time_ns: u64,
        /// Process of the new thread.
        pid: u32,
        /// The new thread.
        tid: u32,
        /// Process of the thread that created it.
        parent_pid: u32,
    },
    /// A thread changed its name.
    Comm {
        /// When.
        time_ns: u64,
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
        /// The name, NUL-padded.
        comm: [u8; 16],
        /// Whether an exec changed it. Then the process runs a new program, and its old mappings are gone.
        exec: bool,
    },
    /// A thread ended.
    Exit {
        /// When.
        time_ns: u64,
        /// Process.
        pid: u32,
        /// Thread.
        tid: u32,
    },
    /// An executable mapping was created.
    Map(MapEvent),
    /// Records were lost, so what is known of mappings and processes may be out of date.
    Lost {
        /// When the loss was noticed.
        time_ns: u64,
        /// How many.
        count: u64,
    },
}

/// An executable mapping that appeared, became executable, or grew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapEvent {
    /// When.
    pub time_ns: u64,
    /// Process that mapped it.
    pub pid: u32,
    /// Thread that mapped it.
    pub tid: u32,
    /// First address.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// Offset in the file, in bytes.
    pub file_offset: u64,
    /// Device of the file. Zero if there is no file.
    pub device: Device,
    /// Inode of the file. 0 if there is no file.
    pub inode: u64,
    /// Generation of the inode. It distinguishes files that reuse an inode number.
    pub inode_generation: u64,
    /// `PROT_*`.
    pub prot: u32,
    /// `MAP_*`.
    pub flags: u32,
    /// Path as the process saw it, or `//anon`, `[vdso]` and so on.
    pub path: Box<[u8]>,
    /// Set if this mapping is a copy of the file's pages: address and length of another mapping that has the file
    /// itself ([`replaced_text`](super::replaced_text)).
    pub kept_at: Option<(u64, u64)>,
}

impl MapEvent {
    /// The same event with another address and length.
    #[must_use]
    pub fn at(self, (address, length): (u64, u64)) -> Self {
        Self { address, length, ..self }
    }

    /// Address and length of a mapping of the file itself.
    #[must_use]
    pub fn file_mapping(&self) -> (u64, u64) {
        self.kept_at.unwrap_or((self.address, self.length))
    }
}

impl HostEvent {
    /// CLOCK_MONOTONIC, nanoseconds.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        match self {
            Self::Fork { time_ns, .. }
            | Self::Comm { time_ns, .. }
            | Self::Exit { time_ns, .. }
            | Self::Lost { time_ns, .. } => *time_ns,
            Self::Map(map) => map.time_ns,
        }
    }
}

/// Time of a whole record (header included). It is in the last 8 bytes, because the events have `sample_id_all` and no
/// sample type except `PERF_SAMPLE_TIME`.
#[must_use]
pub fn time_ns(record: &[u8]) -> Option<u64> {
    (record.len() >= 16).then(|| record.last_chunk().map(|bytes| u64::from_ne_bytes(*bytes)))?
}

/// Decodes one whole record (header included). `None` if its kind is not handled, its mapping is not executable, or it
/// is too short for its kind.
#[must_use]
pub fn decode(record: &[u8]) -> Option<HostEvent> {
    let time_ns = time_ns(record)?;
    let mut header = Fields(record);
    let (kind, misc) = (header.u32()?, header.u16()?);
    let mut fields = Fields(record.get(8..record.len() - 8)?);
    match kind {
        PERF_RECORD_FORK | PERF_RECORD_EXIT => {
            let (pid, parent_pid, tid) = (fields.u32()?, fields.u32()?, fields.u32()?);
            Some(if kind == PERF_RECORD_FORK {
                HostEvent::Fork { time_ns, pid, tid, parent_pid }
            } else {
                HostEvent::Exit { time_ns, pid, tid }
            })
        }
        PERF_RECORD_COMM => {
            let (pid, tid) = (fields.u32()?, fields.u32()?);
            let name = fields.text(15);
            let mut comm = [0; 16];
            comm[..name.len()].copy_from_slice(name);
            Some(HostEvent::Comm { time_ns, pid, tid, comm, exec: misc & PERF_RECORD_MISC_COMM_EXEC as u16 != 0 })
        }
        PERF_RECORD_MMAP2 => decode_map(time_ns, misc, fields).map(HostEvent::Map),
        PERF_RECORD_LOST => {
            let _id = fields.u64()?;
            Some(HostEvent::Lost { time_ns, count: fields.u64()? })
        }
        _ => None,
    }
}

fn decode_map(time_ns: u64, misc: u16, mut fields: Fields<'_>) -> Option<MapEvent> {
    let mut map = MapEvent {
        time_ns,
        pid: fields.u32()?,
        tid: fields.u32()?,
        address: fields.u64()?,
        length: fields.u64()?,
        file_offset: fields.u64()?,
        ..MapEvent::default()
    };
    let device = Device { major: fields.u32()?, minor: fields.u32()? };
    let (inode, inode_generation) = (fields.u64()?, fields.u64()?);
    // A record with a build ID (which heapbpf does not request) uses these 24 bytes differently.
    if misc & PERF_RECORD_MISC_MMAP_BUILD_ID as u16 == 0 {
        (map.device, map.inode, map.inode_generation) = (device, inode, inode_generation);
    }
    (map.prot, map.flags) = (fields.u32()?, fields.u32()?);
    map.path = fields.text(MAX_PATH_BYTES).into();
    let executable = map.prot & libc::PROT_EXEC as u32 != 0;
    (executable && map.length > 0 && map.address.checked_add(map.length).is_some()).then_some(map)
}

/// Takes fields from the front of a record.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// Bytes up to a NUL or the end, at most `max`.
    fn text(&self, max: usize) -> &'a [u8] {
        let end = self.0.iter().position(|byte| *byte == 0).unwrap_or(self.0.len());
        &self.0[..end.min(max)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: u32, misc: u32, body: &[u8], time_ns: u64) -> Vec<u8> {
        let mut record = Vec::new();
        record.extend(kind.to_ne_bytes());
        record.extend((misc as u16).to_ne_bytes());
        record.extend(((body.len() + 16) as u16).to_ne_bytes());
        record.extend(body);
        record.extend(time_ns.to_ne_bytes());
        record
    }

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }

    fn map_body(prot: u32, path: &[u8]) -> Vec<u8> {
        let mut body = words(&[7, 8]);
        for field in [0x7f00_0000_1000_u64, 0x2000, 0x3000] {
            body.extend(field.to_ne_bytes());
        }
        body.extend(words(&[254, 3]));
        body.extend(99_u64.to_ne_bytes());
        body.extend(5_u64.to_ne_bytes());
        body.extend(words(&[prot, 2]));
        body.extend(path);
        body.resize(body.len().next_multiple_of(8), 0);
        body
    }

    #[test]
    fn fork_exit_comm_lost() {
        let mut fork = words(&[10, 9, 11, 9]);
        fork.extend(77_u64.to_ne_bytes());
        assert_eq!(
            decode(&record(PERF_RECORD_FORK, 0, &fork, 78)),
            Some(HostEvent::Fork { time_ns: 78, pid: 10, tid: 11, parent_pid: 9 })
        );
        assert_eq!(
            decode(&record(PERF_RECORD_EXIT, 0, &fork, 79)),
            Some(HostEvent::Exit { time_ns: 79, pid: 10, tid: 11 })
        );
        let mut comm = words(&[10, 11]);
        comm.extend(b"a name\0\0");
        let Some(HostEvent::Comm { comm, exec, .. }) =
            decode(&record(PERF_RECORD_COMM, PERF_RECORD_MISC_COMM_EXEC, &comm, 1))
        else {
            panic!("not a comm event")
        };
        assert_eq!((&comm[..7], exec), (&b"a name\0"[..], true));
        let mut lost = 1_u64.to_ne_bytes().to_vec();
        lost.extend(42_u64.to_ne_bytes());
        assert_eq!(decode(&record(PERF_RECORD_LOST, 0, &lost, 3)), Some(HostEvent::Lost { time_ns: 3, count: 42 }));
    }

    #[test]
    fn executable_mappings_only() {
        let Some(HostEvent::Map(map)) = decode(&record(PERF_RECORD_MMAP2, 0, &map_body(5, b"/a b/lib.so"), 50)) else {
            panic!("not a mapping")
        };
        assert_eq!(
            (map.pid, map.tid, map.address, map.length, map.file_offset),
            (7, 8, 0x7f00_0000_1000, 0x2000, 0x3000)
        );
        assert_eq!((map.device, map.inode, map.inode_generation), (Device { major: 254, minor: 3 }, 99, 5));
        assert_eq!((&*map.path, map.time_ns), (&b"/a b/lib.so"[..], 50));
        assert_eq!(decode(&record(PERF_RECORD_MMAP2, 0, &map_body(1, b"/data"), 50)), None);
        let with_build_id = record(PERF_RECORD_MMAP2, PERF_RECORD_MISC_MMAP_BUILD_ID, &map_body(5, b"/x"), 50);
        let Some(HostEvent::Map(map)) = decode(&with_build_id) else { panic!("not a mapping") };
        assert_eq!((map.device, map.inode), (Device::default(), 0));
    }

    #[test]
    fn a_mapping_past_the_end_of_memory_is_refused() {
        let mut body = map_body(5, b"/x");
        body[8..16].copy_from_slice(&u64::MAX.to_ne_bytes());
        assert_eq!(decode(&record(PERF_RECORD_MMAP2, 0, &body, 50)), None);
    }

    /// Truncated and random records cause no panic, and what is decoded stays within its bounds.
    #[test]
    fn garbage_is_harmless() {
        let whole = record(PERF_RECORD_MMAP2, 0, &map_body(5, b"/some/path"), 50);
        for length in 0..whole.len() {
            let _ = decode(&whole[..length]);
        }
        let mut random = heapbpf_testing::own_process::Random(1);
        let mut decoded = 0;
        for _ in 0..200_000 {
            let mut bytes: Vec<u8> = (0..random.next_u64() % 160).map(|_| random.next_u64() as u8).collect();
            if let Some(kind) = bytes.first_chunk_mut::<4>() {
                *kind = ((random.next_u64() % 12) as u32).to_ne_bytes();
            }
            if let Some(event) = decode(&bytes) {
                decoded += 1;
                if let HostEvent::Map(map) = event {
                    assert!(map.path.len() <= bytes.len() && map.address.checked_add(map.length).is_some());
                }
            }
        }
        assert!(decoded > 10_000, "the generator hardly ever made a decodable record: {decoded}");
    }
}
