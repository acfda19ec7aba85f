#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// What the kernel does with the probed instruction when the probe fires, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeKind {
    /// A 5-byte no-op, which the kernel replaces by a call: no trap.
    Optimized,
    /// One trap; the kernel emulates the instruction.
    Emulated,
    /// Two traps; the kernel single-steps a copy of the instruction.
    Stepped,
}

impl std::fmt::Display for ProbeKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Optimized => "optimized",
            Self::Emulated => "emulated",
            Self::Stepped => "stepped",
        })
    }
}

/// How a file gets into a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FileKind {
    /// A shared library.
    Library,
    /// An executable that loads shared libraries.
    Executable,
    /// An executable that loads no shared libraries.
    StaticExecutable,
}

/// Something that is not hooked, and why.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Missing {
    /// The function or part of the file.
    pub what: String,
    /// Why it is not hooked, and what that means for the figures.
    pub why: String,
}

impl Missing {
    /// Records that `what` is not hooked because of `why`.
    pub fn new(what: impl Into<String>, why: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into() }
    }

    /// Records that stacks through a Python interpreter keep its native frames.
    pub fn python_frames(why: &impl std::fmt::Display) -> Self {
        Self::new("Python frames", format!("{why}: native frames are shown instead"))
    }

    /// Records that Python's free lists hide allocations and frees.
    #[must_use]
    pub fn free_lists() -> Self {
        let why = "Python keeps freed floats, tuples, frames and others for reuse: objects taken from there are not \
                   counted again, and objects put there stay in use";
        Self::new("free lists", why)
    }

    /// Name of what is missing if a process was already running when it was hooked inline.
    pub const EARLY_OBJECTS: &str = "Python's first objects";

    /// Records that a process's Python objects are counted only from the switch to inline hooks, `late_ns` after the
    /// start of the process or of the recording.
    pub fn early_objects(late_ns: u64) -> Self {
        let late = late_ns as f64 * 1e-9;
        Self::new(Self::EARLY_OBJECTS, format!("counted only since inline hooks were placed, after {late:.1} s"))
    }

    /// Name of what is missing if another heapbpf hooked a process inline during the recording.
    pub const UNSEEN: &str = "the time under another recording's inline hooks";

    /// Records that another heapbpf had a process hooked inline during part of the recording.
    #[must_use]
    pub fn unseen() -> Self {
        Self::new(Self::UNSEEN, "not counted while another recording counted the process from inside")
    }

    /// Records that the counts a process with inline hooks keeps in its memory cannot be right.
    #[must_use]
    pub fn own_counts() -> Self {
        Self::new("exact totals", "the counts in its memory are impossible: only its sampled calls are included")
    }

    /// Name of what is missing if a process's mappings are told from an allocator's by their stacks.
    pub const EXACT_MAPPINGS: &str = "exact totals with --mmap";

    /// Records that a process has no exact totals, because unsampled mappings have no stack.
    #[must_use]
    pub fn exact_mappings() -> Self {
        let why = "beside inline hooks, the stack of a sampled mapping tells whether an allocator made it; the others \
                   are not told apart";
        Self::new(Self::EXACT_MAPPINGS, why)
    }

    /// Records that stacks through a JVM lack its Java frames.
    pub fn java_frames(why: &impl std::fmt::Display) -> Self {
        Self::new("Java frames", format!("{why}: stacks end where Java code is"))
    }
}

/// A function without its own probe. Its calls are observed elsewhere because it jumps to a hooked function.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Covered {
    /// Name of the function.
    pub function: String,
    /// The hooked function that observes its calls.
    pub by: String,
}

/// How probes are linked to the BPF program, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// A session link: entry and, on request, return of a function (Linux 6.13).
    Session,
    /// A multi link: many probes in one link (Linux 6.6).
    Multi,
    /// A perf event for each probe.
    Perf,
}

impl std::fmt::Display for LinkKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Session => "session",
            Self::Multi => "multi",
            Self::Perf => "perf",
        })
    }
}

/// How calls of a process are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// Every call hits a kernel probe.
    Probe,
    /// Code inside the process counts them; only sampled calls reach the kernel.
    Inline,
    /// The process announces its samples itself, by USDT probes.
    Usdt,
    /// Nothing is hooked: the process's Go runtime samples its allocations.
    #[serde(rename = "go runtime")]
    GoRuntime,
}

impl Hook {
    /// Returns its name in files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Probe => "probe",
            Self::Inline => "inline",
            Self::Usdt => "usdt",
            Self::GoRuntime => "go runtime",
        }
    }

    /// Returns the hook of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Probe, Self::Inline, Self::Usdt, Self::GoRuntime].into_iter().find(|hook| hook.name() == name)
    }
}

impl std::fmt::Display for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One probe: an element of `attach` in `--stats` and `doctor --json`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttachEntry {
    /// Path of the file.
    pub file: String,
    /// Name and version of the allocator.
    pub allocator: String,
    /// Name of the function.
    pub function: String,
    /// File offset of the probed instruction.
    pub offset: u64,
    /// What the kernel does with that instruction.
    pub kind: ProbeKind,
    /// Kind of link.
    pub link: LinkKind,
    /// Why this instruction was chosen, in words that follow the function name.
    pub reason: String,
}

/// The audit of one file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileAudit {
    /// Path of the file.
    pub file: String,
    /// Name and version of the allocator.
    pub allocator: String,
    /// Whether it is a library or an executable.
    pub kind: FileKind,
    /// GNU build ID, hexadecimal; empty if the file has none.
    pub build_id: String,
    /// Its probes.
    pub attach: Vec<AttachEntry>,
    /// Functions that need no probe of their own.
    pub covered: Vec<Covered>,
    /// What is not hooked, and why.
    pub missing: Vec<Missing>,
    /// Ways to allocate that no probe can follow, if the program uses them.
    pub limits: Vec<Missing>,
}

impl FileAudit {
    /// The probes in one line, each with its reason; `None` without probes.
    #[must_use]
    pub fn summary(&self) -> Option<String> {
        let probes = self.attach.iter().map(|entry| format!("{}{}", entry.function, entry.reason));
        let probes = probes.collect::<Vec<_>>().join("; ");
        (!probes.is_empty()).then(|| format!("probes in {}: {probes}", self.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_displayed_as_they_are_serialized() {
        let shown = |value: serde_json::Value, text: String| assert_eq!(value, text);
        for kind in [ProbeKind::Optimized, ProbeKind::Emulated, ProbeKind::Stepped] {
            shown(serde_json::to_value(kind).unwrap(), kind.to_string());
        }
        for kind in [LinkKind::Session, LinkKind::Multi, LinkKind::Perf] {
            shown(serde_json::to_value(kind).unwrap(), kind.to_string());
        }
        for hook in [Hook::Probe, Hook::Inline, Hook::Usdt, Hook::GoRuntime] {
            shown(serde_json::to_value(hook).unwrap(), hook.to_string());
            assert_eq!(Hook::from_name(hook.name()), Some(hook));
        }
    }

    #[test]
    fn a_summary_has_each_probe_with_its_reason() {
        let entry = |function: &str, reason: &str| AttachEntry {
            file: "/lib/libc.so.6".into(),
            allocator: "glibc 2.36".into(),
            function: function.into(),
            offset: 0x99a40,
            kind: ProbeKind::Emulated,
            link: LinkKind::Session,
            reason: reason.into(),
        };
        let mut audit = FileAudit {
            file: "/lib/libc.so.6".into(),
            allocator: "glibc 2.36".into(),
            kind: FileKind::Library,
            build_id: "0102".into(),
            attach: vec![entry("malloc", "+0x0 `push %rbp` is emulated"), entry("free", "+0x4")],
            covered: vec![Covered { function: "cfree".into(), by: "free".into() }],
            missing: vec![Missing::new("valloc", "an IFUNC")],
            limits: Vec::new(),
        };
        let summary = "probes in /lib/libc.so.6: malloc+0x0 `push %rbp` is emulated; free+0x4";
        assert_eq!(audit.summary().as_deref(), Some(summary));
        let text = serde_json::to_string(&audit).unwrap();
        assert_eq!(serde_json::from_str::<FileAudit>(&text).unwrap(), audit);
        audit.attach.clear();
        assert_eq!(audit.summary(), None);
    }
}
