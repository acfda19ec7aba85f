//! What the kernel allows, found by using each feature once instead of comparing versions.

use std::sync::Arc;

use heapbpf_attach::inline::crashes;
use heapbpf_attach::inline::forbidden::Forbidden;
use heapbpf_audit::LinkKind;
use heapbpf_host::cgroup;
use heapbpf_host::events::HostEvents;
use heapbpf_host::limits::{CAPABILITIES, Limits};
use heapbpf_host::translation;
use heapbpf_kernel::control::ControlMaps;
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::loader::{Loader, MapSizes};
use heapbpf_kernel::mappings::MappingProbes;
use heapbpf_kernel::programs::{Programs, When};
use heapbpf_kernel::ring_maps::RingId;
use heapbpf_kernel::{KernelError, object};
use sampler_ebpf::abi::{Config, LARGEST_STACK_COPY, stack_kind};
use serde::Serialize;

/// The check of one feature.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Name of the feature.
    pub name: &'static str,
    /// Whether it works.
    pub ok: bool,
    /// Whether heapbpf needs it.
    pub needed: bool,
    /// Details. If it does not work, the reason and what to do.
    pub detail: String,
}

/// What the kernel allows.
#[derive(Clone, Debug, Serialize)]
pub struct KernelAudit {
    /// As `uname -r` prints it.
    pub release: String,
    /// The kind of link that a recording would use.
    pub link: Option<LinkKind>,
    /// All checks.
    pub checks: Vec<Check>,
}

/// The kernel's audit, and the BPF programs if it accepts them.
pub struct KernelSide {
    /// The audit.
    pub audit: KernelAudit,
    /// The loaded programs and their control maps, for trial attachments.
    pub loaded: Option<(Programs, ControlMaps)>,
}

impl KernelSide {
    /// Runs all checks.
    #[must_use]
    pub fn look() -> Self {
        let limits = Limits::read();
        let mut checks = environment(&limits);
        let loaded = load(&mut checks);
        let events = HostEvents::open().map(drop);
        checks.push(outcome("process events", true, events.map(|()| "perf events of every CPU".into())));
        let mount = cgroup::mount_point().map(|mount| format!("mounted at {}", mount.display()));
        checks.push(outcome("cgroup v2", false, mount.ok_or("not mounted: --cgroup cannot be used")));
        let link = loaded.as_ref().map(|(programs, _)| programs.kind);
        Self { audit: KernelAudit { release: limits.release, link, checks }, loaded }
    }
}

/// Reports what `--hook auto` means here, and which programs it does not apply to: those excluded by the host owner's
/// rules, and those that crashed under inline hooks.
#[must_use]
pub fn hooking(no_inline: Option<&str>, rules: &Forbidden) -> Vec<Check> {
    let detail = no_inline.map_or_else(
        || {
            "inline hooks: x86-64, and heapbpf may stop processes; a process where they are refused gets its own probes"
                .to_owned()
        },
        |why| format!("probes that every process pays for, because {why}"),
    );
    let auto = Check { name: "--hook auto", ok: no_inline.is_none(), needed: false, detail };
    let rule = |detail| Check { name: "never inline", ok: true, needed: false, detail };
    let died = crashes::read(&crashes::path())
        .into_iter()
        .map(|crash| format!("{} (heapbpf doctor --forget-crashes clears this)", crash.what));
    std::iter::once(auto).chain(rules.holders().into_iter().chain(died).map(rule)).collect()
}

fn outcome<E: std::fmt::Display>(name: &'static str, needed: bool, result: Result<String, E>) -> Check {
    match result {
        Ok(detail) => Check { name, ok: true, needed, detail },
        Err(error) => Check { name, ok: false, needed, detail: error.to_string() },
    }
}

/// Checks of privileges and kernel configuration.
fn environment(limits: &Limits) -> Vec<Check> {
    let mut checks: Vec<Check> = CAPABILITIES
        .iter()
        .map(|capability| {
            let ok = !limits.missing.contains(capability);
            let detail = if ok { format!("for {}", capability.needed_for) } else { capability.if_missing() };
            Check { name: capability.name, ok, needed: capability.is_always_needed(), detail }
        })
        .collect();
    checks.extend(limits.needs().map(|(name, found)| outcome(name, true, found.map(str::to_owned))));
    let paranoid = limits.perf_event_paranoid.map_or_else(|| "unknown".into(), |level| level.to_string());
    let privileged = !limits.missing.iter().any(|missing| missing.name == "CAP_PERFMON");
    let detail = if privileged { format!("{paranoid}, has no effect: heapbpf has CAP_PERFMON") } else { paranoid };
    checks.push(Check { name: "perf_event_paranoid", ok: privileged, needed: false, detail });
    checks.push(translated());
    checks
}

/// Reports which processes run under binary translation. Only these are harmed by links that serve every process, so
/// they are named in advance.
fn translated() -> Check {
    let found = translation::translated();
    let named = found.iter().take(MOST_NAMED).map(|(pid, translator)| format!("process {pid} ({translator})"));
    let more = found.len().saturating_sub(MOST_NAMED);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let detail = match found.len() {
        0 => "none".to_owned(),
        _ => format!("{}{more}: {TRANSLATED}", named.collect::<Vec<_>>().join(", ")),
    };
    Check { name: "translated programs", ok: found.is_empty(), needed: false, detail }
}

/// Maximum number of processes that are named.
const MOST_NAMED: usize = 5;
/// The remark about programs that run under binary translation.
const TRANSLATED: &str = "the default leaves such programs alone; with probes on every process (--hook probe with --all, --comm, --cgroup or children) SIGTRAP would kill them";

/// What links to one process are good for.
const ALL_THREADS: &str = "a link to one process covers all its threads and costs other processes nothing; where \
                           children are followed with --hook probe, links serve every process, and each call of \
                           another process that maps the file traps, too (docs/overhead.md)";

/// The consequence if links to one process cover only its first thread.
const FIRST_THREADS_ONLY: &str = "on this kernel a link to one process covers its first thread only (fixed in Linux \
                                  6.10): heapbpf makes links that serve every process, so other processes that map the \
                                  file pay for the probes, too";

/// Loads the maps and programs with every kind of link. Returns those of the best kind that works.
fn load(checks: &mut Vec<Check>) -> Option<(Programs, ControlMaps)> {
    let config = Config {
        self_tgid: std::process::id(),
        live: 1,
        stack_kind: stack_kind::COPIED,
        stack_bytes: LARGEST_STACK_COPY,
        ..Config::default()
    };
    let sizes = MapSizes { events_bytes: 1 << 16, stacks_bytes: 1 << 18, live_max: 1024, stack_traces_max: 64 };
    let loader = object::object().ok_or(KernelError::NoObject).and_then(|bytes| {
        let loader = Loader::new(bytes, &config, &sizes)?;
        loader.take_first_ring(RingId::Events)?;
        loader.take_first_ring(RingId::Stacks)?;
        Ok(loader)
    });
    let control = loader.as_ref().ok().map(ControlMaps::open);
    let loader = match loader {
        Ok(loader) => {
            let loader = Arc::new(loader);
            for name in ["ring buffer", "task storage"] {
                checks.push(Check { name, ok: true, needed: true, detail: String::new() });
            }
            loader
        }
        Err(error) => {
            let name = match &error {
                KernelError::Map { name, .. } if ["EVENTS", "STACKS"].contains(&name.as_str()) => "ring buffer",
                KernelError::Map { name, .. } if name == "THREADS" => "task storage",
                KernelError::TooOld { .. } => "BPF loops",
                _ => "BPF maps and types",
            };
            checks.push(Check { name, ok: false, needed: true, detail: error.to_string() });
            return None;
        }
    };
    let mut best = None;
    for (kind, name, since, detail) in [
        (LinkKind::Session, "session links", "6.13", "an unsampled call does not trap on its return"),
        (LinkKind::Multi, "multi links", "6.6", "many probes in one link"),
        (LinkKind::Perf, "perf links", "5.15", "one event for each probe"),
    ] {
        let programs = Programs::load(&loader, (true, When::Ahead), Some(kind), &Guardian::default());
        let programs = programs.and_then(|programs| programs.load_rest().map(|()| programs));
        let why_not = |error| format!("needs Linux {since} or later; here: {}", first_line(error));
        checks.push(outcome(name, false, programs.as_ref().map(|_| detail.to_owned()).map_err(why_not)));
        best = best.or_else(|| programs.ok());
    }
    if let Some(programs) = &best {
        let ok = programs.links_one_process;
        let detail = if ok { ALL_THREADS } else { FIRST_THREADS_ONLY };
        checks.push(Check { name: "links to one process", ok, needed: false, detail: detail.into() });
    }
    let mappings = MappingProbes::load(&loader).and_then(|mut probes| probes.link());
    let detail = mappings.map(|()| "for --mmap".to_owned()).map_err(|error| first_line(&error));
    checks.push(outcome("system calls", false, detail));
    let uses = best.as_ref().map(|programs| format!("a recording would use {} links", programs.kind));
    checks.push(outcome("probes", true, uses.ok_or("no kind of link works")));
    Some((best?, control?.ok()?))
}

/// The error's first line, without the verifier's log.
fn first_line(error: &KernelError) -> String {
    error.to_string().lines().next().unwrap_or_default().to_owned()
}
