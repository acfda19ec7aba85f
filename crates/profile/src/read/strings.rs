//! Interns strings.

use std::collections::HashSet;
use std::sync::Arc;

/// The strings seen so far.
#[derive(Default)]
pub(super) struct Strings(HashSet<Arc<str>>);

impl Strings {
    /// The shared copy of `text`.
    pub(super) fn share(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.0.get(text) {
            return Arc::clone(known);
        }
        let shared: Arc<str> = text.into();
        self.0.insert(Arc::clone(&shared));
        shared
    }

    /// The shared copy of an optional string; an empty string counts as missing.
    pub(super) fn share_some(&mut self, text: Option<&str>) -> Option<Arc<str>> {
        text.filter(|text| !text.is_empty()).map(|text| self.share(text))
    }
}
