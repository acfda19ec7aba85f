//! Prometheus' text format: families of series, labels and numbers.

use std::fmt::{Display, Write};

use heapbpf_profile::escape;
use heapbpf_statistics::estimate::Estimate;

/// A metric family: a name, a type, a help text, and the text of its lines.
pub(super) struct Family {
    name: String,
    kind: &'static str,
    help: String,
    lines: String,
}

impl Family {
    pub(super) fn new(name: impl Into<String>, kind: &'static str, help: impl Into<String>) -> Self {
        Self { name: name.into(), kind, help: help.into(), lines: String::new() }
    }

    pub(super) fn add(&mut self, labels: &str, value: impl Display) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.lines, "{}{labels} {value}", self.name);
    }

    pub(super) fn write(&self, out: &mut String) {
        if self.lines.is_empty() {
            return;
        }
        let Self { name, kind, help, lines } = self;
        let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{lines}");
    }
}

/// The families of an estimate and of both ends of its interval.
pub(super) struct Estimated(pub(super) [Family; 3]);

impl Estimated {
    /// Creates gauges whose names begin with `what`, such as `heapbpf_at_exit_bytes` and `heapbpf_at_exit_low_bytes`.
    pub(super) fn new(what: &str, unit: &str, help: &str) -> Self {
        let end = |which: &str| format!("{which} end of the 95 % interval of {what}_{unit}.");
        let families = [("", help.to_owned()), ("low_", end("Lower")), ("high_", end("Upper"))];
        Self(families.map(|(end, help)| Family::new(format!("{what}_{end}{unit}"), "gauge", help)))
    }

    pub(super) fn add(&mut self, labels: &str, figure: &Estimate) {
        let Self([estimate, low, high]) = self;
        estimate.add(labels, number(figure.estimate));
        figure.low.iter().for_each(|bound| low.add(labels, number(*bound)));
        figure.high.iter().for_each(|bound| high.add(labels, number(*bound)));
    }
}

/// Writes a metric with one value and no labels.
pub(super) fn single(out: &mut String, name: &str, kind: &'static str, help: &str, value: impl Display) {
    let mut family = Family::new(name, kind, help);
    family.add("", value);
    family.write(out);
}

/// Escapes a label value: control characters as everywhere, then backslashes and quotes as the format requires.
pub(super) fn escaped(text: &str) -> String {
    escape::escaped(text).replace('\\', "\\\\").replace('"', "\\\"")
}

/// A number without an exponent: the shortest text that reads back as the same value.
pub(super) fn number(value: f64) -> String {
    if value == 0.0 { "0".into() } else { format!("{value}") }
}
