//! Probes on functions of a test, which decides what each call returns and what becomes of it. Needs root and the BPF
//! object.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::ffi::CString;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use heapbpf_heap::event::{Event, decode};
use heapbpf_kernel::control::{ControlMaps, CountedBy};
use heapbpf_kernel::guardian::Guardian;
use heapbpf_kernel::live_map::LiveMap;
use heapbpf_kernel::loader::{Loader, MapSizes};
use heapbpf_kernel::object;
use heapbpf_kernel::programs::{Links, ProbePoint, Programs, Role, When};
use heapbpf_kernel::ring_maps::RingId;
use heapbpf_kernel::rings::Ring;
use heapbpf_kernel::totals::Totals;
use heapbpf_testing::programs_to_load;
use sampler_ebpf::abi::{
    Config, Counters, FileRanges, LiveKey, LiveValue, NO_ARGUMENT, SITE_ZERO_FREES, Site, stack_kind,
};
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::trials::CRITERION_BYTES;

/// What an allocation function of this test does with a call.
pub const RETURNS: u64 = 0;
pub const ENDS_ITS_THREAD: u64 = 1;
pub const WAITS: u64 = 2;

/// Non-zero while waiting calls must keep waiting.
pub static HELD: AtomicU64 = AtomicU64::new(0);
/// Number of calls that are waiting.
pub static WAITING: AtomicU64 = AtomicU64::new(0);

/// Like malloc. Returns the block `address`, which nothing uses as memory.
#[inline(never)]
pub extern "C" fn allocate(size: u64, address: u64, then: u64) -> u64 {
    black_box(size);
    match then {
        ENDS_ITS_THREAD => {
            // SAFETY: ends the calling thread, which the test created for this and which owns nothing.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
        WAITS => {
            WAITING.fetch_add(1, Ordering::SeqCst);
            while HELD.load(Ordering::SeqCst) != 0 {
                std::thread::yield_now();
            }
        }
        _ => {}
    }
    address
}

/// Like posix_memalign, but writes nothing to `out`.
#[inline(never)]
pub extern "C" fn allocate_to(out: u64, size: u64) -> u64 {
    black_box((out, size));
    0
}

/// Like realloc.
#[inline(never)]
pub extern "C" fn reallocate(old: u64, size: u64, address: u64) -> u64 {
    black_box((old, size));
    address
}

/// Like free.
#[inline(never)]
pub extern "C" fn release(address: u64) {
    black_box(address);
}

/// Path of this program, and file offset of a function in it.
pub fn place(function: *const ()) -> (CString, u64) {
    let maps = procfs::process::Process::myself().unwrap().maps().unwrap();
    let address = function as u64;
    let map = maps.iter().find(|map| (map.address.0..map.address.1).contains(&address)).unwrap();
    (CString::new("/proc/self/exe").unwrap(), address - map.address.0 + map.offset)
}

/// The programs, attached to the functions of this test.
pub struct Kernel {
    pub programs: Programs,
    pub control: ControlMaps,
    pub totals: Totals,
    pub live: LiveMap,
    pub events: Ring,
    pub links: Option<Links>,
    /// The probes are on functions of this process, so only one test at a time may have them.
    _turn: MutexGuard<'static, ()>,
}

pub struct Setting {
    pub faults: u32,
    pub interval: u64,
    pub events_bytes: u32,
    pub live: bool,
    pub criterion: u64,
}

pub const EVERY_CALL: Setting =
    Setting { faults: 0, interval: 1, events_bytes: 1 << 20, live: true, criterion: CRITERION_BYTES };

impl Kernel {
    /// Loads and attaches everything. `None` if no BPF program can be loaded here.
    pub fn start(setting: &Setting) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let object = programs_to_load()?;
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let config = Config {
            live: u32::from(setting.live),
            stack_kind: stack_kind::NONE,
            faults: setting.faults,
            criterion: setting.criterion,
            memory_bytes: u64::MAX,
            page_bytes: 4096,
            ..Config::default()
        };
        let sizes =
            MapSizes { events_bytes: setting.events_bytes, stacks_bytes: 4096, live_max: 1 << 12, stack_traces_max: 1 };
        let loader = std::sync::Arc::new(Loader::new(object::aligned(&object), &config, &sizes).unwrap());
        let mut control = ControlMaps::open(&loader).unwrap();
        control.set_draw(draw_constants(setting.interval).unwrap()).unwrap();
        control.add_target(std::process::id(), CountedBy::OwnLinks).unwrap();
        let programs = Programs::load(&loader, (setting.live, When::AtOnce), None, &Guardian::default()).unwrap();
        let (totals, live) = (Totals::open(&loader).unwrap(), LiveMap::open(&loader).unwrap());
        let events = Ring::open(&loader, RingId::Events).unwrap();
        let mut kernel = Self { programs, control, totals, live, events, links: None, _turn: turn };
        kernel.links = Some(kernel.attach(Some(std::process::id())));
        Some(kernel)
    }

    /// Links the functions of this test, for one process or for all.
    pub fn attach(&mut self, pid: Option<u32>) -> Links {
        let none = NO_ARGUMENT;
        let functions = [
            (release as *const (), [none, 0, none], 0, Role::Frees),
            (allocate as *const (), [0, none, none], 0, Role::Allocates),
            (allocate_to as *const (), [1, none, 0], 0, Role::Allocates),
            (reallocate as *const (), [1, 0, none], SITE_ZERO_FREES, Role::Allocates),
        ];
        let sites = functions.map(|(function, [size_argument, old_argument, out_argument], flags, _)| Site {
            offset: place(function).1,
            size_argument,
            times_argument: none,
            old_argument,
            out_argument,
            flags,
            ..Site::default()
        });
        let first = self.control.add_file(&FileRanges::default(), &sites).unwrap();
        let points: Vec<ProbePoint> = (first..)
            .zip(sites.iter().zip(functions))
            .map(|(index, (site, (_, _, _, role)))| ProbePoint {
                offset: site.offset,
                cookie: site.cookie(index).0,
                role,
            })
            .collect();
        let path = place(release as *const ()).0;
        self.programs.attach(&path, &points, pid).unwrap()
    }

    pub fn counters(&self) -> Counters {
        self.totals.read(&self.programs).unwrap().total()
    }

    /// Addresses of the blocks that are live according to the live map.
    pub fn live(&mut self) -> Vec<u64> {
        let mut addresses = Vec::new();
        self.live
            .scan(|entries| {
                let live = |(_, value): &(LiveKey, LiveValue)| value.sample != LiveValue::FREED;
                addresses.extend(entries.filter(live).map(|(key, _)| key.address));
            })
            .unwrap();
        addresses.sort_unstable();
        addresses
    }

    /// The records so far.
    pub fn records(&mut self) -> Vec<Event> {
        let mut records = Vec::new();
        while self.events.drain(|record| records.extend(decode(&record))) > 0 {}
        records
    }
}

/// Samples that the records report as allocated, and as freed.
pub fn samples(records: &[Event]) -> (Vec<u64>, Vec<u64>) {
    let allocated = records.iter().filter_map(|record| match record {
        Event::Allocation(record) => Some(record.sample),
        _ => None,
    });
    let freed = records.iter().filter_map(|record| match record {
        Event::Free(record) => Some(record.sample),
        _ => None,
    });
    let sorted = |samples: &mut dyn Iterator<Item = u64>| {
        let mut samples: Vec<u64> = samples.collect();
        samples.sort_unstable();
        samples
    };
    (sorted(&mut { allocated }), sorted(&mut { freed }))
}

/// Runs a closure in a separate thread and waits for it.
pub fn elsewhere(run: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(run).join()).unwrap();
}

/// Ends its thread inside an allocation.
pub extern "C" fn end_in_a_call(_: *mut libc::c_void) -> *mut libc::c_void {
    allocate(100, 4096, ENDS_ITS_THREAD);
    std::ptr::null_mut()
}

/// The sum of all fates of hits, each counted by its own counter.
pub fn accounted(counters: &Counters) -> u64 {
    counters.unsampled
        + counters.submitted
        + counters.failed
        + counters.lost_ring_full
        + counters.lost_abandoned
        + counters.lost_in_flight
        + counters.lost_undecided
        + counters.lost_no_thread_state
        + counters.lost_result_unreadable
}
