//! Finds the line of an instruction in a code object's line table, in the format of each version.

use crate::layout::LineFormat;

/// Returns the line of the instruction at a byte offset; `None` if it has none. `first`: the code object's first line.
#[must_use]
pub fn line(format: LineFormat, table: &[u8], first: u32, offset: u32) -> Option<u32> {
    let first = i64::from(first);
    let line = match format {
        LineFormat::Increments => Some(by_increments(table, first, offset)),
        LineFormat::Ranges => by_ranges(table, first, offset),
        LineFormat::Locations => by_locations(table, first, offset),
    };
    line.and_then(|line| u32::try_from(line).ok()).filter(|line| *line > 0)
}

/// Pairs of an offset increment and a signed line increment.
fn by_increments(table: &[u8], first: i64, offset: u32) -> i64 {
    let (mut line, mut at) = (first, 0u64);
    for pair in table.chunks_exact(2) {
        at += u64::from(pair[0]);
        if at > u64::from(offset) {
            break;
        }
        line += i64::from(pair[1].cast_signed());
    }
    line
}

/// Pairs of a range length and a line increment; an increment of -128 means that the range has no line.
fn by_ranges(table: &[u8], first: i64, offset: u32) -> Option<i64> {
    let (mut line, mut end) = (first, 0u64);
    for pair in table.chunks_exact(2) {
        let increment = pair[1].cast_signed();
        end += u64::from(pair[0]);
        if increment != i8::MIN {
            line += i64::from(increment);
        }
        if u64::from(offset) < end {
            return (increment != i8::MIN).then_some(line);
        }
    }
    None
}

/// Entries with a length in code units and a line, in one of several forms.
fn by_locations(table: &[u8], first: i64, offset: u32) -> Option<i64> {
    let mut bytes = table.iter().copied();
    let (mut line, mut end) = (first, 0u64);
    while let Some(start) = bytes.next() {
        end += 2 * (u64::from(start & 7) + 1);
        let form = start >> 3 & 15;
        let skipped = match form {
            15 => 0,
            14 => {
                line = line.wrapping_add(signed(&mut bytes)?);
                (0..3).try_for_each(|_| number(&mut bytes).map(drop))?;
                0
            }
            13 => {
                line = line.wrapping_add(signed(&mut bytes)?);
                0
            }
            10..=12 => {
                line += i64::from(form - 10);
                2
            }
            _ => 1,
        };
        (0..skipped).try_for_each(|_| bytes.next().map(drop))?;
        if u64::from(offset) < end {
            return (form != 15).then_some(line);
        }
    }
    None
}

/// Reads a number in groups of six bits, lowest first.
fn number(bytes: &mut impl Iterator<Item = u8>) -> Option<u64> {
    let mut value = 0;
    for shift in (0..36).step_by(6) {
        let byte = bytes.next()?;
        value |= u64::from(byte & 63) << shift;
        if byte & 64 == 0 {
            return Some(value);
        }
    }
    None
}

/// Reads a number whose sign is in the lowest bit.
fn signed(bytes: &mut impl Iterator<Item = u8>) -> Option<i64> {
    let value = number(bytes)?;
    let magnitude = (value >> 1).cast_signed();
    Some(if value & 1 == 0 { magnitude } else { -magnitude })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn increments_add_up_to_the_instruction() {
        // Lines 10, then 11 from offset 4, back to 9 from 10.
        let table = [4, 1, 6, 0xfe];
        let line = |offset| line(LineFormat::Increments, &table, 10, offset);
        assert_eq!([0, 3, 4, 9, 10, 500].map(line), [10, 10, 11, 11, 9, 9].map(Some));
    }

    #[test]
    fn ranges_end_before_the_next_begins() {
        // 10 up to 4, none up to 6, 12 up to 10, still 12 up to 14.
        let table = [4, 0, 2, 0x80, 4, 2, 4, 0];
        let line = |offset| line(LineFormat::Ranges, &table, 10, offset);
        let (ten, twelve) = (Some(10), Some(12));
        assert_eq!([0, 3, 4, 6, 9, 13, 14].map(line), [ten, ten, None, twelve, twelve, twelve, None]);
    }

    #[test]
    fn locations_have_many_forms() {
        let table = [
            0x80 | 14 << 3, // one unit, long: line + 2, and three more numbers, one of two bytes
            2 << 1,
            0,
            64 | 1,
            1,
            5,
            0x80 | 11 << 3 | 1, // two units, one line on
            1,
            2,
            0x80 | 15 << 3, // one unit, no location
            0x80 | 13 << 3, // one unit, no columns: line - 3
            3 << 1 | 1,
            0x80 | 3 << 3, // one unit, short form
            9,
        ];
        let line = |offset| line(LineFormat::Locations, &table, 10, offset);
        assert_eq!([0, 2, 4, 6, 8, 10, 12].map(line), [Some(12), Some(13), Some(13), None, Some(10), Some(10), None]);
    }

    #[test]
    fn broken_tables_give_no_line() {
        for table in [&[0xf0][..], &[0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], &[0xd8], &[]] {
            assert_eq!(line(LineFormat::Locations, table, 1, 0), None, "{table:?}");
        }
        assert_eq!(line(LineFormat::Ranges, &[1], 1, 0), None);
        assert_eq!(line(LineFormat::Increments, &[0, 0x80], 1, 0), None, "a negative line");
    }
}
