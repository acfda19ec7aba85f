//! Prepares a process on another thread: maps the code into it and links the programs, so that only the jumps are
//! missing; and undoes that.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use heapbpf_host::resident::anonymous_bytes;
use heapbpf_host::side_by_side::{Done, on_other_processors};
use heapbpf_inline::abi::{Control, Lead};
use heapbpf_inline::fault::Layout;
use heapbpf_kernel::inline::{InlineLinks, InlinePrograms};
use heapbpf_probes::Table;
use heapbpf_remote::{FoundBlob, Mapped, Pages, Plan, Target};
use sampler_ebpf::abi::{ProcessKey, Site};

use super::control::{Sampling, SetBound};
use super::counted::Linked;
use super::crashes::{self, Builds, Ours};
use super::known::{KnownFiles, KnownNames};
use super::may_be_hooked::Refused;
use super::objects::{ObjectFunction, relative_to};
use super::preview::{self, Planned};
use super::removal::{self, take_out};
use super::{forbidden, left, limits, plan};
use crate::files::FileKey;
use crate::stop_limit;

/// What is needed to prepare any process.
pub(super) struct Preparation {
    pub(super) programs: InlinePrograms,
    pub(super) files: KnownFiles,
    pub(super) names: KnownNames,
}

/// An allocator in a process that is to be prepared.
pub(super) struct Order {
    pub(super) process: ProcessKey,
    pub(super) key: FileKey,
    pub(super) path: String,
    pub(super) file: Arc<File>,
    pub(super) table: Table,
    pub(super) objects: Vec<ObjectFunction>,
    /// Index of the file's first site, if its sites were added.
    pub(super) first_site: Option<u32>,
    pub(super) control: Control,
    pub(super) sampling: Sampling,
    /// Where this heapbpf's code for other allocators is in the process.
    pub(super) bases: Vec<u64>,
}

/// Result of an order, and the CPU time that it took.
pub(super) type Answer = (Result<Outcome, Refused>, Duration);

/// An order that was carried out.
pub(super) type DoneOrder = Done<(ProcessKey, FileKey), Answer>;

pub(super) enum Outcome {
    /// These sites of the file must be added first.
    Sites(Vec<Site>),
    Prepared(Box<Prepared>),
    Undone,
}

/// A process in which everything except the jumps is in place.
pub(super) struct Prepared {
    pub(super) process: ProcessKey,
    /// The control page as it was written.
    pub(super) control: Control,
    pub(super) target: Target,
    pub(super) plan: Plan,
    pub(super) mapped: Mapped,
    pub(super) linked: Linked,
    /// Words that lead an interpreter to the mapped code.
    pub(super) leads: Vec<Lead>,
    /// The set of sampled blocks has 2^`set_log2` entries.
    pub(super) set_log2: u32,
}

impl Prepared {
    /// Restores the process, except for what is mapped. The next attempt reuses that.
    pub(super) fn undo(self) {
        let Self { target, linked, .. } = self;
        drop(linked);
        take_out(target.pid().unsigned_abs());
    }
}

impl Preparation {
    /// Maps everything into a process, and links the programs. No jump leads there yet.
    pub(super) fn prepare(&self, order: &Order) -> Result<Outcome, Refused> {
        let mut outcome = self.map(order)?;
        self.link(order, &mut outcome)?;
        Ok(outcome)
    }

    /// Prepares several processes. Their links are made right after each other, because the kernel then waits a grace
    /// period for the first one alone.
    pub(super) fn prepare_all(&self, orders: Vec<Order>) -> Vec<DoneOrder> {
        let mapped = Mutex::new(Vec::new());
        on_other_processors(orders, |order| {
            let outcome = self.map(&order);
            mapped.lock().unwrap_or_else(PoisonError::into_inner).push((order, outcome));
        });
        let mapped = mapped.into_inner().unwrap_or_else(PoisonError::into_inner);
        let linked = mapped.into_iter().map(|(order, outcome)| {
            let outcome = outcome.and_then(|mut outcome| self.link(&order, &mut outcome).map(|()| outcome));
            // This CPU time is spent before the recording begins.
            ((order.process, order.key), Some((outcome, Duration::ZERO)))
        });
        linked.collect()
    }

    /// Maps everything into a process. The programs are not linked yet.
    fn map(&self, order: &Order) -> Result<Outcome, Refused> {
        let Order { process, key, sampling, control, .. } = *order;
        let (pid, file) = (process.tgid, &*order.file);
        let builds = Builds::of(pid, file)?;
        crashes::check(builds.as_ref())?;
        let known = self.files.functions((&order.path, file), &order.table)?;
        let Some(first_site) = order.first_site else { return Ok(Outcome::Sites(known.sites())) };
        // A process may have several allocators, each with its own hook code.
        let is_ours = |found: &FoundBlob| order.bases.contains(&found.range.start);
        let target = removal::without_what_was_left(pid, &is_ours)?;
        // It may run another program than when this was ordered.
        forbidden::check(pid)?;
        let (set_log2, bound) = sampling.set(anonymous_bytes(pid).unwrap_or(0), limits::most_set_bytes(pid));
        let settings = preview::Sampled { criterion: sampling.criterion, set_log2, control };
        let place = plan::place(&target, file)?;
        let objects: Vec<ObjectFunction> = order.objects.iter().map(|it| relative_to(it, first_site)).collect();
        let what = (known.as_ref(), objects.as_slice());
        let Planned { plan, leads, originals, text, set_log2, lacks } =
            preview::plan((&target, &place), what, &self.names, file, (&settings, true))?;
        let mapped = target.map(&plan, stop_limit()).map_err(|error| removal::reason(pid, error));
        let mapped = mapped.inspect_err(|_| take_out(pid))?.outcome;
        let pages = plan.draft().pages.iter().map(Pages::range).collect();
        let layout = Layout { mapped: plan.range(), originals, pages };
        let from_file = place.mapping.range.start.wrapping_sub(place.mapping.offset);
        let ours = Ours { layout, from_file, builds };
        let set_bound = lacks.map_or(bound, SetBound::Limit);
        let base = plan.draft().base;
        let text = text.map_or_else(|| claimed(pid, base), Ok)?;
        let linked = Linked { pid, key, base, text, links: InlineLinks::default(), ours: Arc::new(ours), set_bound };
        Ok(Outcome::Prepared(Box::new(Prepared { process, control, target, plan, mapped, linked, leads, set_log2 })))
    }

    /// Links the programs to the code that was mapped.
    fn link(&self, order: &Order, outcome: &mut Outcome) -> Result<(), Refused> {
        let (Outcome::Prepared(prepared), Some(first_site)) = (outcome, order.first_site) else { return Ok(()) };
        let path = CString::new(format!("/proc/self/fd/{}", prepared.linked.text.as_raw_fd())).unwrap_or_default();
        let code = heapbpf_inline_blob::code().ok_or(Refused::Machine)?;
        prepared.linked.links = self.programs.link(&path, &heapbpf_inline::site_offsets(&code), first_site)?;
        Ok(())
    }
}

/// Opens the code that was just mapped at `base`, and locks it, so that others can tell that it is in use.
fn claimed(pid: u32, base: u64) -> Result<File, Refused> {
    let range = base..base + heapbpf_inline::abi::TEXT_BYTES;
    let text = left::open_mapped(pid, &range).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => Refused::Claimed,
        _ => Refused::Read { what: "the mapped code", source },
    })?;
    text.try_lock().map_err(|_| Refused::Claimed)?;
    Ok(text)
}
