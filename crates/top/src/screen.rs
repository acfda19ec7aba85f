//! Draws the screen.

use heapbpf_profile::report::chain::{Chain, lines as chain_lines};
use heapbpf_profile::report::text::{clip, clip_start, width, wrap};
use heapbpf_profile::units;
use ratatui_core::buffer::Buffer;
use ratatui_core::style::Style;

use crate::details::sparkline;
use crate::help::{BOTTOM, KEYS};
use crate::layout::{Cell, columns};
use crate::row::Entry;
use crate::sums::Tally;
use crate::top::{Purpose, Status, Top};
use crate::view::{Kind, RowId};
use crate::world::World;

/// Characters of a text per column that are looked at: marks without a width may be many.
const CHARACTERS_PER_COLUMN: usize = 4;
/// Marks without a width that are kept in a row.
const MOST_MARKS: usize = 3;
/// Rows above the table: title, totals, path, header.
const ABOVE: usize = 4;

/// A part of the screen that lines are written to.
struct Canvas<'a> {
    buffer: &'a mut Buffer,
    width: usize,
}

impl Canvas<'_> {
    /// Writes a text at a place, cut to some columns. Returns the columns that it takes.
    fn put(&mut self, x: usize, y: usize, text: &str, columns: usize, style: Style) -> usize {
        let columns = columns.min(self.width.saturating_sub(x));
        if y >= usize::from(self.buffer.area.height) || columns == 0 {
            return 0;
        }
        let text = shown(text, columns);
        self.buffer.set_stringn(x as u16, y as u16, &text, columns, style);
        width(&text)
    }

    /// The same, aligned at the right end of the columns.
    fn put_right(&mut self, x: usize, y: usize, text: &str, columns: usize, style: Style) {
        let text = shown(text, columns);
        let free = columns.saturating_sub(width(&text));
        self.put(x + free, y, &text, columns - free, style);
    }

    /// Styles a whole line.
    fn style(&mut self, y: usize, style: Style) {
        let area = ratatui_core::layout::Rect::new(0, y as u16, self.width as u16, 1);
        self.buffer.set_style(area.intersection(self.buffer.area), style);
    }
}

/// A text without what controls terminals, cut to some columns. Of marks without a width only a few in a row are kept.
fn shown(text: &str, columns: usize) -> String {
    if !text.is_ascii() {
        let mut marks = 0;
        let kept = text.chars().filter(|c| {
            marks = if width(c.encode_utf8(&mut [0; 4])) == 0 { marks + 1 } else { 0 };
            marks <= MOST_MARKS
        });
        let kept: String = kept.take(columns.saturating_mul(CHARACTERS_PER_COLUMN) + 1).collect();
        return clip(&kept, columns);
    }
    match text.char_indices().nth(columns.saturating_mul(CHARACTERS_PER_COLUMN)) {
        Some((end, _)) => clip(&text[..end], columns),
        None => clip(text, columns),
    }
}

impl Top {
    /// Draws the screen into a buffer, which is as large as the terminal.
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
        let figures = "IN USE has its 95 % interval beside it. ~: no interval is known. GROWTH: of the last minute.";
        let line = KEYS.len() + 3;
        for (index, text) in wrap(figures, canvas.width - 2).iter().enumerate() {
            if line + index < bottom {
                canvas.put(1, line + index, text, canvas.width, theme.dim());
            }
        }
    }

    /// Totals, and the path of the view.
    fn head(&self, canvas: &mut Canvas, world: &World) {
        let theme = self.options.theme;
        let total = world.total();
        let profile = &*world.now.profile;
        let mut parts = Vec::new();
        if world.is_live() {
            let blocks = units::count(world.count(&total.sums));
            parts.push(format!("in use {} in {blocks} blocks", units::bytes(total.sums.inuse_bytes)));
        } else {
            parts.push(format!("allocated {} (frees are not followed)", units::bytes(total.sums.alloc_bytes)));
        }
        parts.extend(world.growth(&total).map(|growth| format!("{}/min", signed(growth))));
        parts.extend(world.rate(&total).map(|rate| format!("allocating {}/s", units::bytes(rate.max(0.0)))));
        let number = profile.number_of_processes();
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
        let cells = columns(canvas.width);
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
                Cell::Size => canvas.put_right(x, y, &details.size.figure, columns, theme.bold()),
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

    /// Growth per minute, or since the mark; a star says that it is significant.
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

    /// All about the selected row.
    fn selection(&self, canvas: &mut Canvas, world: &World, entry: &Entry, first: usize, end: usize) {
        let theme = self.options.theme;
        let Some(details) = self.details(&entry.id) else { return };
        let rule = "─".repeat(canvas.width);
        canvas.put(0, first - 1, &rule, canvas.width, theme.dim());
        let columns = canvas.width - 1;
        let figures = |figure: &heapbpf_profile::report::FigureText| {
            if figure.bounds.is_empty() {
                figure.figure.clone()
            } else {
                format!("{} {}", figure.figure, figure.bounds)
            }
        };
        let mut facts = Vec::new();
        if world.is_live() {
            facts.push(format!("in use {} in {} blocks", figures(&details.size), figures(&details.blocks)));
        }
        facts.push(format!("allocated {} in {} calls", figures(&details.allocated), figures(&details.allocations)));
        let mut more = Vec::new();
        if world.is_live() {
            let median = self.median(&entry.id).map(|seconds| format!("median lifetime {}", units::seconds(seconds)));
            more.push(median.unwrap_or_else(|| "median lifetime not known or longer".into()));
            let trend = sparkline(&details.series, 13);
            more.extend((!trend.is_empty()).then(|| format!("last minute {trend}")));
        }
        more.extend(self.since_mark(world, entry));
        facts.extend(more);
        let mut lines: Vec<(String, Style)> =
            joined(&facts, columns - 1).into_iter().map(|line| (line, theme.plain())).collect();
        let left = end.saturating_sub(first + lines.len());
        lines.extend(self.places(world, entry, columns, left));
        for (line, (text, style)) in lines.into_iter().enumerate() {
            if first + line < end {
                canvas.put(1, first + line, &text, columns, style);
            }
        }
    }

    fn since_mark(&self, world: &World, entry: &Entry) -> Option<String> {
        let change = world.marked.as_ref()?.change(&entry.id)?;
        let bounds = change.change.low.zip(change.change.high);
        let bounds = bounds.map(|(low, high)| format!(" [{}, {}]", signed(low), signed(high))).unwrap_or_default();
        let judged = match (change.significant, change.q_value, change.reason) {
            (true, Some(..0.001), _) => "significant, q < 0.001".to_owned(),
            (true, Some(q), _) => format!("significant, q = {q:.3}"),
            (false, Some(q), _) => format!("not significant, q = {q:.2}"),
            (_, None, reason) => reason.unwrap_or("not tested").to_owned(),
        };
        Some(format!("since the mark {}{bounds}: {judged}", signed(change.change.estimate)))
    }

    /// Calls of the selected row with their source lines.
    fn places(&self, world: &World, entry: &Entry, columns: usize, most: usize) -> Vec<(String, Style)> {
        let theme = self.options.theme;
        let leaves = &world.leaves;
        let name = (world.name(&entry.id), theme.name());
        match &entry.id {
            RowId::Leaf(leaf) => {
                let stack = leaves.stack_of(*leaf);
                let calls = stack.calls.iter().map(|(call, repeated)| (leaves.get_call(*call).clone(), *repeated));
                let chain: Chain = calls.collect();
                if self.large {
                    let line = |(call, _): &_| call_line(call, columns);
                    return chain.iter().take(most).map(line).map(|text| (text, theme.name())).collect();
                }
                let lead = leaves.program_name(leaves.program(*leaf));
                let lines =
                    chain_lines(&chain, lead, stack.cut.as_deref(), columns.saturating_sub(1), most.max(1), false);
                lines.into_iter().map(|text| (text, theme.name())).collect()
            }
            RowId::Program(program) => {
                let name = leaves.program_name(*program);
                let profile = &*world.now.profile;
                let shown = heapbpf_profile::group::Groups::new(profile, heapbpf_profile::GroupBy::Program);
                let is_of = |index: &usize| shown.of_process(*index) == name;
                let process = (0..profile.processes.len()).find(is_of).map(|index| &profile.processes[index]);
                let exe = process.map(|process| format!("{} · {}", process.exe, process.allocators.join(", ")));
                std::iter::once((name.to_owned(), theme.name())).chain(exe.map(|exe| (exe, theme.dim()))).collect()
            }
            RowId::Function(function) => {
                let places = leaves.places(*function);
                vec![name, (clip_start(&places.join(", "), columns), theme.dim())]
            }
            RowId::Path(path) => {
                let names: Vec<&str> = path.iter().map(|function| leaves.function_name(*function)).collect();
                let places = path.last().map(|function| leaves.places(*function).join(", ")).unwrap_or_default();
                vec![
                    (clip_start(&names.join(" › "), columns), theme.name()),
                    (clip_start(&places, columns), theme.dim()),
                ]
            }
        }
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

fn leaves_name(world: &World, function: u32) -> String {
    world.leaves.function_name(function).to_owned()
}

fn figure_of(world: &World, tally: &Tally) -> String {
    let what = if world.is_live() { "in use" } else { "allocated" };
    format!("{} {what}", units::bytes(world.size(&tally.sums)))
}

/// Facts in as few lines as they fit in.
fn joined(facts: &[String], columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for fact in facts {
        match lines.last_mut() {
            Some(line) if width(line) + 3 + width(fact) <= columns => line.push_str(&format!(" · {fact}")),
            _ => lines.push(fact.clone()),
        }
    }
    lines
}

/// A call with its source line.
fn call_line(call: &heapbpf_profile::report::chain::Call, columns: usize) -> String {
    clip(&format!("{}  {}", call.name, call.place), columns)
}

/// Bytes with a sign.
fn signed(bytes: f64) -> String {
    if bytes > 0.0 { format!("+{}", units::bytes(bytes)) } else { units::bytes(bytes) }
}

/// Whole seconds.
fn rounded(duration: std::time::Duration) -> std::time::Duration {
    std::time::Duration::from_secs(duration.as_secs())
}
