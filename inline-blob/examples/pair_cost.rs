//! Nanoseconds per malloc(100) and free: bare, hooked without sampling, hooked with sampling, in alternating rounds.
#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

#[cfg(target_arch = "x86_64")]
#[path = "../tests/common/mod.rs"]
mod common;

#[cfg(target_arch = "x86_64")]
fn main() {
    use common::{Functions, Hooked, Options, libc_path, record};

    fn cpu_ns() -> f64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
        time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
    }

    fn pair_ns(f: &Functions, threads: u64) -> f64 {
        const PAIRS: u64 = 100_000;
        let run = |f: Functions| {
            let start = cpu_ns();
            for _ in 0..PAIRS {
                unsafe { (f.free)(std::hint::black_box((f.malloc)(100))) };
            }
            (cpu_ns() - start) / PAIRS as f64
        };
        let f = *f;
        let running: Vec<_> = (0..threads).map(|_| std::thread::spawn(move || run(f))).collect();
        running.into_iter().map(|t| t.join().unwrap()).sum::<f64>() / threads as f64
    }

    let options =
        |interval, hook| (interval, hook, Options { interval, seed: 0, hook, recorder: false, ..Options::default() });
    let kinds =
        [options(0, false), options(0, true), options(512 << 10, true), options(64 << 10, true), options(1, true)];
    record(false);
    let hooked: Vec<_> = kinds.iter().map(|(_, _, o)| Hooked::new(libc_path(), o)).collect();
    for threads in [1, 2] {
        let mut least = [f64::MAX; 5];
        for _ in 0..200 {
            for (hooked, least) in hooked.iter().zip(&mut least) {
                *least = least.min(pair_ns(&hooked.functions(), threads));
            }
        }
        println!("{threads} threads:");
        for ((interval, hook, _), ns) in kinds.iter().zip(least) {
            let name = if *hook { format!("hooked, interval {interval}") } else { "bare".to_owned() };
            println!("  {name:28} {ns:6.2} ns  {:+.2} ns  {:.3}", ns - least[0], ns / least[0]);
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("x86-64 only");
}
