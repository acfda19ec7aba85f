//! `heapbpf-coverage [PROFILES [SEEDS]]`: how often confidence intervals contain the truth, on 18 mixes of sizes with
//! 0.5 to 200 expected samples, for the tables in `docs/sampling.md`. Default: 20,000 profiles per cell, 2 seeds.

use std::process::ExitCode;
use std::time::Instant;

use heapbpf_bench::simulation::{Coverage, Method, coverage, mixes};

const INTERVAL: u64 = 524_288;
const CONFIDENCE: f64 = 0.95;
const MEANS: [f64; 11] = [0.5, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 50.0, 100.0, 200.0];

fn main() -> ExitCode {
    let arguments: Result<Vec<u64>, _> = std::env::args().skip(1).map(|argument| argument.parse()).collect();
    let (profiles, seeds) = match arguments.as_deref() {
        Ok([]) => (20_000, 2),
        Ok([profiles]) => (*profiles, 2),
        Ok([profiles, seeds]) => (*profiles, *seeds),
        _ => {
            eprintln!("usage: heapbpf-coverage [PROFILES [SEEDS]]");
            return ExitCode::from(2);
        }
    };
    let start = Instant::now();
    let mixes = mixes(INTERVAL);
    println!(
        "R = {INTERVAL}, {CONFIDENCE} intervals, {} mixes, {profiles} profiles a cell, {seeds} seeds",
        mixes.len()
    );
    println!("Worst coverage over mixes and seeds: all profiles / those with a sample; w = median of width/truth.\n");
    println!("| mean samples |{}", Method::ALL.map(|method| format!(" {} |", method.name())).concat());
    println!("|---|{}", "---|".repeat(Method::ALL.len()));
    let mut overall: [(f64, String); 4] = std::array::from_fn(|_| (1.0, String::new()));
    for mean in MEANS {
        let cells: Vec<(&str, Coverage)> = mixes
            .iter()
            .flat_map(|mix| {
                (1..=seeds)
                    .map(move |seed| (mix.name.as_str(), coverage(mix, INTERVAL, mean, CONFIDENCE, profiles, seed)))
            })
            .collect();
        let mut line = format!("| {mean} |");
        for method in Method::ALL {
            // Cells with hardly any samples say nothing about profiles with samples.
            let often_seen = cells.iter().filter(|(_, cell)| cell.seen >= profiles / 20);
            let worst_seen = often_seen.map(|(_, cell)| cell.share_seen(method)).fold(1.0, f64::min);
            let mut widths: Vec<f64> =
                cells.iter().map(|(_, cell)| cell.median_width(method)).filter(|w| w.is_finite()).collect();
            widths.sort_by(f64::total_cmp);
            let mut worst = 1.0;
            for (name, cell) in &cells {
                let share = cell.share(method);
                worst = f64::min(worst, share);
                if share < overall[method as usize].0 {
                    overall[method as usize] = (share, format!("{name}, mean {mean}"));
                }
            }
            line += &format!(" {worst:.3}/{worst_seen:.3} w{:.2} |", widths.get(widths.len() / 2).unwrap_or(&f64::NAN));
        }
        println!("{line}");
    }
    let worst = overall.map(|(share, place)| format!(" **{share:.3}** ({place}) |")).concat();
    println!("| worst |{worst}");
    println!("\n{:.0} s", start.elapsed().as_secs_f64());
    ExitCode::SUCCESS
}
