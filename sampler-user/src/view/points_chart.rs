//! A chart of measured points, as SVG: the horizontal axis is logarithmic, with a mark at each point.

use std::fmt::Write as _;

use super::detection_chart::COLORS;
use super::units;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Horizontal lines.
const LINES: u32 = 8;

/// Points joined by a line.
pub struct Line<'a> {
    /// What they are.
    pub name: &'a str,
    /// Place (above 0) and value (0 or more), places ascending.
    pub points: &'a [(f64, f64)],
}

/// What a chart is called, and its axes.
pub struct Axes<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below the horizontal axis.
    pub places: &'a str,
    /// Written behind each value.
    pub unit: &'a str,
    /// Values have a logarithmic axis, too.
    pub logarithmic: bool,
}

/// Where values and places are on the sheet.
struct Scale {
    x: (f64, f64),
    y: (f64, f64),
    logarithmic: bool,
}

impl Scale {
    fn of(lines: &[Line], logarithmic: bool) -> Self {
        let points = || lines.iter().flat_map(|line| line.points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (value.min(low), value.max(high)))
        };
        let x = range(&mut points().map(|(x, _)| x.log10()));
        let (low, high) = range(&mut points().map(|(_, y)| *y));
        let y = if logarithmic {
            (low.max(1e-6).log10().floor(), high.max(1e-6).log10().ceil())
        } else {
            (0.0, round_up(high))
        };
        Self { x, y, logarithmic }
    }

    fn x_of(&self, place: f64) -> f64 {
        let width = (self.x.1 - self.x.0).max(1e-9);
        LEFT + (WIDTH - LEFT - RIGHT) * (place.log10() - self.x.0) / width
    }

    fn y_of(&self, value: f64) -> f64 {
        let value = if self.logarithmic { value.max(1e-6).log10() } else { value };
        let height = (self.y.1 - self.y.0).max(1e-9);
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y.0) / height
    }

    /// Values with a line of their own.
    fn marks(&self) -> Vec<f64> {
        if self.logarithmic {
            (self.y.0 as i32..=self.y.1 as i32).map(|exponent| 10_f64.powi(exponent)).collect()
        } else {
            (0..=LINES).map(|line| self.y.1 * f64::from(line) / f64::from(LINES)).collect()
        }
    }
}

/// The next number above that is 1, 2, 4 or 8 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(1e-9).log10().floor());
    [1.0, 2.0, 4.0, 8.0, 10.0].map(|step| step * power).into_iter().find(|top| *top >= value).unwrap_or(value)
}

/// The chart.
#[must_use]
pub fn chart(axes: &Axes, lines: &[Line]) -> String {
    let scale = Scale::of(lines, axes.logarithmic);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
        axes.title
    );
    // Writing to a string cannot fail.
    for value in scale.marks() {
        let y = scale.y_of(value);
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}{}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
            number(value),
            axes.unit
        );
    }
    let mut places: Vec<f64> = lines.iter().flat_map(|line| line.points).map(|(x, _)| *x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    for place in places {
        let x = scale.x_of(place);
        let _ = writeln!(
            svg,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
            HEIGHT - BOTTOM,
            HEIGHT - BOTTOM + 18.0,
            number(place)
        );
    }
    let (middle, bottom) = ((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 14.0);
    let _ = writeln!(svg, "<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">{}</text>", axes.places);
    for (index, line) in lines.iter().enumerate() {
        let color = COLORS[index % COLORS.len()];
        let points: Vec<String> =
            line.points.iter().map(|(x, y)| format!("{:.1},{:.1}", scale.x_of(*x), scale.y_of(*y))).collect();
        let (x, y) = (LEFT + 16.0, TOP + 16.0 + 18.0 * index as f64);
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{}\"/>\n\
             <line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"2\"/>\n\
             <text x=\"{}\" y=\"{}\">{}</text>",
            points.join(" "),
            x + 28.0,
            x + 36.0,
            y + 4.0,
            line.name
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn number(value: f64) -> String {
    if value >= 1000.0 { units::count(value) } else { format!("{}", (value * 1000.0).round() / 1000.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_lie_where_their_numbers_say() {
        let axes = Axes { title: "t", places: "p", unit: "×", logarithmic: false };
        let svg = chart(&axes, &[Line { name: "one", points: &[(1.0, 0.0), (10.0, 2.0), (100.0, 4.0)] }]);
        // The middle of both axes.
        let (x, y) = ((LEFT + WIDTH - RIGHT) / 2.0, (TOP + HEIGHT - BOTTOM) / 2.0);
        assert!(svg.contains(&format!("{x:.1},{y:.1}")), "{svg}");
        assert!(svg.contains(">4×<") && svg.ends_with("</svg>\n"));
        let axes = Axes { logarithmic: true, ..axes };
        let svg = chart(&axes, &[Line { name: "one", points: &[(1.0, 1.0), (10.0, 10.0), (100.0, 100.0)] }]);
        assert!(svg.contains(&format!("{x:.1},{y:.1}")), "{svg}");
    }
}
