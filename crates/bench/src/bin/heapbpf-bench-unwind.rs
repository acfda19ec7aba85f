//! Measures unwinding of stacks of 8 to 512 frames: cold, with warm rules, and repeated. Prints a JSON object for each.

use std::hint::black_box;
use std::time::Instant;

use heapbpf_bench::quantiles::median;
use heapbpf_testing::own_process::{OwnCapture, OwnProcess, capture_here, take_capture};
use heapbpf_unwind::dwarf::Unwinder;
use heapbpf_unwind::raw::{Completeness, RawStack, SpaceView};

#[inline(never)]
fn descend(depth: u32) -> u32 {
    if depth == 0 {
        capture_here();
        return 0;
    }
    black_box(descend(depth - 1)) + black_box(1)
}

/// Median of `rounds` timings of `work`, nanoseconds.
fn median_ns(rounds: u32, mut work: impl FnMut(u64)) -> f64 {
    const BATCH: u64 = 64;
    let times: Vec<f64> = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            for at in 0..BATCH {
                work(u64::from(round) * BATCH + at);
            }
            start.elapsed().as_nanos() as f64 / BATCH as f64
        })
        .collect();
    median(&times)
}

fn measure(
    process: &OwnProcess,
    files: &mut OwnProcess,
    unwinder: &mut Unwinder,
    stack: &RawStack,
    capture: &OwnCapture,
) {
    let input = capture.input();
    let cold = median_ns(5, |_| {
        black_box(Unwinder::default().unwind(files, &process.space(), input));
    });
    // A new generation of the mappings each time, so that rules are cached but the stack is not.
    let warm = median_ns(400, |generation| {
        let space = SpaceView { generation: Some(generation + 1), ..process.space() };
        black_box(unwinder.unwind(files, &space, input));
    });
    let repeated = median_ns(2000, |_| {
        black_box(unwinder.unwind(files, &process.space(), input));
    });
    println!(
        "{}",
        serde_json::json!({
            "frames": stack.frames.len(),
            "complete": stack.completeness == Completeness::Complete,
            "unwind_new_process_ns": cold,
            "unwind_warm_ns": warm,
            "unwind_repeated_ns": repeated,
        })
    );
}

fn main() -> anyhow::Result<()> {
    let process = OwnProcess::read()?;
    let mut files = process.clone();
    let mut frames_of = |depth: u32, unwinder: &mut Unwinder| {
        descend(depth);
        let capture = take_capture().unwrap_or_default();
        let stack = unwinder.unwind(&mut files, &process.space(), capture.input());
        (stack, capture)
    };
    let mut unwinder = Unwinder::default();
    let base = frames_of(1, &mut unwinder).0.frames.len() as u32;
    for wanted in [base + 1, 70, 140, 280, 512] {
        let (stack, capture) = frames_of(wanted + 1 - base, &mut unwinder);
        measure(&process, &mut process.clone(), &mut unwinder, &stack, &capture);
    }
    Ok(())
}
