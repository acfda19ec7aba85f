//! The daemon's own memory at defaults, by kind: for one process, and for a host's processes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;

use super::cost::compile;
use super::harness::{Bench, Running, get, number};
use crate::context::Context;

/// One-line description of the benchmark.
pub const ABOUT: &str =
    "[PROCESSES STACKS [all]]: the daemon's own memory at defaults, for one process and for 300 with 5,600 stacks";

/// Size of each allocation of the load, bytes. At the default interval, only one in nine million is not sampled.
const BLOCK_BYTES: u64 = 8 << 20;
/// Each call gets its own frame.
const FLAGS: &[&str] = &["-fno-builtin", "-fno-optimize-sibling-calls"];
/// Calls below each of the load's stacks.
const DEPTH: u64 = 20;
/// Time after which a ring that had to grow has shrunk again.
const REST: Duration = Duration::from_secs(35);

/// Runs the benchmark, as root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let load = Load { bench: Bench::new(context, "memory")?, program: compile(context, "many_stacks", FLAGS)? };
    let (processes, stacks) = (number(args, 0, 300)?, number(args, 1, 5600)?);
    println!(
        "| recording | when | resident, MiB | anonymous | rings | its program | libraries and others | most so far |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    load.measure("`--pid` of one process with 64 stacks", 1, 64, None)?;
    // Other processes on the host are recorded only on request.
    let target: &[&str] =
        if args.get(2).is_some_and(|word| word == "all") { &["--all"] } else { &["--comm", "many_stacks"] };
    let title = format!("`serve {}`, {processes} processes with {stacks} stacks", target.join(" "));
    load.measure(&title, processes, stacks, Some(target))
}

struct Load {
    bench: Bench,
    program: PathBuf,
}

impl Load {
    /// Measures a recording of this many processes, which together have this many stacks or a few more.
    fn measure(&self, title: &str, processes: usize, stacks: usize, serve: Option<&[&str]>) -> anyhow::Result<()> {
        let targets = (0..processes).map(|i| self.start(levels(processes, stacks, i)));
        let mut targets: Vec<Running> = targets.collect::<anyhow::Result<_>>()?;
        let pid = targets[0].0.id().to_string();
        let options = serve.map_or(vec!["--pid", &pid], |target| [&["serve"], target].concat());
        let (mut recording, address) = self.bench.serve(&options)?;
        let of = recording.0.id();
        let row = |when: &str| -> anyhow::Result<()> {
            println!("| {title} | {when} | {}", Memory::of(of, &self.bench.heapbpf)?);
            Ok(())
        };
        std::thread::sleep(Duration::from_secs(5));
        row("attached")?;
        for target in &mut targets {
            target.write("go")?;
            // One after the other: this is about memory, not about how fast samples may arrive.
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_secs(10));
        row("10 s after all have allocated")?;
        // As pprof, so that all stacks are named.
        ensure!(get(&address, "/debug/pprof/heap")?.get(8..12) == Some(" 200"), "the scrape failed");
        std::thread::sleep(Duration::from_secs(3));
        row("after a scrape")?;
        std::thread::sleep(REST);
        row("35 s later")?;
        recording.interrupt()?;
        let count = self.bench.stats()?;
        println!(
            "\n{} samples, {} stacks lost, {} records lost\n",
            count("submitted"),
            count("stacks_lost"),
            count("ring_full")
        );
        Ok(())
    }

    fn start(&self, levels: u32) -> anyhow::Result<Running> {
        let arguments = [u64::from(levels), BLOCK_BYTES, DEPTH].map(|number| number.to_string());
        Ok(Running::start(Command::new(&self.program).args(arguments), "READY", false)?.0)
    }
}

/// Levels of process `i`'s binary tree of stacks, so that all processes together have `stacks`, or a few more.
fn levels(processes: usize, stacks: usize, i: usize) -> u32 {
    let each = stacks / processes.max(1);
    let low = each.max(1).ilog2();
    // This many processes have twice as many stacks as the others.
    let larger = stacks.saturating_sub(processes << low).div_ceil(1 << low);
    low + u32::from(i < larger)
}

/// Resident memory of a process by kind, KiB.
#[derive(Debug, Default, PartialEq, Eq)]
struct Memory {
    anonymous: u64,
    rings: u64,
    program: u64,
    others: u64,
    most: u64,
}

impl Memory {
    fn of(pid: u32, program: &Path) -> anyhow::Result<Self> {
        let text = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}"));
        let program = fs::canonicalize(program)?;
        Ok(Self::parse(&text("smaps")?, &text("status")?, &program.to_string_lossy()))
    }

    fn parse(smaps: &str, status: &str, program: &str) -> Self {
        let kib = |text: &str| text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        let mut memory = Self::default();
        let mut path = "";
        let mut resident = 0;
        for line in smaps.lines() {
            if let Some(value) = line.strip_prefix("Rss:") {
                resident = kib(value);
            } else if let Some(value) = line.strip_prefix("Anonymous:") {
                let anonymous = kib(value).min(resident);
                memory.anonymous += anonymous;
                let of_file = resident - anonymous;
                match path {
                    _ if path.contains("bpf") && path.starts_with("anon_inode:") => memory.rings += of_file,
                    _ if path == program => memory.program += of_file,
                    _ => memory.others += of_file,
                }
            } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
                path = line.splitn(6, ' ').nth(5).unwrap_or_default().trim();
            }
        }
        memory.most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).map_or(0, kib);
        memory
    }
}

impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { anonymous, rings, program, others, most } = *self;
        for kib in [anonymous + rings + program + others, anonymous, rings, program, others, most] {
            write!(f, "{:.1} | ", kib as f64 / 1024.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_by_kind() {
        let smaps = "55a0-55b0 r-xp 00000000 fe:00 12    /usr/bin/heapbpf\nSize: 64 kB\nRss:      40 kB\nAnonymous:  8 kB\n\
            7f00-7f10 r--s 00001000 00:0e 1    anon_inode:bpf-map\nRss: 2048 kB\nAnonymous: 0 kB\n\
            7f20-7f30 rw-p 00000000 00:00 0 \nRss: 100 kB\nAnonymous: 100 kB\n\
            7f40-7f50 r-xp 00000000 fe:00 13    /lib/libc.so.6\nRss: 12 kB\nAnonymous: 0 kB\n";
        let memory = Memory::parse(smaps, "VmPeak: 9 kB\nVmHWM:     3000 kB\n", "/usr/bin/heapbpf");
        assert_eq!(memory, Memory { anonymous: 108, rings: 2048, program: 32, others: 12, most: 3000 });
        assert_eq!(memory.to_string(), "2.1 | 0.1 | 2.0 | 0.0 | 0.0 | 2.9 | ");
    }

    #[test]
    fn stacks_are_shared_out() {
        for (processes, stacks) in [(300, 5600), (1, 4096), (300, 4800), (7, 100), (10, 3)] {
            let all: usize = (0..processes).map(|i| 1 << levels(processes, stacks, i)).sum();
            assert!(
                all >= stacks && all < stacks + (stacks / processes).max(processes) + 1,
                "{processes} {stacks} {all}"
            );
        }
    }
}
