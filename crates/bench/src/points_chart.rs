//! Charts of measured points, as SVG. The horizontal axis is logarithmic, with a mark at each point.

use super::chart::{LEFT, Sheet, TOP, color};
use heapbpf_profile::units;

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
        let at = (LEFT + 16.0, TOP + Sheet::name_offset(index));
        sheet.curve(&points.join(" "), color(index), false, at, line.name);
    }
    sheet.finish()
}

fn number(value: f64) -> String {
    if value >= 1000.0 { units::count(value) } else { format!("{}", (value * 1000.0).round() / 1000.0) }
}
