//! The state of the screen, and how profiles change it.

mod on_key;

use std::collections::HashMap;
use std::sync::Arc;

use heapbpf_profile::Profile;
use heapbpf_profile::report::FrameView;

use crate::details::{Details, details};
use crate::entries::{entries, leaves_of, scope};
use crate::leaves::Leaves;
use crate::marked;
use crate::theme::Theme;
use crate::tree::{FlameBox, boxes};
use crate::view::{Entry, Kind, Path, Root, RowId, View};
use crate::world::World;

/// Options of the screen.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where profiles come from: the targets, or an address.
    pub source: String,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// Colours.
    pub theme: Theme,
    /// Which frames of stacks are shown.
    pub frames: FrameView,
}

/// Whether profiles arrive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Status {
    /// No profile has arrived yet.
    #[default]
    Waiting,
    /// Profiles are arriving.
    Live,
    /// No profiles arrive at present; holds the reason. The screen keeps showing the last one.
    Away(String),
}

/// What the caller has to do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Quit.
    Quit,
    /// Write the profile shown, and report the file with [`Top::say`].
    Write,
    /// Redraw everything.
    Redraw,
}

/// What the text being typed is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Only rows that contain the text are shown.
    Filter,
    /// The next row that contains the text is selected.
    Search,
}

/// The state of the screen.
#[derive(Debug, Default)]
pub struct Top {
    pub(crate) options: Options,
    pub(crate) status: Status,
    pub(crate) world: Option<World>,
    /// Whether that is made of totals: the names of functions are awaited.
    pub(crate) has_totals_only: bool,
    /// Whether processes are shown in place of programs.
    pub(crate) apart: bool,
    /// The views, from the outermost to the one shown.
    pub(crate) views: Vec<View>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) input: Option<(Purpose, String)>,
    search: String,
    pub(crate) message: Option<String>,
    pub(crate) help: bool,
    /// Whether the selected row takes up most of the screen.
    pub(crate) large: bool,
    pub(crate) frozen: bool,
    /// Whether a program has been shown or a key pressed.
    has_begun: bool,
    /// The latest profile that arrived while frozen.
    pending: Option<Arc<Profile>>,
    /// Figures of the rows on the screen.
    pub(crate) details: HashMap<RowId, Details>,
    medians: HashMap<RowId, Option<f64>>,
    /// See [`Self::remember`].
    pub(crate) past: HashMap<String, Vec<f64>>,
    pub(crate) boxes: Vec<FlameBox>,
    /// Number of table rows on the screen.
    pub(crate) page: usize,
}

impl Top {
    /// A screen without a profile.
    pub fn new(options: Options) -> Self {
        Self { options, views: vec![View::new(Kind::Programs)], page: 1, ..Self::default() }
    }

    /// Takes totals, without stacks, which need no names. They are shown until a profile arrives.
    pub fn take_totals(&mut self, totals: Arc<Profile>) {
        if self.world.is_none() {
            (self.status, self.has_totals_only) = (Status::Live, true);
            self.world = Some(self.world_of(totals));
            self.refresh();
        }
    }

    /// A world that starts with a profile.
    fn world_of(&self, profile: Arc<Profile>) -> World {
        World::new(profile, self.options.confidence, Leaves::new(self.options.frames, self.apart))
    }

    /// Shows processes in place of programs, or programs again.
    pub(crate) fn divide(&mut self) {
        let Some(world) = &mut self.world else { return };
        self.apart = !self.apart;
        world.divide(self.apart);
        self.views = vec![View { sort: self.views[0].sort, ..View::new(Kind::Programs) }];
        self.renew();
    }

    /// Takes a profile. If the screen is frozen, the profile is shown later.
    pub fn take(&mut self, profile: Arc<Profile>) {
        self.status = Status::Live;
        if self.frozen {
            self.pending = Some(profile);
            return;
        }
        if std::mem::take(&mut self.has_totals_only) {
            // They have no stacks that could be compared.
            self.world = None;
        }
        let has_lifetimes = profile.rows.iter().any(|row| row.lifetimes.is_some());
        match &mut self.world {
            Some(world) => {
                if world.take(profile) {
                    self.views.truncate(1);
                    self.views[0].selected = None;
                }
            }
            None => {
                self.world = Some(self.world_of(profile));
            }
        }
        if has_lifetimes {
            self.medians.clear();
        }
        self.enter_only_program();
        self.refresh();
    }

    /// Takes what processes had in use during the last hour, in bytes at equal steps, by command name. NaN: not known.
    pub fn remember(&mut self, past: HashMap<String, Vec<f64>>) {
        self.past = past;
    }

    /// Enters the first program if it is the only one.
    fn enter_only_program(&mut self) {
        let programs = self.world.as_ref().map_or(0, |world| world.leaves.programs());
        if programs > 0 && !std::mem::replace(&mut self.has_begun, true) && programs == 1 {
            self.views.push(View { program: Some(0), ..View::new(Kind::Functions) });
        }
    }

    /// Sets whether profiles arrive.
    pub fn set_status(&mut self, status: Status) {
        self.status = status;
    }

    /// Shows a message until the next key.
    pub fn say(&mut self, message: String) {
        self.message = Some(message);
    }

    /// The profile that is shown.
    pub fn profile(&self) -> Option<&Arc<Profile>> {
        self.world.as_ref().map(|world| &world.now.profile)
    }

    pub(crate) fn view(&self) -> &View {
        // There is always a view: views are pushed, and popped only down to the first.
        &self.views[self.views.len() - 1]
    }

    fn view_mut(&mut self) -> &mut View {
        let last = self.views.len() - 1;
        &mut self.views[last]
    }

    /// Rebuilds the rows. The selected row stays selected.
    fn refresh(&mut self) {
        self.details.clear();
        let Some(world) = &mut self.world else { return };
        let view = &mut self.views[..];
        let Some(view) = view.last_mut() else { return };
        self.entries = entries(world, view);
        if let Some(at) = view.selected.as_ref().and_then(|id| self.entries.iter().position(|entry| entry.id == *id)) {
            view.cursor = at;
        }
        view.cursor = view.cursor.min(self.entries.len().saturating_sub(1));
        if view.kind != Kind::Flame {
            let is_due = world.marked.as_ref().is_some_and(|marked| marked.is_due(view, world.now.at));
            if is_due {
                let found = marked::test(world, view, &self.entries);
                let at = world.now.at;
                world.marked.iter_mut().for_each(|marked| marked.keep(view, at, found.clone()));
            }
        }
    }

    /// Like [`Self::refresh`], after switching to another view.
    fn renew(&mut self) {
        self.medians.clear();
        self.entries.clear();
        self.boxes.clear();
        self.refresh();
    }

    /// Computes the figures that only visible rows have.
    pub(crate) fn prepare(&mut self, rows: std::ops::Range<usize>) {
        let Some(world) = &self.world else { return };
        let view = &self.views[self.views.len() - 1];
        let shown = &self.entries[rows.start.min(self.entries.len())..rows.end.min(self.entries.len())];
        let lacking = |entry: &&Entry| !self.details.contains_key(&entry.id) || !self.medians.contains_key(&entry.id);
        let new: Vec<&Entry> = shown.iter().filter(lacking).collect();
        let ids: Vec<&RowId> = new.iter().map(|entry| &entry.id).collect();
        let leaves = match view.is_tree() {
            true => new.iter().map(|entry| entry.leaves.clone()).collect(),
            false => leaves_of(world, view, &ids),
        };
        for (id, leaves) in ids.into_iter().zip(leaves) {
            self.details.entry(id.clone()).or_insert_with(|| details(world, &leaves));
            let median = || world.lives.as_ref().and_then(|lives| lives.median_seconds(&leaves));
            self.medians.entry(id.clone()).or_insert_with(median);
        }
    }

    /// The leaves of a row of the view.
    pub(crate) fn leaves_of_row(&self, world: &World, entry: &Entry) -> Vec<u32> {
        match self.view().is_tree() {
            true => entry.leaves.clone(),
            false => leaves_of(world, self.view(), &[&entry.id]).pop().unwrap_or_default(),
        }
    }

    /// Median lifetime of a row on the screen, in seconds.
    pub(crate) fn median(&self, id: &RowId) -> Option<f64> {
        self.medians.get(id).copied().flatten()
    }

    /// The selected row.
    pub(crate) fn selected(&self) -> Option<&Entry> {
        self.entries.get(self.view().cursor)
    }

    /// The selected box of the flame view.
    pub(crate) fn selected_box(&self) -> usize {
        let selected = &self.view().selected;
        let is_selected = |it: &FlameBox| matches!(selected, Some(RowId::Path(path)) if *path == it.path);
        self.boxes.iter().position(is_selected).unwrap_or(0)
    }

    /// Path of the current view, for its title.
    pub(crate) fn trail(&self) -> Vec<String> {
        let Some(world) = &self.world else { return Vec::new() };
        let function = |function: u32| world.leaves.function_name(function).to_owned();
        let mut trail = Vec::new();
        let view = self.view();
        trail.push(view.program.map_or_else(|| "all".to_owned(), |it| world.leaves.program_name(it).to_owned()));
        trail.extend(view.through.map(function));
        trail.push(match view.kind {
            Kind::Programs if self.apart => "processes".to_owned(),
            Kind::Programs => "programs".to_owned(),
            Kind::Stacks => "stacks".to_owned(),
            Kind::Functions => "functions".to_owned(),
            Kind::Tree(Root::Outermost) => "calls, outermost first".to_owned(),
            Kind::Tree(Root::Callers(it)) => format!("callers of {}", function(it)),
            Kind::Tree(Root::Callees(it)) => format!("callees of {}", function(it)),
            Kind::Flame => "flame".to_owned(),
        });
        trail
    }

    /// Rebuilds the boxes of the flame view.
    pub(crate) fn lay_out_flame(&mut self, columns: usize, rows: usize) {
        let view = &self.views[self.views.len() - 1];
        if let Some(world) = &self.world {
            let zoom: &Path = &view.zoom;
            self.boxes = boxes(world, &scope(world, view), zoom, columns, rows);
        }
    }
}
