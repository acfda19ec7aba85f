//! jemalloc's `heap_v2` for `jeprof`: one process per file, with numbers from which `jeprof` computes our estimates.
//!
//! `jeprof` multiplies the numbers of a stack by 1/(1 − e^(−x/R)), where x is their mean size and R comes from the
//! header. The header always says R = 1, whatever the sampling interval was: then the factor is close to 1, and
//! rounding to integers loses nothing. With the real interval, most stacks of a sampled profile would lose up to half a
//! sample to rounding.

use std::io;

use indexmap::IndexMap;

use super::{FormatError, WriteOptions};
use crate::escape::escaped;
use crate::intern::Interned;
use crate::model::Profile;
use crate::round::largest_remainder;
use crate::value::Value;
use heapbpf_statistics::predistort::predistort;

/// R in the header.
const HEADER_INTERVAL: u64 = 1;

pub(super) fn write(profile: &Profile, _: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    if profile.processes.len() > 1 {
        let reason = format!("it has {} processes, and heap_v2 can hold only one", profile.processes.len());
        return Err(FormatError::Unsupported { format: "heap_v2", reason });
    }
    let (stacks, columns) = stacks(profile);
    writeln!(out, "heap_v2/{HEADER_INTERVAL}")?;
    let totals = columns.each_ref().map(|column| column.iter().sum::<i64>());
    write_figures(out, totals)?;
    for (index, addresses) in stacks.iter().enumerate() {
        write!(out, "@")?;
        for address in addresses {
            write!(out, " {address:#x}")?;
        }
        writeln!(out)?;
        write_figures(out, columns.each_ref().map(|column| column[index]))?;
    }
    writeln!(out, "\nMAPPED_LIBRARIES:")?;
    // As in pprof, the program comes first, because readers name a profile after the first file.
    let exe = profile.processes.first().map_or("", |process| &process.exe);
    let mut modules: Vec<_> = profile.modules.iter().filter(|module| module.end > module.start).collect();
    modules.sort_by_key(|module| *module.path != *exe);
    for module in modules {
        let (start, end, offset) = (module.start, module.end, module.file_offset);
        writeln!(out, "{start:08x}-{end:08x} r-xp {offset:08x} 00:00 0 {}", escaped(&module.path))?;
    }
    Ok(())
}

fn write_figures(out: &mut dyn io::Write, [alloc_objects, alloc, inuse_objects, inuse]: [i64; 4]) -> io::Result<()> {
    writeln!(out, "  t*: {inuse_objects}: {inuse} [{alloc_objects}: {alloc}]")
}

/// Distinct address lists, and their pre-distorted figures in the order of [`Value::COLUMNS`].
fn stacks(profile: &Profile) -> (Vec<Vec<u64>>, [Vec<i64>; 4]) {
    let interned = Interned::for_viewers(profile);
    let lists: Vec<Vec<u64>> =
        (0..interned.stacks.len() as u32).map(|stack| addresses(profile, &interned, stack)).collect();
    let mut found: IndexMap<&[u64], [f64; 4]> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        let sums = found.entry(&lists[stack as usize]).or_default();
        sums.iter_mut().zip(Value::COLUMNS).for_each(|(sum, value)| *sum += value.of(row));
    }
    let mut columns: [Vec<f64>; 4] = Default::default();
    for &[alloc_objects, alloc, inuse_objects, inuse] in found.values() {
        let alloc = predistort(alloc_objects, alloc, HEADER_INTERVAL);
        let inuse = predistort(inuse_objects, inuse, HEADER_INTERVAL);
        let values = [alloc.objects, alloc.bytes, inuse.objects, inuse.bytes];
        columns.iter_mut().zip(values).for_each(|(column, value)| column.push(value));
    }
    (found.keys().map(|list| list.to_vec()).collect(), columns.map(|column| largest_remainder(&column)))
}

/// The addresses of a stack as jemalloc would have written them. `jeprof` subtracts one from all but the first.
fn addresses(profile: &Profile, interned: &Interned, stack: u32) -> Vec<u64> {
    interned
        .frame_ids(stack)
        .iter()
        .map(|&id| interned.frames[id as usize])
        // An inlined function has the same address as its caller, which follows.
        .filter(|frame| !frame.inlined)
        .map(|frame| profile.address_in_first_process(frame))
        .enumerate()
        .map(|(depth, address)| if depth == 0 { address } else { address.saturating_add(1) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_reader_that_unbiases_gets_our_totals() {
        let profile = testing::small().only_process(0);
        let back = crate::read::parse(&testing::written(&profile, "heap_v2")).expect("heap_v2");
        for value in Value::COLUMNS {
            let total = |profile: &Profile| profile.rows.iter().map(|row| value.of(row)).sum::<f64>();
            assert!((total(&back) - total(&profile)).abs() <= 1.0, "{}", value.name());
        }
        assert_eq!(back.rows.len(), 2);
        let subject = crate::report::subject(&back);
        assert!(subject.ends_with("sampling interval unknown"), "the header has none: {subject}");
        assert_eq!(back.modules[0].path, profile.modules[0].path);
        // The call in `main`, computed from its return address.
        assert_eq!(back.rows[0].key.stack.frames.last().expect("frames").address, 0x5555_0000_1000);
    }

    #[test]
    fn a_file_holds_one_process() {
        let profile = testing::small();
        let mut out = Vec::new();
        let error = write(&profile, &WriteOptions::default(), &mut out).expect_err("two processes");
        assert!(error.to_string().contains("2 processes"));
    }
}
