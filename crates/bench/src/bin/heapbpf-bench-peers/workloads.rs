//! The workloads: our own program with known truth, and four real programs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use heapbpf_bench::sql_rows;

/// The life cycle of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Our own program: it waits for a request, works, reports what it did, and waits with its heap in place.
    Own,
    /// A real program, which runs from its start to its end.
    ToEnd,
    /// A server at [`socket`], whose work is [`requests`].
    Server,
}

/// A workload.
pub struct Workload {
    /// Its name in the table.
    pub name: &'static str,
    /// What one operation is, in words.
    pub unit: &'static str,
    /// How many operations it does under a profiler, by [`Pace`](super::peers::Pace).
    pub operations: [u64; 3],
    /// Whether it uses all CPUs.
    pub all_cpus: bool,
    /// Its life cycle.
    pub protocol: Protocol,
    /// The library with its malloc, unless another is preloaded.
    pub allocator: &'static str,
    /// Files that it needs to run.
    pub needs: &'static [&'static str],
    /// Whether it works at a fixed rate.
    pub paced: bool,
    /// Whether `--quick` includes it.
    pub quick: bool,
}

/// Name of glibc's C library, which contains its malloc.
pub const GLIBC: &str = "libc.so.6";
/// Name of jemalloc's library, which Debian's redis is linked with.
pub const JEMALLOC: &str = "libjemalloc.so.2";
/// Where Debian has them.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

const OWN: Workload = Workload {
    name: "",
    unit: "allocation",
    operations: [50_000, 600_000, 3_000_000],
    all_cpus: false,
    protocol: Protocol::Own,
    allocator: GLIBC,
    needs: &[],
    paced: false,
    quick: false,
};
const PAIRS: [u64; 3] = [50_000, 600_000, 20_000_000];
const THEIRS: Workload = Workload { protocol: Protocol::ToEnd, ..OWN };
/// The server's program.
pub const REDIS: &str = "/usr/bin/redis-server";
const REDIS_BENCHMARK: &str = "/usr/bin/redis-benchmark";
/// The requests to redis, in equal numbers.
const REDIS_REQUESTS: [&str; 4] = ["set", "get", "lpush", "hset"];

/// All workloads.
pub const WORKLOADS: &[Workload] = &[
    Workload { name: "pairs", unit: "malloc/free pair", operations: PAIRS, quick: true, ..OWN },
    Workload { name: "pairs, 4 threads", unit: "malloc/free pair", operations: PAIRS, all_cpus: true, ..OWN },
    Workload { name: "mix", quick: true, ..OWN },
    Workload { name: "paced", operations: [50_000; 3], paced: true, ..OWN },
    Workload { name: "leak", ..OWN },
    Workload {
        name: "sqlite3",
        unit: "row",
        operations: [2_000, 15_000, 30_000],
        needs: &["/usr/bin/sqlite3"],
        quick: true,
        ..THEIRS
    },
    Workload {
        name: "redis",
        unit: "request",
        operations: [12_000, 80_000, 80_000],
        protocol: Protocol::Server,
        allocator: JEMALLOC,
        needs: &[REDIS, REDIS_BENCHMARK],
        ..OWN
    },
    Workload {
        name: "python3",
        unit: "dumps and loads",
        operations: [500, 3_000, 10_000],
        needs: &["/usr/bin/python3"],
        ..THEIRS
    },
    Workload { name: "gcc", unit: "function", operations: [30, 200, 200], needs: &["/usr/bin/gcc"], ..THEIRS },
];

/// The directories of inputs and programs.
pub struct Files {
    /// Directory of `churn` and the other programs compiled for this benchmark.
    pub programs: PathBuf,
    /// Directory of the test programs' sources.
    pub sources: PathBuf,
    /// Directory for generated inputs.
    pub inputs: PathBuf,
}

impl Workload {
    /// The command line for this number of operations.
    pub fn words(&self, operations: u64, files: &Files) -> anyhow::Result<Vec<String>> {
        let churn = files.programs.join("churn").display().to_string();
        let own = |mode: &str, more: &[&str]| -> Vec<String> {
            let mut words = vec![churn.clone(), mode.into(), operations.to_string()];
            words.extend(more.iter().map(|word| (*word).to_owned()));
            words
        };
        Ok(match self.name {
            "pairs" => own("pairs", &["1"]),
            "pairs, 4 threads" => own("pairs", &["4"]),
            "sqlite3" => {
                let script = made(&files.inputs.join(format!("fill-{operations}.sql")), || sql_rows(operations))?;
                let read = format!(".read {}", script.display());
                ["/usr/bin/sqlite3", "-batch", ":memory:", &read].map(str::to_owned).into()
            }
            "redis" => redis(&files.inputs),
            "python3" => {
                let script = files.sources.join("json_loop.py").display().to_string();
                let rounds = operations.to_string();
                ["/usr/bin/env", "FREE_RUNNING=1", "/usr/bin/python3", &script, &rounds].map(str::to_owned).into()
            }
            "gcc" => {
                let source = made(&files.inputs.join(format!("functions-{operations}.c")), || functions(operations))?;
                let source = source.display().to_string();
                [&*compiler()?, "-quiet", "-O1", &source, "-o", "/dev/null"].map(str::to_owned).into()
            }
            mode => own(mode, &[]),
        })
    }
}

/// The server's command line.
pub fn redis(inputs: &Path) -> Vec<String> {
    let socket = socket(inputs).display().to_string();
    [REDIS, "--port", "0", "--unixsocket", &socket, "--save", "", "--appendonly", "no"].map(str::to_owned).into()
}

/// The compiler that gcc starts for C.
pub fn compiler() -> anyhow::Result<String> {
    let found = Command::new("gcc").arg("-print-prog-name=cc1").output().context("no gcc")?;
    Ok(String::from_utf8(found.stdout)?.trim().to_owned())
}

/// The socket that the server listens on.
pub fn socket(inputs: &Path) -> PathBuf {
    inputs.join("socket")
}

/// A command that sends this number of requests to a server and waits for the last answer.
///
/// # Errors
/// If the client's libraries cannot be copied.
pub fn requests(operations: u64, inputs: &Path) -> anyhow::Result<Command> {
    let mut command = Command::new(REDIS_BENCHMARK);
    command.env("LD_LIBRARY_PATH", own_libraries(inputs)?);
    // Eight connections with four pending requests each, values of 64 bytes, 10,000 different keys.
    command.args(["-q", "-c", "8", "-P", "4", "-d", "64", "-r", "10000"]);
    let each = operations / REDIS_REQUESTS.len() as u64;
    command.args(["-t", &REDIS_REQUESTS.join(","), "-n", &each.to_string(), "-s"]).arg(socket(inputs));
    Ok(command)
}

/// Returns a directory with copies of the allocators' libraries. A process that uses them does not trap at probes on
/// the server's files, as the children of a recorded command would.
fn own_libraries(inputs: &Path) -> anyhow::Result<PathBuf> {
    let dir = inputs.join("own-libraries");
    if !dir.exists() {
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        for library in [GLIBC, JEMALLOC] {
            let path = Path::new(LIBRARIES).join(library);
            fs::copy(&path, dir.join(library)).with_context(|| format!("cannot copy {}", path.display()))?;
        }
    }
    Ok(dir)
}

/// Returns the path of a file with this content, which is written once.
pub fn made(path: &Path, content: impl FnOnce() -> String) -> anyhow::Result<PathBuf> {
    if !path.exists() {
        fs::write(path, content()).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(path.to_path_buf())
}

/// C source with loops and switches, to keep a compiler busy.
pub fn functions(count: u64) -> String {
    let function = |i: u64| {
        let (length, factor) = (i % 9 + 1, i % 13 + 1);
        format!(
            "struct node{i} {{ int values[{length}]; double weight; struct node{i} *next; }};\n\
             int walk{i}(struct node{i} *n, int limit) {{\n  int sum = {i};\n  for (; n; n = n->next) {{\n    for (int k = 0; k < \
             {length}; k++)\n      if (n->values[k] > limit) sum += n->values[k] * {factor};\n      else sum ^= limit << (k & 7);\n    \
             n->weight += sum / {factor}.0;\n  }}\n  switch (sum & 7) {{\n    case 0: return sum;\n    case 3: return sum * \
             5;\n    case 5: return -sum;\n    default: return sum + limit;\n  }}\n}}\n"
        )
    };
    (0..count).map(function).collect()
}
