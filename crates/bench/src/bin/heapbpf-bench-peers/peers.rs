//! The profilers: how each is started on a workload, and how its output is read.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::parse::{self, Names, Sites};

/// The speed of a workload under a profiler. It determines the number of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// About ten microseconds per call.
    Slow,
    /// About one microsecond per call.
    Middle,
    /// Nanoseconds per call.
    Fast,
}

/// How a profiler is applied to a workload.
pub enum How {
    /// No profiler: the bare workload.
    Bare,
    /// The no-op baseline: BPF programs that do nothing, at the instructions that heapbpf probes.
    Baseline,
    /// A command that attaches to the waiting process.
    Attach(fn(&Place) -> Vec<String>),
    /// Environment variables of the workload.
    Preload(fn(&Place) -> Vec<(String, String)>),
}

/// The process and paths of one run.
pub struct Place<'a> {
    /// Process id of the workload.
    pub pid: u32,
    /// The file with its malloc.
    pub library: &'a Path,
    /// Prefix of the paths of results.
    pub out: &'a Path,
    /// The program `heapbpf`.
    pub heapbpf: &'a Path,
    /// The workload's program, to symbolize addresses.
    pub program: &'a Path,
    /// Directory of the programs compiled for this benchmark.
    pub dir: &'a Path,
}

impl Place<'_> {
    fn out(&self, name: &str) -> PathBuf {
        let mut path = self.out.as_os_str().to_owned();
        path.push(name);
        path.into()
    }

    /// The same as text.
    fn path(&self, name: &str) -> String {
        self.out(name).display().to_string()
    }

    /// The newest result whose name ends with `end`.
    fn newest(&self, end: &str) -> Option<String> {
        let begin = self.out.file_name()?.to_string_lossy().into_owned();
        let files = std::fs::read_dir(self.out.parent()?).ok()?.flatten();
        let named = files.filter(|file| {
            let name = file.file_name().to_string_lossy().into_owned();
            name.starts_with(&begin) && name.ends_with(end)
        });
        let newest = named.max_by_key(|file| file.metadata().and_then(|meta| meta.modified()).ok())?;
        std::fs::read_to_string(newest.path()).ok()
    }
}

/// The results of a profiler.
#[derive(Default)]
pub struct Said {
    /// Bytes by site.
    pub sites: Sites,
    /// Events lost; `None` if the profiler does not report them.
    pub lost: Option<u64>,
}

/// A profiler.
pub struct Peer {
    /// Its name in the table.
    pub name: &'static str,
    /// Name of the row to compare with: `bare`, or the same allocator without its profiler.
    pub against: &'static str,
    /// How it is applied.
    pub how: How,
    /// The speed of the workload under it.
    pub pace: Pace,
    /// Reads its results, from its files and its output.
    pub said: fn(&Place, &str) -> Said,
    /// A file that it needs to run.
    pub needs: &'static str,
    /// Whether `--quick` includes it.
    pub quick: bool,
}

fn words(text: &[&str]) -> Vec<String> {
    text.iter().map(|word| (*word).to_owned()).collect()
}

fn silent(_: &Place, _: &str) -> Said {
    Said::default()
}

fn heapbpf(place: &Place, options: &[&str]) -> Vec<String> {
    let mut command = vec![place.heapbpf.display().to_string()];
    // Inline hooks have a table of their own.
    command.extend(words(&["--hook", "probe", "--pid", &place.pid.to_string(), "--quiet", "--force"]));
    command.extend(words(&["-o", &place.path(".json")]));
    command.extend(words(&["--stats", &place.path(".stats")]));
    command.extend(words(options));
    command
}

fn heapbpf_said(place: &Place, _: &str) -> Said {
    let read = |end: &str| -> Value {
        let text = std::fs::read_to_string(place.out(end)).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    };
    let lost = read(".stats")["lost"].as_object().map(|lost| lost.values().filter_map(Value::as_u64).sum());
    Said { sites: parse::heapbpf(&read(".json")), lost }
}

fn bpftrace_script(place: &Place) -> String {
    let (pid, library) = (place.pid, place.library.display());
    format!(
        "uprobe:{library}:malloc /pid == {pid}/ {{ @size[tid] = arg0; }} \
         uretprobe:{library}:malloc /@size[tid]/ {{ @bytes[ustack] = sum(@size[tid]); @live[retval] = @size[tid]; \
         @where[retval] = ustack; delete(@size[tid]); }} \
         uprobe:{library}:free /@live[arg0]/ {{ @freed[@where[arg0]] = sum(@live[arg0]); delete(@live[arg0]); \
         delete(@where[arg0]); }} END {{ clear(@size); clear(@live); clear(@where); }}"
    )
}

fn bpftrace_lost(output: &str) -> Option<u64> {
    let lost =
        output.lines().filter_map(|line| line.strip_prefix("Lost ")?.split_whitespace().next()?.parse::<u64>().ok());
    let all: Vec<u64> = lost.collect();
    (!all.is_empty()).then(|| all.iter().sum())
}

/// The file of an allocator that has a profiler of its own.
pub const JEMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
const TCMALLOC: &str = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4";
const HEAPTRACK: &str = "/usr/lib/heaptrack/libheaptrack_preload.so";
const INTERPRET: &str = "/usr/lib/heaptrack/libexec/heaptrack_interpret";

/// Variables that preload a library, and more of them.
fn preload(path: &str, more: &[(&str, String)]) -> Vec<(String, String)> {
    let more = more.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
    std::iter::once(("LD_PRELOAD".to_owned(), path.to_owned())).chain(more).collect()
}

fn heaptrack_said(place: &Place, _: &str) -> Said {
    let run = |cost: &str| -> String {
        let [raw, folded, interpreted] = [".heaptrack", ".folded", ".interpreted"].map(|name| place.path(name));
        let command = format!(
            "{INTERPRET} < '{raw}' > '{interpreted}' && heaptrack_print -f '{interpreted}' -p 0 -a 0 -l 0 -T 0 -F '{folded}' \
             --flamegraph-cost-type {cost}"
        );
        let _ = std::process::Command::new("sh").args(["-c", &command]).output();
        std::fs::read_to_string(folded).unwrap_or_default()
    };
    Said { sites: parse::folded(&run("leaked"), true), lost: None }
}

/// Reads a heap profile in text from the newest result whose name ends with `end`.
fn heap_said(place: &Place, end: &str, has_totals: bool) -> Said {
    let text = place.newest(end).unwrap_or_default();
    Said { sites: parse::heap_text(&text, &Names::read(place.program), has_totals), lost: None }
}

const BARE: Peer =
    Peer { name: "bare", against: "bare", how: How::Bare, pace: Pace::Fast, said: silent, needs: "", quick: true };
const HEAPBPF: Peer = Peer { pace: Pace::Middle, said: heapbpf_said, ..BARE };

/// All profilers, in the order of the table.
pub const PEERS: &[Peer] = &[
    BARE,
    Peer { name: "no-op probes (the baseline)", how: How::Baseline, pace: Pace::Middle, ..BARE },
    Peer { name: "heapbpf", how: How::Attach(|place| heapbpf(place, &["-i", "512KiB"])), ..HEAPBPF },
    Peer {
        name: "heapbpf `--no-live`",
        how: How::Attach(|place| heapbpf(place, &["-i", "512KiB", "--no-live"])),
        ..HEAPBPF
    },
    Peer {
        name: "heapbpf `-i 16KiB`",
        how: How::Attach(|place| heapbpf(place, &["-i", "16KiB"])),
        quick: false,
        ..HEAPBPF
    },
    Peer {
        name: "bcc memleak",
        how: How::Attach(|place| {
            let (pid, library) = (place.pid.to_string(), place.library.display().to_string());
            words(&["memleak-bpfcc", "-p", &pid, "-O", &library, "-T", "60", "1"])
        }),
        pace: Pace::Slow,
        said: |_, output| Said { sites: parse::memleak(output), lost: None },
        needs: "/usr/sbin/memleak-bpfcc",
        ..BARE
    },
    Peer {
        name: "bpftrace script",
        how: How::Attach(|place| words(&["bpftrace", "-p", &place.pid.to_string(), "-e", &bpftrace_script(place)])),
        pace: Pace::Slow,
        said: |_, output| Said { sites: parse::bpftrace(output), lost: bpftrace_lost(output) },
        needs: "/usr/bin/bpftrace",
        ..BARE
    },
    Peer {
        name: "heaptrack",
        how: How::Preload(|place| preload(HEAPTRACK, &[("DUMP_HEAPTRACK_OUTPUT", place.path(".heaptrack"))])),
        said: heaptrack_said,
        needs: HEAPTRACK,
        ..BARE
    },
    Peer { name: "jemalloc, no profiler", how: How::Preload(|_| preload(JEMALLOC, &[])), needs: JEMALLOC, ..BARE },
    Peer {
        name: "jemalloc's profiler, 512 KiB",
        against: "jemalloc, no profiler",
        how: How::Preload(|place| {
            let conf = "prof:true,prof_final:true,prof_accum:true,lg_prof_sample:19,prof_prefix:";
            preload(JEMALLOC, &[("MALLOC_CONF", conf.to_owned() + &place.path(""))])
        }),
        said: |place, _| heap_said(place, ".heap", true),
        needs: JEMALLOC,
        ..BARE
    },
    Peer {
        name: "tcmalloc, no profiler",
        how: How::Preload(|_| preload(TCMALLOC, &[])),
        needs: TCMALLOC,
        quick: false,
        ..BARE
    },
    Peer {
        name: "tcmalloc's sampler, 512 KiB",
        against: "tcmalloc, no profiler",
        how: How::Preload(|place| {
            let libraries = format!("{} {TCMALLOC}", place.dir.join("tcmalloc_sample.so").display());
            let (interval, out) = ("524288".to_owned(), place.path(".sample"));
            preload(&libraries, &[("TCMALLOC_SAMPLE_PARAMETER", interval), ("TCMALLOC_SAMPLE_OUT", out)])
        }),
        // Its figures for all allocations ever made are not comparable.
        said: |place, _| heap_said(place, ".sample", false),
        needs: TCMALLOC,
        quick: false,
        ..BARE
    },
    Peer {
        name: "gperftools' heap profiler",
        against: "tcmalloc, no profiler",
        how: How::Preload(|place| {
            // Only the last profile is read.
            let intervals = ["HEAP_PROFILE_ALLOCATION_INTERVAL", "HEAP_PROFILE_INUSE_INTERVAL"];
            let [allocation, inuse] = intervals.map(|name| (name, "0".to_owned()));
            preload(TCMALLOC, &[("HEAPPROFILE", place.path("")), allocation, inuse])
        }),
        pace: Pace::Slow,
        said: |place, _| heap_said(place, ".heap", true),
        needs: TCMALLOC,
        quick: false,
    },
];
