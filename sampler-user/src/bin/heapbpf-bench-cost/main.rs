//! Measures what heapbpf adds to a malloc/free pair, against probes that do nothing at the same instructions.

mod command;
mod criteria;
mod pairs;
mod pinned;
mod ratios;
mod scaling;
mod stacks;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;

/// Cost of a malloc/free pair under heapbpf, as ratios to two no-op probes at the same instructions.
#[derive(Parser)]
pub struct Options {
    /// The program `pair_loop`
    #[arg(long)]
    pairs: PathBuf,
    /// The program `heapbpf`; without it only the programs in the kernel are measured
    #[arg(long)]
    heapbpf: Option<PathBuf>,
    /// Interleaved rounds
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Fewer rounds
    #[arg(long)]
    quick: bool,
    /// Measure against threads, live samples and intervals instead
    #[arg(long)]
    scaling: bool,
    /// Measure criteria against sampling by bytes instead
    #[arg(long)]
    criteria: bool,
    /// Measure copies of stacks by their size instead
    #[arg(long)]
    stacks: bool,
    /// Another BPF object to measure beside the built-in one; may be repeated
    #[arg(long)]
    object: Vec<PathBuf>,
    /// Bytes per allocation
    #[arg(long, default_value_t = 100)]
    size: u64,
}

fn main() -> anyhow::Result<()> {
    let mut options = Options::parse();
    if options.quick {
        options.rounds = options.rounds.min(15);
    }
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("kernel {}, load {}, {} rounds", kernel.trim(), load.trim(), options.rounds);
    let object = sampler_user::kernel::object::object().context("built without the BPF programs")?;
    sampler_user::cost::cpus::pin(0, |cpu| cpu == 0);
    let library = pinned::Library::copy()?;
    if options.scaling {
        return scaling::run(&options, object, &library);
    }
    if options.criteria {
        return criteria::run(&options, object, &library);
    }
    if options.stacks {
        return stacks::run(&options, object, &library);
    }
    pairs::run(&options, object, &library)?;
    if let Some(heapbpf) = &options.heapbpf {
        command::run(&options, object, &library, heapbpf)?;
        command::daemon(&options, &library, heapbpf)?;
    }
    Ok(())
}
