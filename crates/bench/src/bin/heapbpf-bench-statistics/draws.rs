//! The cost of a draw in integers, compared with an exponential and a geometric one in floating point.

use std::hint::black_box;

use heapbpf_statistics::weight::log_q;
use sampler_ebpf::constants::draw_constants;
use sampler_ebpf::{geometric, rng};

use crate::cpu_time;

const DRAWS: u64 = 20_000_000;
const INTERVAL: u64 = 524_288;

pub fn run() {
    let Some(constants) = draw_constants(INTERVAL) else { return };
    let (r, ln_q) = (INTERVAL as f64, log_q(INTERVAL));
    let unit = |random: u64| (random as f64 + 1.0) / 2f64.powi(64);
    for round in 1..=3 {
        let none = timed(|random| random);
        let integer = timed(|random| geometric::draw(random, black_box(&constants)));
        let exponential = timed(|random| (-unit(random).ln() * r) as u64);
        let exact = timed(|random| (unit(random).ln() / ln_q).ceil().max(1.0) as u64);
        println!(
            "round {round}: ns a draw above the generator's {none:.2}: integers {:.2}, exponential {:.2}, geometric {:.2}",
            integer - none,
            exponential - none,
            exact - none
        );
    }
}

/// CPU time per call, nanoseconds, including the random number.
fn timed(draw: impl Fn(u64) -> u64) -> f64 {
    let mut state = rng::seed(3, 0);
    let mut sum = 0u64;
    let start = cpu_time();
    for _ in 0..DRAWS {
        sum = sum.wrapping_add(draw(rng::next(&mut state)));
    }
    black_box(sum);
    (cpu_time() - start).as_secs_f64() * 1e9 / DRAWS as f64
}
