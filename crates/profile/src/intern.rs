//! Interning of frames and stacks, which keeps files small and writers fast.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, LazyLock};

use foldhash::fast::RandomState;
use indexmap::IndexSet;

use super::model::{Frame, Profile, Stack};

/// Distinct texts by number, in the order of their first use. Number 0 is the empty text.
#[derive(Debug)]
pub(crate) struct Strings(pub(crate) IndexSet<String>);

impl Default for Strings {
    fn default() -> Self {
        Self(IndexSet::from([String::new()]))
    }
}

impl Strings {
    /// The number of a text.
    pub(crate) fn id<N: From<u32>>(&mut self, text: &str) -> N {
        N::from(self.0.get_index_of(text).unwrap_or_else(|| self.0.insert_full(text.to_owned()).0) as u32)
    }
}

/// The distinct frames and stacks of a profile, in the order of their first use.
#[derive(Debug)]
pub struct Interned<'a> {
    /// Distinct frames.
    pub frames: Vec<&'a Frame>,
    /// Distinct stacks.
    pub stacks: Vec<InternedStack<'a>>,
    /// For each row of the profile, the index of its stack in `stacks`.
    pub stack_of_row: Vec<u32>,
    frame_ids: Vec<u32>,
}

/// A stack as frame indices.
#[derive(Clone, Debug)]
pub struct InternedStack<'a> {
    /// The stack in the profile.
    pub stack: &'a Stack,
    range: Range<usize>,
}

/// Placeholder for a stack without frames.
pub const NO_STACK: &str = "[no stack]";

static NO_STACK_FRAME: LazyLock<Frame> =
    LazyLock::new(|| Frame { function: Some(NO_STACK.into()), ..Frame::default() });

impl<'a> Interned<'a> {
    /// Finds the distinct frames and stacks of all rows.
    pub fn new(profile: &'a Profile) -> Self {
        Self::build(profile, Builder::default())
    }

    /// Like [`Self::new`], but a stack without frames gets the frame [`NO_STACK`]. Viewers drop stacks without frames,
    /// and their totals would be too small.
    pub fn for_viewers(profile: &'a Profile) -> Self {
        Self::build(profile, Builder { shows_no_stack: true, ..Builder::default() })
    }

    fn build(profile: &'a Profile, mut builder: Builder<'a>) -> Self {
        let stack_of_row = profile.rows.iter().map(|row| builder.stack(&row.key.stack)).collect();
        let Builder { frames, stacks, frame_ids, .. } = builder;
        Self { frames: frames.into_iter().collect(), stacks, stack_of_row, frame_ids }
    }

    /// A stack's frames as indices into `frames`, innermost first.
    pub fn frame_ids(&self, stack: u32) -> &[u32] {
        &self.frame_ids[self.stacks[stack as usize].range.clone()]
    }
}

#[derive(Default)]
struct Builder<'a> {
    frames: IndexSet<&'a Frame, RandomState>,
    stacks: Vec<InternedStack<'a>>,
    frame_ids: Vec<u32>,
    /// Frames by address: stacks share most frames, and hashing a frame's text is slow.
    by_address: HashMap<*const Frame, u32, RandomState>,
    by_pointer: HashMap<*const Stack, u32, RandomState>,
    by_content: HashMap<Content<'a>, u32, RandomState>,
    shows_no_stack: bool,
}

/// Frames, the reason why the stack was cut, and the unwinder.
type Content<'a> = (Box<[u32]>, Option<&'a str>, &'static str);

impl<'a> Builder<'a> {
    fn stack(&mut self, stack: &'a Arc<Stack>) -> u32 {
        let pointer = Arc::as_ptr(stack);
        if let Some(&id) = self.by_pointer.get(&pointer) {
            return id;
        }
        let ids: Box<[u32]> = if self.shows_no_stack && stack.frames.is_empty() {
            [self.frame(&NO_STACK_FRAME)].into()
        } else {
            stack.frames.iter().map(|frame| self.frame(frame)).collect()
        };
        let key = (ids, stack.cut.as_deref(), stack.unwinder);
        let id = match self.by_content.get(&key) {
            Some(&id) => id,
            None => {
                let id = self.stacks.len() as u32;
                let start = self.frame_ids.len();
                self.frame_ids.extend_from_slice(&key.0);
                self.stacks.push(InternedStack { stack, range: start..self.frame_ids.len() });
                self.by_content.insert(key, id);
                id
            }
        };
        self.by_pointer.insert(pointer, id);
        id
    }

    fn frame(&mut self, frame: &'a Frame) -> u32 {
        if let Some(&id) = self.by_address.get(&std::ptr::from_ref(frame)) {
            return id;
        }
        let id = self.frames.insert_full(frame).0 as u32;
        self.by_address.insert(frame, id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn equal_frames_and_stacks_are_found_even_in_different_allocations() {
        let mut profile = testing::small();
        let copy = profile.rows[0].key.stack.as_ref().clone();
        let mut row = profile.rows[0].clone();
        row.key.stack = Arc::new(copy);
        profile.rows.push(row);
        let interned = Interned::new(&profile);
        assert_eq!(interned.stack_of_row[0], *interned.stack_of_row.last().expect("rows"));
        for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
            let frames: Vec<&Frame> =
                interned.frame_ids(stack).iter().map(|&id| interned.frames[id as usize]).collect();
            assert_eq!(frames, row.key.stack.frames.iter().map(|frame| &**frame).collect::<Vec<_>>());
            assert_eq!(interned.stacks[stack as usize].stack, row.key.stack.as_ref());
        }
    }

    #[test]
    fn stacks_that_differ_only_in_their_end_are_two() {
        let mut profile = testing::small();
        let mut cut = profile.rows[0].key.stack.as_ref().clone();
        cut.cut = Some("stack copy too small".into());
        let mut row = profile.rows[0].clone();
        row.key.stack = Arc::new(cut);
        profile.rows = vec![profile.rows[0].clone(), row];
        assert_eq!(Interned::new(&profile).stacks.len(), 2);
    }
}
