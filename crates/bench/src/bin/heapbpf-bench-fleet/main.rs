//! The cost of a fleet of synthetic hosts to its stores: bytes per profile in each format, series of metrics, and the
//! error of estimates summed over many hosts.

mod host;

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use heapbpf_profile::formats::{FORMATS, WriteOptions};
use heapbpf_profile::model::Profile;
use heapbpf_record::recent::Recent;
use heapbpf_record::requests::FinishedProfile;
use heapbpf_record::stats::Stats;
use heapbpf_serve::metrics::{Metrics, Serving};
use host::{Fleet, Host};
use sampler_ebpf::abi::ProcessKey;

/// Sizes of hosts, in processes.
const PROCESSES: [usize; 3] = [20, 100, 500];
/// Sampling intervals: the packaged one, and the default.
const INTERVALS: [u64; 2] = [4 << 20, 512 << 10];
/// Duration that one profile covers.
const WINDOW: Duration = Duration::from_secs(60);
/// Bytes that all processes of a host allocate per second.
const HOST_BYTES_PER_SECOND: f64 = (500u64 << 20) as f64;
/// Sizes of fleets, in hosts.
const FLEETS: [usize; 4] = [1, 10, 100, 1000];

fn main() -> anyhow::Result<()> {
    let fleet = Fleet::new(40, 600);
    sizes(&fleet)?;
    adding_up(&fleet);
    Ok(())
}

/// A writer that only counts bytes.
#[derive(Default)]
struct Counting(u64);

impl Write for Counting {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn sizes(fleet: &Fleet) -> anyhow::Result<()> {
    println!(
        "One profile of one host: {} s, {:.0} MiB/s allocated; KiB, in brackets as sent compressed (gzip)",
        WINDOW.as_secs(),
        HOST_BYTES_PER_SECOND / 1_048_576.0
    );
    for interval in INTERVALS {
        for processes in PROCESSES {
            let host = Host { number: 1, processes, interval, window: WINDOW, bytes_per_second: HOST_BYTES_PER_SECOND };
            let profile = fleet.profile(&host).profile;
            let samples: u64 = profile.rows.iter().map(|row| row.alloc.samples).sum();
            println!(
                "\nR = {} KiB, {processes} processes: {samples} samples, {} rows",
                interval >> 10,
                profile.rows.len()
            );
            for format in FORMATS.iter().filter(|format| !format.one_process_per_file()) {
                let mut plain = Counting::default();
                format.write(&profile, &WriteOptions::default(), &mut plain)?;
                let mut gzip = GzEncoder::new(Counting::default(), Compression::default());
                format.write(&profile, &WriteOptions::default(), &mut gzip)?;
                let gzip = gzip.finish()?.0;
                println!("  {:12} {:8} ({})", format.name(), kib(plain.0), kib(gzip));
            }
            let text = metrics(profile);
            let series = text.lines().filter(|line| !line.starts_with('#')).count();
            println!("  /metrics     {:8} {series} series", kib(text.len() as u64));
        }
    }
    Ok(())
}

fn kib(bytes: u64) -> String {
    format!("{:.0}", bytes as f64 / 1024.0)
}

/// The metrics of this host, as Prometheus would scrape them.
fn metrics(profile: Profile) -> String {
    let keys = profile.processes.iter().map(|process| ProcessKey { start_ns: 1, tgid: process.pid, exec_id: 0 });
    let keys = keys.collect();
    let made = FinishedProfile {
        profile,
        stats: Stats::default(),
        keys,
        begun: Instant::now(),
        cost: Duration::ZERO,
        cpu: Duration::ZERO,
        recent: Recent::default(),
    };
    Metrics::default().write(&made, &[], Serving::default())
}

/// Estimate, variance and truth of one function.
#[derive(Clone, Copy, Default)]
struct Sum {
    estimate: f64,
    variance: f64,
    samples: u64,
    truth: f64,
}

impl Sum {
    fn half_width(&self) -> f64 {
        1.96 * self.variance.sqrt()
    }

    fn holds(&self) -> bool {
        (self.estimate - self.truth).abs() <= self.half_width()
    }
}

fn adding_up(fleet: &Fleet) {
    const INTERVAL: u64 = 4 << 20;
    println!("\nAdding up hosts of 20 processes, R = {} MiB, {} s each:", INTERVAL >> 20, WINDOW.as_secs());
    println!("  hosts  all allocated, of its truth   95 % interval   functions with 30 samples or more: truth within");
    let mut functions: HashMap<String, Sum> = HashMap::new();
    let mut done = 0;
    for hosts in FLEETS {
        for number in done..hosts {
            let host = Host {
                number,
                processes: 20,
                interval: INTERVAL,
                window: WINDOW,
                bytes_per_second: HOST_BYTES_PER_SECOND,
            };
            let made = fleet.profile(&host);
            for row in &made.profile.rows {
                let name = row.key.stack.frames.first().and_then(|frame| frame.function.as_deref()).unwrap_or_default();
                let sum = functions.entry(name.to_owned()).or_default();
                sum.estimate += row.alloc.bytes;
                sum.variance += row.alloc.bytes_variance;
                sum.samples += row.alloc.samples;
            }
            for (name, bytes) in made.truth {
                functions.entry(name).or_default().truth += bytes;
            }
        }
        done = hosts;
        let mut all = Sum::default();
        for sum in functions.values() {
            all.estimate += sum.estimate;
            all.variance += sum.variance;
            all.truth += sum.truth;
        }
        let seen: Vec<&Sum> = functions.values().filter(|sum| sum.samples >= 30).collect();
        let within = seen.iter().filter(|sum| sum.holds()).count();
        println!(
            "  {hosts:5}  {:26.3} %   ± {:9.3} %   {within} of {} ({:.1} %)",
            100.0 * all.estimate / all.truth,
            100.0 * all.half_width() / all.truth,
            seen.len(),
            100.0 * within as f64 / seen.len().max(1) as f64,
        );
    }
}
