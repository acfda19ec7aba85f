//! `cargo xtask vm [KERNEL…]`: runs the cases of `tests/tests/alone/long/kernels.rs` on other kernels, in an emulator,
//! and compares their results with the tables of docs/kernels.md and instructions.md.

mod image;
mod kernels;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;

use crate::build;
use crate::context::Context;
use crate::packages;
use crate::shell::{announce, say};

use self::table::Findings;

/// Which kernels to run, and how.
#[derive(Args, Debug)]
pub struct Selection {
    /// Versions, such as 6.12; without any, all that docs/kernels.md has
    kernels: Vec<String>,
    /// Only the cases whose name contains this; nothing is compared then
    #[arg(long, value_name = "NAME")]
    case: Option<String>,
    /// Run this heapbpf, instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Skip a kernel that cannot be fetched, or all if the emulator cannot be installed, and say so, instead of failing
    #[arg(long)]
    skip_unavailable: bool,
    /// Write what was found into the tables, instead of comparing
    #[arg(long)]
    record: bool,
}

/// Debian packages that the emulator needs.
const NEEDED: [(&str, &str); 4] = [
    ("qemu-system-x86", "emulates the machine"),
    ("busybox-static", "is the emulated machine's shell, and packs its files"),
    ("binutils", "strips the programs, which makes the machine's memory small"),
    ("xz-utils", "unpacks kernel packages"),
];

/// The files with the tables: for users, and for these runs alone.
const FILES: [&str; 2] = ["docs/kernels.md", "xtask/src/vm/instructions.md"];

/// Time limit of a kernel's cases, in seconds. Nothing takes that long; it ends an emulator that hangs.
const SECONDS: &str = "5400";

/// Runs the cases on each kernel. The exit code is a failure if any failed, or if a table is wrong.
pub fn run(context: &Context, selection: &Selection) -> anyhow::Result<ExitCode> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("the emulated machine is an x86-64 one, and so are its programs: run this on x86-64");
    }
    let kernels = if selection.kernels.is_empty() {
        table::versions(&read_tables(context)?.concat())
    } else {
        selection.kernels.clone()
    };
    match packages::install(context, &NEEDED) {
        // The machine may have a conflicting version of a part of the emulator, which would have to be removed.
        Err(error) if selection.skip_unavailable => {
            say!("skipped: Linux {} in an emulator: {error:#}", kernels.join(", "));
            return Ok(ExitCode::SUCCESS);
        }
        installed => installed?,
    }
    let heapbpf = selection.binary.clone().map_or_else(|| build::build(context), Ok)?;
    let dir = context.target().join("vm");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let image = image::pack(context, &dir, &heapbpf, selection.case.as_deref())?;
    let mut wrong = Vec::new();
    for version in &kernels {
        let begun = Instant::now();
        let kernel = match kernels::kernel(context, version) {
            Err(error) if selection.skip_unavailable => {
                say!("skipped: Linux {version} cannot be fetched: {error:#}");
                continue;
            }
            kernel => kernel?,
        };
        say!("Linux {version}: {}", kernel.package);
        let said = boot(context, &kernel.image, &image, &dir.join(format!("{version}.log")))?;
        let findings = Findings::of(&said);
        let seconds = begun.elapsed().as_secs();
        if findings.passed() {
            say!("Linux {version}: all cases pass ({seconds} s)");
        } else {
            eprintln!("{said}");
            wrong.push(format!("Linux {version}: a case failed, or the machine did not reach its end ({seconds} s)"));
        }
        for line in findings.lines() {
            println!("{version}: {line}");
        }
        if selection.case.is_some() {
            continue;
        }
        let texts = read_tables(context)?;
        if selection.record {
            for (file, text) in FILES.iter().zip(&texts) {
                let text = table::with(text, version, &kernel.package, &findings);
                fs::write(context.root.join(file), text).with_context(|| format!("cannot write {file}"))?;
            }
        } else {
            wrong.extend(table::differences(&texts.concat(), version, &findings));
        }
    }
    for line in &wrong {
        say!("{line}");
    }
    Ok(if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the texts of the files with the tables.
fn read_tables(context: &Context) -> anyhow::Result<Vec<String>> {
    let read = |file: &&str| fs::read_to_string(context.root.join(file)).with_context(|| format!("cannot read {file}"));
    FILES.iter().map(read).collect()
}

/// Boots a kernel with these files. Returns what the machine wrote to its serial console, which is in `log`.
fn boot(context: &Context, kernel: &Path, image: &Path, log: &Path) -> anyhow::Result<String> {
    let mut command = Command::new("timeout");
    // Stays in the caller's process group: if the whole group is ended, so is the machine.
    command.args(["--foreground", SECONDS, "qemu-system-x86_64", "-accel", "tcg,thread=single"]);
    command.args(["-cpu", "max", "-smp", "2", "-m", "2G"]);
    // On a busy machine the emulated timer is late, and the kernel would consider it broken.
    command.args(["-append", "console=ttyS0 quiet panic=-1 no_timer_check"]);
    command.args(["-nodefaults", "-display", "none", "-no-reboot"]);
    command.arg("-serial").arg(format!("file:{}", log.display()));
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(image);
    announce(&command, context.options.verbose);
    let output = command.stdin(Stdio::null()).output().context("cannot start the emulator")?;
    let said = fs::read(log).unwrap_or_default();
    if said.is_empty() {
        bail!("the emulated machine said nothing: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&said).replace('\r', ""))
}
