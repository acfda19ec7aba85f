//! A busy host that is recorded at defaults: what its programs still get done, heapbpf's share of its CPU time, and
//! whether figures in use and their error bars are available.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::harness::{Bench, Running, get, number, spread};
use crate::context::Context;
use crate::packages;
use crate::shell::read;

/// One-line description of the benchmark.
pub const ABOUT: &str = "[SECONDS ROUNDS]: PostgreSQL, nginx, redis and git at full load, bare and under --all and serve --all at defaults (inline hooks)";

const SCRIPT: &str = include_str!("host.sh");
/// Where nginx listens.
const NGINX: &str = "127.0.0.1:18099";
/// Clock ticks per second in `/proc/stat`.
const TICKS: f64 = 100.0;
/// Time after the start of a recording in which processes are hooked.
const WARM_UP: Duration = Duration::from_secs(20);
/// Time for what happens once in a recording, and after its end.
const SETTLED: Duration = Duration::from_secs(5);
/// From then on, a recording has figures in use with their error bars.
const FIGURES_WITHIN: Duration = Duration::from_secs(3);
/// How the host is recorded.
const MODES: [&[&str]; 2] = [&["--all"], &["serve", "--all"]];
/// Whose work is counted.
const SERVERS: [&str; 3] = ["PostgreSQL", "nginx", "redis"];

/// CPU time used so far, in seconds.
#[derive(Clone, Copy)]
struct Used {
    host: f64,
    daemon: f64,
    probes: f64,
    hits: f64,
}

/// What a recording cost during a slice of time.
struct Cost {
    /// Work of each server that was done per second, as a ratio of bare.
    work: [f64; 3],
    /// Shares of the host's CPU time, in percent.
    probes: f64,
    daemon: f64,
    /// Allocation calls per second.
    calls: f64,
}

/// The programs that keep the host busy.
struct Load(Running);

impl Drop for Load {
    fn drop(&mut self) {
        // With the `kill` command, because xtask has no unsafe code. The script ends everything that it has started.
        let _ = Command::new("kill").arg(self.0.0.id().to_string()).status();
        let _ = self.0.0.wait();
    }
}

/// Runs the benchmark; needs root.
pub fn run(context: &Context, args: &[String]) -> anyhow::Result<()> {
    let bench = Bench::new(context, "host")?;
    let (slice, rounds) = (Duration::from_secs(number(args, 0, 30)?), number(args, 1, 3)?);
    let packages = [
        ("postgresql", "a database"),
        ("nginx-light", "a web server"),
        ("apache2-utils", "its client"),
        ("redis-server", "a store"),
        ("redis-tools", "its client"),
        ("git", "a program that starts often"),
    ];
    packages::install(context, &packages)?;
    let (dir, script) = (&bench.dir, bench.path("host.sh"));
    fs::write(&script, SCRIPT)?;
    let of_each = 2 * slice.as_secs() + WARM_UP.as_secs() + 4 * SETTLED.as_secs();
    let all = slice.as_secs() + rounds * MODES.len() as u64 * of_each + 60;
    let mut load = Command::new("bash");
    load.args([&script, dir]).arg(all.to_string()).arg(&context.root).process_group(0);
    let _load = Load(Running::start(&mut load, "READY", false)?.0);
    let mut costs = MODES.map(|_| Vec::new());
    std::thread::sleep(SETTLED);
    let mut before = work(dir, slice)?;
    for _ in 0..rounds {
        for (mode, costs) in MODES.iter().zip(&mut costs) {
            let mut cost = recorded(&bench, mode, slice)?;
            std::thread::sleep(SETTLED);
            let after = work(dir, slice)?;
            for (rate, bare) in cost.work.iter_mut().zip(before.iter().zip(&after)) {
                *rate /= 0.5 * (bare.0 + bare.1);
            }
            before = after;
            costs.push(cost);
        }
    }
    MODES.iter().zip(&costs).for_each(|(mode, costs)| print(&mode.join(" "), costs));
    Ok(())
}

/// Records the host, and measures one slice of time once its busy processes are hooked.
fn recorded(bench: &Bench, mode: &[&str], slice: Duration) -> anyhow::Result<Cost> {
    let (mut daemon, address) = bench.serve(mode)?;
    std::thread::sleep(FIGURES_WITHIN);
    print_figures(&mode.join(" "), &address)?;
    std::thread::sleep(WARM_UP);
    // The first answer looks up the packages of modules without names, once.
    get(&address, "/debug/pprof/heap")?;
    std::thread::sleep(SETTLED);
    let before = used(&address)?;
    let work = work(&bench.dir, slice)?;
    let now = used(&address)?;
    print_figures(&mode.join(" "), &address)?;
    daemon.interrupt()?;
    let share = |part: f64| 100.0 * part / (now.host - before.host);
    Ok(Cost {
        work,
        probes: share(now.probes - before.probes),
        daemon: share(now.daemon - before.daemon),
        calls: (now.hits - before.hits) / slice.as_secs_f64(),
    })
}

/// Prints how many processes have which figures now. None is an error.
fn print_figures(mode: &str, address: &str) -> anyhow::Result<()> {
    let metrics = get(address, "/metrics")?;
    let hooked = |how: &str| metrics.lines().filter(|line| line.contains(&format!("hook=\"{how}\""))).count();
    let in_use = metrics.lines().filter(|line| line.starts_with("heapbpf_process_inuse_bytes{")).count();
    let errors = metrics.lines().filter(|line| line.starts_with("heapbpf_process_inuse_low_bytes{")).count();
    println!(
        "{mode}: now {} processes are counted inline, {} by probes; {in_use} have memory in use, {errors} with its error \
         bar",
        hooked("inline"),
        hooked("probe")
    );
    ensure!(in_use > 0 && errors > 0, "there are no figures in use, or no error bars");
    Ok(())
}

/// Prints the medians of the rounds; in brackets, the least and the largest.
fn print(mode: &str, costs: &[Cost]) {
    let spread = |of: &dyn Fn(&Cost) -> f64| spread(costs.iter().map(of).collect());
    let work = SERVERS.iter().enumerate().map(|(i, server)| format!("{server} {}", spread(&|cost| cost.work[i])));
    println!("{mode}: work per second, of bare (wanted: at least 0.97): {}", work.collect::<Vec<_>>().join(", "));
    println!(
        "{mode}: of the host's CPU time, in percent: probes and samples {}, the daemon {}, together {} (wanted: at \
         most 2); {} allocation calls a second",
        spread(&|cost| cost.probes),
        spread(&|cost| cost.daemon),
        spread(&|cost| cost.probes + cost.daemon),
        spread(&|cost| cost.calls)
    );
}

/// What the servers do per second, during a slice of time: transactions, requests, commands.
fn work(dir: &Path, slice: Duration) -> anyhow::Result<[f64; 3]> {
    let (begun, before) = (Instant::now(), done(dir)?);
    std::thread::sleep(slice);
    let (seconds, after) = (begun.elapsed().as_secs_f64(), done(dir)?);
    Ok(std::array::from_fn(|i| (after[i] - before[i]) / seconds))
}

/// What the servers have done so far.
fn done(dir: &Path) -> anyhow::Result<[f64; 3]> {
    let mut psql = Command::new("runuser");
    psql.current_dir(dir).args(["-u", "nobody", "--", "psql", "-h"]).arg(dir.join("pg"));
    let transactions = read(psql.args(["-Atc", "select sum(xact_commit) from pg_stat_database", "postgres"]))?;
    let nginx = get(NGINX, "/status")?;
    let stats = read(Command::new("redis-cli").arg("-s").arg(dir.join("redis")).args(["info", "stats"]))?;
    let requests = nginx.split_once("handled requests").and_then(|(_, numbers)| numbers.split_whitespace().nth(2));
    let commands = stats.lines().find_map(|line| line.strip_prefix("total_commands_processed:"));
    let number = |text: Option<&str>| text.and_then(|text| text.trim().parse::<f64>().ok());
    let counts = [number(Some(&transactions)), number(requests), number(commands)];
    let [Some(transactions), Some(requests), Some(commands)] = counts else {
        bail!("the servers say {transactions:?}, {nginx:?} and {stats:?}")
    };
    Ok([transactions, requests, commands])
}

fn used(address: &str) -> anyhow::Result<Used> {
    let metrics = get(address, "/metrics")?;
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|value| value.parse::<f64>().ok()).with_context(|| format!("no {name}"))
    };
    let stat = fs::read_to_string("/proc/stat")?;
    let ticks: Vec<f64> = stat.lines().next().unwrap_or_default().split(' ').flat_map(str::parse).collect();
    // Everything except idle, waiting for devices, and stolen time.
    let [user, nice, system, _, _, interrupts, soft, ..] = ticks[..] else { bail!("/proc/stat is not as expected") };
    Ok(Used {
        host: (user + nice + system + interrupts + soft) / TICKS,
        daemon: value("heapbpf_daemon_cpu_seconds_total")?,
        probes: value("heapbpf_probe_seconds_total")?,
        hits: value("heapbpf_hits_total")?,
    })
}
