//! The self-check: what probes cost on this machine, measured on a private child, once per boot.
//!
//! The child calls malloc and free some thousand times under heapbpf's own programs, and functions that begin with each
//! kind of instruction under a program that does nothing: so the table of kinds is verified, not believed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::budget::ProbeCosts;
use super::library::PrivateLibrary;
use super::specimens::file_offset;
use super::trial::{Allocator, Floor, Recording, Setting};
use super::workload::Workload;
use crate::arch::SPECIMENS;
use crate::kernel::programs::LinkKind;

/// Calls per slice: a few milliseconds.
const CALLS: u64 = 4_000;
/// Calls per slice if each is sampled, or takes microseconds.
const SLOW_CALLS: u64 = 1_000;
/// Slices of each kind. The fastest counts: whatever else goes on, other recordings' probes too, only adds.
const ROUNDS: usize = 5;
/// The same with perf links: the kernel takes a tenth of a second and more to take one away.
const PERF_ROUNDS: usize = 2;
/// A call under heapbpf costs about as much as a probe that does nothing (twice that where each return traps), or
/// something disturbed the measurement.
const PROBES: std::ops::Range<f64> = 0.8..3.0;
/// A disturbed measurement serves this long: to repeat it takes seconds on a machine that is busy enough to disturb it.
const DISTURBED_FOR: std::time::Duration = std::time::Duration::from_secs(60);
/// Bytes per allocation.
const SIZE: u64 = 64;

/// What was measured. All figures are nanoseconds of the target's CPU time per call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Which boot of which kernel, and which programs: measured anew for others.
    pub identity: String,
    /// The allocator that was measured on.
    pub allocator: String,
    /// What the kernel does with the probed instruction of its malloc.
    pub allocation_kind: String,
    /// The same of its free.
    pub free_kind: String,
    /// A pair of malloc and free without probes.
    pub bare_pair_ns: f64,
    /// What heapbpf's probes add.
    pub costs: ProbeCosts,
    /// What a probe that does nothing adds, by what the kernel does with its instruction.
    pub nothing_ns: BTreeMap<String, f64>,
}

impl Measured {
    /// Whether nothing disturbed the measurement much: what is not plausible does not serve for long.
    pub fn is_plausible(&self) -> bool {
        let nothing = |kind: &str| self.nothing_ns.get(kind).copied();
        let fits = |cost: f64, kind| nothing(kind).is_none_or(|nothing| PROBES.contains(&(cost / nothing)));
        fits(self.costs.allocation_ns, &self.allocation_kind) && fits(self.costs.free_ns, &self.free_kind)
    }

    /// The costs if probes are at instructions of other kinds than those measured on.
    pub fn costs_at(&self, allocation_kind: &str, free_kind: &str) -> ProbeCosts {
        let nothing = |kind: &str| self.nothing_ns.get(kind).copied();
        let moved = |measured: f64, from: &str, to: &str| match (nothing(from), nothing(to)) {
            (Some(from), Some(to)) => (measured + to - from).max(0.0),
            _ => measured,
        };
        ProbeCosts {
            allocation_ns: moved(self.costs.allocation_ns, &self.allocation_kind, allocation_kind),
            free_ns: moved(self.costs.free_ns, &self.free_kind, free_kind),
            sample_ns: self.costs.sample_ns,
        }
    }
}

/// What was measured since the last boot, or measures now.
///
/// # Errors
/// It cannot be measured: no allocator, no BPF.
pub fn known_or_measured(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    known(object, link).map_or_else(|| measured_anew(object, link), Ok)
}

/// What was measured since the last boot, if anything was.
pub fn known(object: &[u8], link: Option<LinkKind>) -> Option<Measured> {
    let file = std::fs::File::open(cache_file(link)?).ok()?;
    let age = file.metadata().ok()?.modified().ok()?.elapsed().unwrap_or_default();
    let measured: Measured = serde_json::from_reader(std::io::BufReader::new(file)).ok()?;
    let is_good = measured.is_plausible() || age < DISTURBED_FOR;
    (is_good && measured.identity == identity(object, link)).then_some(measured)
}

/// Measures, and keeps it for the recordings to come: of this boot, or of the next minute if something disturbed it.
///
/// # Errors
/// As of [`measure`].
pub fn measured_anew(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    let measured = measure(object, link)?;
    if !measured.is_plausible() {
        log::info!("something disturbed the measurement of probes: {measured:?}");
    }
    if let Some(path) = cache_file(link)
        && let Err(error) = keep(&path, &measured)
    {
        log::info!("cannot keep what was measured in {}: {error}", path.display());
    }
    Ok(measured)
}

fn keep(path: &Path, measured: &Measured) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&fresh, serde_json::to_vec_pretty(measured)?)?;
    std::fs::rename(&fresh, path)
}

/// `/run` for root, a user's own folder there otherwise: both are gone with the next boot.
fn cache_file(link: Option<LinkKind>) -> Option<PathBuf> {
    // SAFETY: no argument.
    let root = unsafe { libc::geteuid() } == 0;
    let folder = if root {
        PathBuf::from("/run/heapbpf")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?).join("heapbpf")
    };
    let forced = link.map(|link| format!("-{link}")).unwrap_or_default();
    Some(folder.join(format!("probe-costs{forced}.json")))
}

fn identity(object: &[u8], link: Option<LinkKind>) -> String {
    let line = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    // FNV-1a: enough to tell one build's programs from another's.
    let programs = object
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let link = link.map_or_else(|| "best".to_owned(), |link| link.to_string());
    format!("{} {} {programs:016x} {link}", line("/proc/sys/kernel/random/boot_id"), line("/proc/sys/kernel/osrelease"))
}

/// Measures.
///
/// # Errors
/// The child has no allocator that can be probed, or the kernel refuses the programs.
pub fn measure(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    let library = PrivateLibrary::copy()?;
    let mut child = Workload::start_own(library.as_ref())?;
    let pid = child.pid();
    let allocator = Allocator::of_process(pid)?;
    let plain = Setting { interval: 0, link, ..Setting::DEFAULT };
    let mut full = Recording::load(object, plain, &allocator, pid)?;
    let mut allocations = Recording::load(object, Setting { live: false, ..plain }, &allocator, pid)?;
    let mut sampled = Recording::load(object, Setting { interval: 1, ..plain }, &allocator, pid)?;
    let mut nothing = Floor::load(object)?;

    let mut slices = Slices::default();
    for _ in 0..if full.link() == LinkKind::Perf { PERF_ROUNDS } else { ROUNDS } {
        slices.add("bare", pairs(&mut child, 10 * CALLS)?);
        for (name, recording, calls) in [
            ("full", &mut full, CALLS),
            ("allocations", &mut allocations, CALLS),
            ("sampled", &mut sampled, SLOW_CALLS),
        ] {
            recording.on()?;
            pairs(&mut child, 100)?;
            slices.add(name, pairs(&mut child, calls)?);
            recording.off();
        }
        for (index, (kind, specimen)) in SPECIMENS.iter().enumerate() {
            let Some(offset) = file_offset(*specimen) else { continue };
            let bare = calls(&mut child, index, CALLS)?;
            nothing.on_own(offset, pid)?;
            calls(&mut child, index, 100)?;
            let probed = calls(&mut child, index, SLOW_CALLS)?;
            nothing.off();
            slices.add(kind, probed - bare);
        }
    }
    let (bare, full, allocation) = (slices.fastest("bare"), slices.fastest("full"), slices.fastest("allocations"));
    Ok(Measured {
        identity: identity(object, link),
        allocator: allocator.name().to_owned(),
        allocation_kind: allocator.kind("malloc").unwrap_or_default().to_owned(),
        free_kind: allocator.kind("free").unwrap_or_default().to_owned(),
        bare_pair_ns: bare,
        costs: ProbeCosts {
            allocation_ns: (allocation - bare).max(0.0),
            free_ns: (full - allocation).max(0.0),
            sample_ns: (slices.fastest("sampled") - full).max(0.0),
        },
        nothing_ns: SPECIMENS.iter().map(|(kind, _)| ((*kind).to_owned(), slices.fastest(kind))).collect(),
    })
}

/// Nanoseconds per pair.
fn pairs(child: &mut Workload, pairs: u64) -> std::io::Result<f64> {
    Ok(child.run(pairs, SIZE)?.cpu_ns as f64 / pairs as f64)
}

/// Nanoseconds per call of a specimen.
fn calls(child: &mut Workload, specimen: usize, calls: u64) -> std::io::Result<f64> {
    Ok(child.call(specimen, calls)?.cpu_ns as f64 / calls as f64)
}

/// Slices by name.
#[derive(Default)]
struct Slices(BTreeMap<String, Vec<f64>>);

impl Slices {
    fn add(&mut self, name: &str, ns: f64) {
        self.0.entry(name.to_owned()).or_default().push(ns);
    }

    fn fastest(&self, name: &str) -> f64 {
        self.0.get(name).into_iter().flatten().copied().reduce(f64::min).unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
            identity: "boot kernel programs best".into(),
            allocator: "glibc 2.36".into(),
            allocation_kind: "emulated".into(),
            free_kind: "emulated".into(),
            bare_pair_ns: 8.0,
            costs: ProbeCosts { allocation_ns: 550.0, free_ns: 520.0, sample_ns: 2500.0 },
            nothing_ns: [("emulated".to_owned(), 500.0), ("stepped".to_owned(), 9000.0)].into(),
        }
    }

    #[test]
    fn other_instructions_cost_what_the_kernel_takes_for_them() {
        let costs = measured().costs_at("emulated", "stepped");
        assert_eq!((costs.allocation_ns, costs.free_ns, costs.sample_ns), (550.0, 9020.0, 2500.0));
        // A kind that was not measured is taken for what was.
        assert_eq!(measured().costs_at("optimized", "?"), measured().costs);
    }

    #[test]
    fn a_disturbed_measurement_is_told_from_a_sound_one() {
        assert!(measured().is_plausible());
        let disturbed = ProbeCosts { allocation_ns: 2361.0, ..measured().costs };
        assert!(!Measured { costs: disturbed, ..measured() }.is_plausible());
        // Another recording's probe was there already: the trap was not seen.
        let shared = ProbeCosts { free_ns: 105.0, ..measured().costs };
        assert!(!Measured { costs: shared, ..measured() }.is_plausible());
    }

    #[test]
    fn what_was_measured_survives_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/probe-costs.json");
        keep(&path, &measured()).unwrap();
        let read: Measured = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(read, measured());
        assert_ne!(identity(b"one", None), identity(b"two", None));
    }
}
