//! Which growth since the mark is significant.

use std::collections::HashMap;

use heapbpf_profile::Pool;
use heapbpf_profile::diff::{Change, DiffOptions, changes};

use crate::entries::leaves_of;
use crate::moment::Moment;
use crate::row::Entry;
use crate::view::{RowId, View};
use crate::world::World;

/// Maximum number of rows tested: those that grew the most. The rest count as tests that found nothing.
const MOST_TESTS: usize = 500;
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
