//! The only build tool a contributor learns: `cargo xtask <command>`.

mod bench;
mod build;
mod cargo_tools;
mod context;
mod cross;
mod dist;
mod fuzz;
mod linker;
mod nightly;
mod packages;
mod python;
mod root;
mod run;
mod shell;
mod skips;
mod soak;
mod test;
mod toolchain;
mod torture;
mod vm;
mod web;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use context::Context;

/// Sets up, builds, runs, tests and measures heapbpf.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    command: Command,
}

/// What every command understands.
#[derive(Args, Clone, Debug, Default)]
pub struct Options {
    /// Never become root: steps and tests that need it are listed as skipped
    #[arg(long, global = true)]
    pub no_root: bool,
    /// Show every command before it runs, and all that it says
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// Refuse to change Cargo.lock
    #[arg(long, global = true)]
    pub locked: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Install what building needs: a rustc for BPF and bpf-linker
    Setup {
        /// Also install what the tests need
        #[arg(long)]
        tests: bool,
    },
    /// Build the BPF programs, then target/release/heapbpf with them inside
    Build {
        /// Build for another machine, such as aarch64-unknown-linux-gnu
        #[arg(long, value_name = "TRIPLE")]
        target: Option<String>,
        /// Build only the BPF programs, which the next plain cargo build of the daemon embeds
        #[arg(long)]
        bpf: bool,
    },
    /// Build and run heapbpf; without arguments, its demonstration: a program with a leak, for five seconds
    Run {
        /// Arguments for heapbpf
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
    /// Install what the tests need, build, and run every test (the end-to-end ones as root)
    Test(test::Selection),
    /// Check licences and sources of all dependencies by deny.toml
    ///
    /// Installs cargo-deny into the cache, if it is not there.
    Deny {
        /// Check for known vulnerabilities, too (fetches their database from GitHub)
        #[arg(long)]
        advisories: bool,
    },
    /// Run tests of the ABI in Rust's interpreter, which reports undefined behaviour
    ///
    /// Needs `rustup component add --toolchain nightly miri rust-src`.
    Miri,
    /// Fuzz everything that reads foreign bytes, with coverage and the address sanitizer; prints inputs and coverage
    ///
    /// Needs rustup's nightly; installs cargo-fuzz into the cache, if it is not there. The inputs that it found so far are in
    /// fuzz/corpus, the smallest that take every edge known in fuzz/seeds. An input that ends a target is in fuzz/artifacts.
    Fuzz(fuzz::Selection),
    /// Check, test and bundle the web page (needs npm); the bundle is committed
    Web {
        /// Change nothing: fail if the committed page was not built from the files in web/
        #[arg(long)]
        check: bool,
    },
    /// Build, and copy heapbpf to /usr/local/bin
    Install,
    /// Make a release in target/dist: a static binary in a tarball and in a Debian package, checksums, and a list of its parts
    Dist,
    /// Run a benchmark; without a name, list them
    Bench {
        /// Fewer rounds; without a name, the ratios to other profilers in under three minutes
        #[arg(long)]
        quick: bool,
        /// Its name
        name: Option<String>,
        /// Arguments for the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Repeat faults that must never harm a target: kills, full disks, debuggers and the like; prints what was seen
    ///
    /// Each row is a test in tests/tests, repeated with both ways of hooking.
    /// docs/reliability.md has the table.
    Torture(torture::Selection),
    /// Record a mixed load for a long time: does the daemon's memory stay flat, do estimates agree with exact counts?
    Soak(soak::Selection),
    /// Run a few end-to-end tests on other kernels, in an emulator
    ///
    /// Fetches Debian's kernels, boots each with the programs that are needed, runs tests/tests/alone/long/kernels.rs, and compares what
    /// it finds with the tables of docs/kernels.md.
    Vm(vm::Selection),
    /// Check the mathematics against files of known answers
    Vectors {
        /// The directory with the files
        directory: PathBuf,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match perform(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(cli: Cli) -> anyhow::Result<ExitCode> {
    let context = Context::new(cli.options)?;
    match cli.command {
        Command::Setup { tests } => {
            build::set_up(&context)?;
            if tests {
                test::set_up(&context);
            }
        }
        Command::Build { target, bpf } => {
            let machine = target.as_deref().map(cross::machine).transpose().map_err(anyhow::Error::msg)?.flatten();
            let context = Context { machine, keeps_notes: true, ..context };
            if bpf { build::build_bpf(&context) } else { build::build(&context) }.map(|_| ())?;
        }
        Command::Run { args } => return run::run(&context, &args),
        Command::Test(selection) => return test::test(&context, &selection),
        Command::Torture(selection) => return torture::torture(&context, &selection),
        Command::Soak(selection) => soak::soak(&context, &selection)?,
        Command::Vm(selection) => return vm::run(&context, &selection),
        Command::Deny { advisories } => cargo_tools::deny(&context, advisories)?,
        Command::Fuzz(selection) => fuzz::fuzz(&context, &selection)?,
        Command::Miri => nightly::miri(&context)?,
        Command::Web { check } => web::web(&context, check)?,
        Command::Dist => dist::dist(&context)?,
        Command::Install => build::install(&context)?,
        Command::Bench { quick, name, args } => bench::bench(&context, name.as_deref(), quick, &args)?,
        Command::Vectors { directory } => bench::run_program(&context, "heapbpf-vectors", &[directory])?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        Cli::command().debug_assert();
    }
}
