//! Lines of text in cells.

use heapbpf_profile::report::text::{clip, width};
use ratatui_core::buffer::Buffer;
use ratatui_core::style::Style;

/// Characters of a text that are examined per column. There may be many zero-width marks.
const CHARACTERS_PER_COLUMN: usize = 4;
/// Maximum number of consecutive zero-width marks that are kept.
const MOST_MARKS: usize = 3;

/// A part of the screen into which lines are written.
pub(super) struct Canvas<'a> {
    pub(super) buffer: &'a mut Buffer,
    pub(super) width: usize,
}

impl Canvas<'_> {
    /// Writes a text at a position, cut to at most `columns`. Returns the columns that it takes.
    pub(super) fn put(&mut self, x: usize, y: usize, text: &str, columns: usize, style: Style) -> usize {
        let columns = columns.min(self.width.saturating_sub(x));
        if y >= usize::from(self.buffer.area.height) || columns == 0 {
            return 0;
        }
        let text = shown(text, columns);
        self.buffer.set_stringn(x as u16, y as u16, &text, columns, style);
        width(&text)
    }

    /// Like [`Self::put`], but aligned to the right end of the columns.
    pub(super) fn put_right(&mut self, x: usize, y: usize, text: &str, columns: usize, style: Style) {
        let text = shown(text, columns);
        let free = columns.saturating_sub(width(&text));
        self.put(x + free, y, &text, columns - free, style);
    }

    /// Styles a whole line.
    pub(super) fn style(&mut self, y: usize, style: Style) {
        let area = ratatui_core::layout::Rect::new(0, y as u16, self.width as u16, 1);
        self.buffer.set_style(area.intersection(self.buffer.area), style);
    }
}

/// A text without terminal control characters, cut to at most `columns`. Only a few consecutive zero-width marks are
/// kept.
pub(super) fn shown(text: &str, columns: usize) -> String {
    let mut marks = 0;
    let kept = text.chars().filter(|c| {
        marks = if width(c.encode_utf8(&mut [0; 4])) == 0 { marks + 1 } else { 0 };
        marks <= MOST_MARKS
    });
    let kept: String = kept.take(columns.saturating_mul(CHARACTERS_PER_COLUMN) + 1).collect();
    clip(&kept, columns)
}
