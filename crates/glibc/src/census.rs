//! The census: what is in use, by type and by size.

use std::ops::RangeInclusive;

use crate::arena::HEAP;
use crate::pages::Pages;
use crate::pools::{self, Pools};
use crate::tally::{Tally, sizes_of};
use crate::types::{Files, Language, Types};
use crate::walk::Blocks;
use crate::{Heap, Memory, NotRead, Space, read_by};

/// What blocks are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// Objects of a type.
    Type(Language, String),
    /// Blocks of glibc without a known type: the sizes that a program asks for to get one of them.
    Sizes(RangeSizes),
    /// Blocks of Python's allocator of small objects without a known type, of this size.
    PythonSize(u64),
}

/// Sizes, from the smallest to the largest.
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

/// Blocks in use that are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What they are.
    pub what: What,
    /// How many there are.
    pub blocks: u64,
    /// Their sizes, with their headers and as they were rounded up.
    pub bytes: u64,
}

/// What is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// glibc's heap.
    pub heap: Heap,
    /// Python's allocator of small objects.
    pub python: Pools,
    /// What is in use, the most bytes first. It may be less than what the sums say: large blocks that were not found are in no row.
    pub rows: Vec<Row>,
    /// Whether there were more types than are told apart: objects of others are in the rows of their sizes.
    pub has_more_types: bool,
}

/// Counts what is in use in the heap of glibc 2.`version`, and Python's small objects if there is an interpreter.
///
/// # Errors
/// [`NotRead`].
pub fn census(memory: &mut dyn Memory, space: &Space, version: u32, files: &Files) -> Result<Census, NotRead> {
    let mut pages = Pages::new(memory);
    let mut types = Some(Types::new(files));
    let (heap, tally, arenas) = read_by(&mut pages, space, version, &mut types)?;
    let mut types = types.unwrap_or_else(|| Types::new(files));
    let (mut python, mut small) = (Pools::default(), Tally::default());
    if files.has_python {
        let heaps: Vec<u64> = arenas.iter().map(|base| base & !(HEAP - 1)).collect();
        (python, small) = pools::count(&mut pages, space, &heaps, &mut types);
    }
    let (names, has_more_types) = types.into_names();
    Ok(Census { heap, python, rows: rows(&tally, &small, names), has_more_types })
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
