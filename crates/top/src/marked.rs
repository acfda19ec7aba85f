//! A baseline that the user marked, and which growth since then is significant.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_profile::Pool;
use heapbpf_profile::diff::{Change, DiffOptions, changes};

use crate::entries::leaves_of;
use crate::moment::Moment;
use crate::view::{Entry, RowId, View};
use crate::world::World;

/// Minimum time between two tests of the same rows.
const EVERY: Duration = Duration::from_secs(3);
/// Maximum number of rows tested: those that grew the most. The rest count as tests that found nothing.
const MOST_TESTS: usize = 500;

/// The baseline.
#[derive(Debug)]
pub(crate) struct Marked {
    /// The profile at that point.
    pub(crate) moment: Arc<Moment>,
    /// Which rows were tested last, and when (as length of the recording).
    tested: Option<(String, Duration)>,
    found: HashMap<RowId, Change>,
}

impl Marked {
    /// A baseline against which nothing has been tested yet.
    pub(crate) fn new(moment: Arc<Moment>) -> Self {
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

/// Tests the rows of a view for growth since the mark.
pub(crate) fn test(world: &World, view: &View, entries: &[Entry]) -> HashMap<RowId, Change> {
    let Some(marked) = &world.marked else { return HashMap::new() };
    let value = world.value();
    let growth = |entry: &Entry| world.growth_since_mark(&entry.tally);
    let mut grown: Vec<&Entry> = entries.iter().filter(|entry| growth(entry) > 0.0).collect();
    grown.sort_by(|a, b| growth(b).total_cmp(&growth(a)));
    grown.truncate(MOST_TESTS);
    let ids: Vec<&RowId> = grown.iter().map(|entry| &entry.id).collect();
    let of_table = if view.is_tree() { Vec::new() } else { leaves_of(world, view, &ids) };
    let leaves = |index: usize| if view.is_tree() { &grown[index].leaves } else { &of_table[index] };
    let samples = |moment: &Moment, leaves: &[u32]| Pool::of(moment.rows(leaves));
    let pairs: Vec<(Pool, Pool)> = (0..grown.len())
        .map(|index| (samples(&marked.moment, leaves(index)), samples(&world.now, leaves(index))))
        .collect();
    let options = DiffOptions { values: vec![value], confidence: world.confidence, ..DiffOptions::default() };
    let profiles = (&*marked.moment.profile, &*world.now.profile);
    let changes = changes(profiles, pairs, value, entries.len(), &options);
    ids.into_iter().cloned().zip(changes).collect()
}
