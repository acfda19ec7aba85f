//! How deeply debug information is nested. Its readers call themselves once per level, and a stack overflow would end
//! heapbpf: it is no panic that could be caught.

use gimli::{Abbreviations, DebugAbbrev, DebugInfo, Reader, UnitHeader};

/// Maximum number of levels. Real programs have tens.
const MOST_LEVELS: isize = 1000;

/// Whether any unit is nested too deeply to be read, or there are so many that the time is over before all were read.
/// Reads all entries, skipping their attributes.
pub fn is_too_deep<R: Reader<Offset = usize>>(
    info: &DebugInfo<R>,
    abbreviations: &DebugAbbrev<R>,
    is_over: &dyn Fn() -> bool,
) -> bool {
    let mut units = info.units();
    while let Ok(Some(unit)) = units.next() {
        // All units may have the same long list of abbreviations.
        if is_over() {
            return true;
        }
        // Its readers stop at the same errors.
        if let Ok(abbreviations) = unit.abbreviations(abbreviations)
            && is_unit_too_deep(&unit, &abbreviations) == Ok(true)
        {
            return true;
        }
    }
    false
}

fn is_unit_too_deep<R: Reader<Offset = usize>>(
    unit: &UnitHeader<R>,
    abbreviations: &Abbreviations,
) -> Result<bool, gimli::Error> {
    let mut entries = unit.entries_raw(abbreviations, None)?;
    // Ends of lists that nobody began lower the level, and do not keep what follows from being nested.
    let mut lowest = 0;
    while !entries.is_empty() {
        lowest = entries.next_depth().min(lowest);
        if entries.next_depth() - lowest > MOST_LEVELS {
            return Ok(true);
        }
        if let Some(abbreviation) = entries.read_abbreviation()? {
            entries.skip_attributes(abbreviation.attributes())?;
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use gimli::{EndianSlice, LittleEndian};

    use super::*;

    /// A unit with a function, and this many calls inlined into each other. Before the function, this many lists end.
    fn nested(ends: usize, levels: usize) -> Vec<u8> {
        const VERSION_4: [u8; 2] = [4, 0];
        const HEADER: [u8; 5] = [0, 0, 0, 0, 8];
        let entries = [vec![1], vec![0; ends], vec![2], vec![3; levels], vec![0; levels + 2]].concat();
        let rest = [&VERSION_4[..], &HEADER, &entries].concat();
        [&u32::try_from(rest.len()).unwrap().to_le_bytes()[..], &rest].concat()
    }

    #[test]
    fn debug_information_that_is_nested_without_end_is_recognised() {
        // A unit, a function and an inlined call: no attributes, with children.
        let abbreviations = [1, 0x11, 1, 0, 0, 2, 0x2e, 1, 0, 0, 3, 0x1d, 1, 0, 0, 0];
        let abbreviations = DebugAbbrev::new(&abbreviations, LittleEndian);
        for (ends, levels, is_deep) in [
            (0, 0, false),
            (0, 900, false),
            (0, 1100, true),
            (0, 200_000, true),
            (5000, 900, false),
            (5000, 1100, true),
        ] {
            let info = [nested(0, 3), nested(ends, levels)].concat();
            let info: DebugInfo<EndianSlice<'_, LittleEndian>> = DebugInfo::new(&info, LittleEndian);
            assert_eq!(is_too_deep(&info, &abbreviations, &|| false), is_deep, "{ends} {levels}");
            assert!(is_too_deep(&info, &abbreviations, &|| true), "the time is over");
        }
    }
}
