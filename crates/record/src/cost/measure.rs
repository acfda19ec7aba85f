//! Measures what probes cost on this machine, on a child process, once per boot.
//!
//! The child calls malloc and free some thousand times under heapbpf's own BPF programs, and one microbenchmark per
//! kind of instruction under a no-op program. So the cost of each kind is measured, not assumed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use heapbpf_host::arch::MICROBENCHMARKS;
use heapbpf_host::limits::{forbid_inline_hooks, links_need_admin};
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::programs::LinkKind;
use heapbpf_kernel::{no_ops, own_location};
use heapbpf_probes::ProbeKind;
use serde::{Deserialize, Serialize};

use super::library::PrivateLibrary;
use super::probe_costs::ProbeCosts;
use super::trial::{Allocator, Baseline, Recording, Setting};
use super::workload::Workload;

/// Calls per slice, which takes a few milliseconds.
const CALLS: u64 = 4_000;
/// Calls per slice if each call is sampled, or takes microseconds.
const SLOW_CALLS: u64 = 1_000;
/// Size of the events ring for such slices of a round, bytes. Each sample takes some 200 bytes, and 4.3 KiB of the stacks
/// ring, which is four times as large.
const SLOW_EVENTS_BYTES: u32 = 4 << 20;
/// Rounds over all kinds, and slices of each kind in a round. The fastest slice counts, because every disturbance (such
/// as another recording's probes) only adds time. There are few rounds, because the kernel takes 0.1 s and more to remove
/// a link.
const ROUNDS: usize = 2;
const SLICES: usize = 3;
/// Plausible ratios of a call under heapbpf to a no-op probe: about 1, or 2 where each return traps. A ratio outside
/// this range means that something disturbed the measurement.
const PROBES: std::ops::Range<f64> = 0.8..3.0;
/// How long a disturbed measurement is used. Repeating it takes seconds on a machine that is busy enough to disturb it.
const DISTURBED_FOR: std::time::Duration = std::time::Duration::from_secs(60);
/// How long an upper bound for inline hooks is used, or no figure. A bound says what matters: that they take next to
/// nothing.
const BOUND_FOR: std::time::Duration = std::time::Duration::from_secs(3600);
/// Differences below this cannot be distinguished from zero.
const LEAST_NS: f64 = 0.1;
/// Bytes per allocation.
const SIZE: u64 = 64;

/// Measured costs. All figures are nanoseconds of the target's CPU time per call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Boot, kernel, BPF programs and kind of link that the figures are valid for.
    pub identity: String,
    /// The allocator that was measured.
    pub allocator: String,
    /// How the kernel executes the probed instruction of its malloc.
    pub allocation_kind: String,
    /// How it executes that of its free.
    pub free_kind: String,
    /// A pair of malloc and free without probes.
    pub bare_pair_ns: f64,
    /// What heapbpf's probes add.
    pub costs: ProbeCosts,
    /// What inline hooks add to a pair of malloc and free that is not sampled; `None` if processes cannot be hooked
    /// inline here, or if the process that is measured could not be hooked in time.
    pub inline_pair_ns: Option<f64>,
    /// Whether that cost cannot be distinguished from zero: the figure is an upper bound.
    #[serde(default)]
    pub inline_is_bound: bool,
    /// Lengths of the no-ops that this kernel turns into calls when they are probed, bytes.
    pub no_ops: Option<Vec<usize>>,
    /// What a no-op probe adds, by how the kernel executes the probed instruction.
    pub nothing_ns: BTreeMap<String, f64>,
}

impl Measured {
    /// Whether the probe costs are plausible, that is, show no disturbance.
    pub fn is_plausible(&self) -> bool {
        let nothing = |kind: &str| self.nothing_ns.get(kind).copied();
        let fits = |cost: f64, kind| nothing(kind).is_none_or(|nothing| PROBES.contains(&(cost / nothing)));
        let fits_both =
            fits(self.costs.allocation_ns, &self.allocation_kind) && fits(self.costs.free_ns, &self.free_kind);
        // A sample always takes time.
        fits_both && self.costs.sample_ns > 0.0
    }

    /// Whether probes cost much less than a no-op probe, so that they cannot have seen the calls.
    fn missed_calls(&self) -> bool {
        let nothing = self.nothing_ns.get(&self.allocation_kind);
        nothing.is_some_and(|nothing| self.costs.allocation_ns < 0.5 * nothing)
    }

    /// How long the figures are used; `None` until the next boot.
    fn lasts(&self) -> Option<std::time::Duration> {
        let lacks_inline = self.inline_pair_ns.is_none() && forbid_inline_hooks().is_none();
        match (self.is_plausible(), self.inline_is_bound || lacks_inline) {
            (false, _) => Some(DISTURBED_FOR),
            (true, true) => Some(BOUND_FOR),
            (true, false) => None,
        }
    }

    /// Costs in programs with probes on instructions of these kinds: those of the most expensive kind, or of the
    /// measured one if none are given.
    pub fn costs_on(&self, allocation_kinds: &[ProbeKind], free_kinds: &[ProbeKind]) -> ProbeCosts {
        let cost = |kind: &String| self.nothing_ns.get(kind).copied().unwrap_or(0.0);
        let worst = |kinds: &[ProbeKind], otherwise: &str| {
            let names = kinds.iter().map(ToString::to_string);
            names.max_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or_else(|| otherwise.to_owned())
        };
        let allocation = worst(allocation_kinds, &self.allocation_kind);
        self.costs_at(&allocation, &worst(free_kinds, &self.free_kind)).in_programs()
    }

    /// The costs for probes on instructions of other kinds than the measured ones.
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

/// The costs measured since the last boot; if there are none, measures now.
///
/// # Errors
/// Those of [`measure`].
pub fn known_or_measured(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    known(object, link).map_or_else(|| measured_anew(object, link), Ok)
}

/// The costs measured since the last boot.
pub fn known(object: &[u8], link: Option<LinkKind>) -> Option<Measured> {
    let file = std::fs::File::open(cache_file(link)?).ok()?;
    let age = file.metadata().ok()?.modified().ok()?.elapsed().unwrap_or_default();
    let measured: Measured = serde_json::from_reader(std::io::BufReader::new(file)).ok()?;
    if measured.identity != identity(object, link) {
        return None;
    }
    // A disturbance of the measurement does not change this.
    measured.no_ops.iter().for_each(|lengths| no_ops::note(lengths.iter().copied().collect()));
    measured.lasts().is_none_or(|lasts| age < lasts).then_some(measured)
}

/// Measures, and saves the result for later recordings: until the next boot, or for a shorter time if something
/// disturbed it or if inline hooks have only an upper bound.
///
/// # Errors
/// Those of [`measure`].
pub fn measured_anew(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    let measured = measure(object, link)?;
    if measured.missed_calls() {
        anyhow::bail!("no call of the measured process reached the probes: another heapbpf counts it from inside");
    }
    if !measured.is_plausible() {
        log::info!("something disturbed the measurement of probes: {measured:?}");
    }
    if let Some(path) = cache_file(link)
        && let Err(error) = keep(&path, &measured)
    {
        log::info!("cannot save the measured costs in {}: {error}", path.display());
    }
    Ok(measured)
}

fn keep(path: &Path, measured: &Measured) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let fresh = path.with_extension(format!("{}.new", std::process::id()));
    std::fs::write(&fresh, serde_json::to_vec_pretty(measured)?)?;
    std::fs::rename(&fresh, path)
}

/// The file with saved costs: in `/run` for root, otherwise in the user's runtime directory. A reboot clears both.
fn cache_file(link: Option<LinkKind>) -> Option<PathBuf> {
    let dir = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run/heapbpf")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?).join("heapbpf")
    };
    let forced = link.map(|link| format!("-{link}")).unwrap_or_default();
    Some(dir.join(format!("probe-costs{forced}.json")))
}

fn identity(object: &[u8], link: Option<LinkKind>) -> String {
    let line = |path: &str| std::fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    // FNV-1a, which is enough to distinguish builds.
    let programs = object
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    let link = link.map_or_else(|| "best".to_owned(), |link| link.to_string());
    // The last number changes with what is measured: inline hooks were added, costs that look like zero became bounds,
    // no-ops were added.
    format!(
        "{} {} {programs:016x} {link} 4",
        line("/proc/sys/kernel/random/boot_id"),
        line("/proc/sys/kernel/osrelease")
    )
}

/// Measures the costs now.
///
/// # Errors
/// The child has no allocator that can be probed, or the kernel refuses the BPF programs.
pub fn measure(object: &[u8], link: Option<LinkKind>) -> anyhow::Result<Measured> {
    let library = PrivateLibrary::copy()?;
    let guardian = Guardian::started(links_need_admin(link));
    let mut child = Workload::start_own(library.as_ref())?;
    let pid = child.pid();
    let allocator = Allocator::of_process(pid)?;
    let plain = Setting { interval: 0, link, ..Setting::DEFAULT };
    let mut full = Recording::load(object, plain, &allocator, pid, &guardian)?;
    let mut allocations = Recording::load(object, Setting { live: false, ..plain }, &allocator, pid, &guardian)?;
    let slow = Setting { interval: 1, events_bytes: SLOW_EVENTS_BYTES, ..plain };
    let mut sampled = Recording::load(object, slow, &allocator, pid, &guardian)?;
    let mut nothing = Baseline::load(object, &guardian)?;

    let mut slices = Slices::default();
    for _ in 0..ROUNDS {
        for _ in 0..SLICES {
            slices.add("bare", pairs(&mut child, 10 * CALLS)?);
        }
        for (name, recording, calls) in [
            ("full", &mut full, CALLS),
            ("allocations", &mut allocations, CALLS),
            ("sampled", &mut sampled, SLOW_CALLS),
        ] {
            recording.on()?;
            pairs(&mut child, 100)?;
            for _ in 0..SLICES {
                slices.add(name, pairs(&mut child, calls)?);
            }
            recording.off();
        }
        for (index, (kind, microbenchmark)) in MICROBENCHMARKS.iter().enumerate() {
            let Some(place) = own_location(*microbenchmark as *const () as u64) else { continue };
            let bare = calls(&mut child, index, CALLS)?;
            nothing.on_own(&place, pid)?;
            calls(&mut child, index, 100)?;
            for _ in 0..SLICES {
                slices.add(kind, calls(&mut child, index, SLOW_CALLS)? - bare);
            }
            nothing.off();
        }
    }
    let inline =
        inline_pair(&mut child, &allocator).inspect_err(|why| log::info!("inline hooks are not measured: {why}")).ok();
    let (bare, full, allocation) = (slices.fastest("bare"), slices.fastest("full"), slices.fastest("allocations"));
    let no_ops = no_ops::found().map(|lengths| lengths.iter().collect());
    Ok(Measured {
        no_ops,
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
        inline_pair_ns: inline.map(|(ns, _)| ns),
        inline_is_bound: inline.is_some_and(|(_, is_bound)| is_bound),
        nothing_ns: MICROBENCHMARKS.iter().map(|(kind, _)| ((*kind).to_owned(), slices.fastest(kind))).collect(),
    })
}

/// Nanoseconds that inline hooks add to a pair of malloc and free that is not sampled, and whether that is a bound, as
/// in [`Slices::added`].
fn inline_pair(child: &mut Workload, allocator: &Allocator) -> anyhow::Result<(f64, bool)> {
    /// Pairs per slice, which take nanoseconds.
    const PAIRS: u64 = 400_000;
    let mut slices = Slices::default();
    for _ in 0..SLICES {
        slices.add("bare", pairs(child, PAIRS)?);
    }
    // Hooked only once: that takes longer than all slices.
    let _trial = allocator.hook_inline(child.pid())?;
    for _ in 0..SLICES {
        slices.add("inline", pairs(child, PAIRS)?);
    }
    Ok(slices.added("bare", "inline"))
}

/// Nanoseconds per pair of malloc and free.
fn pairs(child: &mut Workload, pairs: u64) -> std::io::Result<f64> {
    Ok(child.run(pairs, SIZE)?.cpu_ns as f64 / pairs as f64)
}

/// Nanoseconds per call of a microbenchmark.
fn calls(child: &mut Workload, microbenchmark: usize, calls: u64) -> std::io::Result<f64> {
    Ok(child.call(microbenchmark, calls)?.cpu_ns as f64 / calls as f64)
}

/// Measured slices by name, nanoseconds per call.
#[derive(Default)]
struct Slices(BTreeMap<String, Vec<f64>>);

impl Slices {
    fn add(&mut self, name: &str, ns: f64) {
        self.0.entry(name.to_owned()).or_default().push(ns);
    }

    fn fastest(&self, name: &str) -> f64 {
        self.0.get(name).into_iter().flatten().copied().reduce(f64::min).unwrap_or(0.0)
    }

    /// How much slower the fastest slice of one kind is than that of another. If the two fastest slices of a kind
    /// differ by more than that, the difference cannot be distinguished from zero: then returns an upper bound, and
    /// `true`.
    fn added(&self, bare: &str, with: &str) -> (f64, bool) {
        let spread = |name: &str| {
            let mut slices = self.0.get(name).cloned().unwrap_or_default();
            slices.sort_by(f64::total_cmp);
            slices.get(1).map_or(0.0, |second| second - slices[0])
        };
        let added = self.fastest(with) - self.fastest(bare);
        let noise = spread(bare).max(spread(with));
        if added > noise && added > 0.0 { (added, false) } else { (added.abs() + noise.max(LEAST_NS), true) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured() -> Measured {
        Measured {
            no_ops: None,
            identity: "boot kernel programs best".into(),
            allocator: "glibc 2.36".into(),
            allocation_kind: "emulated".into(),
            free_kind: "emulated".into(),
            bare_pair_ns: 8.0,
            costs: ProbeCosts { allocation_ns: 550.0, free_ns: 520.0, sample_ns: 2500.0 },
            inline_pair_ns: Some(1.5),
            inline_is_bound: false,
            nothing_ns: [("emulated".to_owned(), 500.0), ("stepped".to_owned(), 9000.0)].into(),
        }
    }

    #[test]
    fn costs_follow_the_kind_of_instruction() {
        let costs = measured().costs_at("emulated", "stepped");
        assert_eq!((costs.allocation_ns, costs.free_ns, costs.sample_ns), (550.0, 9020.0, 2500.0));
        // A kind that was not measured is taken to cost as much as the one that was.
        assert_eq!(measured().costs_at("optimized", "?"), measured().costs);
    }

    #[test]
    fn a_disturbed_measurement_is_recognised() {
        assert!(measured().is_plausible());
        let disturbed = ProbeCosts { allocation_ns: 2361.0, ..measured().costs };
        assert!(!Measured { costs: disturbed, ..measured() }.is_plausible());
        // Another recording had already probed the same instruction, so the trap was not seen.
        let shared = ProbeCosts { free_ns: 105.0, ..measured().costs };
        assert!(!Measured { costs: shared, ..measured() }.is_plausible());
        let without_samples = ProbeCosts { sample_ns: 0.0, ..measured().costs };
        assert!(!Measured { costs: without_samples, ..measured() }.is_plausible());
        // Another recording had hooked it inline, so no probe was reached.
        let hidden = Measured { costs: ProbeCosts { allocation_ns: 0.3, ..measured().costs }, ..measured() };
        assert!(hidden.missed_calls() && !measured().missed_calls());
    }

    #[test]
    fn what_cannot_be_told_from_nothing_is_a_bound_and_measured_again() {
        let added = |bare: [f64; 3], inline: [f64; 3]| {
            let slices = [("bare".to_owned(), bare.to_vec()), ("inline".to_owned(), inline.to_vec())];
            Slices(slices.into()).added("bare", "inline")
        };
        assert_eq!(added([6.0, 6.25, 9.0], [7.5, 7.5, 8.0]), (1.5, false));
        assert_eq!(added([6.0, 8.0, 9.0], [6.5, 6.5, 6.5]), (2.5, true), "bare slices differ by more");
        assert_eq!(added([9.0, 9.5, 9.5], [7.0, 7.0, 7.0]), (2.5, true), "bare slices were disturbed");
        assert_eq!(added([6.0; 3], [6.0; 3]), (LEAST_NS, true));
        assert_eq!(Measured { inline_is_bound: true, ..measured() }.lasts(), Some(BOUND_FOR));
        assert_eq!(measured().lasts(), None);
        let unknown = Measured { inline_pair_ns: None, ..measured() };
        assert_eq!(unknown.lasts(), forbid_inline_hooks().is_none().then_some(BOUND_FOR));
    }

    #[test]
    fn saved_costs_are_read_back_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/probe-costs.json");
        keep(&path, &measured()).unwrap();
        let read: Measured = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(read, measured());
        assert_ne!(identity(b"one", None), identity(b"two", None));
    }
}
