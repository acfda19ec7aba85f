//! Measures how long writing each format takes and how large the files are; `docs/formats.md` has the figures.
//!
//! `cargo test --release -p heapbpf-record --lib -- --ignored --nocapture speed` prints them; `HEAPBPF_SPEED_FORMAT`
//! selects one format.

use std::time::Instant;
use std::{fs, io};

use heapbpf_profile::formats::{FORMATS, WriteOptions};
use heapbpf_profile::testing;

use super::Output;

/// Peak and current resident memory, MiB.
fn resident() -> (u64, u64) {
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).expect("a field of every process");
        line.split_whitespace().nth(1).and_then(|number| number.parse::<u64>().ok()).expect("a number") / 1024
    };
    (field("VmHWM:"), field("VmRSS:"))
}

/// CPU time of this thread so far, seconds; other work on the machine does not affect it.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("procfs");
    stat.split_whitespace().next().and_then(|nanoseconds| nanoseconds.parse::<f64>().ok()).expect("a number") / 1e9
}

#[test]
#[ignore = "prints measurements; asserts nothing"]
fn speed() {
    let profile = testing::large(50_000, 40);
    println!("50,000 stacks x 40 frames, {} MiB resident", resident().1);
    println!("format        wall s   CPU s  CPU s without the file       MiB  more MiB resident");
    let dir = tempfile::tempdir().expect("temporary directory");
    let options = WriteOptions::default();
    // Memory figures are right for one format per process only: a later format reuses what an earlier one freed.
    let only = std::env::var("HEAPBPF_SPEED_FORMAT").ok();
    for format in FORMATS.iter().filter(|format| only.as_deref().is_none_or(|only| only == format.name())) {
        let path = dir.path().join(format!("x{}", format.extensions()[0]));
        let output = Output::new(&path, format, true);
        fs::write("/proc/self/clear_refs", "5").expect("resets the peak");
        let before = resident().1;
        let (start, cpu) = (Instant::now(), cpu_seconds());
        let written = output.write(&profile, &options).expect("written");
        let (wall, both) = (start.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        let more = resident().0.saturating_sub(before);
        let cpu = cpu_seconds();
        let part = if format.one_process_per_file() { &profile.only_process(0) } else { &profile };
        format.write(part, &options, &mut io::sink()).expect("nowhere");
        let encoding = cpu_seconds() - cpu;
        let bytes: u64 = written.iter().map(|path| fs::metadata(path).expect("there").len()).sum();
        let size = bytes as f64 / 1_048_576.0;
        println!("{:12} {wall:7.2} {both:7.2} {encoding:23.2} {size:9.1} {more:6}", format.name());
        written.iter().for_each(|path| fs::remove_file(path).expect("removed"));
    }
}
