//! Comparing numbers, and reading them from JSON.

use serde_json::Value;

/// Most failures that are printed per file; all are counted.
const PRINTED: usize = 20;

/// Counts comparisons that agree and comparisons that do not.
#[derive(Default)]
pub struct Checker {
    pub passed: u64,
    pub failed: u64,
    pub failures: Vec<String>,
}

impl Checker {
    pub fn fail(&mut self, what: &str) {
        self.failed += 1;
        if self.failures.len() < PRINTED {
            self.failures.push(what.to_owned());
        }
    }

    pub fn holds(&mut self, what: &str, holds: bool) {
        if holds {
            self.passed += 1;
        } else {
            self.fail(what);
        }
    }

    /// Compares with an absolute tolerance.
    pub fn near(&mut self, what: &str, actual: f64, expected: &Value, tolerance: f64) {
        let Some(expected) = expected.as_f64() else {
            return self.fail(&format!("{what}: {expected} is not a number"));
        };
        // A NaN on either side must not pass.
        if (actual - expected).abs() <= tolerance {
            self.passed += 1;
        } else {
            self.fail(&format!("{what}: got {actual:e}, expected {expected:e} ± {tolerance:e}"));
        }
    }

    /// Compares with a relative tolerance. Numbers below 1e-290, where an `f64` loses precision, are compared with an
    /// absolute tolerance of 1e-280.
    pub fn close(&mut self, what: &str, actual: f64, expected: &Value, tolerance: f64) {
        let size = expected.as_f64().unwrap_or(f64::NAN).abs();
        self.near(what, actual, expected, if size < 1e-290 { 1e-280 } else { tolerance * size });
    }

    /// Compares two optional numbers; `null` means none.
    pub fn close_or_null(&mut self, what: &str, actual: Option<f64>, expected: &Value, tolerance: f64) {
        match actual {
            Some(actual) => self.close(what, actual, expected, tolerance),
            None => self.holds(&format!("{what}: got none, expected {expected}"), expected.is_null()),
        }
    }

    /// Compares whole numbers.
    pub fn equal(&mut self, what: &str, actual: u64, expected: &Value) {
        self.holds(&format!("{what}: got {actual}, expected {expected}"), whole(expected) == Some(actual));
    }
}

/// A whole number, written with or without a decimal point.
fn whole(value: &Value) -> Option<u64> {
    value
        .as_u64()
        .or_else(|| value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..1.8e19).contains(x)).map(|x| x as u64))
}

/// A whole number of a row. 0 if it is missing, which then fails the comparison that uses it.
pub fn count(row: &Value, key: &str) -> u64 {
    whole(&row[key]).unwrap_or_default()
}

/// A number of a row. NaN, which agrees with nothing, if it is missing.
pub fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

/// The rows under a key; none if the key is missing.
pub fn rows<'a>(file: &'a Value, key: &str) -> &'a [Value] {
    file[key].as_array().map_or(&[], Vec::as_slice)
}

/// Pairs `[size, count]`.
pub fn pairs(value: &Value) -> Vec<(u64, u64)> {
    let pair = |pair: &Value| Some((whole(&pair[0])?, whole(&pair[1])?));
    value.as_array().map(|pairs| pairs.iter().filter_map(pair).collect()).unwrap_or_default()
}
