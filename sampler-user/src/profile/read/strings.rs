//! Equal strings, once.

use std::collections::HashSet;
use std::sync::Arc;

/// Strings that were seen.
#[derive(Default)]
pub(super) struct Strings(HashSet<Arc<str>>);

impl Strings {
    /// The shared string that is equal to `text`.
    pub(super) fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.0.get(text) {
            return Arc::clone(known);
        }
        let shared: Arc<str> = text.into();
        self.0.insert(Arc::clone(&shared));
        shared
    }

    /// The same for a string that may be missing; an empty one counts as missing.
    pub(super) fn share_some(&mut self, text: Option<&str>) -> Option<Arc<str>> {
        text.filter(|text| !text.is_empty()).map(|text| self.share(text))
    }
}
