//! Tests of `hooks` with a linker that records what it is asked for, and refuses what a test tells it to.

use std::cell::{Cell, RefCell};
use std::ffi::CString;
use std::os::unix::fs::FileExt as _;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

use heapbpf_audit::FileKind;
use heapbpf_kernel::programs::{ProbePoint, Role};
use heapbpf_probes::{AllocatorFile, Machine, ResultLocation, ReturnSite};
use sampler_ebpf::abi::SITE_RETURN_SITES_PROBED;

use super::*;
use crate::linker::Refused;

const P: Option<u32> = Some(10);
const Q: Option<u32> = Some(11);
const MALLOC: u64 = 0x100;
const THROWING: u64 = 0x200;
const RETURN_SITE: u64 = 0x240;
const FREE: u64 = 0x300;
/// Linux's ENOTSUPP: this instruction cannot be probed.
const ENOTSUPP: i32 = 524;

/// Existing links by number: the process, and the file offsets.
type InForce = Arc<Mutex<BTreeMap<usize, (Option<u32>, Vec<u64>)>>>;

/// The kernel's side of the tests.
#[derive(Default)]
struct Kernel {
    in_force: InForce,
    /// Error number that every attempt returns. 0 for none.
    error: Cell<i32>,
    /// Instructions on which it refuses a probe.
    unprobable: RefCell<Vec<u64>>,
    attempts: Cell<usize>,
    points: RefCell<Vec<ProbePoint>>,
}

struct FakeLinks {
    in_force: InForce,
    number: usize,
}

impl FakeLinks {
    fn make(in_force: &InForce, number: usize, points: &[ProbePoint], pid: Option<u32>) -> Self {
        let offsets = points.iter().map(|point| point.offset).collect();
        in_force.lock().expect("no panic").insert(number, (pid, offsets));
        Self { in_force: Arc::clone(in_force), number }
    }
}

impl Drop for FakeLinks {
    fn drop(&mut self) {
        self.in_force.lock().expect("no panic").remove(&self.number);
    }
}

impl ProbeLinks for FakeLinks {
    fn stop_tracking_frees(&mut self) {
        let mut in_force = self.in_force.lock().expect("no panic");
        let (_, offsets) = in_force.get_mut(&self.number).expect("in force");
        offsets.retain(|offset| *offset != FREE);
    }
}

impl Linker for Kernel {
    type Links = FakeLinks;

    fn kind(&self) -> LinkKind {
        LinkKind::Session
    }

    fn link(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> Result<FakeLinks, KernelError> {
        assert!(path.to_string_lossy().starts_with("/proc/self/fd/"));
        self.attempts.set(self.attempts.get() + 1);
        let refusal =
            |number| Err(KernelError::Link { what: "x".into(), source: std::io::Error::from_raw_os_error(number) });
        if self.error.get() != 0 {
            return refusal(self.error.get());
        }
        if points.iter().any(|point| self.unprobable.borrow().contains(&point.offset)) {
            return refusal(ENOTSUPP);
        }
        let number = self.attempts.get();
        *self.points.borrow_mut() = points.to_vec();
        Ok(FakeLinks::make(&self.in_force, number, points, pid))
    }

    fn link_each(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> LinkResult<FakeLinks> {
        let unprobable = self.unprobable.borrow().clone();
        let (refused, accepted): (Vec<ProbePoint>, Vec<ProbePoint>) =
            points.iter().partition(|point| unprobable.contains(&point.offset));
        Ok((self.link(path, &accepted, pid)?, refused.iter().map(|it| (it.offset, "ENOTSUPP".to_owned())).collect()))
    }
}

impl Kernel {
    /// Existing links, in a fixed order.
    fn links(&self) -> Vec<(Option<u32>, Vec<u64>)> {
        let mut links: Vec<_> = self.in_force.lock().expect("no panic").values().cloned().collect();
        links.sort();
        links
    }
}

/// Makes links when it is told to.
struct Slow {
    in_force: InForce,
    gate: Mutex<Receiver<usize>>,
}

impl Linker for Slow {
    type Links = FakeLinks;

    fn kind(&self) -> LinkKind {
        LinkKind::Session
    }

    fn link(&self, _: &CString, points: &[ProbePoint], pid: Option<u32>) -> Result<FakeLinks, KernelError> {
        let number = self.gate.lock().expect("no panic").recv().expect("the test goes on");
        Ok(FakeLinks::make(&self.in_force, number, points, pid))
    }

    fn link_each(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> LinkResult<FakeLinks> {
        Ok((self.link(path, points, pid)?, Refused::new()))
    }
}

/// The sites that were added, file by file.
#[derive(Default)]
struct Sites(Vec<Site>);

impl SiteTable for Sites {
    fn add_file(&mut self, _: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        let first = self.0.len() as u32;
        self.0.extend(sites);
        Ok(first)
    }

    fn remove_file(&mut self, first_site: u32) {
        self.0.truncate(first_site as usize);
    }
}

#[derive(Default)]
struct World {
    kernel: Kernel,
    sites: Sites,
}

impl World {
    fn hook(&mut self, hooks: &mut Hooks<FakeLinks>, key: FileKey, pid: Option<u32>) -> Result<Hooked, HookError> {
        hooks.hook(key, pid, &self.kernel, &mut self.sites)
    }
}

fn planned(function: &str, row: u16, offset: u64, return_needed: bool, return_sites: &[u64]) -> PlannedSite {
    PlannedSite {
        function: function.into(),
        site: Site { offset, function: row, ..Site::default() },
        kind: ProbeKind::Emulated,
        reason: "+0x0 push".into(),
        return_needed,
        return_probe: if return_sites.is_empty() { ReturnProbe::Harmless } else { ReturnProbe::Harmful },
        return_sites: return_sites
            .iter()
            .map(|offset| ReturnSite { offset: *offset, result: ResultLocation::RETURN })
            .collect(),
        announces: None,
    }
}

fn plan() -> AllocatorFile {
    AllocatorFile {
        allocator: "glibc 2.36".into(),
        kind: FileKind::Library,
        build_id: vec![0xab],
        sites: vec![
            planned("malloc", 1, MALLOC, true, &[]),
            planned("operator new", 2, THROWING, true, &[RETURN_SITE]),
            planned("free", 3, FREE, false, &[]),
        ],
        ranges: FileRanges::default(),
        own: Vec::new(),
        may_call_out: false,
        may_be_interposed: false,
        covered: Vec::new(),
        missing: Vec::new(),
        limits: Vec::new(),
    }
}

fn hooks(live: bool) -> Hooks<FakeLinks> {
    let rules = KernelRules::of(Machine::host().unwrap_or(Machine::X86_64), (6, 1));
    Hooks::new(rules, Table::default(), live)
}

/// An examined file with an allocator.
fn allocator(hooks: &mut Hooks<FakeLinks>, path: &str) -> FileKey {
    hooks.files.add(path, tempfile::tempfile().expect("a file"), Ok(plan()))
}

const ALL: [u64; 4] = [MALLOC, THROWING, RETURN_SITE, FREE];

#[test]
fn a_file_is_linked_once_for_each_process() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    assert_eq!(hooks.probed_files(None), 0);
    assert_eq!(world.hook(&mut hooks, key, P).expect("links"), Hooked::Now);
    assert_eq!(world.hook(&mut hooks, key, P).expect("links"), Hooked::Already);
    assert_eq!([None, P, Q].map(|but| hooks.probed_files(but)), [1, 0, 1]);
    assert_eq!(world.hook(&mut hooks, key, Q).expect("links"), Hooked::Now);
    assert_eq!(world.kernel.links(), [(P, ALL.to_vec()), (Q, ALL.to_vec())]);
    assert_eq!((hooks.probed_files(P), world.sites.0.len()), (1, 3), "one set of sites serves both");
    assert_eq!(hooks.functions, [1, 2, 3]);
    assert_eq!(hooks.shared_since(key), None, "each link serves one process");
    hooks.release(10);
    assert!(!hooks.is_served(key, P) && hooks.is_served(key, Q));
    drop(hooks.take_loose());
    assert_eq!(world.kernel.links(), [(Q, ALL.to_vec())]);
    hooks.release_all();
    assert_eq!(world.kernel.links(), []);
}

#[test]
fn files_that_nobody_has_mapped_any_more_are_let_go_of_and_their_sites_with_them() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let [stays, custom, third] = ["/libc.so.6", "/plugin.so", "/built"].map(|path| allocator(&mut hooks, path));
    for key in [stays, custom, third] {
        world.hook(&mut hooks, key, None).expect("links");
    }
    let gone = hooks.forget(|key, path| *key == stays || path == "/plugin.so", &mut world.sites);
    drop(hooks.take_loose());
    assert_eq!((gone, world.kernel.links().len(), world.sites.0.len()), (vec![third], 2, 6));
    assert!(hooks.files.get(third).is_none() && !hooks.has_sites(third) && hooks.is_served(custom, None));
    let again = allocator(&mut hooks, "/another");
    assert_eq!(world.hook(&mut hooks, again, None).expect("links"), Hooked::Now);
    assert_eq!(hooks.functions, [1, 2, 3, 1, 2, 3, 1, 2, 3]);
}

#[test]
fn links_are_made_aside_and_told_once_they_are_there() {
    let (mut sites, mut hooks) = (Sites::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    let ((go, gate), in_force) = (channel(), InForce::default());
    let slow = Arc::new(Slow { in_force: Arc::clone(&in_force), gate: Mutex::new(gate) });
    let is_under_way = |result: &Result<Hooked, HookError>| matches!(result, Err(HookError::UnderWay { .. }));
    for _ in 0..2 {
        assert!(is_under_way(&hooks.hook_aside(key, P, &slow, &mut sites)));
    }
    assert_eq!((hooks.own_links(key), hooks.is_served(key, P)), (1, false));
    assert!(hooks.is_making(key, P) && !hooks.is_making(key, None));
    // The process of these has ended before they are made.
    assert!(is_under_way(&hooks.hook_aside(key, Q, &slow, &mut sites)));
    hooks.release(11);
    [1, 2].iter().for_each(|number| go.send(*number).expect("it waits"));
    let hooked = loop {
        let hooked = hooks.hook_aside(key, P, &slow, &mut sites);
        if !is_under_way(&hooked) {
            break hooked;
        }
        std::thread::yield_now();
    };
    assert_eq!(hooked.expect("links"), Hooked::Now);
    assert_eq!(hooks.hook_aside(key, P, &slow, &mut sites).expect("links"), Hooked::Already);
    while !hooks.making.under_way().is_empty() {
        hooks.take_in_made(LinkKind::Session);
        std::thread::yield_now();
    }
    assert_eq!((hooks.is_served(key, Q), hooks.take_loose().len(), hooks.own_links(key)), (false, 1, 1));
    let made: Vec<Option<u32>> = in_force.lock().expect("no panic").values().map(|(pid, _)| *pid).collect();
    assert_eq!(made, [P]);
}

#[test]
fn links_to_a_file_that_nobody_has_mapped_for_a_while_are_let_go_of_and_made_again() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let [gone, stays] = ["/mnt/plugin.so", "/libc.so.6"].map(|path| allocator(&mut hooks, path));
    for (key, pid) in [(gone, None), (gone, P), (stays, None)] {
        world.hook(&mut hooks, key, pid).expect("links");
    }
    let begun = Instant::now();
    let look = |hooks: &mut Hooks<FakeLinks>, seconds, is_mapped: bool| {
        let now = begun + Duration::from_secs(seconds);
        hooks.let_go_of_unmapped(now, |key| key == stays || is_mapped);
        hooks.take_loose().len()
    };
    assert_eq!([look(&mut hooks, 0, false), look(&mut hooks, 59, false), look(&mut hooks, 60, true)], [0, 0, 0]);
    assert_eq!([look(&mut hooks, 70, false), look(&mut hooks, 129, false), look(&mut hooks, 130, false)], [0, 0, 1]);
    let served = [(gone, None), (gone, P), (stays, None)].map(|(key, pid)| hooks.is_served(key, pid));
    assert_eq!(served, [false, true, true]);
    assert_eq!(hooks.shared_since(gone), None);
    assert_eq!(world.hook(&mut hooks, gone, None).expect("links"), Hooked::Now);
    assert_eq!((look(&mut hooks, 131, false), world.kernel.links().len()), (0, 3));
}

/// The kernel keeps probes at their offsets, whatever is there later.
#[test]
fn a_file_that_is_written_to_has_no_links() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let file = tempfile::tempfile().expect("a file");
    let write = |text: &[u8]| file.write_all_at(text, 0).expect("there is space");
    let add = |hooks: &mut Hooks<FakeLinks>| hooks.files.add("/server", file.try_clone().expect("a copy"), Ok(plan()));
    let key = add(&mut hooks);
    world.hook(&mut hooks, key, None).expect("links");
    world.hook(&mut hooks, key, P).expect("links");
    assert!(hooks.forget_written(&mut world.sites).is_empty() && world.kernel.links().len() == 2);
    write(b"another build");
    assert_eq!(hooks.forget_written(&mut world.sites), [(key, "/server".to_owned())]);
    assert!(world.kernel.links().is_empty() && hooks.files.get(key).is_none() && !hooks.has_sites(key));
    // Written to between being examined and being linked.
    add(&mut hooks);
    write(b"one that is longer");
    let refused = world.hook(&mut hooks, key, None).expect_err("it is another file now");
    assert!(matches!(refused, HookError::Overwritten { .. }) && world.kernel.links().is_empty(), "{refused}");
    add(&mut hooks);
    assert_eq!(world.hook(&mut hooks, key, None).expect("links"), Hooked::Now);
}

#[test]
fn a_file_that_is_written_to_while_its_links_wait_gets_none() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let file = tempfile::tempfile().expect("a file");
    let key = hooks.files.add("/server", file.try_clone().expect("a copy"), Ok(plan()));
    let job = hooks.plan_links((key, None), LinkKind::Session, &mut world.sites).expect("fit").expect("not linked yet");
    file.write_all_at(b"another build", 0).expect("there is space");
    let made = job.make(&world.kernel);
    assert!(made.is_err() && world.kernel.attempts.get() == 0, "the kernel is not asked");
    let outcome = hooks.take_in((key, None), made, LinkKind::Session);
    assert!(matches!(outcome, Err(HookError::Overwritten { .. })) && !hooks.is_served(key, None));
}

#[test]
fn roles_and_cookies_tell_the_programs_what_each_instruction_is() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let first = allocator(&mut hooks, "/one");
    let second = allocator(&mut hooks, "/two");
    world.hook(&mut hooks, first, None).expect("links");
    world.hook(&mut hooks, second, None).expect("links");
    // The second file's sites come after the first one's three.
    let site = |index: u32, flags| Site { flags, ..plan().sites[0].site }.cookie(index).0;
    let expected = [
        ProbePoint { offset: MALLOC, cookie: site(3, 0), role: Role::Allocates },
        ProbePoint { offset: THROWING, cookie: site(4, SITE_RETURN_SITES_PROBED), role: Role::AllocatesWithoutReturn },
        ProbePoint { offset: RETURN_SITE, cookie: ResultLocation::RETURN.cookie(4).0, role: Role::ReturnSite },
        ProbePoint { offset: FREE, cookie: site(5, 0), role: Role::Frees },
    ];
    assert_eq!(*world.kernel.points.borrow(), expected);
}

#[test]
fn links_for_every_process_are_beside_those_of_one() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    assert_eq!(world.hook(&mut hooks, key, P).expect("links"), Hooked::Now);
    assert_eq!((hooks.shared_since(key), hooks.is_served(key, None)), (None, false), "they serve one process alone");
    assert_eq!(world.hook(&mut hooks, key, None).expect("links"), Hooked::Now);
    assert_eq!(world.hook(&mut hooks, key, None).expect("links"), Hooked::Already);
    assert_eq!(world.kernel.links(), [(None, ALL.to_vec()), (P, ALL.to_vec())]);
    assert_eq!(world.sites.0.len(), 3, "one set of sites serves both");
    assert!(hooks.shared_since(key).is_some());
    assert_eq!([P, None, Q].map(|pid| hooks.is_served(key, pid)), [true, true, false]);
    hooks.release(10);
    drop(hooks.take_loose());
    assert_eq!(world.kernel.links(), [(None, ALL.to_vec())], "another process may still need it");
}

#[test]
fn a_file_that_another_tracer_has_patched_is_tried_again_after_a_while() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.kernel.error.set(libc::EINVAL);
    let is_conflict = |result: Result<Hooked, HookError>| {
        matches!(result, Err(HookError::Kernel { source: KernelError::Conflict, .. }))
    };
    assert!(is_conflict(world.hook(&mut hooks, key, P)));
    assert_eq!(world.kernel.attempts.get(), 1);
    // The recorded time is far in the future, so it counts as recent, however slow this machine is.
    let later = Instant::now() + Duration::from_secs(3600);
    hooks.conflicts.insert(key, later);
    world.kernel.error.set(0);
    assert!(is_conflict(world.hook(&mut hooks, key, P)));
    assert_eq!(world.kernel.attempts.get(), 1, "the kernel is not asked again so soon");
    let Some(earlier) = Instant::now().checked_sub(CONFLICT_RETRY) else { return };
    hooks.conflicts.insert(key, earlier);
    assert_eq!(world.hook(&mut hooks, key, P).expect("links"), Hooked::Now);
    assert_eq!(hooks.functions.len(), 3, "the failed attempts left no second set of sites");
}

#[test]
fn an_instruction_without_a_probe_costs_its_function_only() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.kernel.unprobable.borrow_mut().push(THROWING);
    assert_eq!(world.hook(&mut hooks, key, P).expect("links"), Hooked::Now);
    let rest = vec![MALLOC, RETURN_SITE, FREE];
    assert_eq!(world.kernel.links(), [(P, rest.clone())]);
    let audit = hooks.audited(key).expect("hooked");
    let functions: Vec<&str> = audit.attach.iter().map(|entry| entry.function.as_str()).collect();
    assert_eq!(functions, ["malloc", "free"]);
    assert_eq!(audit.missing[0].what, "operator new");
    assert!(audit.missing[0].why.contains("0x200") && audit.missing[0].why.contains("ENOTSUPP"), "{audit:?}");
    let attempts = world.kernel.attempts.get();
    world.hook(&mut hooks, key, Q).expect("links");
    assert_eq!(world.kernel.attempts.get(), attempts + 1, "the refused instruction is not tried again");
    assert_eq!(world.kernel.links(), [(P, rest.clone()), (Q, rest)]);
}

#[test]
fn a_file_without_any_probe_is_refused() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.kernel.unprobable.borrow_mut().extend(ALL);
    let error = world.hook(&mut hooks, key, P).expect_err("nothing can be probed");
    assert!(matches!(error, HookError::Kernel { source: KernelError::Link { .. }, .. }) && !error.is_too_late());
    assert!(hooks.audited(key).is_none());
}

#[test]
fn a_process_that_has_ended_is_told_from_other_failures() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.kernel.error.set(libc::ESRCH);
    assert!(world.hook(&mut hooks, key, P).expect_err("gone").is_too_late());
    world.kernel.error.set(libc::EPERM);
    assert!(!world.hook(&mut hooks, key, P).expect_err("refused").is_too_late());
}

#[test]
fn only_examined_files_with_an_allocator_are_hooked() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let go = hooks.files.add("/go", tempfile::tempfile().expect("a file"), Err(AttachError::Go));
    let error = world.hook(&mut hooks, go, P).expect_err("nothing to hook");
    assert!(matches!(&error, HookError::Unfit { path, .. } if path == "/go"), "{error}");
    let other = FileKey::of(&tempfile::tempfile().expect("a file")).expect("stat");
    assert_eq!(world.hook(&mut hooks, other, P).expect("nothing to do"), Hooked::Already);
    assert_eq!((world.kernel.attempts.get(), hooks.probed_files(None)), (0, 0));
}

#[test]
fn without_live_tracking_freeing_functions_are_not_linked() {
    let (mut world, mut hooks) = (World::default(), hooks(false));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.hook(&mut hooks, key, P).expect("links");
    assert_eq!(world.kernel.links(), [(P, vec![MALLOC, THROWING, RETURN_SITE])]);
    let audit = hooks.audit_of(key, LinkKind::Perf).expect("examined");
    assert_eq!(audit.attach.len(), 2);
    assert_eq!(hooks.kinds(false).count(), 2);
    hooks.stop_tracking_frees(LinkKind::Session);
    assert!(!hooks.gave_up_frees, "nobody wants them");
}

#[test]
fn named_functions_alone_are_linked() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    hooks.only = Some(&["malloc", "free"]);
    let key = allocator(&mut hooks, "/libc.so.6");
    world.hook(&mut hooks, key, P).expect("links");
    assert_eq!(world.kernel.links(), [(P, vec![MALLOC, FREE])]);
}

#[test]
fn frees_stop_everywhere_and_allocations_stay_hooked() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    for pid in [P, Q] {
        world.hook(&mut hooks, key, pid).expect("links");
    }
    assert!(!hooks.gave_up_frees);
    hooks.stop_tracking_frees(LinkKind::Session);
    let without = vec![MALLOC, THROWING, RETURN_SITE];
    assert_eq!(world.kernel.links(), [(P, without.clone()), (Q, without.clone())]);
    let audit = hooks.audited(key).expect("hooked");
    assert!(hooks.gave_up_frees && audit.attach.iter().all(|entry| entry.function != "free"), "{audit:?}");
    // A file that is hooked later is linked the same way.
    let late = allocator(&mut hooks, "/late");
    world.hook(&mut hooks, late, None).expect("links");
    assert_eq!(world.kernel.links()[0], (None, without));
}

#[test]
fn functions_that_may_throw_and_freeing_ones_get_no_session_link() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let key = allocator(&mut hooks, "/libc.so.6");
    world.hook(&mut hooks, key, None).expect("links");
    let audit = hooks.audited(key).expect("hooked");
    let kinds: Vec<(&str, LinkKind)> = audit.attach.iter().map(|entry| (&*entry.function, entry.link)).collect();
    assert_eq!(kinds, [("malloc", LinkKind::Session), ("operator new", LinkKind::Multi), ("free", LinkKind::Multi)]);
    hooks.stop_tracking_frees(LinkKind::Session);
    assert_eq!(hooks.audited(key).expect("hooked").attach.len(), 2);
}

#[test]
fn a_session_that_awaits_one_return_at_a_time_serves_every_process() {
    let (mut world, mut hooks) = (World::default(), hooks(true));
    let mut switching = plan();
    switching.sites[0].return_probe = ReturnProbe::OneAtATime;
    let key = hooks.files.add("/plugin.so", tempfile::tempfile().expect("a file"), Ok(switching));
    assert!(hooks.must_be_shared(key, LinkKind::Session) && !hooks.must_be_shared(key, LinkKind::Multi));
    let refused = world.hook(&mut hooks, key, P).expect_err("other processes would come to harm");
    assert!(matches!(&refused, HookError::MustBeShared(path) if path == "/plugin.so"), "{refused}");
    assert_eq!(world.kernel.links(), []);
    assert_eq!(world.hook(&mut hooks, key, None).expect("links"), Hooked::Now);
    let other = allocator(&mut hooks, "/libc.so.6");
    assert!(!hooks.must_be_shared(other, LinkKind::Session));
}
