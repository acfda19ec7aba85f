//! Styles of the screen: with the terminal's own sixteen colours, or without colours.

use ratatui_core::style::{Color, Modifier, Style};

/// Styles of the screen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Theme {
    /// Whether to use colours.
    pub color: bool,
}

impl Theme {
    fn with(self, color: Color, otherwise: Style) -> Style {
        if self.color { Style::new().fg(color) } else { otherwise }
    }

    pub(crate) fn plain(self) -> Style {
        Style::new()
    }

    pub(crate) fn bold(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub(crate) fn dim(self) -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    pub(crate) fn bar(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub(crate) fn name(self) -> Style {
        self.with(Color::Cyan, Style::new())
    }

    pub(crate) fn grows(self) -> Style {
        self.with(Color::Red, self.bold())
    }

    pub(crate) fn shrinks(self) -> Style {
        self.with(Color::Green, self.plain())
    }

    pub(crate) fn warning(self) -> Style {
        self.with(Color::Yellow, self.bold())
    }

    pub(crate) fn header(self) -> Style {
        Style::new().add_modifier(Modifier::UNDERLINED)
    }

    /// A box of the flame view; neighbouring boxes differ.
    pub(crate) fn flame(self, number: u32, odd: bool) -> Style {
        const COLORS: [Color; 5] = [Color::Red, Color::Yellow, Color::Green, Color::Magenta, Color::Cyan];
        if self.color {
            return Style::new().fg(Color::Black).bg(COLORS[number as usize % COLORS.len()]);
        }
        if odd {
            Style::new().add_modifier(Modifier::REVERSED)
        } else {
            Style::new().add_modifier(Modifier::UNDERLINED)
        }
    }
}
