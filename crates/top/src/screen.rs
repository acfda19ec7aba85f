//! Draws the screen.

mod canvas;
mod selection;
mod texts;

use std::ops::Range;
use std::time::Duration;

use heapbpf_profile::model::Resident;
use heapbpf_profile::report::change_text;
use heapbpf_profile::report::text::{clip_middle, clip_start, width, wrap};
use heapbpf_profile::{Estimate, units};
use ratatui_core::buffer::Buffer;
use ratatui_core::style::Style;

use self::canvas::{Canvas, shown};
use self::texts::{chain, joined};
use crate::details::{Details, details, sparkline};
use crate::layout::{Cell, Column, fitting};
use crate::top::{Purpose, Status, Top};
use crate::view::{Entry, Kind};
use crate::world::{MEASURING, SETTLED, Whole, World};

/// Lines above the table: title, totals, path, header.
const ABOVE: usize = 4;
/// Width that is kept for names if they need it.
const NAME: usize = 24;
/// Maximum number of bars for the last minute.
const TREND: usize = 13;

/// Keys and what they do.
const KEYS: &[(&str, &str)] = &[
    ("↑ ↓  PgUp PgDn  Home End", "move (also k j g G)"),
    ("Enter  →", "go inside: a program, a function's callees, a branch"),
    ("Esc  ←", "go back"),
    ("Tab", "stacks or functions"),
    ("p", "programs or processes"),
    ("s   r", "sort by the next column; reverse the order"),
    ("1 … 7", "in use, growing, rate, count, lifetime, name, memory"),
    ("f", "filter: only rows whose name has this text"),
    ("/   n N", "search for a name; next, previous"),
    ("c   d", "tree of callers; of callees (down)"),
    ("t", "tree of all calls, from the outermost"),
    ("F", "flame view; Enter zooms in, Esc out"),
    ("Space", "freeze; again: resume"),
    ("m   M", "mark a baseline (*: significant growth since); clear"),
    ("w", "write a profile here"),
    ("?   q", "this help; quit"),
];

/// The keys shown at the bottom of the screen. Where space is short, those with the highest number are dropped first.
const BOTTOM: &[(u8, &str, &str)] = &[
    (0, "q", "quit"),
    (0, "?", "help"),
    (1, "Enter", "inside"),
    (1, "Esc", "back"),
    (2, "Tab", "stacks/functions"),
    (2, "s", "sort"),
    (2, "f", "filter"),
    (3, "/", "search"),
    (2, "Space", "freeze"),
    (3, "c", "callers"),
    (4, "d", "callees"),
    (5, "t", "tree"),
    (3, "F", "flame"),
    (3, "m", "mark"),
    (4, "w", "write"),
];

impl Top {
    /// Draws the screen into a buffer of the terminal's size.
    pub fn draw(&mut self, buffer: &mut Buffer) {
        let (width, height) = (usize::from(buffer.area.width), usize::from(buffer.area.height));
        let mut canvas = Canvas { buffer, width };
        if width < 20 || height < 6 {
            canvas.put(0, 0, "too small", width, Style::new());
            return;
        }
        self.title(&mut canvas);
        let bottom = height - 1;
        if self.help {
            self.help_page(&mut canvas, bottom);
        } else if self.world.is_none() {
            self.waiting(&mut canvas);
        } else if self.view().kind == Kind::Flame {
            self.flame(&mut canvas, bottom);
        } else {
            self.table(&mut canvas, bottom);
        }
        self.bottom(&mut canvas, bottom);
    }

    fn title(&self, canvas: &mut Canvas) {
        let theme = self.options.theme;
        let state = match (&self.status, self.frozen) {
            (Status::Away(_), _) => "AWAY".to_owned(),
            (_, true) => "FROZEN".to_owned(),
            (Status::Waiting, _) => "WAITING".to_owned(),
            (Status::Live, _) if self.has_totals_only => "WAITING FOR NAMES".to_owned(),
            (Status::Live, _) => "LIVE".to_owned(),
        };
        let time = self.world.as_ref().map(|world| rounded(world.now.at)).unwrap_or_default();
        let marked = self.world.as_ref().and_then(|world| world.marked.as_ref());
        let marked = marked.map(|marked| format!("marked at {}  ", rounded(marked.moment.at)));
        let right = format!("{}{time}  {state} ", marked.unwrap_or_default());
        let columns = canvas.width.saturating_sub(width(&right) + 1);
        let host = self.profile().map(|profile| profile.header.host.clone()).filter(|host| !host.is_empty());
        let host = host.map(|host| format!(" on {host}")).unwrap_or_default();
        canvas.put(0, 0, &format!(" heapbpf top  {}{host}", self.options.source), columns, theme.bold());
        canvas.put_right(columns, 0, &right, canvas.width - columns, theme.bold());
        canvas.style(0, theme.bar());
    }

    fn waiting(&self, canvas: &mut Canvas) {
        let theme = self.options.theme;
        canvas.put(1, 2, "waiting for the first profile", canvas.width - 2, theme.dim());
        if let Status::Away(why) = &self.status {
            for (line, text) in wrap(why, canvas.width - 2).into_iter().take(5).enumerate() {
                canvas.put(1, 4 + line, &text, canvas.width - 2, theme.warning());
            }
        }
    }

    fn help_page(&self, canvas: &mut Canvas, bottom: usize) {
        let theme = self.options.theme;
        let first = KEYS.iter().map(|(keys, _)| width(keys)).max().unwrap_or(0) + 2;
        for (line, (keys, what)) in KEYS.iter().enumerate().take_while(|(line, _)| line + 2 < bottom) {
            canvas.put(1, line + 2, keys, first, theme.bold());
            canvas.put(1 + first, line + 2, what, canvas.width, theme.plain());
        }
        let level = units::percent(self.options.confidence);
        let figures = format!("IN USE and GROWING have {level} intervals beside them. ~: a figure without one.");
        let line = KEYS.len() + 3;
        for (index, text) in wrap(&figures, canvas.width - 2).iter().enumerate() {
            if line + index < bottom {
                canvas.put(1, line + index, text, canvas.width, theme.dim());
            }
        }
    }

    /// Draws the totals and the path of the view.
    fn head(&self, canvas: &mut Canvas, world: &World) {
        let theme = self.options.theme;
        let profile = &*world.now.profile;
        let Whole { size, count, growth } = &world.whole;
        let mut parts = Vec::new();
        let is_measured = !profile.rows.is_empty() || world.now.at >= SETTLED;
        match (world.is_live(), is_measured) {
            (_, false) => parts.push(MEASURING.to_owned()),
            (true, _) => parts.push(format!("in use {}", size.text())),
            (false, _) => parts.push(format!("allocated {} (frees are not tracked)", size.text())),
        }
        if world.is_live() && is_measured {
            let (figure, bounds) = growth;
            let word = if figure == MEASURING { "growth:" } else { "growing" };
            parts.push(format!("{word} {figure} {bounds}").trim_end().to_owned());
        }
        let number = profile.number_of_targets();
        if number > 1 {
            parts.push(format!("{} processes", units::count(number as f64)));
        }
        let rate = world.whole_rate().map(|rate| world.about(rate.max(0.0), units::bytes));
        parts.extend(rate.map(|rate| format!("allocating {rate}/s")));
        if world.is_live() && is_measured {
            parts.push(format!("{} blocks", count.text()));
        }
        if !profile.losses().is_none() || profile.header.unread.is_some() {
            parts.insert(1, "records lost".into());
        }
        let line = joined(&parts, canvas.width - 2).into_iter().next().unwrap_or_default();
        canvas.put(1, 1, &line, canvas.width - 1, theme.plain());
        let mut trail = self.trail().join(" › ");
        if !self.view().filter.is_empty() {
            trail.push_str(&format!("   only {:?}", self.view().filter));
        }
        let count = match self.view().kind {
            Kind::Flame => String::new(),
            _ => format!("{} of {} ", (self.view().cursor + 1).min(self.entries.len()), self.entries.len()),
        };
        let columns = canvas.width.saturating_sub(width(&count) + 2);
        canvas.put(1, 2, &trail, columns, theme.bold());
        canvas.put_right(columns + 1, 2, &count, canvas.width - columns - 1, theme.dim());
    }

    fn table(&mut self, canvas: &mut Canvas, bottom: usize) {
        let free = bottom.saturating_sub(ABOVE);
        let below = match (self.large, free) {
            (true, 8..) => free - 4,
            (_, 15..) => 7,
            (_, 9..) => 4,
            _ => 0,
        };
        self.page = free - below;
        let page = self.page;
        let last = self.views.len() - 1;
        let view = &mut self.views[last];
        view.offset = view.offset.min(view.cursor).max((view.cursor + 1).saturating_sub(page));
        view.offset = view.offset.min(self.entries.len().saturating_sub(page));
        let rows = view.offset..(view.offset + page).min(self.entries.len());
        self.prepare(rows.clone());
        let Some(world) = &self.world else { return };
        self.head(canvas, world);
        self.cells(canvas, world, rows);
        if self.entries.is_empty() {
            let nothing = if self.view().filter.is_empty() { "nothing was sampled yet" } else { "nothing matches" };
            canvas.put(1, ABOVE, nothing, canvas.width - 1, self.options.theme.dim());
        }
        if below > 0
            && let Some(entry) = self.selected()
        {
            self.selection(canvas, world, entry, bottom - below + 1, bottom);
        }
    }

    /// The columns of the table, as far as they fit.
    fn columns(&self, world: &World, rows: Range<usize>, width: usize) -> Vec<Column> {
        let has_memory = self.view().kind == Kind::Programs && world.now.has_memory();
        let is_there = |cell: &Cell| match cell {
            Cell::Resident | Cell::ResidentGrowth => has_memory,
            Cell::Growth | Cell::GrowthBounds => world.is_live() || world.marked.is_some(),
            _ => true,
        };
        let column = |cell| {
            let texts = rows.clone().map(|index| self.text(world, cell, &self.entries[index], NAME));
            Column::new(cell, self.heading(world, cell), texts.collect())
        };
        fitting(Cell::ALL.into_iter().filter(is_there).map(column).collect(), width)
    }

    /// The heading of a column.
    fn heading(&self, world: &World, cell: Cell) -> String {
        let title = match cell {
            Cell::Size if world.is_live() => "IN USE",
            Cell::Size => "ALLOCATED",
            Cell::Bounds | Cell::GrowthBounds => "",
            Cell::Resident => "RESIDENT",
            Cell::ResidentGrowth => "PER MINUTE",
            Cell::Growth if world.marked.is_some() => "SINCE MARK",
            Cell::Growth => "GROWING",
            Cell::Rate => "ALLOC/S",
            Cell::Count if world.is_live() => "BLOCKS",
            Cell::Count => "CALLS",
            Cell::Lifetime => "LIFETIME",
            Cell::Trend => "LAST MINUTE",
            Cell::Name => "NAME",
        };
        let arrow = match (self.is_sorted_by(world, cell), self.view().reversed) {
            (false, _) => "",
            (true, false) => "↓",
            (true, true) => "↑",
        };
        format!("{title}{arrow}")
    }

    fn is_sorted_by(&self, world: &World, cell: Cell) -> bool {
        !self.view().is_tree() && cell == world.order(self.view())
    }

    /// Draws the table.
    fn cells(&self, canvas: &mut Canvas, world: &World, rows: Range<usize>) {
        let theme = self.options.theme;
        canvas.style(ABOVE - 1, theme.header());
        let mut x = 0;
        for Column { cell, title, texts, width } in self.columns(world, rows.clone(), canvas.width) {
            let is_sorted = self.is_sorted_by(world, cell);
            let style = if is_sorted { theme.header().patch(theme.bold()) } else { theme.header() };
            let mut put = |y: usize, text: &str, style: Style| match cell.is_number() {
                true => canvas.put_right(x, y, text, width, style),
                false => drop(canvas.put(x, y, text, width, style)),
            };
            put(ABOVE - 1, &title, style);
            for (line, (index, (text, style))) in rows.clone().zip(texts).enumerate() {
                let name = (cell == Cell::Name).then(|| self.text(world, cell, &self.entries[index], width).0);
                put(ABOVE + line, &name.unwrap_or(text), style);
            }
            x += width + 1;
        }
        if rows.contains(&self.view().cursor) {
            canvas.style(ABOVE + self.view().cursor - rows.start, theme.bar());
        }
    }

    /// The text of a cell. Names have at most `columns`.
    fn text(&self, world: &World, cell: Cell, entry: &Entry, columns: usize) -> (String, Style) {
        let theme = self.options.theme;
        let Some(details) = self.details.get(&entry.id) else { return Default::default() };
        let known = |text: Option<String>| match text {
            Some(text) => (text, theme.plain()),
            None => (world.lacking().to_owned(), theme.dim()),
        };
        let resident = world.resident(&entry.id);
        match cell {
            // Nothing was sampled here.
            Cell::Size if entry.tally.is_nothing() => known(None),
            Cell::Size => (details.size.figure.clone(), theme.bold()),
            Cell::Resident => known(resident.map(|it| units::bytes(it.total_bytes() as f64))),
            Cell::ResidentGrowth => known(resident.map(Resident::growth_text)),
            Cell::Bounds => (details.size.bounds.clone(), theme.dim()),
            Cell::Growth => self.growth(world, entry, details),
            Cell::GrowthBounds if world.marked.is_some() => (self.since_marked(world, entry).1, theme.dim()),
            Cell::GrowthBounds => (details.growth.1.clone(), theme.dim()),
            Cell::Rate => known(world.rate(&entry.tally).map(|rate| world.about(rate.max(0.0), units::bytes))),
            Cell::Count => known(Some(world.about(world.count(&entry.tally.sums), units::count))),
            Cell::Lifetime => known(self.median(&entry.id).map(units::seconds)),
            Cell::Trend => (sparkline(&details.series, TREND), theme.name()),
            Cell::Name => (self.row_name(world, entry, columns), theme.name()),
        }
    }

    fn row_name(&self, world: &World, entry: &Entry, columns: usize) -> String {
        if !self.view().is_tree() {
            return chain(&world.names(&entry.id), columns);
        }
        let mark = match entry.is_open {
            Some(true) => "▾",
            Some(false) => "▸",
            None => " ",
        };
        let mark = format!("{}{mark} ", " ".repeat(entry.depth.min(12)));
        let left = columns.saturating_sub(width(&mark));
        format!("{mark}{}", chain(&world.names(&entry.id), left))
    }

    /// Growth per second, or since the mark. A star marks significant growth.
    fn growth(&self, world: &World, entry: &Entry, details: &Details) -> (String, Style) {
        let theme = self.options.theme;
        let Some(marked) = &world.marked else { return (details.growth.0.clone(), theme.plain()) };
        let growth = world.growth_since_mark(&entry.tally);
        let is_significant = marked.change(&entry.id).is_some_and(|change| change.significant);
        let style = match (is_significant, growth) {
            (true, _) => theme.grows(),
            (false, ..0.0) => theme.shrinks(),
            _ => theme.plain(),
        };
        let (figure, bounds) = self.since_marked(world, entry);
        let figure = if bounds.is_empty() { world.about(growth, |_| figure) } else { figure };
        (format!("{figure}{}", if is_significant { "*" } else { "" }), style)
    }

    /// Growth since the mark, and its interval if it was tested.
    fn since_marked(&self, world: &World, entry: &Entry) -> (String, String) {
        let change = world.marked.as_ref().and_then(|marked| marked.change(&entry.id));
        let untested = || Estimate { estimate: world.growth_since_mark(&entry.tally), ..Estimate::default() };
        change_text(&change.map_or_else(untested, |change| change.change))
    }

    fn flame(&mut self, canvas: &mut Canvas, bottom: usize) {
        let rows = bottom.saturating_sub(ABOVE + 2);
        self.lay_out_flame(canvas.width, rows);
        let Some(world) = &self.world else { return };
        self.head(canvas, world);
        let theme = self.options.theme;
        let selected = self.selected_box();
        for (index, it) in self.boxes.iter().enumerate() {
            let y = ABOVE - 1 + it.row;
            let function = it.path.last().map(|function| world.leaves.function_name(*function).to_owned());
            let name = function.unwrap_or_else(|| self.trail()[0].clone());
            let style = match index == selected {
                true => theme.bar().patch(theme.bold()),
                false => theme.flame(it.path.last().copied().unwrap_or(0), index % 2 == 1),
            };
            let name = clip_middle(&name, it.columns.saturating_sub(2));
            let text = if it.columns > 2 { format!(" {}", shown(&name, it.columns - 2)) } else { String::new() };
            let padding = it.columns.saturating_sub(width(&text));
            canvas.put(it.x, y, &format!("{text}{}", " ".repeat(padding)), it.columns, style);
            if it.x > 0 && it.columns > 1 {
                canvas.put(it.x, y, "│", 1, style);
            }
        }
        if let Some(it) = self.boxes.get(selected) {
            let share = world.size(&it.tally.sums) / world.size(&world.now.total).max(1.0);
            let size = details(world, &it.leaves).size.text();
            let what = if world.is_live() { "in use" } else { "allocated" };
            let facts = format!("{size} {what} · {}", units::share(share));
            canvas.put(1, bottom - 2, &facts, canvas.width - 1, theme.plain());
            let names: Vec<&str> = it.path.iter().map(|function| world.leaves.function_name(*function)).collect();
            let trail = clip_start(&names.join(" › "), canvas.width - 2);
            canvas.put(1, bottom - 1, &trail, canvas.width - 1, theme.name());
        }
    }

    fn bottom(&self, canvas: &mut Canvas, y: usize) {
        let theme = self.options.theme;
        let said = match (&self.input, &self.message, &self.status) {
            (Some((Purpose::Filter, text)), ..) => format!("only rows with: {text}▏ Enter · Esc"),
            (Some((Purpose::Search, text)), ..) => format!("search for: {text}▏ Enter · Esc"),
            (None, Some(text), _) | (None, None, Status::Away(text)) => text.clone(),
            _ => String::new(),
        };
        if !said.is_empty() {
            let style = if self.input.is_some() { theme.bold() } else { theme.warning() };
            canvas.put(0, y, &said, canvas.width, style);
            return;
        }
        let mut shown: Vec<&(u8, &str, &str)> = BOTTOM.iter().collect();
        let needed = |keys: &[&(u8, &str, &str)]| keys.iter().map(|it| width(it.1) + width(it.2) + 3).sum::<usize>();
        while needed(&shown) > canvas.width
            && let Some(rank) = shown.iter().map(|it| it.0).max().filter(|rank| *rank > 0)
            && let Some(last) = shown.iter().rposition(|it| it.0 == rank)
        {
            shown.remove(last);
        }
        let mut x = 0;
        for (_, key, what) in shown {
            x += canvas.put(x, y, key, canvas.width, theme.bar());
            x += 1 + canvas.put(x + 1, y, what, canvas.width, theme.plain());
            x += 1;
        }
    }
}

/// A length of a recording, in whole seconds; `measuring` during the first one.
fn rounded(length: Duration) -> String {
    match length.as_secs() {
        0 => MEASURING.into(),
        seconds => units::duration(Duration::from_secs(seconds)),
    }
}
