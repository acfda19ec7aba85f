//! Tables for the terminal.

pub mod census;
pub mod diff;
pub mod doctor;
pub mod plan;

use std::io::IsTerminal as _;

use heapbpf_record::terminal::{self, Color};

/// Options of the tables.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableOptions {
    /// Columns of the terminal.
    pub width: usize,
    /// Whether to use colours.
    pub color: bool,
    /// Maximum number of rows of a census or a comparison.
    pub top: usize,
    /// Whether a comparison shows stacks instead of functions.
    pub stacks: bool,
}

impl TableOptions {
    /// The options of tables on standard output.
    #[must_use]
    pub fn of_output(color: Color) -> Self {
        let color = color.is_on(std::io::stdout().is_terminal());
        Self { width: terminal::width().unwrap_or(100), color, ..Self::default() }
    }
}
