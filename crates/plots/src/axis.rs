//! Axes: where a value lies, and which values get a grid line.

use heapbpf_profile::units::{self, ByteUnit};

/// What the numbers of an axis measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Seconds.
    Seconds,
    /// Shares; 1 is 100 %.
    Share,
    /// Counts.
    Count,
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Name of the axis, with the unit if the numbers do not show it.
    pub label: String,
    /// Unit of the numbers.
    pub unit: Unit,
    /// Whether it is logarithmic.
    pub logarithmic: bool,
    /// Lowest value shown; above 0 on a logarithmic axis.
    pub low: f64,
    /// Highest value shown.
    pub high: f64,
}

/// Maximum number of grid lines on an axis.
const MOST: usize = 9;
/// Seconds in a minute, an hour and a day.
const LONG: [(f64, &str); 3] = [(60.0, "min"), (3_600.0, "h"), (86_400.0, "d")];

impl Axis {
    /// A linear axis from 0 to a round number that is not below `high`.
    pub fn linear(label: impl Into<String>, unit: Unit, high: f64) -> Self {
        let axis = Self::up_to(label, unit, high);
        let step = axis.step();
        Self { high: (axis.high / step - 1e-9).ceil() * step, ..axis }
    }

    /// A linear axis from 0 to exactly `high`.
    pub fn up_to(label: impl Into<String>, unit: Unit, high: f64) -> Self {
        let high = if high.is_finite() && high > 0.0 { high } else { 1.0 };
        Self { label: label.into(), unit, logarithmic: false, low: 0.0, high }
    }

    /// A logarithmic axis; ends that are not above 0 are replaced.
    pub fn logarithmic(label: impl Into<String>, unit: Unit, low: f64, high: f64) -> Self {
        let low = if low.is_finite() && low > 0.0 { low } else { 1e-9 };
        let high = if high.is_finite() { high.max(low * 2.0) } else { low * 10.0 };
        Self { label: label.into(), unit, logarithmic: true, low, high }
    }

    /// The position of a value, from 0 at the low end to 1 at the high end. Values beyond an end are clamped to it.
    pub fn position(&self, value: f64) -> f64 {
        let at = if self.logarithmic {
            (value.max(self.low) / self.low).ln() / (self.high / self.low).ln()
        } else {
            (value - self.low) / (self.high - self.low)
        };
        if at.is_nan() { 0.0 } else { at.clamp(0.0, 1.0) }
    }

    /// The values that get a grid line, each with its text.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let values = if self.logarithmic { self.powers() } else { self.multiples() };
        values.into_iter().map(|value| (value, self.text(value))).collect()
    }

    /// Multiples of a round number.
    fn multiples(&self) -> Vec<f64> {
        let step = self.step();
        let number = ((self.high - self.low) / step + 1e-9).floor() as usize;
        (0..=number.min(2 * MOST)).map(|index| self.low + index as f64 * step).collect()
    }

    /// A round step that divides the axis into about six parts.
    fn step(&self) -> f64 {
        let wanted = (self.high - self.low) / 6.0;
        let unit = match self.unit {
            Unit::Bytes => ByteUnit::of(self.high).bytes(),
            Unit::Seconds => self.time_unit().0,
            Unit::Share => 0.01,
            Unit::Count => 1.0,
        };
        let of_units = wanted / unit;
        let steps: &[f64] = match self.unit {
            Unit::Seconds if unit == 60.0 || (unit == 1.0 && of_units > 5.0) => {
                &[1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0]
            }
            Unit::Seconds if unit == 3_600.0 => &[1.0, 2.0, 3.0, 6.0, 12.0, 24.0],
            _ => &[],
        };
        if let Some(step) = steps.iter().copied().find(|step| *step >= of_units) {
            return step * unit;
        }
        let power = 10_f64.powf(of_units.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| *step >= of_units * 0.999);
        let step = step.unwrap_or(10.0 * power) * unit;
        // Counts have no halves.
        if self.unit == Unit::Count { step.max(1.0) } else { step }
    }

    /// Powers: of 10; of 4 for bytes; round minutes, hours and days for long times.
    fn powers(&self) -> Vec<f64> {
        let all: Vec<f64> = match self.unit {
            Unit::Bytes => (0..32).map(|power| 4_f64.powi(power)).collect(),
            Unit::Seconds => (-9..=1)
                .map(|power| 10_f64.powi(power))
                .chain([60.0, 600.0, 3_600.0, 36_000.0, 86_400.0, 864_000.0, 8_640_000.0])
                .collect(),
            Unit::Share | Unit::Count => (-6..=15).map(|power| 10_f64.powi(power)).collect(),
        };
        let is_on = |value: &f64| (self.low * 0.999..=self.high * 1.001).contains(value);
        let on: Vec<f64> = all.into_iter().filter(is_on).collect();
        let each = on.len().div_ceil(MOST).max(1);
        on.into_iter().step_by(each).collect()
    }

    /// The unit of a linear time axis, and its name.
    fn time_unit(&self) -> (f64, &'static str) {
        let long = LONG.iter().rev().find(|(seconds, _)| self.high > 2.0 * seconds);
        let short = [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")];
        long.copied().or_else(|| short.into_iter().find(|(unit, _)| self.high > 2.0 * unit)).unwrap_or((1e-9, "ns"))
    }

    /// The text of a grid line.
    fn text(&self, value: f64) -> String {
        match self.unit {
            Unit::Bytes if value == 0.0 => "0".into(),
            Unit::Bytes => {
                let unit = ByteUnit::of(if self.logarithmic { value } else { self.high });
                format!("{} {}", trimmed(value / unit.bytes()), unit.name())
            }
            Unit::Seconds if value == 0.0 => "0".into(),
            Unit::Seconds if self.logarithmic => {
                let long = LONG.iter().rev().find(|(seconds, _)| value >= *seconds);
                long.map_or_else(
                    || units::seconds(value),
                    |(seconds, name)| format!("{} {name}", trimmed(value / seconds)),
                )
            }
            Unit::Seconds => {
                let (unit, name) = self.time_unit();
                format!("{} {name}", trimmed(value / unit))
            }
            Unit::Share => format!("{} %", trimmed(value * 100.0)),
            Unit::Count if value.abs() >= 1.0 => units::count(value),
            Unit::Count => trimmed(value),
        }
    }
}

/// A number rounded to four decimals, without trailing zeros.
fn trimmed(value: f64) -> String {
    let rounded = (value * 1e4).round() / 1e4;
    if rounded.abs() >= 1_000.0 { units::count(rounded) } else { format!("{rounded}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(axis: &Axis) -> Vec<String> {
        axis.ticks().into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn linear_axes_have_round_numbers() {
        let bytes = Axis::linear("", Unit::Bytes, 10.5 * 1_048_576.0);
        assert_eq!(texts(&bytes), ["0", "2 MiB", "4 MiB", "6 MiB", "8 MiB", "10 MiB", "12 MiB"]);
        let small = Axis::linear("", Unit::Bytes, 1.2 * 1_073_741_824.0);
        assert_eq!(texts(&small).last().map(String::as_str), Some("1.2 GiB"), "{:?}", texts(&small));
        assert_eq!(texts(&Axis::up_to("", Unit::Seconds, 10.0)), ["0", "2 s", "4 s", "6 s", "8 s", "10 s"]);
        assert_eq!(texts(&Axis::up_to("", Unit::Seconds, 3_600.0))[1], "10 min");
        assert_eq!(texts(&Axis::up_to("", Unit::Share, 1.0)), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]);
        assert_eq!(texts(&Axis::linear("", Unit::Count, 3.0)), ["0", "1", "2", "3"]);
    }

    #[test]
    fn logarithmic_axes_have_powers() {
        let bytes = Axis::logarithmic("", Unit::Bytes, 4_096.0, 64.0 * 1_048_576.0);
        assert_eq!(texts(&bytes), ["4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"]);
        let ages = Axis::logarithmic("", Unit::Seconds, 1e-3, 7_200.0);
        assert_eq!(texts(&ages), ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min", "1 h"]);
        let shares = Axis::logarithmic("", Unit::Share, 1e-3, 1.0);
        assert_eq!(texts(&shares), ["0.1 %", "1 %", "10 %", "100 %"]);
        assert_eq!((bytes.position(4_096.0), bytes.position(1e12), bytes.position(0.0)), (0.0, 1.0, 0.0));
        assert!((bytes.position(512.0 * 1_024.0) - 0.5).abs() < 1e-9);
    }

    /// Whatever values a file holds, an axis has few grid lines, and positions stay within it.
    #[test]
    fn absurd_values_have_axes() {
        for high in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300, 1e-300] {
            for unit in [Unit::Bytes, Unit::Seconds, Unit::Share, Unit::Count] {
                for axis in
                    [Axis::linear("", unit, high), Axis::up_to("", unit, high), Axis::logarithmic("", unit, high, high)]
                {
                    assert!(axis.ticks().len() <= 2 * MOST + 1, "{axis:?}");
                    for value in [0.0, f64::NAN, f64::INFINITY, -1.0, high] {
                        assert!((0.0..=1.0).contains(&axis.position(value)), "{axis:?} {value}");
                    }
                }
            }
        }
    }
}
