//! `heapbpf-bench-statistics [speed|draw]…`: the cost of the statistics, for the figures in `docs/sampling.md`. All
//! random numbers are seeded.

mod draws;
mod speed;

use std::process::ExitCode;
use std::time::Duration;

const PARTS: [(&str, fn()); 2] = [("speed", speed::run), ("draw", draws::run)];

fn main() -> ExitCode {
    let wanted: Vec<String> = std::env::args().skip(1).collect();
    if let Some(unknown) = wanted.iter().find(|name| !PARTS.iter().any(|(known, _)| known == name)) {
        eprintln!(
            "heapbpf-bench-statistics: no part {unknown:?}; there are {}",
            PARTS.map(|(name, _)| name).join(", ")
        );
        return ExitCode::from(2);
    }
    for (name, run) in PARTS {
        if wanted.is_empty() || wanted.iter().any(|wanted| wanted == name) {
            println!("## {name}");
            run();
            println!();
        }
    }
    ExitCode::SUCCESS
}

/// CPU time of this thread, which excludes waiting on a busy machine; to a clock tick (1 to 10 ms).
fn cpu_time() -> Duration {
    let nanoseconds = std::fs::read_to_string("/proc/thread-self/schedstat")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or_default())
}

/// A uniform number in (0, 1].
fn uniform(state: &mut u64) -> f64 {
    ((sampler_ebpf::rng::next(state) >> 11) as f64 + 1.0) / 2f64.powi(53)
}
