//! The functions of a profile's frames.

use indexmap::IndexMap;

use super::chain::FrameView;
use crate::intern::Interned;
use crate::model::{Frame, Profile};
use crate::naming::{FunctionKey, told_apart};

/// Rows of a list, numbered in the order of their first use, each with the short name under which it is shown.
#[derive(Default)]
pub(super) struct Named<'a>(pub(super) IndexMap<FunctionKey<'a>, String>);

impl<'a> Named<'a> {
    /// The functions of distinct frames, and the number of each frame's function.
    pub(super) fn functions(profile: &'a Profile, interned: &Interned<'a>, view: FrameView) -> (Self, Vec<usize>) {
        Self::of_frames(interned, |frame| FunctionKey::of(profile, frame), |frame| view.name(profile, frame))
    }

    /// Rows that distinct frames count towards, and the number of each frame's row.
    pub(super) fn of_frames(
        interned: &Interned<'a>,
        key: impl Fn(&'a Frame) -> FunctionKey<'a>,
        name: impl Fn(&'a Frame) -> String,
    ) -> (Self, Vec<usize>) {
        let mut named = Self::default();
        let numbers = interned.frames.iter().map(|frame| named.number(key(frame), || name(frame))).collect();
        (named, numbers)
    }

    /// The number of a row.
    pub(super) fn number(&mut self, key: FunctionKey<'a>, name: impl FnOnce() -> String) -> usize {
        let entry = self.0.entry(key);
        let number = entry.index();
        entry.or_insert_with(name);
        number
    }

    /// The names of rows that stand in one list.
    pub(super) fn told_apart(&self, rows: impl IntoIterator<Item = usize>) -> Vec<String> {
        let rows = rows.into_iter().filter_map(|row| self.0.get_index(row));
        told_apart(&rows.map(|(key, name)| (key, name.as_str(), ())).collect::<Vec<_>>())
    }
}
