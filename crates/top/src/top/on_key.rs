//! What keys do to the screen.

use super::{Action, Purpose, Top};
use crate::entries::{Matching, scope};
use crate::key::Key;
use crate::layout::Cell;
use crate::tree::{self, neighbour};
use crate::view::{Entry, Kind, Root, RowId, View};
use crate::world::World;

/// Maximum length of a filter or search text.
const LONGEST_INPUT: usize = 200;

impl Top {
    /// Handles a key. Returns what the caller has to do.
    pub fn key(&mut self, key: Key) -> Option<Action> {
        self.message = None;
        self.has_begun = true;
        match key {
            Key::Interrupt => return Some(Action::Quit),
            Key::Redraw => return Some(Action::Redraw),
            _ if self.input.is_some() => self.typed(key),
            _ if self.help => match key {
                Key::Char('q') => return Some(Action::Quit),
                _ => self.help = false,
            },
            Key::Char('q') => return Some(Action::Quit),
            Key::Char('w') if !self.has_totals_only => return Some(Action::Write),
            Key::Char('?' | 'h') => self.help = true,
            Key::Char(' ') => self.freeze(),
            _ if self.world.is_none() => {}
            _ if self.has_totals_only => self.message = Some("the names of functions are awaited".into()),
            _ if self.view().kind == Kind::Flame => self.flame_key(key),
            _ => self.table_key(key),
        }
        None
    }

    fn table_key(&mut self, key: Key) {
        let page = self.page.max(1) as isize;
        match key {
            Key::Up | Key::Char('k') => self.go(-1),
            Key::Down | Key::Char('j') => self.go(1),
            Key::PageUp => self.go(-page),
            Key::PageDown => self.go(page),
            Key::Home | Key::Char('g') => self.go(isize::MIN / 2),
            Key::End | Key::Char('G') => self.go(isize::MAX / 2),
            Key::Enter | Key::Right => self.enter(key),
            Key::Left if self.closes_branch() => {}
            Key::Escape | Key::Left | Key::Backspace => self.back(),
            Key::Char('n') => self.search(1),
            Key::Char('N') => self.search(-1),
            _ => self.choose(key),
        }
    }

    /// Keys that choose what is shown.
    fn choose(&mut self, key: Key) {
        match key {
            Key::Tab => self.other_table(),
            Key::Char('s') => self.sort(|sort, _| (sort.next(), false)),
            Key::Char('r') => self.sort(|sort, reversed| (sort, !reversed)),
            Key::Char(digit @ '1'..='7') => {
                let wanted = Cell::SORTED[digit as usize - '1' as usize];
                self.sort(|sort, reversed| (wanted, sort == wanted && !reversed));
            }
            Key::Char('f') => self.input = Some((Purpose::Filter, self.view().filter.clone())),
            Key::Char('/') => self.input = Some((Purpose::Search, String::new())),
            Key::Char('c') => self.tree_of_selected(Root::Callers),
            Key::Char('d') => self.tree_of_selected(Root::Callees),
            Key::Char('t') => self.open_tree(Root::Outermost),
            Key::Char('p') => self.divide(),
            Key::Char('F') => self.push(self.view().inside(Kind::Flame)),
            Key::Char('m') => self.mark(true),
            Key::Char('M') => self.mark(false),
            _ => {}
        }
    }

    fn flame_key(&mut self, key: Key) {
        let at = self.selected_box();
        let to = match key {
            Key::Down | Key::Char('j') => neighbour(&self.boxes, at, 1, 0),
            Key::Up | Key::Char('k') => neighbour(&self.boxes, at, -1, 0),
            Key::Right => neighbour(&self.boxes, at, 0, 1),
            Key::Left => neighbour(&self.boxes, at, 0, -1),
            Key::Enter => {
                if let Some(found) = self.boxes.get(at) {
                    let path = found.path.clone();
                    self.view_mut().zoom = path;
                }
                at
            }
            Key::Escape | Key::Backspace => {
                if self.view_mut().zoom.pop().is_none() {
                    self.back();
                }
                return;
            }
            Key::Char('t' | 'm' | 'M') => return self.choose(key),
            Key::Char(c @ ('c' | 'd')) => {
                let root = if c == 'c' { Root::Callers } else { Root::Callees };
                let function = self.boxes.get(at).and_then(|it| it.path.last().copied());
                return function.into_iter().for_each(|function| self.open_tree(root(function)));
            }
            _ => return,
        };
        let selected = self.boxes.get(to).map(|it| RowId::Path(it.path.clone()));
        self.view_mut().selected = selected;
    }

    fn typed(&mut self, key: Key) {
        let Some((purpose, mut text)) = self.input.take() else { return };
        match (key, purpose) {
            (Key::Escape, Purpose::Search) | (Key::Enter, Purpose::Filter) => return,
            (Key::Escape, Purpose::Filter) => return self.filter(String::new()),
            (Key::Enter, Purpose::Search) => {
                self.search = text;
                return self.search(0);
            }
            (Key::Char(c), _) if text.len() < LONGEST_INPUT => text.push(c),
            (Key::Backspace, _) => {
                text.pop();
            }
            _ => {}
        }
        if purpose == Purpose::Filter {
            self.filter(text.clone());
        }
        self.input = Some((purpose, text));
    }

    fn filter(&mut self, text: String) {
        self.view_mut().filter = text;
        self.refresh();
    }

    /// Selects the next row that contains the search text: starting at the selected row for direction 0, otherwise at
    /// the next row in that direction.
    fn search(&mut self, direction: isize) {
        let Some(world) = &self.world else { return };
        if self.search.is_empty() || self.entries.is_empty() {
            return;
        }
        let matching = Matching::new(world, &self.search);
        let (count, from) = (self.entries.len(), self.view().cursor);
        let step = if direction < 0 { count - 1 } else { 1 };
        let first = from + if direction == 0 { 0 } else { step };
        let found = (0..count).map(|index| (first + index * step) % count);
        match found.into_iter().find(|index| matching.has(world, &self.entries[*index].id)) {
            Some(index) => self.go_to(index),
            None => self.message = Some(format!("not found: {:?}", self.search)),
        }
    }

    fn go(&mut self, rows: isize) {
        let last = self.entries.len().saturating_sub(1);
        let to = (self.view().cursor as isize).saturating_add(rows).clamp(0, last as isize);
        self.go_to(to as usize);
    }

    fn go_to(&mut self, index: usize) {
        let id = self.entries.get(index).map(|entry| entry.id.clone());
        let view = self.view_mut();
        (view.cursor, view.selected) = (index, id);
    }

    /// Sorts as `how` makes of the present column and whether its order is reversed.
    fn sort(&mut self, how: impl FnOnce(Cell, bool) -> (Cell, bool)) {
        let Some(world) = &self.world else { return };
        if self.view().is_tree() {
            self.message = Some("a tree is always sorted by size".into());
            return;
        }
        let (sort, reversed) = how(world.order(self.view()), self.view().reversed);
        let view = self.view_mut();
        (view.sort, view.reversed, view.selected, view.cursor, view.offset) = (Some(sort), reversed, None, 0, 0);
        self.refresh();
    }

    fn push(&mut self, view: View) {
        let id = self.selected().map(|entry| entry.id.clone());
        self.view_mut().selected = id;
        self.views.push(view);
        self.large = false;
        self.renew();
    }

    fn back(&mut self) {
        if self.large {
            self.large = false;
        } else if !self.view().filter.is_empty() {
            self.filter(String::new());
        } else if self.views.len() > 1 {
            self.views.pop();
            self.renew();
        }
    }

    /// Enters the selected row.
    fn enter(&mut self, key: Key) {
        let Some(entry) = self.selected().cloned() else { return };
        let kind = self.view().kind;
        match (entry.id, kind) {
            (RowId::Program(program), _) => {
                self.push(View { program: Some(program), ..self.view().inside(Kind::Functions) });
            }
            (RowId::Function(function), _) => {
                self.push(View { through: Some(function), ..self.view().inside(Kind::Stacks) });
            }
            (RowId::Path(path), Kind::Tree(root)) => match entry.is_open {
                Some(false) => self.with_scope(|world, view, scope| tree::open(world, view, root, &path, scope)),
                Some(true) if key == Key::Enter => {
                    self.view_mut().open.remove(&path);
                    self.refresh();
                }
                _ if key == Key::Enter => self.large = !self.large,
                _ => {}
            },
            _ => self.large = !self.large,
        }
    }

    /// Closes the selected branch. Returns whether there was an open branch to close.
    fn closes_branch(&mut self) -> bool {
        let Some(Entry { id: RowId::Path(path), is_open: Some(true), .. }) = self.selected().cloned() else {
            return false;
        };
        self.view_mut().open.remove(&path);
        self.refresh();
        true
    }

    fn with_scope(&mut self, change: impl FnOnce(&World, &mut View, &[u32])) {
        let last = self.views.len() - 1;
        if let Some(world) = &self.world {
            let scope = scope(world, &self.views[last]);
            change(world, &mut self.views[last], &scope);
        }
        self.refresh();
    }

    /// Switches between stacks and functions.
    fn other_table(&mut self) {
        let kind = if self.view().kind == Kind::Functions { Kind::Stacks } else { Kind::Functions };
        let view = self.view().inside(kind);
        if self.view().kind == Kind::Programs {
            self.push(view);
        } else {
            *self.view_mut() = view;
            self.renew();
        }
    }

    fn tree_of_selected(&mut self, root: impl FnOnce(u32) -> Root) {
        let Some(world) = &self.world else { return };
        let function = match self.selected().map(|entry| &entry.id) {
            Some(RowId::Function(function)) => Some(*function),
            Some(RowId::Path(path)) => path.last().copied(),
            Some(RowId::Leaf(leaf)) => world.leaves.stack_of(*leaf).path.first().copied(),
            _ => None,
        };
        match function {
            Some(function) => self.open_tree(root(function)),
            None => self.message = Some("select a function or a stack first".into()),
        }
    }

    fn open_tree(&mut self, root: Root) {
        self.push(View { through: None, ..self.view().inside(Kind::Tree(root)) });
        self.with_scope(|world, view, scope| tree::open_largest(world, view, root, scope));
    }

    fn freeze(&mut self) {
        self.frozen = !self.frozen;
        if let Some(profile) = self.pending.take().filter(|_| !self.frozen) {
            self.take(profile);
        }
    }

    fn mark(&mut self, set: bool) {
        let Some(world) = &mut self.world else { return };
        if set {
            world.mark();
            self.message = Some("marked: growth counts from here; M clears the mark".into());
        } else {
            world.marked = None;
        }
        self.refresh();
    }
}
