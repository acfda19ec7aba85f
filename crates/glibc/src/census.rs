//! The census: blocks in use by type and by size.

use std::ops::RangeInclusive;

use crate::pages::Pages;
use crate::pools::{self, Found, Pools};
use crate::tally::{Tally, sizes_of};
use crate::types::{Files, Language, Types};
use crate::walk::Blocks;
use crate::{Heap, Memory, NotRead, Space, read_by};

/// What a group of blocks contains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// Objects of a type.
    Type(Language, String),
    /// glibc blocks without a known type, by the requested sizes that lead to a block of this size.
    Sizes(RangeSizes),
    /// Blocks of Python's small-object allocator without a known type, by block size.
    PythonSize(u64),
}

/// A range of sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RangeSizes {
    /// The smallest.
    pub from: u64,
    /// The largest.
    pub to: u64,
}

impl From<RangeInclusive<u64>> for RangeSizes {
    fn from(sizes: RangeInclusive<u64>) -> Self {
        Self { from: *sizes.start(), to: *sizes.end() }
    }
}

/// A group of similar blocks in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What the blocks contain.
    pub what: What,
    /// Number of blocks.
    pub blocks: u64,
    /// Sum of their sizes, including headers and rounding.
    pub bytes: u64,
}

/// The blocks in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// glibc's heap.
    pub heap: Heap,
    /// Python's small-object allocator.
    pub python: Pools,
    /// The groups of blocks in use, the most bytes first. They may add up to less than the sums: large blocks that were
    /// not found are in no row.
    pub rows: Vec<Row>,
    /// Whether there were too many types to keep apart: objects of the other types are in the rows of their sizes.
    pub has_more_types: bool,
}

/// Counts the blocks in use in the heap of glibc 2.`version`, and Python's small objects if there is an interpreter.
///
/// # Errors
/// [`NotRead`].
pub fn census(memory: &mut dyn Memory, space: &Space, version: u32, files: &Files) -> Result<Census, NotRead> {
    let mut pages = Pages::new(memory);
    let mut types = Some(Types::new(files));
    let (heap, tally, arenas) = read_by(&mut pages, space, version, &mut types)?;
    let small = match files.has_python {
        true => pools::count(&mut pages, space, (&arenas, &heap.mapped), &mut types),
        false => Found::default(),
    };
    let (names, has_more_types) = types.map(Types::into_names).unwrap_or_default();
    Ok(Census { heap, python: small.pools, rows: rows(&tally, &small.tally, names), has_more_types })
}

fn rows(tally: &Tally, small: &Tally, names: Vec<(Language, String)>) -> Vec<Row> {
    let of = |blocks: &[Blocks], number: usize| blocks.get(number).copied().unwrap_or_default();
    let of_types = names.into_iter().enumerate().map(|(number, (language, name))| {
        (What::Type(language, name), of(&tally.types, number).with(of(&small.types, number)))
    });
    let classes = tally.classes.iter().enumerate();
    let of_sizes = classes.map(|(class, blocks)| (What::Sizes(sizes_of(class).into()), *blocks));
    let small = small.classes.iter().filter(|blocks| blocks.count > 0);
    let of_python = small.map(|blocks| (What::PythonSize(blocks.bytes / blocks.count), *blocks));
    let all = of_types.chain(of_sizes).chain(of_python).filter(|(_, blocks)| blocks.count > 0);
    let row = |(what, Blocks { count, bytes }): (What, Blocks)| Row { what, blocks: count, bytes };
    let mut rows: Vec<Row> = all.map(row).collect();
    rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.what.cmp(&b.what)));
    rows
}
