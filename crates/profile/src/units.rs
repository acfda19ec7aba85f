//! Parsing and formatting of sizes, durations, counts and shares.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use thiserror::Error;

/// Why a size could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SizeError {
    /// It is not a number with a known unit.
    #[error("{0:?} is not a size: write bytes like 4096, or a number with a unit, like 64k, 64KiB, 1MB or 1.5GiB")]
    Syntax(String),
    /// It is not a whole number of bytes.
    #[error("{0:?} is not a whole number of bytes")]
    Fraction(String),
    /// It is more than 2⁶⁴ − 1 bytes.
    #[error("{0:?} is 2^64 bytes or more")]
    TooLarge(String),
}

/// Parses a size in bytes: `4096`, `64k`, `64KiB` (both 65,536), `64kB` (64,000), `1.5MiB`.
///
/// A bare letter and the `iB` units are powers of 1024; units that end in a plain `B` are powers of 1000 (as in GNU
/// coreutils). Case does not matter, and a space before the unit is allowed.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let syntax = || SizeError::Syntax(text.into());
    let trimmed = text.trim();
    let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits_end);
    let factor = unit_factor(unit.trim_start()).ok_or_else(syntax)?;
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, ""));
    if whole.is_empty() || (number.contains('.') && fraction.is_empty()) || fraction.contains('.') {
        return Err(syntax());
    }
    let too_large = || SizeError::TooLarge(text.into());
    let mut bytes = whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(factor)).ok_or_else(too_large)?;
    let fraction = fraction.trim_end_matches('0');
    if !fraction.is_empty() {
        // Computed in integers: 1.5KiB is whole, 1.5 bytes are not.
        let scale = u32::try_from(fraction.len()).ok().and_then(|places| 10u128.checked_pow(places));
        let part = fraction.parse::<u128>().ok().and_then(|part| part.checked_mul(factor.into()));
        let (scale, part) = scale.zip(part).ok_or_else(syntax)?;
        if part % scale != 0 {
            return Err(SizeError::Fraction(text.into()));
        }
        let part = u64::try_from(part / scale).map_err(|_| too_large())?;
        bytes = bytes.checked_add(part).ok_or_else(too_large)?;
    }
    Ok(bytes)
}

fn unit_factor(unit: &str) -> Option<u64> {
    let unit = unit.to_ascii_lowercase();
    if unit.is_empty() || unit == "b" {
        return Some(1);
    }
    let power = "kmgtpe".find(unit.chars().next()?)? as u32 + 1;
    match &unit[1..] {
        "" | "ib" => Some(1024u64.pow(power)),
        "b" => Some(1000u64.pow(power)),
        _ => None,
    }
}

/// Why a duration could not be parsed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0:?} is not a duration: write a number with a unit, like 500ms, 30s, 5m, 2h or 1m30s")]
pub struct DurationError(String);

/// Parses a duration: `30s`, `5m`, `1h30m`, `500ms`, `1.5s`. A number without a unit is in seconds.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let trimmed = text.trim();
    let error = || DurationError(text.into());
    let plain = trimmed.strip_suffix('s').unwrap_or(trimmed);
    if !plain.is_empty() && plain.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return Duration::try_from_secs_f64(plain.parse().map_err(|_| error())?).map_err(|_| error());
    }
    humantime::parse_duration(trimmed).map_err(|_| error())
}

/// Formats a number of bytes with three significant digits: `512 B`, `1.50 KiB`, `12.3 MiB`.
pub fn bytes(value: f64) -> String {
    let unit = ByteUnit::of(value);
    format!("{} {}", unit.figure(value), unit.name())
}

/// Formats a change in bytes: `+1.50 KiB`, `-12.3 MiB`, `0 B`.
pub fn signed(change: f64) -> String {
    if change > 0.0 { format!("+{}", bytes(change)) } else { bytes(change) }
}

/// The unit of a number of bytes, a power of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteUnit(usize);

const BYTE_UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

impl ByteUnit {
    /// The largest unit in which `value` is at least one after rounding to three digits.
    pub fn of(value: f64) -> Self {
        let mut power = 0;
        // The limit is 999.5, not 1024, because "1000 KiB" would have four digits.
        while power + 1 < BYTE_UNITS.len() && value.abs() / 1024f64.powi(power as i32) >= 999.5 {
            power += 1;
        }
        Self(power)
    }

    /// `B`, `KiB`, …
    pub fn name(self) -> &'static str {
        BYTE_UNITS[self.0]
    }

    /// Number of bytes in the unit.
    pub fn bytes(self) -> f64 {
        1024f64.powi(self.0 as i32)
    }

    /// `value` bytes in this unit, without its name.
    pub fn figure(self, value: f64) -> String {
        if self.0 == 0 { count(value) } else { three_digits(value / self.bytes()) }
    }
}

/// Formats three significant digits, at most two of them after the point.
fn three_digits(value: f64) -> String {
    match value.abs() {
        size if size < 9.995 => format!("{value:.2}"),
        size if size < 99.95 => format!("{value:.1}"),
        _ => count(value),
    }
}

/// Formats a whole number with thousands separators: `1,234,567`.
pub fn count(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    if !value.is_finite() {
        return digits;
    }
    let mut text = String::with_capacity(digits.len() * 4 / 3 + 1);
    if value < 0.0 && digits != "0" {
        text.push('-');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a share (1 is all) as a percentage: `34.2 %`, `100 %`, `<0.1 %`.
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent.abs() {
        0.0 => "0 %".into(),
        size if size < 0.05 => "<0.1 %".into(),
        // A share below 1 is never shown as "100 %".
        size if (99.95..100.0).contains(&size) => ">99.9 %".into(),
        size if size < 99.95 && (size - size.round()).abs() >= 0.05 => format!("{percent:.1} %"),
        _ => format!("{percent:.0} %"),
    }
}

/// Formats a share as [`percent`] does. `is_bound`: the share is an upper bound, as in `under 2 %`.
pub fn at_most(share: f64, is_bound: bool) -> String {
    let text = percent(share);
    if is_bound && !text.starts_with('<') { format!("under {text}") } else { text }
}

/// Formats a share as a percentage for table columns, always with one digit after the point: `3.0 %`, `<0.1 %`,
/// `100.0 %`.
pub fn share(share: f64) -> String {
    if share > 0.0 && share < 0.0005 { "<0.1 %".into() } else { format!("{:.1} %", share * 100.0) }
}

/// Formats a duration: `350 ms`, `30.5 s`, `5 min 03 s`, `2 h 05 min`.
pub fn duration(duration: Duration) -> String {
    let (seconds, total) = (duration.as_secs_f64(), duration.as_secs());
    match total {
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{} s", format!("{seconds:.1}").trim_end_matches(".0")),
        60..3600 => format!("{} min {:02} s", total / 60, total % 60),
        _ => format!("{} h {:02} min", total / 3600, total / 60 % 60),
    }
}

/// Formats a short time: `800 ns`, `12.5 µs`, `3.1 ms`; longer ones as [`duration`] does.
pub fn seconds(seconds: f64) -> String {
    let figure = |value: f64, unit: &str| {
        let text = if value < 100.0 { format!("{value:.1}") } else { format!("{value:.0}") };
        format!("{} {unit}", text.trim_end_matches(".0"))
    };
    match seconds {
        ..1e-6 => figure((seconds * 1e9).max(0.0).round(), "ns"),
        ..1e-3 => figure(seconds * 1e6, "µs"),
        ..1.0 => figure(seconds * 1e3, "ms"),
        _ => Duration::try_from_secs_f64(seconds).map_or_else(|_| "for ever".into(), duration),
    }
}

/// The last second that RFC 3339 can represent, since 1970.
const LAST_SECOND: u64 = 253_402_300_799;

/// Formats a wall-clock time as RFC 3339, in UTC with nanoseconds. Times outside the years 1970 to 9999 are clamped.
pub fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default().min(Duration::from_secs(LAST_SECOND));
    humantime::format_rfc3339_nanos(UNIX_EPOCH + since).to_string()
}

/// Milliseconds since 1970.
pub fn unix_ms(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Parses an RFC 3339 wall-clock time. Times before 1970 are clamped.
pub fn parse_rfc3339(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok().map(|time| time.max(UNIX_EPOCH))
}

/// Formats the time of day in UTC to a tenth of a second: `12:00:03.2 UTC`.
pub fn time_of_day(time: SystemTime) -> String {
    let text = rfc3339(time);
    let (_, of_day) = text.split_once('T').unwrap_or(("", &text));
    format!("{} UTC", &of_day[..of_day.len().min("00:00:00.0".len())])
}

/// A remark with the share of samples or calls that it is about: `7 samples were lost (2.10 %): the ring was full`.
pub fn with_share(what: &str, share: f64, why: &str) -> String {
    format!("{what} ({:.2} %): {why}", 100.0 * share)
}

/// Formats bytes as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    ::hex::encode(bytes)
}

/// Parses hexadecimal digits; `None` if the text is something else.
pub fn parse_hex(text: &str) -> Option<Vec<u8>> {
    ::hex::decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_day_and_calendars_without_end() {
        let time = UNIX_EPOCH + Duration::new(1_700_000_029, 250_000_001);
        assert_eq!(
            (rfc3339(time), time_of_day(time)),
            ("2023-11-14T22:13:49.250000001Z".into(), "22:13:49.2 UTC".into())
        );
        assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(1 << 40)), "9999-12-31T23:59:59.000000000Z");
        assert_eq!(rfc3339(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000000000Z");
    }

    #[test]
    fn short_times() {
        for (time, text) in
            [(0.0, "0 ns"), (8e-7, "800 ns"), (1.25e-5, "12.5 µs"), (3.1e-3, "3.1 ms"), (0.25, "250 ms")]
        {
            assert_eq!(seconds(time), text);
        }
        assert_eq!(
            (seconds(1.5), seconds(90.0), seconds(f64::MAX)),
            ("1.5 s".into(), "1 min 30 s".into(), "for ever".into())
        );
    }

    #[test]
    fn sizes_are_read_as_the_contract_says() {
        for (text, bytes) in [
            ("0", 0),
            ("1", 1),
            ("4096", 4096),
            ("64k", 65_536),
            ("64K", 65_536),
            ("64KiB", 65_536),
            ("64kib", 65_536),
            ("64kB", 64_000),
            ("1MB", 1_000_000),
            ("1MiB", 1_048_576),
            ("1m", 1_048_576),
            ("512 KiB", 524_288),
            (" 8b ", 8),
            ("1.5KiB", 1_536),
            ("0.5k", 512),
            ("2.50MB", 2_500_000),
            ("1_000", 1_000),
            ("16GiB", 17_179_869_184),
            ("15EiB", 15 << 60),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "", " ", "k", "KiB", "-1", "+1", "1x", "1KiBB", "1kk", "1 2", "1.k", ".5k", "1..5k", "1e6", "0x10", "∞",
            "1ki",
        ] {
            assert_eq!(parse_size(text), Err(SizeError::Syntax(text.into())), "{text}");
        }
        for text in ["1.5", "0.3k", "1.0000001MB"] {
            assert_eq!(parse_size(text), Err(SizeError::Fraction(text.into())), "{text}");
        }
        for text in ["18446744073709551616", "16EiB", "99999999999999999999999", "15.9999999999EiB999"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        let long = format!("1.{}1k", "0".repeat(60));
        assert!(parse_size(&long).is_err());
    }

    #[test]
    fn durations_are_read_as_the_contract_says() {
        for (text, milliseconds) in [
            ("30s", 30_000),
            ("5m", 300_000),
            ("5min", 300_000),
            ("500ms", 500),
            ("1h30m", 5_400_000),
            ("1m30s", 90_000),
            ("10", 10_000),
            ("1.5s", 1_500),
            ("0.25", 250),
            ("0s", 0),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for text in ["", "s", "-5s", "5x", "5 parsecs", "1e400s", "nan", "inf", "..", "99999999999999999999999s"] {
            assert_eq!(parse_duration(text), Err(DurationError(text.into())), "{text}");
        }
    }

    #[test]
    fn bytes_have_three_digits_and_a_unit() {
        for (value, text) in [
            (0.0, "0 B"),
            (1.0, "1 B"),
            (512.4, "512 B"),
            (999.4, "999 B"),
            (999.6, "0.98 KiB"),
            (1536.0, "1.50 KiB"),
            (65_536.0, "64.0 KiB"),
            (524_288.0, "512 KiB"),
            (1_048_575.0, "1.00 MiB"),
            (12.34 * 1_048_576.0, "12.3 MiB"),
            (-2_048.0, "-2.00 KiB"),
            (1e24, "867,362 EiB"),
        ] {
            assert_eq!(bytes(value), text, "{value}");
        }
    }

    #[test]
    fn counts_have_separators() {
        for (value, text) in [(0.0, "0"), (-0.3, "0"), (999.0, "999"), (1000.0, "1,000"), (-1234567.4, "-1,234,567")] {
            assert_eq!(count(value), text);
        }
        assert_eq!(count(f64::INFINITY), "inf");
    }

    #[test]
    fn shares_never_say_all_or_nothing_of_a_part() {
        for (share, text) in [
            (0.0, "0 %"),
            (0.0001, "<0.1 %"),
            (0.342, "34.2 %"),
            (0.05, "5 %"),
            (0.9999, ">99.9 %"),
            (1.0, "100 %"),
            (1.5, "150 %"),
        ] {
            assert_eq!(percent(share), text, "{share}");
            assert_eq!(at_most(share, false), text, "{share}");
        }
        assert_eq!([0.03, 0.0001].map(|share| at_most(share, true)), ["under 3 %", "<0.1 %"]);
    }

    #[test]
    fn shares_in_tables_align() {
        for (value, text) in [(0.0, "0.0 %"), (0.0001, "<0.1 %"), (0.03, "3.0 %"), (1.0, "100.0 %")] {
            assert_eq!(share(value), text);
        }
    }

    #[test]
    fn durations_are_shown_in_their_order_of_magnitude() {
        for (milliseconds, text) in
            [(350, "350 ms"), (30_000, "30 s"), (30_500, "30.5 s"), (303_000, "5 min 03 s"), (7_500_000, "2 h 05 min")]
        {
            assert_eq!(duration(Duration::from_millis(milliseconds)), text);
        }
    }

    #[test]
    fn changes_have_their_sign() {
        let texts = [1536.0, 0.0, -12.3 * 1_048_576.0].map(signed);
        assert_eq!(texts, ["+1.50 KiB", "0 B", "-12.3 MiB"]);
    }

    #[test]
    fn remarks_keep_their_share() {
        let remark = with_share("7,000 samples were lost", 0.125, "the ring was full (100.00 %): why");
        assert_eq!(remark, "7,000 samples were lost (12.50 %): the ring was full (100.00 %): why");
    }
}
