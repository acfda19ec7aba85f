//! Measures the cost of heapbpf per malloc/free pair, compared with the no-op baseline: probes at the same instructions
//! that do nothing.

mod arrival;
mod command;
mod inline;
mod pairs;
mod pinned;
mod stacks;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use heapbpf_bench::describe_machine;
use heapbpf_kernel::object::aligned;

/// Bytes per allocation.
const SIZE: u64 = 100;

/// Cost of a malloc/free pair under heapbpf, as ratios to two no-op probes at the same instructions.
#[derive(Parser)]
pub struct Options {
    /// The program `pair_loop`
    #[arg(long)]
    pairs: PathBuf,
    /// The same program, linked statically with musl
    #[arg(long)]
    musl_pairs: Option<PathBuf>,
    /// The same for Python's objects, in Python
    #[arg(long)]
    python_pairs: Option<PathBuf>,
    /// The program `heapbpf`; without it only the programs in the kernel are measured
    #[arg(long)]
    heapbpf: Option<PathBuf>,
    /// Interleaved rounds
    #[arg(long, default_value_t = 40)]
    rounds: usize,
    /// Fewer rounds
    #[arg(long)]
    quick: bool,
    /// Measure copies of stacks by their size instead
    #[arg(long)]
    stacks: bool,
    /// Measure inline hooks against nothing instead
    #[arg(long)]
    inline: bool,
    /// Measure how much a recording at defaults slows programs that already run when it begins, instead
    #[arg(long)]
    arrival: bool,
}

fn main() -> anyhow::Result<()> {
    let mut options = Options::parse();
    if options.quick {
        options.rounds = options.rounds.min(15);
    }
    println!("{}, {} rounds", describe_machine(), options.rounds);
    let object = aligned(&heapbpf_testing::bpf_object().context("the BPF programs are not built")?);
    heapbpf_record::cost::cpus::pin(0, |cpu| cpu == 0);
    let library = pinned::Library::copy()?;
    if options.stacks {
        return stacks::run(&options, object, &library);
    }
    if let (true, Some(heapbpf)) = (options.arrival, &options.heapbpf) {
        return arrival::run(&options, heapbpf);
    }
    if let (true, Some(heapbpf)) = (options.inline, &options.heapbpf) {
        return inline::run(&options, &library, heapbpf);
    }
    pairs::run(&options, object, &library)?;
    if let Some(heapbpf) = &options.heapbpf {
        inline::run(&options, &library, heapbpf)?;
        command::run(&options, object, &library, heapbpf)?;
        command::daemon(&options, &library, heapbpf)?;
    }
    Ok(())
}
