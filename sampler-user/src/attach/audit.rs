//! What was hooked and what was not, as the profile, `--stats` and `doctor` print it.

use serde::{Deserialize, Serialize};

use super::elf::FileKind;
use super::placement::Kind;
use super::{AllocatorFile, Covered, Missing};

/// How probes are linked to a program, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkKind {
    /// Entry and, only where asked for, return (Linux 6.13).
    Session,
    /// Many probes in one link (Linux 6.6).
    Multi,
    /// One perf event for each probe.
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

/// One probe: an element of `attach` in `--stats` and in `doctor --json`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttachEntry {
    /// Path of the file.
    pub file: String,
    /// Allocator and version.
    pub allocator: String,
    /// Function.
    pub function: String,
    /// File offset of the probed instruction.
    pub offset: u64,
    /// What the kernel does with that instruction.
    pub kind: Kind,
    /// Kind of link.
    pub link: LinkKind,
    /// Why this instruction.
    pub reason: String,
}

/// One file of the audit.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileAudit {
    /// Path of the file.
    pub file: String,
    /// Allocator and version.
    pub allocator: String,
    /// Library or executable.
    pub kind: FileKind,
    /// GNU build ID, hexadecimal; empty if the file has none.
    pub build_id: String,
    /// The probes.
    pub attach: Vec<AttachEntry>,
    /// Functions that need no probe.
    pub covered: Vec<Covered>,
    /// What is not hooked, and why.
    pub missing: Vec<Missing>,
    /// What no probe can follow, if the program uses it.
    pub limits: Vec<Missing>,
}

impl FileAudit {
    /// The audit of a file that was attached with links of kind `link`.
    #[must_use]
    pub fn new(file: &str, planned: &AllocatorFile, link: LinkKind) -> Self {
        Self {
            file: file.to_owned(),
            allocator: planned.allocator.clone(),
            kind: planned.kind,
            build_id: planned.build_id.iter().map(|b| format!("{b:02x}")).collect(),
            attach: planned
                .sites
                .iter()
                .map(|site| AttachEntry {
                    file: file.to_owned(),
                    allocator: planned.allocator.clone(),
                    function: site.function.clone(),
                    offset: site.site.offset,
                    kind: site.kind,
                    link,
                    reason: site.reason.clone(),
                })
                .collect(),
            covered: planned.covered.clone(),
            missing: planned.missing.clone(),
            limits: planned.limits.clone(),
        }
    }

    /// The probes in one line, with their reasons; `None` if there are none.
    #[must_use]
    pub fn summary(&self) -> Option<String> {
        let probes = self.attach.iter().map(|entry| format!("{}{}", entry.function, entry.reason));
        let probes = probes.collect::<Vec<_>>().join("; ");
        (!probes.is_empty()).then(|| format!("probes in {}: {probes}", self.file))
    }
}
