//! What the tests need from the machine: Debian packages, Python packages, and the standard library for other machines.

use std::path::{Path, PathBuf};

use crate::context::Context;
use crate::packages;
use crate::skips::Skips;
use crate::{cross, python};

/// The variable that names the Python for tests that need its packages.
pub const PYTHON_VARIABLE: &str = "HEAPBPF_TEST_PYTHON";

/// Requirements of the tests: a file that shows that the requirement is installed, the Debian package, and its purpose.
/// The tests use the distribution's version, even if a version manager has put another one first. A test whose
/// requirement cannot be installed reports that it is skipped.
const NEEDED: &[(&str, &str, &str)] = &[
    ("/usr/bin/cc", "gcc", "compiles the test programs, and is profiled while it compiles"),
    ("/usr/bin/c++", "g++", "compiles the test programs that throw"),
    ("/usr/include/stdlib.h", "libc6-dev", "what the test programs are compiled against"),
    ("/usr/share/doc/libc6-dbg", "libc6-dbg", "names functions inside libc, which known call paths go through"),
    ("/usr/bin/python3", "python3", "is profiled while it parses JSON"),
    ("/usr/bin/sqlite3", "sqlite3", "is profiled while it fills a table"),
    ("/usr/bin/redis-server", "redis-server", "is profiled while its threads serve"),
    ("/usr/bin/gdb", "gdb", "debugs a program while it is profiled"),
    ("/usr/bin/strace", "strace", "traces a program while it is profiled"),
    ("/usr/bin/systemd-analyze", "systemd", "runs the unit"),
    ("/usr/bin/bpftrace", "bpftrace", "has probes in a program while it is profiled"),
    ("/usr/bin/perf", "linux-perf", "samples a program while it is profiled"),
    ("/usr/bin/clang++", "clang", "is profiled while it compiles: deep stacks"),
    ("/usr/bin/Rscript", "r-base-core", "is profiled while it fits models: deep stacks"),
    ("/usr/bin/convert", "imagemagick", "is profiled while it scales a picture: stacks with unused arrays"),
    ("/usr/bin/javac", "openjdk-17-jdk-headless", "compiles a Java program, whose stacks are known"),
    ("/usr/bin/node", "nodejs", "is profiled while it runs code that it made"),
    ("/usr/bin/prometheus", "prometheus", "scrapes the metrics"),
    ("/usr/bin/go", "golang-go", "go tool pprof reads the profiles"),
    ("/usr/bin/jeprof", "libjemalloc-dev", "jeprof reads the profiles"),
    ("/usr/bin/chromium", "chromium", "shows the page"),
    ("/usr/libexec/valgrind/dh_view.html", "valgrind", "brings the viewer of DHAT's files"),
    ("/usr/bin/tmux", "tmux", "is the terminal of heapbpf top"),
    ("/usr/bin/xz", "xz-utils", "packs symbol tables"),
    ("/usr/bin/debuginfod", "debuginfod", "serves debug files"),
    ("/usr/bin/dwz", "dwz", "moves debug information that files share into one of its own"),
    ("/usr/lib/x86_64-linux-gnu/libjemalloc.so.2", "libjemalloc2", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4", "libtcmalloc-minimal4", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-gnu/libmimalloc.so.2", "libmimalloc2.0", "an allocator that is profiled"),
    ("/usr/lib/x86_64-linux-musl/musl-gcc.specs", "musl-tools", "compiles test programs for another libc"),
];

/// Installs what the end-to-end tests need. Returns what is missing, and why.
pub fn install(context: &Context) -> Vec<(String, String)> {
    // Debian names its library directories after the architecture.
    let missing =
        NEEDED.iter().filter(|(file, ..)| !Path::new(&file.replace("x86_64", std::env::consts::ARCH)).exists());
    let missing: Vec<(&str, &str)> = missing.map(|(_, package, purpose)| (*package, *purpose)).collect();
    if packages::install(context, &missing).is_ok() {
        return Vec::new();
    }
    // Installed one by one, so that a package that does not exist does not block the others.
    let install_one = |(name, purpose): (&str, &str)| {
        let what = format!("installing {name}, which {purpose}");
        packages::install(context, &[(name, purpose)]).err().map(|error| (what, format!("{error:#}")))
    };
    missing.into_iter().filter_map(install_one).collect()
}

/// Installs everything, and does not report what cannot be installed, because the tests will.
pub fn set_up(context: &Context) {
    install(context);
    cross::others().for_each(|machine| drop(cross::set_up_library(context, machine)));
    drop(python::ensure(context));
}

/// Returns the Python with the packages that tests need. `None` if the user named one or it cannot be installed.
pub fn readers_python(context: &Context, skips: &mut Skips) -> Option<PathBuf> {
    if std::env::var_os(PYTHON_VARIABLE).is_some() {
        return None;
    }
    let python = python::ensure(context);
    python.map_err(|error| skips.note("Python packages that read the formats", format!("{error:#}"))).ok()
}
