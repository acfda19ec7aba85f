//! A figure as data: panels with axes and curves, and a legend.

use crate::axis::Axis;

/// A picture before it is drawn.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// What the figure shows.
    pub title: String,
    /// Which program, when, and with which sampling interval.
    pub subject: String,
    /// Panels, from top to bottom.
    pub panels: Vec<Panel>,
    /// Names of the curves, in the order of their keys.
    pub legend: Vec<Entry>,
    /// How to read the figure; each note is a paragraph below the legend.
    pub notes: Vec<String>,
}

/// A pair of axes with curves.
#[derive(Clone, Debug)]
pub struct Panel {
    /// Horizontal axis.
    pub x: Axis,
    /// Vertical axis.
    pub y: Axis,
    /// Curves; later ones are drawn above earlier ones.
    pub curves: Vec<Curve>,
    /// Vertical lines with a text.
    pub marks: Vec<Mark>,
}

/// Identifies a curve: its colour and the sign in its badge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// The whole: black, `Σ`.
    Whole,
    /// A part, by its number from 1.
    Part(usize),
}

/// A point of a curve, with the ends of its interval if there is one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Horizontal position.
    pub x: f64,
    /// Value.
    pub y: f64,
    /// Lower and upper end of the interval.
    pub band: Option<(f64, f64)>,
}

/// A curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Which curve it is.
    pub key: Key,
    /// Points, ascending by position.
    pub points: Vec<Point>,
    /// Whether values hold until the next point; otherwise the points are joined.
    pub steps: bool,
    /// Whether each point is marked, because only the points were measured and not what lies between them.
    pub dots: bool,
    /// From this position on the curve is dashed: it continues, but no event was observed there.
    pub dashed_from: Option<f64>,
    /// Positions at which the curve has a cross-stroke, and the curve's value there.
    pub strokes: Vec<(f64, f64)>,
}

/// A vertical line.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Horizontal position.
    pub x: f64,
    /// Text of the line.
    pub text: String,
}

/// A line of the legend.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Which curve it names.
    pub key: Key,
    /// Name of the curve.
    pub name: String,
    /// Its figure or a remark.
    pub about: String,
}

impl Curve {
    /// A curve through points, with nothing else.
    pub fn through(key: Key, points: Vec<Point>) -> Self {
        Self { key, points, steps: false, dots: false, dashed_from: None, strokes: Vec::new() }
    }
}
