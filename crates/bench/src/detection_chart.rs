//! Charts of what a sampling interval detects, as SVG: the probability of seeing a site, and the error of its estimate.

use std::fmt::Write as _;

use super::chart::{BOTTOM, RIGHT, Sheet, TOP, WIDTH, color};
use heapbpf_profile::units;
use heapbpf_statistics::detect::{Detection, detection};

const HEIGHT: f64 = 420.0;
/// Smallest and largest size, as powers of two: 4 KiB to 16 MiB.
const FIRST: u32 = 12;
const LAST: u32 = 24;
/// Points of a curve per doubling of the size: the mean error has a kink at each multiple of R.
const PER_DOUBLING: u32 = 24;
struct Curve {
    name: String,
    dashed: bool,
    interval: u64,
    value: fn(&Detection) -> f64,
}

/// The chart of the probability that a site has at least one sample, against its size, for each sampling interval in
/// bytes.
pub fn probability_chart(intervals: &[u64]) -> String {
    let curves: Vec<Curve> = intervals
        .iter()
        .map(|&interval| Curve {
            name: format!("R = {}", size_name(interval)),
            dashed: false,
            interval,
            value: |found| found.seen,
        })
        .collect();
    // The legend goes to the lower right corner, which is empty.
    svg("Probability of seeing a site at all", 1.0, HEIGHT - BOTTOM - 80.0, &curves)
}

/// The chart of the mean relative error of a site's estimate, against its size, for each sampling interval in bytes:
/// over all recordings, and over those that see the site.
pub fn error_chart(intervals: &[u64]) -> String {
    let mut curves = Vec::new();
    for &interval in intervals {
        let name = size_name(interval);
        curves.push(Curve {
            name: format!("R = {name}"),
            dashed: false,
            interval,
            value: |found| found.expected_error,
        });
        let value = |found: &Detection| found.expected_error_if_seen;
        curves.push(Curve { name: format!("R = {name}, if seen"), dashed: true, interval, value });
    }
    svg("Mean relative error of a site's estimate (count of successes)", 2.0, TOP, &curves)
}

fn svg(title: &str, top_value: f64, legend_top: f64, curves: &[Curve]) -> String {
    let mut sheet = Sheet::new(HEIGHT, title);
    axes(&mut sheet, top_value);
    let group = if curves.iter().any(|curve| curve.dashed) { 2 } else { 1 };
    for (index, curve) in curves.iter().enumerate() {
        let at = (WIDTH - RIGHT - 190.0, legend_top + Sheet::name_offset(index));
        let points = points(&sheet, curve, top_value);
        sheet.curve(&points, color(index / group), curve.dashed, at, &curve.name);
    }
    sheet.finish()
}

fn axes(sheet: &mut Sheet, top_value: f64) {
    for tenth in 0..=10 {
        let value = top_value * f64::from(tenth) / 10.0;
        sheet.value(sheet.y_of(value / top_value), &format!("{:.0} %", 100.0 * value));
    }
    for exponent in FIRST..=LAST {
        sheet.place(x_of(f64::from(exponent)), &size_name(1 << exponent));
    }
    sheet.places("bytes allocated at the site");
}

/// A power of two as `512 KiB`, without decimals.
fn size_name(bytes: u64) -> String {
    units::bytes(bytes as f64).replace(".00 ", " ").replace(".0 ", " ")
}

fn points(sheet: &Sheet, curve: &Curve, top_value: f64) -> String {
    let mut points = String::new();
    for step in 0..=(LAST - FIRST) * PER_DOUBLING {
        let exponent = f64::from(FIRST) + f64::from(step) / f64::from(PER_DOUBLING);
        let size = exponent.exp2().round() as u64;
        if let Some(found) = detection(size, curve.interval) {
            let value = (curve.value)(&found).min(top_value);
            let _ = write!(points, "{:.1},{:.1} ", x_of(exponent), sheet.y_of(value / top_value));
        }
    }
    points
}

fn x_of(exponent: f64) -> f64 {
    Sheet::x_of((exponent - f64::from(FIRST)) / f64::from(LAST - FIRST))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The intervals of the published charts.
    const PUBLISHED: [u64; 3] = [32 << 10, 512 << 10, 2 << 20];

    /// The charts in the documentation are drawn by this code. `HEAPBPF_BLESS=1` writes them again.
    #[test]
    fn charts_in_the_documentation_are_current() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/charts"));
        for (name, chart) in
            [("probability.svg", probability_chart(&PUBLISHED)), ("error.svg", error_chart(&PUBLISHED))]
        {
            let path = folder.join(name);
            if std::env::var_os("HEAPBPF_BLESS").is_some() {
                std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, &chart)).expect("writable");
            }
            let kept = std::fs::read_to_string(&path).expect("docs/charts; HEAPBPF_BLESS=1 writes it");
            assert!(kept == chart, "{name} is not what the formulas give; HEAPBPF_BLESS=1 writes it anew");
        }
    }

    #[test]
    fn curves_go_through_known_points() {
        // 63.2 % at size = R = 512 KiB, exponent 19.
        let curve = Curve { name: String::new(), dashed: false, interval: 512 << 10, value: |found| found.seen };
        let sheet = Sheet::new(HEIGHT, "");
        let point = format!("{:.1},{:.1} ", x_of(19.0), sheet.y_of(0.632_12));
        assert!(points(&sheet, &curve, 1.0).contains(&point));
    }
}
