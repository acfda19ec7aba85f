//! The terminal: its width, and whether to use colours.

use rustix::stdio::{stderr, stdout};
use rustix::termios::{Winsize, tcgetwinsize};

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Color {
    /// On a terminal
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl Color {
    /// Whether to use colours, given whether the output is a terminal.
    pub fn is_on(self, terminal: bool) -> bool {
        match self {
            Self::Auto => terminal && std::env::var_os("NO_COLOR").is_none(),
            Self::Always => true,
            Self::Never => false,
        }
    }
}

/// Number of columns of the terminal, if there is one.
pub fn width() -> Option<usize> {
    let columns = |size: Winsize| Some(usize::from(size.ws_col)).filter(|columns| *columns > 0);
    [stdout(), stderr()].into_iter().find_map(|stream| columns(tcgetwinsize(stream).ok()?))
}
