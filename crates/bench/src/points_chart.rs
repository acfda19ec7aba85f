//! Charts of measured points, as SVG. The horizontal axis is logarithmic, with a mark at each point.

use std::fmt::Write as _;

use heapbpf_profile::units;

/// Width and margins of a sheet, pixels.
const WIDTH: f64 = 760.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 56.0;
/// Colors that color-blind readers can tell apart.
const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// The color of the curve, or group of curves, with this number.
const fn color(index: usize) -> &'static str {
    COLORS[index % COLORS.len()]
}

/// A chart that is being drawn.
struct Sheet {
    svg: String,
    height: f64,
}

impl Sheet {
    /// An empty sheet of this height, pixels, with a title.
    fn new(height: f64, title: &str) -> Self {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{title}</text>\n"
        );
        Self { svg, height }
    }

    /// The x coordinate of a share of the horizontal axis, from its left end, pixels.
    fn x_of(share: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * share
    }

    /// The y coordinate of a share of the vertical axis, from its lower end, pixels.
    fn y_of(&self, share: f64) -> f64 {
        self.height - BOTTOM - (self.height - TOP - BOTTOM) * share
    }

    /// Draws a horizontal grid line with its number.
    fn value(&mut self, y: f64, name: &str) {
        self.draw(format_args!(
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
        ));
    }

    /// Draws a vertical grid line with its number.
    fn place(&mut self, x: f64, name: &str) {
        let bottom = self.height - BOTTOM;
        self.draw(format_args!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
            bottom + 18.0,
        ));
    }

    /// Writes the name of the horizontal axis below it.
    fn places(&mut self, name: &str) {
        let (middle, bottom) = (f64::midpoint(LEFT, WIDTH - RIGHT), self.height - 14.0);
        self.draw(format_args!("<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">{name}</text>"));
    }

    /// Draws a curve through points (`x,y x,y …`), and its entry in the legend at this place.
    fn curve(&mut self, points: &str, color: &str, (x, y): (f64, f64), name: &str) {
        self.draw(format_args!(
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\" points=\"{points}\"/>\n\
             <line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"2\"/>\n\
             <text x=\"{}\" y=\"{}\">{name}</text>",
            x + 28.0,
            x + 36.0,
            y + 4.0,
        ));
    }

    /// The finished SVG file.
    fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }

    fn draw(&mut self, line: std::fmt::Arguments) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.svg, "{line}");
    }
}

const HEIGHT: f64 = 360.0;
/// Horizontal grid lines of a linear axis.
const LINES: u32 = 8;

/// Points joined by a line.
pub struct Line<'a> {
    /// Name in the legend.
    pub name: &'a str,
    /// Horizontal place (above 0) and value (0 or more) of each point, places ascending.
    pub points: &'a [(f64, f64)],
}

/// Title and axes of a chart.
pub struct Axes<'a> {
    /// Title above the chart.
    pub title: &'a str,
    /// Text below the horizontal axis.
    pub places: &'a str,
    /// Unit, appended to each value.
    pub unit: &'a str,
    /// Whether the vertical axis is logarithmic, too.
    pub logarithmic: bool,
}

/// The positions of values and places on the sheet.
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
        Sheet::x_of((place.log10() - self.x.0) / width)
    }

    fn y_of(&self, sheet: &Sheet, value: f64) -> f64 {
        let value = if self.logarithmic { value.max(1e-6).log10() } else { value };
        let height = (self.y.1 - self.y.0).max(1e-9);
        sheet.y_of((value - self.y.0) / height)
    }

    /// The values that have a grid line.
    fn marks(&self) -> Vec<f64> {
        if self.logarithmic {
            (self.y.0 as i32..=self.y.1 as i32).map(|exponent| 10_f64.powi(exponent)).collect()
        } else {
            (0..=LINES).map(|line| self.y.1 * f64::from(line) / f64::from(LINES)).collect()
        }
    }
}

/// The least number not below `value` that is 1, 2, 4 or 8 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10_f64.powf(value.max(1e-9).log10().floor());
    [1.0, 2.0, 4.0, 8.0, 10.0].map(|step| step * power).into_iter().find(|top| *top >= value).unwrap_or(value)
}

/// Draws the lines as an SVG file.
#[must_use]
pub fn chart(axes: &Axes, lines: &[Line]) -> String {
    let scale = Scale::of(lines, axes.logarithmic);
    let mut sheet = Sheet::new(HEIGHT, axes.title);
    for value in scale.marks() {
        sheet.value(scale.y_of(&sheet, value), &format!("{}{}", number(value), axes.unit));
    }
    let mut places: Vec<f64> = lines.iter().flat_map(|line| line.points).map(|(x, _)| *x).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    for place in places {
        sheet.place(scale.x_of(place), &number(place));
    }
    sheet.places(axes.places);
    for (index, line) in lines.iter().enumerate() {
        let points: Vec<String> =
            line.points.iter().map(|(x, y)| format!("{:.1},{:.1}", scale.x_of(*x), scale.y_of(&sheet, *y))).collect();
        let at = (LEFT + 16.0, TOP + 16.0 + 18.0 * index as f64);
        sheet.curve(&points.join(" "), color(index), at, line.name);
    }
    sheet.finish()
}

fn number(value: f64) -> String {
    if value >= 1000.0 { units::count(value) } else { format!("{}", (value * 1000.0).round() / 1000.0) }
}
