//! A baseline that the user marked.

use std::collections::HashMap;
use std::time::Duration;

use heapbpf_profile::diff::Change;

use crate::moment::Moment;
use crate::view::{RowId, View};

/// Minimum time between two tests of the same rows.
const EVERY: Duration = Duration::from_secs(3);

/// The baseline.
#[derive(Debug)]
pub(crate) struct Marked {
    /// The profile at that point.
    pub(crate) moment: Moment,
    /// Which rows were tested last, and when (as length of the recording).
    tested: Option<(String, Duration)>,
    found: HashMap<RowId, Change>,
}

impl Marked {
    /// A baseline against which nothing has been tested yet.
    pub(crate) fn new(moment: Moment) -> Self {
        Self { moment, tested: None, found: HashMap::new() }
    }

    /// Whether the rows of a view are due for a test.
    pub(crate) fn is_due(&self, view: &View, now: Duration) -> bool {
        let last = self.tested.as_ref().filter(|(of, _)| *of == signature(view));
        last.is_none_or(|(_, at)| now >= *at + EVERY || now < *at)
    }

    /// Stores the result of a test.
    pub(crate) fn keep(&mut self, view: &View, now: Duration, found: HashMap<RowId, Change>) {
        (self.tested, self.found) = (Some((signature(view), now)), found);
    }

    /// The change of a row, if it was tested.
    pub(crate) fn change(&self, id: &RowId) -> Option<&Change> {
        self.found.get(id)
    }
}

/// What distinguishes the rows of one view from those of another.
fn signature(view: &View) -> String {
    format!("{:?} {:?} {:?}", view.kind, view.program, view.through)
}
