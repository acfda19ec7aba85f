//! Tables for the terminal.

pub mod census;
pub mod diff;
pub mod doctor;
pub mod plan;

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
