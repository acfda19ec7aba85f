//! The files of the emulated machine: a shell, heapbpf, the test binary, the programs it runs, and the libraries of all
//! of these.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{read, run_quietly};
use crate::test::test_program;

/// Path of the test binary in the machine: three directories below what it considers cargo's target directory.
const TESTS: &str = "heapbpf/target/release/deps/alone";
/// Path of the programs that the tests run, in the same target directory.
const PROGRAMS: &str = "heapbpf/target/test-programs";
/// Path of the binary under test.
const HEAPBPF: &str = "heapbpf/heapbpf";

/// What the machine's first process does. The last line reports how the tests ended.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root HEAPBPF_BIN=/heapbpf/heapbpf HEAPBPF_TEST_PATIENCE=600 HEAPBPF_STOP_LIMIT_MS=500
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tracefs tracefs /sys/kernel/tracing
mkdir -p /sys/fs/cgroup
mount -t cgroup2 cgroup /sys/fs/cgroup
echo +memory > /sys/fs/cgroup/cgroup.subtree_control
ip link set lo up
dmesg -n 1
/heapbpf/target/release/deps/alone --test-threads=1 --nocapture long::kernels::@CASE@
code=$?
echo
echo \"tests ended: $code\"
poweroff -f
";

/// Packs the files. Returns the archive.
pub fn pack(context: &Context, dir: &Path, heapbpf: &Path, case: Option<&str>) -> anyhow::Result<PathBuf> {
    let root = dir.join("root");
    let _ = fs::remove_dir_all(&root);
    for name in ["bin", "proc", "sys", "dev", "tmp", "root", "etc"] {
        fs::create_dir_all(root.join(name))
            .with_context(|| format!("cannot make directories in {}", root.display()))?;
    }
    let tests = test_program(context, "alone")?.executable;
    let programs =
        read(Command::new(&tests).args(["--exact", "long::kernels::the_programs_are_built", "--nocapture"]))?;
    let programs: Vec<PathBuf> =
        programs.lines().filter_map(|line| line.strip_prefix("program: ")).map(PathBuf::from).collect();
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].map(PathBuf::from).into_iter().find(|path| path.exists());
    copy(&busybox.context("there is no busybox")?, &root.join("bin/busybox"))?;
    for (from, to) in [(heapbpf, HEAPBPF), (&tests, TESTS)] {
        strip(context, from, &root.join(to))?;
    }
    for program in &programs {
        // The last two parts of the path are a directory named after the sources, and the file.
        let parts: PathBuf = program.iter().rev().take(2).collect::<Vec<_>>().into_iter().rev().collect();
        copy(program, &root.join(PROGRAMS).join(parts))?;
    }
    for library in libraries(programs.iter().map(PathBuf::as_path).chain([heapbpf, &tests]))? {
        copy(&library, &root.join(library.strip_prefix("/").context("a library without a full path")?))?;
    }
    // The test harness finds a program by the text of its sources.
    let sources = context.root.join("tests/programs");
    for source in fs::read_dir(&sources).with_context(|| format!("cannot read {}", sources.display()))?.flatten() {
        let to = root.join(sources.strip_prefix("/").context("the workspace has no full path")?);
        copy(&source.path(), &to.join(source.file_name()))?;
    }
    let init = root.join("init");
    fs::write(&init, INIT.replace("@CASE@", case.unwrap_or_default())).context("cannot write init")?;
    run_quietly(Command::new("chmod").arg("755").arg(&init), context.options.verbose)?;
    let archive = dir.join("files.cpio");
    let script = "find . | busybox cpio -o -H newc > ../files.cpio";
    run_quietly(Command::new("sh").args(["-c", script]).current_dir(&root), context.options.verbose)?;
    Ok(archive)
}

/// Returns the libraries that programs load, and the loader.
fn libraries<'a>(programs: impl Iterator<Item = &'a Path>) -> anyhow::Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    for program in programs {
        let listing = read(Command::new("ldd").arg(program))?;
        if listing.contains("not found") {
            bail!("{} lacks a library: {listing}", program.display());
        }
        let paths = listing.split_whitespace().filter(|word| word.starts_with('/'));
        found.extend(paths.map(PathBuf::from));
    }
    Ok(found)
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    if from.is_dir() {
        return Ok(());
    }
    make_dir_of(to)?;
    fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

/// Copies a program without its debug information, which is most of it.
fn strip(context: &Context, from: &Path, to: &Path) -> anyhow::Result<()> {
    make_dir_of(to)?;
    run_quietly(Command::new("strip").arg("-o").arg(to).arg(from), context.options.verbose)
}

fn make_dir_of(file: &Path) -> anyhow::Result<()> {
    let dir = file.parent().context("a file without a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}
