//! Synthetic profiles for tests: a small one with every feature, and a large one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use super::model::{
    Criterion, Frame, GO_RUNTIME, Header, InMemory, Lifetimes, Losses, Module, Octave, Placement, Process, Profile,
    Resident, Row, RowKey, SharedFrames, Stack, Unread,
};
use heapbpf_audit::{AttachEntry, FileAudit, FileKind, Hook, LinkKind, Missing, ProbeKind};
use heapbpf_statistics::growth::Growth;
use heapbpf_statistics::sums::SampleSums;

/// Sums of `samples` samples of `size` bytes each under the sampling interval `interval`, in bytes.
pub fn sums(samples: u64, size: u64, interval: u64) -> SampleSums {
    if samples == 0 {
        return SampleSums::default();
    }
    let p = if interval == 1 { 1.0 } else { -f64::exp_m1(size.max(1) as f64 * f64::ln_1p(-1.0 / interval as f64)) };
    let (count, weight, size_bytes) = (samples as f64, 1.0 / p, size as f64);
    SampleSums {
        samples,
        zero_byte_samples: if size == 0 { samples } else { 0 },
        sampled_bytes: samples * size,
        offset_sum: samples * (size / 2),
        bytes: count * size_bytes * weight,
        bytes_variance: count * size_bytes * size_bytes * weight * (weight - 1.0),
        objects: count * weight,
        objects_variance: count * weight * (weight - 1.0),
        smallest_bytes: size,
        largest_bytes: size,
        ..SampleSums::default()
    }
}

/// The profile as a file of the given format, with default options.
#[cfg(test)]
pub(crate) fn written(profile: &Profile, format: &str) -> Vec<u8> {
    let mut file = Vec::new();
    let format = crate::formats::by_name(format).expect("a format");
    format.write(profile, &crate::WriteOptions::default(), &mut file).expect("memory");
    file
}

/// The profile as a file of text.
#[cfg(test)]
pub(crate) fn text(profile: &Profile, format: &str) -> String {
    String::from_utf8(written(profile, format)).expect("text")
}

/// The profile as a file of JSON.
#[cfg(test)]
pub(crate) fn json(profile: &Profile, format: &str) -> serde_json::Value {
    serde_json::from_slice(&written(profile, format)).expect("JSON")
}

/// A named frame of module `module` at `address`.
pub fn frame(module: usize, address: u64, function: &str, file: &str, line: u32) -> Frame {
    Frame {
        function: Some(function.into()),
        file: Some(file.into()),
        line: Some(line),
        module: Some(module),
        address,
        file_offset: Some(address & 0xf_ffff),
        ..Frame::default()
    }
}

fn module(path: &str, build_id: &[u8], start: u64) -> Module {
    let (end, file_offset) = (start + 0x10_0000, start & 0xf_ffff);
    Module { path: path.into(), build_id: Some(build_id.to_vec()), start, end, file_offset, reason: None }
}

/// An audit of one file with one hooked function and one that is not hooked.
fn audit() -> FileAudit {
    let file = "/usr/lib/x86_64-linux-gnu/libc.so.6";
    FileAudit {
        file: file.into(),
        allocator: "glibc 2.36".into(),
        kind: FileKind::Library,
        build_id: "0a0b".into(),
        attach: vec![AttachEntry {
            file: file.into(),
            allocator: "glibc 2.36".into(),
            function: "malloc".into(),
            offset: 0x99a40,
            kind: ProbeKind::Emulated,
            link: LinkKind::Session,
            reason: "+0x0 `push %rbp` is emulated".into(),
        }],
        covered: Vec::new(),
        missing: vec![Missing::new("valloc", "an IFUNC")],
        limits: Vec::new(),
    }
}

fn processes() -> Vec<Process> {
    vec![
        Process {
            pid: 4242,
            namespace_pid: Some(7),
            comm: "server".into(),
            exe: "/usr/bin/server".into(),
            cgroup: "/system.slice/server.service".into(),
            placement: Placement { unit: "server.service".into(), ..Placement::default() },
            allocators: vec!["glibc 2.36".into()],
            hook: Some(Hook::Inline),
            audit: vec![Arc::new(audit())],
            missing: vec![Missing::new("/opt/lib/custom.so", "cannot be read")],
            coverage: 1.0,
            ended: false,
            inuse_unknown: false,
            exact_alloc_bytes: Some(60_000_000),
            exact_alloc_objects: Some(9_000),
            losses: Losses::default(),
            ..Process::default()
        },
        Process {
            pid: 4300,
            comm: "worker \"x\"".into(),
            hook: Some(Hook::Probe),
            cpu_coverage: Some(0.25),
            not_inline: Some("it runs with shadow stacks".into()),
            own_links: Some(true),
            coverage: 0.5,
            ended: true,
            ..Process::default()
        },
    ]
}

/// [`small`], with measured memory of the first process.
pub fn measured() -> Profile {
    let mut profile = small();
    profile.processes[0].resident = Some(Resident {
        heap_bytes: 300 << 20,
        files_bytes: 5 << 20,
        other_bytes: 3 << 20,
        at_attach_bytes: Some(100 << 20),
        ..Resident::default()
    });
    profile
}

/// [`measured`], as a recording of a whole host in which other processes were idle.
pub fn whole_host() -> Profile {
    let idle = |pid, comm: &str, exe: &str, resident: Resident| Process {
        pid,
        comm: comm.into(),
        exe: exe.into(),
        allocators: vec!["glibc 2.36".into()],
        resident: Some(resident),
        ..Process::default()
    };
    let mut profile = measured();
    let ledger = Resident {
        heap_bytes: 180 << 20,
        files_bytes: 12 << 20,
        other_bytes: 430 << 20,
        swapped_bytes: 30 << 20,
        pss_bytes: Some(615 << 20),
        at_attach_bytes: Some(610 << 20),
        ..Resident::default()
    };
    let rough = Resident { undivided_bytes: 1 << 20, files_bytes: 3 << 20, ..Resident::default() };
    let shell = "/usr/bin/sh";
    profile.idle = vec![
        idle(900, "ledgerd", "/usr/bin/ledgerd", ledger),
        idle(901, "sh", shell, rough),
        idle(902, "sh", shell, rough),
    ];
    profile
}

/// [`small`], with a stripped library: only the start of the function in its unnamed frame is known.
pub fn stripped() -> Profile {
    let mut profile = small();
    profile.modules[1].reason = Some("libjson.so is stripped: install libjson1-dbgsym".into());
    for row in &mut profile.rows {
        let mut stack = Stack::clone(&row.key.stack);
        for frame in stack.frames.iter_mut().map(Arc::make_mut).filter(|frame| frame.function.is_none()) {
            (frame.function_start, frame.reason) = (Some(0x3f40), None);
        }
        row.key.stack = stack.into();
    }
    profile
}

/// A profile of two processes with six rows: inlined, unnamed and recursive frames, a cut stack, two sampling
/// intervals, a stack with a single sample, and two rows that differ only in the allocator function.
pub fn small() -> Profile {
    const R: u64 = 524_288;
    let modules = vec![
        module("/usr/bin/server", &[0xab, 0xcd, 0xef, 1], 0x5555_0000_0000),
        module("/srv/lib/libjson.so", &[1, 2, 3, 4, 5, 6, 7, 8], 0x7f00_0000_0000),
    ];
    let main = frame(0, 0x5555_0000_1000, "main", "/src/main.c", 10);
    let handle = frame(0, 0x5555_0000_2000, "handle(Request const&)", "/src/server.cc", 20);
    let inlined = Frame { inlined: true, ..frame(1, 0x7f00_0000_3000, "grow", "/src/json.c", 31) };
    let parse = frame(1, 0x7f00_0000_3000, "parse_value", "/src/json.c", 99);
    let again = frame(1, 0x7f00_0000_3100, "parse_value", "/src/json.c", 120);
    let unnamed = Frame {
        module: Some(1),
        address: 0x7f00_0000_4000,
        file_offset: Some(0x4000),
        reason: Some("no symbols".into()),
        ..Frame::default()
    };
    let stack = |frames: &[&Frame], cut: Option<&str>| {
        let frames = frames.iter().map(|&frame| Arc::new(frame.clone())).collect();
        Arc::new(Stack { frames, unwinder: "dwarf", cut: cut.map(Into::into) })
    };
    let deep = stack(&[&inlined, &parse, &again, &again, &handle, &main], None);
    let row = |process, function: &str, interval, alloc, inuse, stack: &Arc<Stack>| Row {
        alloc,
        inuse,
        ..Row::new(RowKey {
            process,
            thread: "worker".into(),
            function: function.into(),
            interval,
            stack: stack.clone(),
        })
    };
    let mut rows = vec![
        row(0, "malloc", R, sums(40, 70_000, R), sums(20, 70_000, R), &deep),
        row(0, "calloc", R, sums(3, 70_000, R), sums(1, 70_000, R), &deep),
        row(0, "malloc", 2 * R, sums(5, 1_000, 2 * R), SampleSums::default(), &deep),
        row(0, "malloc", R, sums(1, 512, R), sums(1, 512, R), &stack(&[&unnamed, &handle, &main], None)),
        row(1, "malloc", R, sums(9, 4_096, R), sums(9, 4_096, R), &deep),
        row(1, "realloc", R, sums(2, 100, R), sums(1, 100, R), &stack(&[&handle], Some("stack copy too small"))),
    ];
    let ages = vec![Octave { exponent: 30, freed: 20, left: 3 }, Octave { exponent: 33, freed: 0, left: 17 }];
    let survival = vec![(0.0, 1.0), (2.0, 0.5)];
    rows[0].lifetimes = Some(Lifetimes { median_seconds: Some(1.5), temporary: 0.25, survival, ages });
    rows[0].growth = Some(Growth { kept: sums(3, 64, R), freed: sums(2, 128, R) });
    Profile {
        header: Header {
            version: "0.1.0".into(),
            unwind: "auto".into(),
            started: UNIX_EPOCH + Duration::new(1_700_000_000, 123_456_789),
            time: UNIX_EPOCH + Duration::new(1_700_000_030, 623_456_789),
            duration: Duration::from_millis(30_500),
            growth_over: Some(Duration::from_millis(14_250)),
            host: "host1".into(),
            ..Header::new(R, Criterion::Bytes)
        },
        processes: processes(),
        idle: Vec::new(),
        rows,
        modules,
        counters: BTreeMap::from([("hits".into(), 9_100), ("lost_ring_full".into(), 3)]),
        notes: vec!["worker \"x\" (4300) was counted for 50 % of its life".into()],
    }
}

/// A profile with a last row like its first one. A function has another name in each of the two, and no source line.
pub fn with_overload(mut profile: Profile, function: &str, names: [&str; 2]) -> Profile {
    profile.rows.push(profile.rows[0].clone());
    let last = profile.rows.len() - 1;
    for (index, name) in [(0, names[0]), (last, names[1])] {
        let row = &mut profile.rows[index];
        row.key.stack = Arc::new(row.key.stack.with_frames(&mut SharedFrames::default(), |frame| {
            if frame.function.as_deref() == Some(function) {
                (frame.function, frame.file, frame.line) = (Some(name.into()), None, None);
            }
        }));
    }
    profile
}

/// Checks that a JSON object has keys, which are given in one text.
///
/// # Panics
/// It lacks one.
pub fn has_keys(object: &serde_json::Value, keys: &str) {
    keys.split_whitespace().for_each(|key| assert!(object.get(key).is_some(), "no {key} in {object}"));
}

/// [`small`], with unknown figures in use for the second process.
pub fn partly_followed() -> Profile {
    let mut profile = small();
    profile.processes[1].inuse_unknown = true;
    for row in profile.rows.iter_mut().filter(|row| row.key.process == 1) {
        (row.inuse, row.peak, row.lifetimes) = (SampleSums::default(), None, None);
    }
    profile
}

/// [`small`], where half of the bytes in use are in memory and some are swapped out.
pub fn partly_in_memory() -> Profile {
    let mut profile = small();
    for row in &mut profile.rows {
        let part = |share: f64| SampleSums {
            sampled_bytes: (row.inuse.sampled_bytes as f64 * share) as u64,
            bytes: row.inuse.bytes * share,
            bytes_variance: row.inuse.bytes_variance * share * share,
            ..row.inuse
        };
        row.in_memory = Some(Box::new(InMemory { resident: part(0.5), swapped: part(0.125), ..InMemory::NONE }));
    }
    profile
}

/// [`small`], where following the first process's frees resumed 12.5 s after its start.
pub fn followed_again() -> Profile {
    let mut profile = small();
    profile.processes[0].inuse_since = Some(profile.header.started + Duration::from_millis(12_500));
    profile.rows.iter_mut().filter(|row| row.key.process == 0).for_each(|row| row.growth = None);
    profile
}

/// [`small`], where memory that the second process held at exit is separate from memory in use.
pub fn ended_apart() -> Profile {
    let mut profile = small();
    profile.header.ended_apart = true;
    profile.header.time = UNIX_EPOCH + Duration::new(1_700_000_029, 250_000_000);
    for row in profile.rows.iter_mut().filter(|row| row.key.process == 1) {
        row.at_exit = std::mem::take(&mut row.inuse);
    }
    profile
}

/// [`ended_apart`], with some records that were not read in time.
pub fn partly_read() -> Profile {
    let mut profile = ended_apart();
    profile.header.unread = Some(Unread { records: 12, of: 1_000 });
    profile
}

/// [`small`], where the second process also has a Go heap, sampled at a different rate.
pub fn with_go_heap() -> Profile {
    let mut profile = small();
    profile.processes[1].hook = Some(Hook::GoRuntime);
    let frames = vec![frame(0, 0x5555_0000_5000, "main.list", "/src/main.go", 12)];
    let stack = Arc::new(Stack { frames: frames.into_iter().map(Arc::new).collect(), unwinder: GO_RUNTIME, cut: None });
    let key = RowKey { process: 1, thread: "".into(), function: "runtime.mallocgc".into(), interval: 1 << 20, stack };
    profile.rows.push(Row { inuse: SampleSums { offset_sum: 0, ..sums(7, 300, 1 << 20) }, ..Row::new(key) });
    profile
}

/// A profile of `stacks` distinct stacks with `depth` frames each, over 2,000 functions with long names. The stacks
/// share their outer frames as in real call trees.
pub fn large(stacks: usize, depth: usize) -> Profile {
    let mut profile = small();
    let module = 1;
    let functions: Vec<Frame> = (0..2_000u64)
        .map(|index| {
            let name =
                format!("company::subsystem_{}::Component<Policy{}>::operation_{index}(int)", index % 40, index % 7);
            frame(module, 0x7f00_0000_0000 + index * 64, &name, &format!("/src/subsystem/file_{}.cc", index % 300), 1)
        })
        .collect();
    let sites: Vec<Arc<Frame>> = (0..20_000usize)
        .map(|site| {
            let function = &functions[site % functions.len()];
            let address = function.address + (site / functions.len()) as u64 * 4;
            Arc::new(Frame {
                line: Some((site % 900) as u32 + 1),
                address,
                file_offset: Some(address & 0xf_ffff),
                ..function.clone()
            })
        })
        .collect();
    profile.rows = (0..stacks)
        .map(|index| {
            let frames = (0..depth)
                .map(|level| {
                    // The outer frames change rarely, the inner ones with every stack.
                    let path = if level < 3 { index * 31 } else { index >> (level / 3).min(14) };
                    let spread = path * 17 + level * 131;
                    sites[spread % sites.len()].clone()
                })
                .collect();
            let samples = 1 + (index % 37) as u64;
            Row {
                alloc: sums(samples, 100 + (index % 5_000) as u64, profile.header.interval),
                inuse: sums(samples / 2, 100 + (index % 5_000) as u64, profile.header.interval),
                ..Row::new(RowKey {
                    process: index % 2,
                    thread: "worker".into(),
                    function: "malloc".into(),
                    interval: profile.header.interval,
                    stack: Arc::new(Stack { frames, unwinder: "dwarf", cut: None }),
                })
            }
        })
        .collect();
    profile
}
