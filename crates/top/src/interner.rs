//! Assigns numbers to recurring items.

use std::collections::HashMap;
use std::hash::Hash;

use foldhash::fast::RandomState;

/// Numbers items in order of first appearance.
#[derive(Debug)]
pub(crate) struct Interner<T> {
    ids: HashMap<T, u32, RandomState>,
    items: Vec<T>,
}

impl<T> Default for Interner<T> {
    fn default() -> Self {
        Self { ids: HashMap::default(), items: Vec::new() }
    }
}

impl<T: Clone + Eq + Hash> Interner<T> {
    /// The number of an item, and whether the item is new.
    pub(crate) fn id(&mut self, item: T) -> (u32, bool) {
        if let Some(&id) = self.ids.get(&item) {
            return (id, false);
        }
        let id = self.items.len() as u32;
        self.items.push(item.clone());
        self.ids.insert(item, id);
        (id, true)
    }

    /// The item with this number, which must come from [`Self::id`].
    pub(crate) fn get(&self, id: u32) -> &T {
        &self.items[id as usize]
    }

    /// How many items have a number.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_things_have_one_number() {
        let mut names = Interner::default();
        assert_eq!([names.id("a"), names.id("b"), names.id("a")], [(0, true), (1, true), (0, false)]);
        assert_eq!((names.len(), *names.get(1)), (2, "b"));
    }
}
