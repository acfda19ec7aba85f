//! Shared values that are compared by identity.

use std::hash::{Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

/// A shared value that equals only its own copies: it is compared and hashed by address, in constant time. The key
/// keeps the value alive, so no other value can get the same address.
#[derive(Debug)]
pub struct ByAddress<T>(pub Arc<T>);

impl<T> ByAddress<T> {
    fn address(&self) -> *const T {
        Arc::as_ptr(&self.0)
    }
}

impl<T> Clone for ByAddress<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> PartialEq for ByAddress<T> {
    fn eq(&self, other: &Self) -> bool {
        self.address() == other.address()
    }
}

impl<T> Eq for ByAddress<T> {}

impl<T> Hash for ByAddress<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.address().hash(state);
    }
}

impl<T> Deref for ByAddress<T> {
    type Target = Arc<T>;

    fn deref(&self) -> &Arc<T> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn a_key_is_equal_to_its_copies_and_not_to_equal_values() {
        let [one, other] = ["same", "same"].map(|text| ByAddress(Arc::new(text.to_owned())));
        assert_eq!(*one.0, *other.0);
        let numbers = HashMap::from([(one.clone(), 1), (other.clone(), 2)]);
        assert_eq!((numbers.len(), numbers[&one], numbers[&other]), (2, 1, 2));
        assert_eq!(numbers.get(&ByAddress(Arc::clone(&one))), Some(&1));
    }
}
