//! Everything that views are built from: the profile shown, the ones before it, and the identities of their rows.

use std::sync::Arc;
use std::time::Duration;

use heapbpf_profile::diff::growth::growth;
use heapbpf_profile::model::Resident;
use heapbpf_profile::report::{FigureText, rate_text};
use heapbpf_profile::{Pool, Profile, Row, Value};

use crate::history::History;
use crate::layout::Cell;
use crate::leaves::Leaves;
use crate::marked::Marked;
use crate::moment::Moment;
use crate::sums::{Sums, Tally};
use crate::view::{Kind, RowId, View};

/// Identities are rebuilt when there are more than this many per row of the profile.
const MOST_PER_LEAF: usize = 4;
/// Maximum number of innermost calls in the name of a stack.
const MOST_NAMES: usize = 8;
/// What stands between a call and its caller.
pub(crate) const ARROW: &str = " ← ";
/// Identities are never rebuilt up to this number.
const LEAST_KEPT: usize = 20_000;

/// What a recording does not know by then, it does not know at all.
pub(crate) const SETTLED: Duration = Duration::from_secs(10);
/// What stands for a figure before that.
pub(crate) const MEASURING: &str = "measuring";

/// Figures of everything, with their intervals.
#[derive(Clone, Debug, Default)]
pub(crate) struct Whole {
    /// Bytes in use (allocated, if frees are not followed).
    pub(crate) size: FigureText,
    /// Blocks in use, or calls.
    pub(crate) count: FigureText,
    /// How fast the bytes in use grow.
    pub(crate) growth: (String, String),
}

/// Everything that views are built from.
#[derive(Debug)]
pub(crate) struct World {
    /// Identities.
    pub(crate) leaves: Leaves,
    /// The profile that is shown.
    pub(crate) now: Arc<Moment>,
    /// The last minute.
    pub(crate) history: History,
    /// The baseline.
    pub(crate) marked: Option<Marked>,
    /// The last profile with lifetimes.
    pub(crate) lives: Option<Arc<Moment>>,
    /// Confidence level of intervals, 0 to 1.
    pub(crate) confidence: f64,
    /// Figures of everything.
    pub(crate) whole: Whole,
    /// Whether there was a program with idle processes only. It stays so, lest rows change their order again and again.
    has_idle_program: bool,
}

impl World {
    /// A world that starts with a profile.
    pub(crate) fn new(profile: Arc<Profile>, confidence: f64, mut leaves: Leaves) -> Self {
        let now = Arc::new(Moment::new(profile, &mut leaves));
        let (history, marked, lives, whole, has_idle_program) = Default::default();
        let mut world = Self { leaves, now, history, marked, lives, confidence, whole, has_idle_program };
        world.note();
        world
    }

    /// Takes the next profile. Returns whether all identities were renumbered.
    pub(crate) fn take(&mut self, profile: Arc<Profile>) -> bool {
        let crowded = self.leaves.len() > LEAST_KEPT.max(profile.rows.len() * MOST_PER_LEAF);
        if crowded {
            self.renumber(self.leaves.apart);
        }
        self.now = Arc::new(Moment::new(profile, &mut self.leaves));
        self.note();
        crowded
    }

    /// Shows each process as a program of its own, or programs again. Baseline and lifetimes stay.
    pub(crate) fn divide(&mut self, apart: bool) {
        let lives = self.lives.take();
        self.renumber(apart);
        let mut anew = |moment: &Moment| Arc::new(Moment::new(Arc::clone(&moment.profile), &mut self.leaves));
        self.lives = lives.map(|lives| anew(&lives));
        // The last, so that it has figures for every identity.
        self.now = anew(&self.now);
        self.note();
    }

    /// Begins with new identities.
    fn renumber(&mut self, apart: bool) {
        self.leaves = Leaves::new(self.leaves.frames, apart);
        self.history.clear();
        self.lives = None;
        self.marked = self.marked.take().map(|marked| {
            let profile = Arc::clone(&marked.moment.profile);
            Marked::new(Arc::new(Moment::new(profile, &mut self.leaves)))
        });
    }

    fn note(&mut self) {
        let profile = &*self.now.profile;
        self.history.add(&self.now);
        self.has_idle_program = self.has_idle_program || self.leaves.has_idle_program(profile);
        let (pool, rows) = (Pool::whole(profile), profile.rows.iter().collect::<Vec<_>>());
        let figure = |value| FigureText::new(profile, &pool, value, self.confidence);
        self.whole =
            Whole { size: figure(self.value()), count: figure(self.counted()), growth: self.growth_text(&rows) };
        if profile.rows.iter().any(|row| row.lifetimes.is_some()) {
            self.lives = Some(Arc::clone(&self.now));
        }
    }

    /// Marks the profile shown as the baseline.
    pub(crate) fn mark(&mut self) {
        self.marked = Some(Marked::new(Arc::clone(&self.now)));
    }

    /// Whether frees are followed.
    pub(crate) fn is_live(&self) -> bool {
        self.now.profile.knows_some_inuse()
    }

    /// The value that determines the size of rows: in use, or allocated if frees are not followed.
    pub(crate) fn value(&self) -> Value {
        if self.is_live() { Value::InuseSpace } else { Value::AllocSpace }
    }

    /// The value that counts blocks: in use, or allocations.
    pub(crate) fn counted(&self) -> Value {
        if self.is_live() { Value::InuseObjects } else { Value::AllocObjects }
    }

    /// The figures of a leaf, by its number. The point of comparison is looked up only once.
    pub(crate) fn figures(&self) -> impl Fn(u32) -> Tally {
        let rate = self.history.for_rate(self.now.at).map(|(point, _)| point);
        let is_live = self.is_live();
        move |leaf| {
            let marked = self.marked.as_ref().map(|marked| marked.moment.sums_of(leaf)).unwrap_or_default();
            Tally {
                sums: self.now.sums_of(leaf),
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

    /// What stands for a figure that is not known: it may come soon, or not at all.
    pub(crate) fn lacking(&self) -> &'static str {
        if self.now.at < SETTLED { MEASURING } else { "–" }
    }

    /// The text of an estimate that has no interval.
    pub(crate) fn about(&self, estimate: f64, text: impl FnOnce(f64) -> String) -> String {
        let is_exact = self.now.profile.header.interval <= 1 || estimate == 0.0;
        format!("{}{}", if is_exact { "" } else { "~" }, text(estimate))
    }

    /// How fast the bytes in use of some rows grow, as in a report, and the interval of that.
    pub(crate) fn growth_text(&self, rows: &[&Row]) -> (String, String) {
        let Some(grown) = growth(&self.now.profile, rows, self.confidence) else {
            let is_early = self.now.profile.header.growth_over.is_none();
            let lacking = if is_early { self.lacking() } else { "–" };
            return (lacking.to_owned(), String::new());
        };
        let (figure, bounds) = rate_text(&grown.per_second);
        match grown.per_second.low {
            // Rows that did not change have no interval.
            _ if rows.iter().all(|row| row.growth.is_none()) => (figure, String::new()),
            None => (format!("~{figure}"), bounds),
            Some(_) => (figure, bounds),
        }
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

    /// The column that the rows of a view are sorted by. Where programs only idle, as on a whole host, the first question
    /// is who uses its memory.
    pub(crate) fn order(&self, view: &View) -> Cell {
        let has_memory = view.kind == Kind::Programs && self.now.has_memory();
        match view.sort {
            None if has_memory && self.has_idle_program => Cell::Resident,
            Some(cell) if cell != Cell::Resident || has_memory => cell,
            _ => Cell::Size,
        }
    }

    /// Growth since the mark, in bytes.
    pub(crate) fn growth_since_mark(&self, tally: &Tally) -> f64 {
        self.size(&tally.sums) - tally.inuse_marked
    }

    /// Name of a row; of a stack, the names of its innermost calls and of the outermost one.
    pub(crate) fn names(&self, id: &RowId) -> Vec<&str> {
        match id {
            RowId::Program(program) => vec![self.leaves.program_name(*program)],
            RowId::Function(function) => vec![self.leaves.function_name(*function)],
            RowId::Path(path) => path.last().map(|it| self.leaves.function_name(*it)).into_iter().collect(),
            RowId::Leaf(leaf) => {
                let calls = &self.leaves.stack_of(*leaf).calls;
                let name = |(call, _): &(u32, bool)| self.leaves.get_call(*call).name.as_str();
                let (first, rest) = calls.split_at(calls.len().min(MOST_NAMES));
                let gap = (rest.len() > 1).then_some("…");
                first.iter().map(name).chain(gap).chain(rest.last().map(name)).collect()
            }
        }
    }

    /// Name of a row, in one text.
    pub(crate) fn name(&self, id: &RowId) -> String {
        self.names(id).join(ARROW)
    }

    /// Rate of allocation of everything.
    pub(crate) fn whole_rate(&self) -> Option<f64> {
        let before = self.history.for_rate(self.now.at).map_or(0.0, |(point, _)| point.allocated);
        self.rate(&Tally { sums: self.now.total, alloc_before: before, ..Tally::default() })
    }
}
