//! Indirect functions (IFUNC): every function that their resolvers can choose.
//!
//! The loader runs a resolver when the program starts, or at the first call, and binds the result. The resolver's code
//! shows what that can be, so all choices are probed before any process runs.

use std::collections::{BTreeMap, HashMap};

use crate::arch;
use crate::call_graph::Extent;
use crate::elf::{FileImage, Symbol};
use crate::flow::{Returned, Target};

/// Bytes of code that are read of a function of unknown size.
pub(super) const UNSIZED_FUNCTION_BYTES: u64 = 256;
/// Most resolvers of one file that are analysed; an allocator has fewer functions.
const RESOLVERS_MAX: usize = 128;

/// The functions that a resolver chooses from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Choices {
    /// Functions of the same file.
    pub(super) functions: Vec<Extent>,
    /// Names of functions that the loader binds, mostly to another file.
    pub(super) imported: Vec<String>,
    /// Whether these are all.
    pub(super) is_whole: bool,
}

/// Every function in a file's symbols or unwind tables.
struct Functions<'a> {
    /// Start and end.
    bounds: BTreeMap<u64, u64>,
    by_name: HashMap<&'a str, u64>,
}

impl<'a> Functions<'a> {
    fn of(image: &'a FileImage) -> Self {
        let sized = image.functions().filter_map(|(_, s)| Some((s.address, s.address.checked_add(s.size)?)));
        let mut bounds: BTreeMap<u64, u64> = sized.collect();
        bounds.extend(image.bounds.iter().copied());
        let direct = image.functions().filter(|(_, symbol)| !symbol.indirect);
        Self { bounds, by_name: direct.map(|(name, symbol)| (name, symbol.address)).collect() }
    }

    fn end(&self, address: u64) -> u64 {
        let around = self.bounds.range(..=address).next_back().map(|(_, end)| *end).filter(|end| address < *end);
        around.unwrap_or(address.saturating_add(UNSIZED_FUNCTION_BYTES))
    }
}

/// The resolvers of one file.
pub(super) struct Resolvers<'a> {
    image: &'a FileImage,
    /// Filled when first needed.
    functions: Option<Functions<'a>>,
    known: HashMap<u64, Returned>,
}

impl<'a> Resolvers<'a> {
    pub(super) fn new(image: &'a FileImage) -> Self {
        Self { image, functions: None, known: HashMap::new() }
    }

    /// The functions that the resolver at `symbol` can choose: the addresses it returns at which a function is known to
    /// start.
    pub(super) fn choices(&mut self, symbol: &Symbol) -> Choices {
        let image = self.image;
        let functions = self.functions.get_or_insert_with(|| Functions::of(image));
        if !self.known.contains_key(&symbol.address) && self.known.len() >= RESOLVERS_MAX {
            return Choices::default();
        }
        let code_at = |address: u64| image.code_between(address, functions.end(address));
        let returned =
            self.known.entry(symbol.address).or_insert_with(|| arch::returns(image.machine, symbol.address, &code_at));
        let mut found = Choices { is_whole: returned.is_whole, ..Choices::default() };
        for target in &returned.targets {
            let (imported, address) = match *target {
                Target::Address(address) => (None, Some(address)),
                Target::Slot(slot) => {
                    let name = image.import_at(slot);
                    let here = name.and_then(|name| functions.by_name.get(name)).copied();
                    (name.filter(|_| here.is_none()), here)
                }
            };
            match (imported, address.filter(|address| functions.bounds.contains_key(address))) {
                (Some(name), _) => found.imported.push(name.to_owned()),
                (None, Some(start)) => found.functions.push(Extent { start, end: functions.end(start) }),
                (None, None) => found.is_whole = false,
            }
        }
        found
    }
}
