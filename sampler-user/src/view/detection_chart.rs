//! Charts of what a sampling interval can see, as SVG: the probability of seeing a site, and how far its estimate is off.

use std::fmt::Write as _;

use crate::sampling::detect::{Detection, detection};
use crate::view::units;

/// A chart's place on the sheet, in pixels.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Sizes from 4 KiB to 16 MiB, as powers of two.
const FIRST: u32 = 12;
const LAST: u32 = 24;
/// Points on a curve for each doubling: the mean error has a kink at each multiple of R.
const PER_DOUBLING: u32 = 24;
/// Colours that stay apart for colour-blind readers.
pub(super) const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

struct Curve {
    name: String,
    dashed: bool,
    interval: u64,
    value: fn(&Detection) -> f64,
}

/// Probability that a site of given size has at least one sample, for each sampling interval.
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
    // The lower right corner is free.
    svg("Probability of seeing a site at all", 1.0, HEIGHT - BOTTOM - 80.0, &curves)
}

/// Mean relative error of a site's estimate, of all recordings and of those that see it, for each sampling interval.
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
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{title}</text>\n"
    );
    axes(&mut svg, top_value);
    for (index, curve) in curves.iter().enumerate() {
        let color = COLORS[index / if curves.iter().any(|c| c.dashed) { 2 } else { 1 } % COLORS.len()];
        let dash = if curve.dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let points = points(curve, top_value);
        let y = legend_top + 16.0 + 18.0 * index as f64;
        let x = WIDTH - RIGHT - 190.0;
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash} points=\"{points}\"/>\n\
             <line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>\n\
             <text x=\"{}\" y=\"{}\">{}</text>",
            x + 28.0,
            x + 36.0,
            y + 4.0,
            curve.name
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn axes(svg: &mut String, top_value: f64) {
    for tenth in 0..=10 {
        let value = top_value * f64::from(tenth) / 10.0;
        let y = y_of(value, top_value);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            100.0 * value
        );
    }
    for exponent in FIRST..=LAST {
        let x = x_of(f64::from(exponent));
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 18.0,
            size_name(1 << exponent)
        );
    }
    let (middle, bottom) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0);
    let _ =
        writeln!(svg, "<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">bytes allocated at the site</text>");
}

/// `512 KiB`, not `512.0 KiB`: these are all powers of two.
fn size_name(bytes: u64) -> String {
    units::bytes(bytes as f64).replace(".00 ", " ").replace(".0 ", " ")
}

fn points(curve: &Curve, top_value: f64) -> String {
    let mut points = String::new();
    for step in 0..=(LAST - FIRST) * PER_DOUBLING {
        let exponent = f64::from(FIRST) + f64::from(step) / f64::from(PER_DOUBLING);
        let size = exponent.exp2().round() as u64;
        if let Some(found) = detection(size, curve.interval) {
            let value = (curve.value)(&found).min(top_value);
            let _ = write!(points, "{:.1},{:.1} ", x_of(exponent), y_of(value, top_value));
        }
    }
    points
}

fn x_of(exponent: f64) -> f64 {
    LEFT + (WIDTH - LEFT - RIGHT) * (exponent - f64::from(FIRST)) / f64::from(LAST - FIRST)
}

fn y_of(value: f64, top_value: f64) -> f64 {
    HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top_value
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// The intervals of the published charts.
    const PUBLISHED: [u64; 3] = [32 << 10, 512 << 10, 2 << 20];

    /// The charts in the documentation are made by these formulas. `HEAPBPF_BLESS=1` writes them anew.
    #[test]
    fn charts_in_the_documentation_are_current() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/charts"));
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
        let point = format!("{:.1},{:.1} ", x_of(19.0), y_of(0.632_12, 1.0));
        assert!(points(&curve, 1.0).contains(&point));
    }
}
