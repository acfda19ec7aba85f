//! What a process's resident memory is used for.

use serde::{Deserialize, Serialize};

use super::Glibc;
use crate::units;

/// The part in heaps of allocators.
pub const HEAP: &str = "heap";
/// The part with executable memory that is no file.
pub const JIT_CODE: &str = "JIT code";
/// The remaining part: anonymous memory that cannot be attributed.
pub const OTHER: &str = "other";
/// Private anonymous memory whose mappings were not read.
pub const UNDIVIDED: &str = "anonymous";

/// From this size and share of the resident memory, memory of unknown use is reported.
const MUCH_BYTES: f64 = (8 << 20) as f64;
const MUCH: f64 = 0.1;

/// Arenas of CPython's small objects, which it gets by mmap: no part of glibc's heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PythonArenas {
    /// Blocks in use.
    pub blocks: u64,
    /// Sizes of these blocks, in bytes.
    #[serde(rename = "in_use")]
    pub inuse_bytes: u64,
    /// Parts that contradict themselves, in bytes. Their blocks are not counted.
    #[serde(rename = "inconsistent")]
    pub inconsistent_bytes: u64,
    /// Resident memory of the arenas, in bytes.
    #[serde(rename = "resident")]
    pub resident_bytes: u64,
}

impl PythonArenas {
    /// Adds the arenas of another process.
    fn with(self, other: &Self) -> Self {
        Self {
            blocks: self.blocks.saturating_add(other.blocks),
            inuse_bytes: self.inuse_bytes.saturating_add(other.inuse_bytes),
            inconsistent_bytes: self.inconsistent_bytes.saturating_add(other.inconsistent_bytes),
            resident_bytes: self.resident_bytes.saturating_add(other.resident_bytes),
        }
    }
}

/// Resident memory of a process by purpose, in bytes. The parts do not overlap, so their sum is what the kernel counts
/// as resident (`Rss` in proc(5)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resident {
    /// Heaps of allocators: the main heap, arenas (also Python's), and other mappings that contain sampled blocks.
    #[serde(rename = "heap")]
    pub heap_bytes: u64,
    /// Mapped files, including their pages that the process has written to.
    #[serde(rename = "files")]
    pub files_bytes: u64,
    /// Stacks of threads.
    #[serde(rename = "stacks")]
    pub stacks_bytes: u64,
    /// Memory that may be shared with other processes and is in no file on a disk: anonymous, System V, memfds, files
    /// on a tmpfs.
    #[serde(rename = "shared")]
    pub shared_bytes: u64,
    /// Executable memory that is not file-backed, and memory files through which such code is written.
    #[serde(rename = "jit_code")]
    pub jit_code_bytes: u64,
    /// Anonymous memory that a runtime has named as its own, in mappings without a sampled block.
    #[serde(rename = "runtime")]
    pub runtime_bytes: u64,
    /// heapbpf's own pages: inline hooks and their data.
    #[serde(rename = "heapbpf")]
    pub own_bytes: u64,
    /// Other anonymous memory.
    #[serde(rename = "other")]
    pub other_bytes: u64,
    /// Private anonymous memory that is not divided into parts, because only the kernel's sums were read.
    #[serde(rename = "anonymous")]
    pub undivided_bytes: u64,
    /// Huge pages of hugetlbfs. The kernel does not count them as resident, so no sum includes them.
    #[serde(rename = "hugetlb")]
    pub hugetlb_bytes: u64,
    /// Private memory in swap space; not part of resident memory.
    #[serde(rename = "swapped")]
    pub swapped_bytes: u64,
    /// The process's proportional share of the resident memory (`Pss`); `None` if mappings were not read.
    #[serde(rename = "pss")]
    pub pss_bytes: Option<u64>,
    /// All memory that the kernel charges to the process's cgroup (`memory.current`), which other processes may share.
    #[serde(rename = "cgroup")]
    pub cgroup_bytes: Option<u64>,
    /// Private anonymous memory that was resident or swapped out when the recording attached to the process; `None` if
    /// unknown.
    #[serde(rename = "at_attach")]
    pub at_attach_bytes: Option<u64>,
    /// Growth of the resident memory in bytes per minute: since the recording attached to the process, or over the last
    /// one to two minutes where memory is read repeatedly. `None` if it was read only once.
    pub growth_per_minute: Option<i64>,
    /// Memory by glibc's own records; `None` if its arenas were not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub glibc: Option<Glibc>,
    /// Python's arenas, which are in the heap's part; `None` if they were not looked for, or if there is no Python.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python: Option<PythonArenas>,
    /// Whether this is the last reading of a process that has ended since.
    #[serde(rename = "before_end", skip_serializing_if = "std::ops::Not::not")]
    pub is_before_end: bool,
}

impl Resident {
    /// The sum of all parts.
    pub fn total_bytes(&self) -> u64 {
        self.parts().iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Names and sizes of the parts, in a fixed order.
    pub const fn parts(&self) -> [(&'static str, u64); 9] {
        [
            (HEAP, self.heap_bytes),
            ("files", self.files_bytes),
            ("stacks", self.stacks_bytes),
            ("shared", self.shared_bytes),
            (JIT_CODE, self.jit_code_bytes),
            ("runtime", self.runtime_bytes),
            ("heapbpf", self.own_bytes),
            (OTHER, self.other_bytes),
            (UNDIVIDED, self.undivided_bytes),
        ]
    }

    /// Anonymous memory that no known heap has: a runtime's own, and what nobody accounts for. In bytes.
    pub const fn not_seen_bytes(&self) -> u64 {
        self.other_bytes.saturating_add(self.runtime_bytes)
    }

    /// The parts whose sizes are known. If memory is not divided, a part of it that is 0 is not known.
    pub fn known_parts(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let is_divided = self.undivided_bytes == 0;
        let is_known =
            move |&(part, bytes): &(&str, u64)| is_divided || bytes > 0 || matches!(part, "files" | "shared");
        self.parts().into_iter().filter(is_known)
    }

    /// Share of the anonymous memory, without stacks and heapbpf's own pages, that lies in heaps of allocators. `None`
    /// if there is none, or if it is not divided into parts.
    pub fn heap_share(&self) -> Option<f64> {
        let all = [self.heap_bytes, self.jit_code_bytes, self.not_seen_bytes()];
        let all = all.into_iter().fold(0, u64::saturating_add);
        (all > 0 && self.undivided_bytes == 0).then(|| self.heap_bytes as f64 / all as f64)
    }

    /// Whether so many bytes are a large part of it. Memory of unknown use is reported from there on.
    pub fn is_much(&self, bytes: f64) -> bool {
        bytes >= MUCH_BYTES.max(MUCH * self.total_bytes() as f64)
    }

    /// Its growth per minute in words: `+1.20 MiB`, or `unknown`.
    pub fn growth_text(&self) -> String {
        self.growth_per_minute.map_or_else(|| "unknown".into(), |bytes| units::signed(bytes as f64))
    }

    /// Adds the memory of another process. Pages that both have resident count twice, as in sums of `Rss`.
    pub fn add(&mut self, other: &Self) {
        let sum = |a: u64, b: u64| a.saturating_add(b);
        *self = Self {
            heap_bytes: sum(self.heap_bytes, other.heap_bytes),
            files_bytes: sum(self.files_bytes, other.files_bytes),
            stacks_bytes: sum(self.stacks_bytes, other.stacks_bytes),
            shared_bytes: sum(self.shared_bytes, other.shared_bytes),
            jit_code_bytes: sum(self.jit_code_bytes, other.jit_code_bytes),
            runtime_bytes: sum(self.runtime_bytes, other.runtime_bytes),
            own_bytes: sum(self.own_bytes, other.own_bytes),
            other_bytes: sum(self.other_bytes, other.other_bytes),
            undivided_bytes: sum(self.undivided_bytes, other.undivided_bytes),
            hugetlb_bytes: sum(self.hugetlb_bytes, other.hugetlb_bytes),
            swapped_bytes: sum(self.swapped_bytes, other.swapped_bytes),
            pss_bytes: self.pss_bytes.zip(other.pss_bytes).map(|(a, b)| sum(a, b)),
            // Processes of one cgroup share it.
            cgroup_bytes: self.cgroup_bytes.filter(|_| self.cgroup_bytes == other.cgroup_bytes),
            at_attach_bytes: self.at_attach_bytes.zip(other.at_attach_bytes).map(|(a, b)| sum(a, b)),
            growth_per_minute: self.growth_per_minute.zip(other.growth_per_minute).map(|(a, b)| a.saturating_add(b)),
            glibc: self.glibc.zip(other.glibc).map(|(a, b)| a.with(&b)),
            python: self.python.zip(other.python).map(|(a, b)| a.with(&b)),
            is_before_end: self.is_before_end || other.is_before_end,
        };
    }

    /// Lower and upper bound of the unused bytes that allocators hold (free blocks, caches, rounding). `inuse_bytes`
    /// has the lower end of what sampled stacks have in the heap's resident memory, and the upper end of what they have
    /// in use.
    ///
    /// The heap's resident memory is used by blocks that the recording saw, by older blocks, or not at all. How large
    /// older blocks are is not known: the program may have written to them for the first time since.
    pub fn unused_bytes(&self, inuse_bytes: (f64, f64)) -> (f64, f64) {
        let heap = self.heap_bytes as f64;
        let older = if self.at_attach_bytes == Some(0) { 0.0 } else { heap };
        ((heap - inuse_bytes.1 - older).max(0.0), (heap - inuse_bytes.0).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_and_what_nobody_uses_is_bounded() {
        let mut one = Resident { heap_bytes: 1000, files_bytes: 20, other_bytes: 3, ..Resident::default() };
        assert_eq!(one.total_bytes(), 1023);
        let large = Resident { files_bytes: 200 << 20, ..Resident::default() };
        assert!(one.is_much(f64::from(8_u32 << 20)) && !one.is_much(f64::from(7_u32 << 20)));
        assert!(large.is_much(f64::from(21_u32 << 20)) && !large.is_much(f64::from(19_u32 << 20)));
        // The age of blocks that were not sampled is unknown.
        assert_eq!(one.unused_bytes((200.0, 300.0)), (0.0, 800.0));
        one.at_attach_bytes = Some(0);
        assert_eq!(one.unused_bytes((200.0, 300.0)), (700.0, 800.0));
        one.at_attach_bytes = Some(100);
        assert_eq!(one.unused_bytes((200.0, 300.0)), (0.0, 800.0), "an old block may be written to only now");
        // Blocks may be in use but not resident.
        assert_eq!(one.unused_bytes((2_000.0, 3_000.0)), (0.0, 0.0));
        let mut sum = one;
        sum.add(&one);
        assert_eq!((sum.total_bytes(), sum.at_attach_bytes), (2046, Some(200)));
        sum.add(&Resident::default());
        assert_eq!(sum.at_attach_bytes, None);
        let arenas = PythonArenas { blocks: 3, inuse_bytes: 96, inconsistent_bytes: 0, resident_bytes: 4096 };
        let mut python = Resident { python: Some(arenas), ..one };
        python.add(&Resident { python: Some(arenas), ..one });
        assert_eq!(python.python.map(|sum| (sum.blocks, sum.inuse_bytes, sum.resident_bytes)), Some((6, 192, 8192)));
        python.add(&one);
        assert_eq!(python.python, None, "not all are known");
        assert_eq!(one.heap_share(), Some(1000.0 / 1003.0));
        let mut named = Resident { runtime_bytes: 4, ..one };
        assert_eq!((named.total_bytes(), named.not_seen_bytes()), (1027, 7));
        assert_eq!(named.heap_share(), Some(1000.0 / 1007.0));
        named.add(&Resident { runtime_bytes: 4, ..one });
        assert_eq!(named.runtime_bytes, 8);
        let rough = Resident { undivided_bytes: 7, hugetlb_bytes: 5, swapped_bytes: 6, ..one };
        let only_sums = Resident { undivided_bytes: 7, files_bytes: 2, ..Resident::default() };
        let known: Vec<_> = only_sums.known_parts().collect();
        assert_eq!(known, [("files", 2), ("shared", 0), (UNDIVIDED, 7)]);
        assert_eq!(one.known_parts().count(), one.parts().len(), "0 is known where memory is divided");
        assert_eq!((rough.total_bytes(), rough.heap_share(), Resident::default().heap_share()), (1030, None, None));
    }

    #[test]
    fn growth_adds_up_unless_one_part_is_unknown() {
        let of = |growth_per_minute| Resident { growth_per_minute, ..Resident::default() };
        let sum = |a, b| {
            let mut sum = of(a);
            sum.add(&of(b));
            sum.growth_per_minute
        };
        assert_eq!((sum(Some(3), Some(-5)), sum(Some(3), None), sum(None, Some(3))), (Some(-2), None, None));
        assert_eq!(sum(Some(i64::MIN), Some(-1)), Some(i64::MIN));
        assert_eq!([Some(2 << 20), Some(0), None].map(|it| of(it).growth_text()), ["+2.00 MiB", "0 B", "unknown"]);
    }
}
