//! Draws the screen.

mod canvas;
mod selection;
mod texts;

use heapbpf_profile::model::Resident;
use heapbpf_profile::report::text::{clip_start, width, wrap};
use heapbpf_profile::units::{self, signed};
use ratatui_core::buffer::Buffer;
use ratatui_core::style::Style;

use self::canvas::{Canvas, shown};
use self::texts::{figure_of, joined, leaves_name};
use crate::details::sparkline;
use crate::help::{BOTTOM, KEYS};
use crate::layout::{Cell, columns};
use crate::row::Entry;
use crate::top::{Purpose, Status, Top};
use crate::view::{Kind, RowId};
use crate::world::World;

/// Lines above the table: title, totals, path, header.
const ABOVE: usize = 4;

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
            (Status::Live, _) => "LIVE".to_owned(),
        };
        let time = self.world.as_ref().map(|world| units::duration(rounded(world.now.at))).unwrap_or_default();
        let marked = self.world.as_ref().and_then(|world| world.marked.as_ref());
        let marked = marked.map(|marked| format!("marked at {}  ", units::duration(rounded(marked.moment.at))));
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
        let figures = "IN USE has its 95 % interval beside it. ~: none is known. GROWTH: last minute.";
        let line = KEYS.len() + 3;
        for (index, text) in wrap(figures, canvas.width - 2).iter().enumerate() {
            if line + index < bottom {
                canvas.put(1, line + index, text, canvas.width, theme.dim());
            }
        }
    }

    /// Draws the totals and the path of the view.
    fn head(&self, canvas: &mut Canvas, world: &World) {
        let theme = self.options.theme;
        let total = world.total();
        let profile = &*world.now.profile;
        let mut parts = Vec::new();
        if world.is_live() {
            let blocks = units::count(world.count(&total.sums));
            parts.push(format!("in use {} in {blocks} blocks", units::bytes(total.sums.inuse_bytes)));
        } else {
            parts.push(format!("allocated {} (frees are not tracked)", units::bytes(total.sums.alloc_bytes)));
        }
        parts.extend(world.growth(&total).map(|growth| format!("{}/min", signed(growth))));
        parts.extend(world.rate(&total).map(|rate| format!("allocating {}/s", units::bytes(rate.max(0.0)))));
        let number = profile.number_of_targets();
        if number > 1 {
            parts.push(format!("{} processes", units::count(number as f64)));
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
        let cells = columns(canvas.width, self.view().kind == Kind::Programs && world.now.has_memory());
        self.header(canvas, world, &cells);
        for (line, index) in rows.enumerate() {
            self.row(canvas, world, &cells, ABOVE + line, index);
        }
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

    fn header(&self, canvas: &mut Canvas, world: &World, cells: &[(Cell, usize)]) {
        let view = self.view();
        let mut x = 0;
        let theme = self.options.theme;
        canvas.style(ABOVE - 1, theme.header());
        for &(cell, columns) in cells {
            let title = match cell {
                Cell::Size if world.is_live() => "IN USE",
                Cell::Size => "ALLOCATED",
                Cell::Bounds => "",
                Cell::Resident => "RESIDENT",
                Cell::ResidentGrowth => "PER MINUTE",
                Cell::Growth if world.marked.is_some() => "SINCE MARK",
                Cell::Growth => "GROWTH/MIN",
                Cell::Rate => "ALLOC/S",
                Cell::Count if world.is_live() => "BLOCKS",
                Cell::Count => "CALLS",
                Cell::Lifetime => "LIFETIME",
                Cell::Trend => "LAST MINUTE",
                Cell::Name => "NAME",
            };
            let is_sorted = !view.is_tree() && cell.sort() == Some(view.sort);
            let arrow = match (is_sorted, view.reversed) {
                (false, _) => "",
                (true, false) => "↓",
                (true, true) => "↑",
            };
            let title = format!("{title}{arrow}");
            let style = if is_sorted { theme.header().patch(theme.bold()) } else { theme.header() };
            match cell {
                Cell::Name | Cell::Trend | Cell::Bounds => drop(canvas.put(x, ABOVE - 1, &title, columns, style)),
                _ => canvas.put_right(x, ABOVE - 1, &title, columns, style),
            }
            x += columns + 1;
        }
    }

    fn row(&self, canvas: &mut Canvas, world: &World, cells: &[(Cell, usize)], y: usize, index: usize) {
        let theme = self.options.theme;
        let entry = &self.entries[index];
        let Some(details) = self.details(&entry.id) else { return };
        let mut x = 0;
        for &(cell, columns) in cells {
            match cell {
                // Nothing was sampled here.
                Cell::Size if entry.tally.is_nothing() => canvas.put_right(x, y, "–", columns, theme.dim()),
                Cell::Size => canvas.put_right(x, y, &details.size.figure, columns, theme.bold()),
                Cell::Resident => {
                    let bytes = |it: &Resident| units::bytes(it.total_bytes() as f64);
                    let bytes = world.resident(&entry.id).map_or_else(|| "–".into(), bytes);
                    canvas.put_right(x, y, &bytes, columns, theme.plain());
                }
                Cell::ResidentGrowth => {
                    let growth = world.resident(&entry.id).map_or_else(|| "–".into(), Resident::growth_text);
                    canvas.put_right(x, y, &growth, columns, theme.plain());
                }
                Cell::Bounds => drop(canvas.put(x, y, &details.size.bounds, columns, theme.dim())),
                Cell::Growth => {
                    let (text, style) = self.growth(world, entry);
                    canvas.put_right(x, y, &text, columns, style);
                }
                Cell::Rate => {
                    let rate = world.rate(&entry.tally).map_or_else(|| "–".into(), |it| units::bytes(it.max(0.0)));
                    canvas.put_right(x, y, &rate, columns, theme.plain());
                }
                Cell::Count => {
                    let count = units::count(world.count(&entry.tally.sums));
                    canvas.put_right(x, y, &count, columns, theme.plain());
                }
                Cell::Lifetime => canvas.put_right(x, y, &self.lifetime(&entry.id), columns, theme.plain()),
                Cell::Trend => drop(canvas.put(x, y, &sparkline(&details.series, columns), columns, theme.name())),
                Cell::Name => {
                    let name = self.row_name(world, entry);
                    canvas.put(x, y, &name, columns, theme.name());
                }
            }
            x += columns + 1;
        }
        if index == self.view().cursor {
            canvas.style(y, theme.selected());
        }
    }

    fn row_name(&self, world: &World, entry: &Entry) -> String {
        let name = world.name(&entry.id);
        if !self.view().is_tree() {
            return name;
        }
        let mark = match entry.is_open {
            Some(true) => "▾",
            Some(false) => "▸",
            None => " ",
        };
        format!("{}{mark} {name}", " ".repeat(entry.depth.min(12)))
    }

    /// Growth per minute, or since the mark. A star marks significant growth.
    fn growth(&self, world: &World, entry: &Entry) -> (String, Style) {
        let theme = self.options.theme;
        let Some(marked) = &world.marked else {
            return match world.growth(&entry.tally) {
                Some(growth) => (signed(growth), theme.plain()),
                None => ("–".into(), theme.dim()),
            };
        };
        let growth = world.growth_since_mark(&entry.tally);
        let is_significant = marked.change(&entry.id).is_some_and(|change| change.significant);
        let style = match (is_significant, growth) {
            (true, _) => theme.grows(),
            (false, ..0.0) => theme.shrinks(),
            _ => theme.plain(),
        };
        (format!("{}{}", signed(growth), if is_significant { "*" } else { "" }), style)
    }

    fn lifetime(&self, id: &RowId) -> String {
        self.median(id).map_or_else(|| "–".into(), units::seconds)
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
            let name = it.path.last().map_or_else(|| self.trail()[0].clone(), |function| leaves_name(world, *function));
            let style = match index == selected {
                true => theme.bar().patch(theme.bold()),
                false => theme.flame(it.path.last().copied().unwrap_or(0), index % 2 == 1),
            };
            let text = if it.columns > 2 { format!(" {}", shown(&name, it.columns - 2)) } else { String::new() };
            let padding = it.columns.saturating_sub(width(&text));
            canvas.put(it.x, y, &format!("{text}{}", " ".repeat(padding)), it.columns, style);
            if it.x > 0 && it.columns > 1 {
                canvas.put(it.x, y, "│", 1, style);
            }
        }
        if let Some(it) = self.boxes.get(selected) {
            let share = world.size(&it.tally.sums) / world.size(&world.now.total).max(1.0);
            let facts = format!("{} · {}", figure_of(world, &it.tally), units::share(share));
            canvas.put(1, bottom - 2, &facts, canvas.width - 1, theme.plain());
            let names: Vec<String> = it.path.iter().map(|function| leaves_name(world, *function)).collect();
            let trail = clip_start(&names.join(" › "), canvas.width - 2);
            canvas.put(1, bottom - 1, &trail, canvas.width - 1, theme.name());
        }
    }

    fn bottom(&self, canvas: &mut Canvas, y: usize) {
        let theme = self.options.theme;
        if let Some((purpose, text)) = &self.input {
            let prompt = if *purpose == Purpose::Filter { "only rows with: " } else { "search for: " };
            canvas.put(0, y, &format!("{prompt}{text}▏ Enter · Esc"), canvas.width, theme.bold());
            return;
        }
        if let Some(message) = &self.message {
            canvas.put(0, y, message, canvas.width, theme.warning());
            return;
        }
        if let Status::Away(why) = &self.status {
            canvas.put(0, y, why, canvas.width, theme.warning());
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

/// Rounds down to whole seconds.
fn rounded(duration: std::time::Duration) -> std::time::Duration {
    std::time::Duration::from_secs(duration.as_secs())
}
