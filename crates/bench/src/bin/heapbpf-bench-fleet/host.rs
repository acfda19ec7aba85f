//! Synthetic hosts: the same programs everywhere, each process with its share of the host's allocations, most of them
//! at few call sites. The allocations are known; the samples in a profile are drawn as the probes draw them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fastrand::Rng;
use heapbpf_profile::model::{Criterion, Frame, Header, Module, Process, Profile, Row, RowKey, SharedFrames, Stack};
use heapbpf_statistics::binomial;
use heapbpf_statistics::sums::SampleSums;

/// Sizes of allocations, bytes, and how many of 100 have each.
const SIZES: [(u64, u32); 8] =
    [(16, 20), (32, 25), (64, 20), (128, 14), (512, 10), (4096, 7), (65_536, 3), (1 << 20, 1)];
/// Share of the allocated bytes that is in use.
const IN_USE: f64 = 0.1;

/// A host.
pub struct Host {
    /// Its number, which is also its seed.
    pub number: usize,
    /// How many processes it has.
    pub processes: usize,
    /// Sampling interval R, bytes.
    pub interval: u64,
    /// Duration of the recording.
    pub window: Duration,
    /// Bytes that all its processes together allocate per second.
    pub bytes_per_second: f64,
}

/// A profile and the truth about it.
pub struct ProfileAndTruth {
    /// The profile.
    pub profile: Profile,
    /// Bytes actually allocated, by innermost function.
    pub truth: HashMap<String, f64>,
}

/// A call site of a program.
struct Site {
    stack: Arc<Stack>,
    size: u64,
    /// Share of the program's calls.
    share: f64,
}

/// The programs of a fleet.
pub struct Fleet {
    modules: Vec<Module>,
    programs: Vec<Vec<Site>>,
}

impl Fleet {
    /// A number of programs, with a number of call sites each.
    pub fn new(programs: usize, sites: usize) -> Self {
        let mut random = Rng::with_seed(7);
        let mut modules = vec![module(&mut random, "/usr/lib/x86_64-linux-gnu/libc.so.6".into())];
        let programs = (0..programs)
            .map(|program| {
                modules.push(module(&mut random, format!("/usr/bin/service-{program}")));
                sites_of(program, modules.len() - 1, sites, &mut random)
            })
            .collect();
        Self { modules, programs }
    }

    /// The profile of this host.
    pub fn profile(&self, host: &Host) -> ProfileAndTruth {
        let mut random = Rng::with_seed(1 + host.number as u64);
        let mut truth = HashMap::new();
        let mut rows = Vec::new();
        let mut processes = Vec::new();
        let shares: Vec<f64> = (1..=host.processes).map(|rank| 1.0 / rank as f64).collect();
        let all: f64 = shares.iter().sum();
        for (process, share) in shares.iter().enumerate() {
            let program = random.usize(..self.programs.len());
            let bytes = host.bytes_per_second * host.window.as_secs_f64() * share / all;
            let mean: f64 = self.programs[program].iter().map(|site| site.share * site.size as f64).sum();
            for site in &self.programs[program] {
                let calls = (bytes / mean * site.share).round() as u64;
                let name = site.stack.frames[0].function.as_deref().unwrap_or_default();
                *truth.entry(name.to_owned()).or_insert(0.0) += calls as f64 * site.size as f64;
                rows.extend(row(process, site, calls, host.interval, &mut random));
            }
            processes.push(Process {
                pid: 1000 + process as u32,
                comm: format!("service-{program}"),
                exe: format!("/usr/bin/service-{program}"),
                cgroup: format!("/system.slice/service-{program}.service"),
                allocators: vec!["glibc 2.36".into()],
                coverage: 1.0,
                exact_alloc_bytes: Some(bytes as u64),
                exact_alloc_objects: Some((bytes / mean) as u64),
                ..Process::default()
            });
        }
        let profile = Profile {
            header: Header {
                version: env!("CARGO_PKG_VERSION").into(),
                unwind: "auto".into(),
                started: UNIX_EPOCH + Duration::from_secs(1_700_000_000),
                time: UNIX_EPOCH + Duration::from_secs(1_700_000_000) + host.window,
                duration: host.window,
                host: format!("host-{:04}", host.number),
                ..Header::new(host.interval, Criterion::Bytes)
            },
            processes,
            idle: Vec::new(),
            rows,
            modules: self.modules.clone(),
            counters: Default::default(),
            notes: Vec::new(),
        };
        ProfileAndTruth { profile, truth }
    }
}

fn module(random: &mut Rng, path: String) -> Module {
    let start = 0x7f00_0000_0000 + random.u64(..1 << 24) * 4096;
    let build_id = (0..20).map(|_| random.u8(..)).collect();
    Module {
        path: path.into(),
        build_id: Some(build_id),
        start,
        end: start + (8 << 20),
        file_offset: 0x1000,
        reason: None,
    }
}

/// The call sites of a program: each is a path from `main` through a tree of functions. The k-th call site has 1/k of
/// the calls of the first.
fn sites_of(program: usize, module: usize, sites: usize, random: &mut Rng) -> Vec<Site> {
    let functions: Vec<Frame> = (0..400u64)
        .map(|index| {
            let address = 0x5555_0000_0000 + index * 512;
            Frame {
                function: Some(
                    format!(
                        "service_{program}::part_{}::Component<Policy{}>::operation_{index}(Request const&)",
                        index % 20,
                        index % 7
                    )
                    .into(),
                ),
                file: Some(format!("/src/service_{program}/part_{}/file_{}.cc", index % 20, index % 60).into()),
                module: Some(module),
                address,
                file_offset: Some(address & 0xf_ffff),
                ..Frame::default()
            }
        })
        .collect();
    let mut shared = SharedFrames::default();
    let all: f64 = (1..=sites).map(|rank| 1.0 / rank as f64).sum();
    (1..=sites)
        .map(|rank| {
            let depth = random.usize(12..36);
            let mut at = 0;
            // Root first: there are few branches near the root, and many near the leaves.
            let mut frames: Vec<Arc<Frame>> = (0..depth)
                .map(|level| {
                    at = (at * 7 + random.usize(..2 + level / 3)) % functions.len();
                    let call = random.u64(..4) * 5;
                    let function = &functions[at];
                    let address = function.address + call;
                    shared.share(Frame {
                        line: Some((at as u32 * 13 + call as u32) % 900 + 1),
                        address,
                        file_offset: Some(address & 0xf_ffff),
                        ..function.clone()
                    })
                })
                .collect();
            frames.reverse();
            let mut chance = random.u32(..100);
            let of_chance = |(_, share): &&(u64, u32)| {
                let here = chance < *share;
                chance = chance.saturating_sub(*share);
                here
            };
            let size = SIZES.iter().find(of_chance).map_or(64, |(size, _)| *size);
            let stack = Arc::new(Stack { frames, unwinder: "dwarf", cut: None });
            Site { stack, size, share: 1.0 / rank as f64 / all }
        })
        .collect()
}

/// The samples at a call site, if there are any.
fn row(process: usize, site: &Site, calls: u64, interval: u64, random: &mut Rng) -> Option<Row> {
    let probability = -f64::exp_m1(site.size as f64 * f64::ln_1p(-1.0 / interval as f64));
    let samples = binomial::draw(calls, probability, || random.u64(..));
    let mut alloc = SampleSums::default();
    let mut inuse = SampleSums::default();
    for _ in 0..samples {
        let offset = random.u64(..site.size);
        alloc.record(site.size, site.size, offset, interval);
        if random.f64() < IN_USE {
            inuse.record(site.size, site.size, offset, interval);
        }
    }
    let key = RowKey {
        process,
        thread: format!("worker-{}", samples % 8).into(),
        function: "malloc".into(),
        interval,
        stack: Arc::clone(&site.stack),
    };
    (samples > 0).then(|| Row { alloc, inuse, peak: Some(inuse), ..Row::new(key) })
}
