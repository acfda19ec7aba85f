//! Encodes cells of the screen as bytes for a terminal. Uses the oldest sequences for the sixteen colours, and writes
//! each frame in one piece.

use std::fmt::Write as _;

use ratatui_core::buffer::Cell;
use ratatui_core::style::{Color, Modifier};

/// Switches to a separate screen, without a cursor.
pub const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
/// Switches back to the screen before.
pub const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";
/// Clears the screen.
pub const CLEAR: &str = "\x1b[0m\x1b[2J";

/// Returns what is written for some changed cells.
pub fn bytes<'a>(cells: impl Iterator<Item = (u16, u16, &'a Cell)>) -> String {
    let mut out = String::new();
    let mut style = None;
    let mut next = None;
    for (x, y, cell) in cells {
        // Writing to a string cannot fail.
        if next != Some((x, y)) {
            let _ = write!(out, "\x1b[{};{}H", u32::from(y) + 1, u32::from(x) + 1);
        }
        let wanted = (cell.fg, cell.bg, cell.modifier);
        if style != Some(wanted) {
            add_sequence(&mut out, wanted);
            style = Some(wanted);
        }
        out.push_str(cell.symbol());
        // Terminals disagree on the width of other characters.
        next = is_one_column(cell.symbol()).then(|| (x.saturating_add(1), y));
    }
    if style.is_some() {
        out.push_str("\x1b[0m");
    }
    out
}

fn is_one_column(symbol: &str) -> bool {
    let mut characters = symbol.chars();
    let first = characters.next();
    characters.next().is_none() && first.is_some_and(|c| matches!(c, ' '..='~' | '─'..='▟' | '…' | '←' | '·' | '›'))
}

/// Adds the sequence for a style, whatever the style before was.
fn add_sequence(out: &mut String, (fg, bg, modifier): (Color, Color, Modifier)) {
    out.push_str("\x1b[0");
    let modifiers = [(Modifier::BOLD, 1), (Modifier::DIM, 2), (Modifier::UNDERLINED, 4), (Modifier::REVERSED, 7)];
    let modifiers = modifiers.iter().filter(|(it, _)| modifier.contains(*it)).map(|(_, code)| *code);
    let foreground = color(fg).map(|number| if number < 8 { 30 + number } else { 82 + number });
    let background = color(bg).map(|number| if number < 8 { 40 + number } else { 92 + number });
    for code in modifiers.chain(foreground).chain(background) {
        // Writing to a string cannot fail.
        let _ = write!(out, ";{code}");
    }
    out.push('m');
}

/// Number of one of the sixteen colours. `None` means the terminal's default.
fn color(color: Color) -> Option<u8> {
    const COLORS: [Color; 16] = [
        Color::Black,
        Color::Red,
        Color::Green,
        Color::Yellow,
        Color::Blue,
        Color::Magenta,
        Color::Cyan,
        Color::Gray,
        Color::DarkGray,
        Color::LightRed,
        Color::LightGreen,
        Color::LightYellow,
        Color::LightBlue,
        Color::LightMagenta,
        Color::LightCyan,
        Color::White,
    ];
    COLORS.iter().position(|it| *it == color).map(|number| number as u8)
}

#[cfg(test)]
mod tests {
    use ratatui_core::style::Style;

    use super::*;

    fn cell(symbol: &'static str, style: Style) -> Cell {
        let mut cell = Cell::new(symbol);
        cell.set_style(style);
        cell
    }

    #[test]
    fn neighbours_share_place_and_style() {
        let plain = cell("a", Style::new());
        let out = bytes([(2, 3, &plain), (3, 3, &plain), (5, 3, &plain)].into_iter());
        assert_eq!(out, "\x1b[4;3H\x1b[0maa\x1b[4;6Ha\x1b[0m");
        assert_eq!(bytes(std::iter::empty()), "");
    }

    #[test]
    fn colours_are_the_sixteen() {
        let red = cell("x", Style::new().fg(Color::Red).bg(Color::White).add_modifier(Modifier::BOLD));
        assert_eq!(bytes([(0, 0, &red)].into_iter()), "\x1b[1;1H\x1b[0;1;31;107mx\x1b[0m");
        let none = cell("x", Style::new().fg(Color::Rgb(1, 2, 3)));
        assert_eq!(bytes([(0, 0, &none)].into_iter()), "\x1b[1;1H\x1b[0mx\x1b[0m");
    }

    #[test]
    fn after_a_character_of_unsure_width_the_place_is_told() {
        let (wide, plain) = (cell("漢", Style::new()), cell("a", Style::new()));
        let out = bytes([(0, 0, &wide), (2, 0, &plain)].into_iter());
        assert_eq!(out, "\x1b[1;1H\x1b[0m漢\x1b[1;3Ha\x1b[0m");
    }
}
