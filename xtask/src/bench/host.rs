//! A busy host under `serve --all --hook inline`: heapbpf's share of its CPU time, and whether figures in use and their
//! error bars are still available.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::scratch::{Folder, Running};
use crate::context::Context;
use crate::packages::{self, Package};
use crate::root::Privilege;

/// One-line description of the benchmark.
pub const ABOUT: &str = "[SECONDS]: PostgreSQL, nginx, redis and git at full load under serve --all --hook inline";

const SCRIPT: &str = include_str!("host.sh");
/// Clock ticks per second in `/proc/stat`.
const TICKS: f64 = 100.0;
/// Time after the start in which processes are promoted from probes.
const WARM_UP: Duration = Duration::from_secs(20);

/// CPU time used so far, in seconds.
#[derive(Clone, Copy)]
struct Used {
    host: f64,
    daemon: f64,
    probes: f64,
    hits: f64,
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
    ensure!(matches!(context.privilege, Privilege::Root), "this benchmark runs as root: sudo cargo xtask bench host");
    let seconds: u64 = args.first().map_or(Ok(60), |text| text.parse())?;
    let packages = [
        ("postgresql", "a database"),
        ("nginx-light", "a web server"),
        ("apache2-utils", "its client"),
        ("redis-server", "a store"),
        ("redis-tools", "its client"),
        ("git", "a program that starts often"),
    ];
    packages::install(context, &packages.map(|(name, purpose)| Package::new(name, purpose)))?;
    let folder = Folder::new()?;
    let script = folder.path().join("host.sh");
    fs::write(&script, SCRIPT)?;
    let all = WARM_UP.as_secs() + seconds + 30;
    let mut load = Command::new("bash");
    load.args([&script, folder.path()]).arg(all.to_string()).arg(&context.root).process_group(0);
    let _load = Load(Running::start(&mut load, "READY", false)?);
    let mut daemon = Command::new(std::env::var_os("HEAPBPF_BIN").map_or_else(|| context.binary(), PathBuf::from));
    daemon.args(["serve", "--all", "--hook", "inline", "--listen", "127.0.0.1:0"]);
    let mut daemon = Running(daemon.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?);
    let mut lines = BufReader::new(daemon.0.stderr.take().context("piped")?).lines();
    let address = loop {
        let line = lines.next().context("heapbpf ended")??;
        if let Some(address) = line.strip_prefix("heapbpf: listening on http://") {
            break address.to_owned();
        }
    };
    std::thread::spawn(move || lines.for_each(drop));
    std::thread::sleep(WARM_UP);
    // The first answer looks up the packages of modules without names, once.
    get(&address, "/debug/pprof/heap")?;
    std::thread::sleep(Duration::from_secs(5));
    let before = used(&address)?;
    std::thread::sleep(Duration::from_secs(seconds));
    let now = used(&address)?;
    let host = now.host - before.host;
    let share = |part: f64| 100.0 * part / host;
    let (probes, own) = (now.probes - before.probes, now.daemon - before.daemon);
    println!(
        "of the host's CPU time ({host:.0} s busy in {seconds} s): probes and samples {:.2} %, the daemon {:.2} %, together {:.2} %; \
         {:.0} allocation calls a second",
        share(probes),
        share(own),
        share(probes + own),
        (now.hits - before.hits) / seconds as f64
    );
    let metrics = get(&address, "/metrics")?;
    let hooked = |how: &str| metrics.lines().filter(|line| line.contains(&format!("hook=\"{how}\""))).count();
    let in_use = metrics.lines().filter(|line| line.starts_with("heapbpf_process_inuse_bytes{")).count();
    let errors = metrics.lines().filter(|line| line.starts_with("heapbpf_process_inuse_low_bytes{")).count();
    println!(
        "now {} processes are counted inline, {} by probes; {in_use} have memory in use, {errors} with its error bar",
        hooked("inline"),
        hooked("probe")
    );
    ensure!(in_use > 0 && errors > 0, "figures in use, or their error bars, were given up");
    Ok(())
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

/// Returns an HTTP server's answer, head and body.
pub fn get(address: &str, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
