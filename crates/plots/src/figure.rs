//! A figure as data: panels with axes and curves, and a legend.

use crate::axis::Axis;

/// A picture before it is drawn.
#[derive(Clone, Debug, Default)]
pub struct Figure {
    /// What it shows.
    pub title: String,
    /// Of which program, when, at which sampling interval.
    pub subject: String,
    /// Panels, from top to bottom.
    pub panels: Vec<Panel>,
    /// What the curves are, in the order of their keys.
    pub legend: Vec<Entry>,
    /// How to read it; each note is a paragraph below the legend.
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

/// Which curve it is: its colour and the sign in its badge.
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
    /// Horizontal place.
    pub x: f64,
    /// Value.
    pub y: f64,
    /// Lower and upper end.
    pub band: Option<(f64, f64)>,
}

/// A curve.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Which one it is.
    pub key: Key,
    /// Its points, places ascending.
    pub points: Vec<Point>,
    /// Whether values hold until the next point (else the points are joined).
    pub steps: bool,
    /// Whether each point is marked: it was measured, and what lies between was not.
    pub dots: bool,
    /// From this place on the curve is dashed: it goes on, but nothing was seen to happen.
    pub dashed_from: Option<f64>,
    /// Places at which the curve has a cross-stroke, and the curve's value there.
    pub strokes: Vec<(f64, f64)>,
}

/// A vertical line.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Its place.
    pub x: f64,
    /// Its text.
    pub text: String,
}

/// A line of the legend.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The curve.
    pub key: Key,
    /// What it is.
    pub name: String,
    /// Its figure, or a remark.
    pub about: String,
}

impl Curve {
    /// A curve through points, without anything else.
    pub fn through(key: Key, points: Vec<Point>) -> Self {
        Self { key, points, steps: false, dots: false, dashed_from: None, strokes: Vec::new() }
    }
}
