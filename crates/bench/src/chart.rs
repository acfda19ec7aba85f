//! The parts of every chart, as SVG: a sheet with a title, grid lines with numbers, curves with a legend.

use std::fmt::Write as _;

/// Width and margins of a sheet, pixels.
pub(super) const WIDTH: f64 = 760.0;
pub(super) const LEFT: f64 = 64.0;
pub(super) const RIGHT: f64 = 20.0;
pub(super) const TOP: f64 = 44.0;
pub(super) const BOTTOM: f64 = 56.0;
/// Colors that color-blind readers can tell apart.
const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];

/// The color of the curve, or group of curves, with this number.
pub(super) const fn color(index: usize) -> &'static str {
    COLORS[index % COLORS.len()]
}

/// A chart that is being drawn.
pub(super) struct Sheet {
    svg: String,
    height: f64,
}

impl Sheet {
    /// An empty sheet of this height, pixels, with a title.
    pub(super) fn new(height: f64, title: &str) -> Self {
        let svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{title}</text>\n"
        );
        Self { svg, height }
    }

    /// The x coordinate of a share of the horizontal axis, from its left end, pixels.
    pub(super) fn x_of(share: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * share
    }

    /// The y coordinate of a share of the vertical axis, from its lower end, pixels.
    pub(super) fn y_of(&self, share: f64) -> f64 {
        self.height - BOTTOM - (self.height - TOP - BOTTOM) * share
    }

    /// Draws a horizontal grid line with its number.
    pub(super) fn value(&mut self, y: f64, name: &str) {
        self.draw(format_args!(
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>",
            WIDTH - RIGHT,
            LEFT - 8.0,
            y + 4.0,
        ));
    }

    /// Draws a vertical grid line with its number.
    pub(super) fn place(&mut self, x: f64, name: &str) {
        let bottom = self.height - BOTTOM;
        self.draw(format_args!(
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
             <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\">{name}</text>",
            bottom + 18.0,
        ));
    }

    /// Writes the name of the horizontal axis below it.
    pub(super) fn places(&mut self, name: &str) {
        let (middle, bottom) = (f64::midpoint(LEFT, WIDTH - RIGHT), self.height - 14.0);
        self.draw(format_args!("<text x=\"{middle}\" y=\"{bottom}\" text-anchor=\"middle\">{name}</text>"));
    }

    /// Draws a curve through points (`x,y x,y …`), and its entry in the legend at `at`.
    pub(super) fn curve(&mut self, points: &str, color: &str, dashed: bool, at: (f64, f64), name: &str) {
        let dash = if dashed { " stroke-dasharray=\"5 4\"" } else { "" };
        let (x, y) = at;
        self.draw(format_args!(
            "<polyline fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"{dash} points=\"{points}\"/>\n\
             <line x1=\"{x}\" x2=\"{}\" y1=\"{y}\" y2=\"{y}\" stroke=\"{color}\" stroke-width=\"2\"{dash}/>\n\
             <text x=\"{}\" y=\"{}\">{name}</text>",
            x + 28.0,
            x + 36.0,
            y + 4.0,
        ));
    }

    /// Vertical distance of a legend entry from the legend's top, pixels.
    pub(super) fn name_offset(index: usize) -> f64 {
        16.0 + 18.0 * index as f64
    }

    /// The finished SVG file.
    pub(super) fn finish(mut self) -> String {
        self.svg.push_str("</svg>\n");
        self.svg
    }

    fn draw(&mut self, line: std::fmt::Arguments) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.svg, "{line}");
    }
}
