//! Everything that views are built from: the profile shown, the ones before it, and the identities of their rows.

use std::sync::Arc;

use heapbpf_profile::model::Resident;
use heapbpf_profile::report::FrameView;
use heapbpf_profile::{Profile, Value};

use crate::history::History;
use crate::leaves::Leaves;
use crate::marked::Marked;
use crate::moment::Moment;
use crate::sums::{Sums, Tally};
use crate::view::RowId;

/// Identities are rebuilt when there are more than this many per row of the profile.
const MOST_PER_LEAF: usize = 4;
/// Identities are never rebuilt up to this number.
const LEAST_KEPT: usize = 20_000;

/// Everything that views are built from.
#[derive(Debug)]
pub(crate) struct World {
    /// Identities.
    pub(crate) leaves: Leaves,
    /// The profile that is shown.
    pub(crate) now: Moment,
    /// The last minute.
    pub(crate) history: History,
    /// The baseline.
    pub(crate) marked: Option<Marked>,
    /// The last profile with lifetimes.
    pub(crate) lives: Option<Moment>,
    /// Confidence level of intervals, 0 to 1.
    pub(crate) confidence: f64,
}

impl World {
    /// A world that starts with a profile.
    pub(crate) fn new(profile: Arc<Profile>, confidence: f64, frames: FrameView) -> Self {
        let mut leaves = Leaves::new(frames);
        let now = Moment::new(Arc::clone(&profile), &mut leaves);
        let (history, marked, lives) = Default::default();
        let mut world = Self { leaves, now, history, marked, lives, confidence };
        world.note(&profile);
        world
    }

    /// Takes the next profile. Returns whether all identities were renumbered.
    pub(crate) fn take(&mut self, profile: Arc<Profile>) -> bool {
        let crowded = self.leaves.len() > LEAST_KEPT.max(profile.rows.len() * MOST_PER_LEAF);
        if crowded {
            self.leaves = Leaves::new(self.leaves.frames);
            self.history.clear();
            self.lives = None;
            self.marked = self.marked.take().map(|marked| {
                let profile = Arc::clone(&marked.moment.profile);
                Marked::new(Moment::new(profile, &mut self.leaves))
            });
        }
        self.now = Moment::new(Arc::clone(&profile), &mut self.leaves);
        self.note(&profile);
        crowded
    }

    fn note(&mut self, profile: &Arc<Profile>) {
        self.history.add(&self.now);
        if profile.rows.iter().any(|row| row.lifetimes.is_some()) {
            self.lives = Some(Moment::new(Arc::clone(profile), &mut self.leaves));
        }
    }

    /// Marks the profile shown as the baseline.
    pub(crate) fn mark(&mut self) {
        let profile = Arc::clone(&self.now.profile);
        self.marked = Some(Marked::new(Moment::new(profile, &mut self.leaves)));
    }

    /// Whether frees are followed.
    pub(crate) fn is_live(&self) -> bool {
        self.now.profile.knows_some_inuse()
    }

    /// The value that determines the size of rows: in use, or allocated if frees are not followed.
    pub(crate) fn value(&self) -> Value {
        if self.is_live() { Value::InuseSpace } else { Value::AllocSpace }
    }

    /// The figures of a leaf, by its number. The points of comparison are looked up only once.
    pub(crate) fn figures(&self) -> impl Fn(u32) -> Tally {
        let growth = self.history.for_growth(self.now.at).map(|(point, _)| point);
        let rate = self.history.for_rate(self.now.at).map(|(point, _)| point);
        let is_live = self.is_live();
        move |leaf| {
            let marked = self.marked.as_ref().map(|marked| marked.moment.sums_of(leaf)).unwrap_or_default();
            Tally {
                sums: self.now.sums_of(leaf),
                inuse_before: growth.map_or(0.0, |point| point.of(leaf).0),
                alloc_before: rate.map_or(0.0, |point| point.of(leaf).1),
                inuse_marked: if is_live { marked.inuse_bytes } else { marked.alloc_bytes },
            }
        }
    }

    /// How large something is, in bytes of [`Self::value`].
    pub(crate) fn size(&self, sums: &Sums) -> f64 {
        if self.is_live() { sums.inuse_bytes } else { sums.alloc_bytes }
    }

    /// Its blocks in use, or its allocations.
    pub(crate) fn count(&self, sums: &Sums) -> f64 {
        if self.is_live() { sums.inuse_blocks } else { sums.allocations }
    }

    /// Growth of the bytes in use during the last minute, in bytes per minute.
    pub(crate) fn growth(&self, tally: &Tally) -> Option<f64> {
        let (_, minutes) = self.history.for_growth(self.now.at).filter(|_| self.is_live())?;
        Some((tally.sums.inuse_bytes - tally.inuse_before) / minutes)
    }

    /// Rate of allocation during the last seconds, in bytes per second.
    pub(crate) fn rate(&self, tally: &Tally) -> Option<f64> {
        let (_, seconds) = self.history.for_rate(self.now.at)?;
        Some((tally.sums.alloc_bytes - tally.alloc_before) / seconds)
    }

    /// Resident memory of a row's program; `None` for other rows, or if it was not measured.
    pub(crate) fn resident(&self, id: &RowId) -> Option<&Resident> {
        let RowId::Program(program) = id else { return None };
        self.now.resident.get(*program as usize)?.as_ref()
    }

    /// Growth since the mark, in bytes.
    pub(crate) fn growth_since_mark(&self, tally: &Tally) -> f64 {
        self.size(&tally.sums) - tally.inuse_marked
    }

    /// Name of a row. The calls of a stack are joined by arrows, the innermost first.
    pub(crate) fn name(&self, id: &RowId) -> String {
        match id {
            RowId::Program(program) => self.leaves.program_name(*program).to_owned(),
            RowId::Function(function) => self.leaves.function_name(*function).to_owned(),
            RowId::Path(path) => path.last().map_or_else(String::new, |it| self.leaves.function_name(*it).to_owned()),
            RowId::Leaf(leaf) => {
                let calls = self.leaves.stack_of(*leaf).calls.iter();
                let name = |(call, _): &(u32, bool)| self.leaves.get_call(*call).name.as_str();
                calls.take(8).map(name).collect::<Vec<_>>().join(" ← ")
            }
        }
    }

    /// Sums and earlier figures over everything.
    pub(crate) fn total(&self) -> Tally {
        let before = |found: Option<(&crate::history::Point, f64)>| found.map_or((0.0, 0.0), |it| it.0.total);
        Tally {
            sums: self.now.total,
            inuse_before: before(self.history.for_growth(self.now.at)).0,
            alloc_before: before(self.history.for_rate(self.now.at)).1,
            inuse_marked: self.marked.as_ref().map_or(0.0, |marked| self.size(&marked.moment.total)),
        }
    }
}
