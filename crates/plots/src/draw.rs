//! Draws a figure: the layout and everything that makes up the style.

use plotters::coord::Shift;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind};
use plotters::element::{Circle, DashedPathElement, PathElement, Polygon, Rectangle, Text};
use plotters::prelude::DrawingBackend;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, RGBColor, TextStyle};

use crate::axis::Axis;
use crate::figure::{Curve, Figure, Key, Panel, Point};
use crate::letters::{self, FAMILY};

/// Backend units per unit of the figure, so that integer coordinates are fine enough.
pub const SCALE: u32 = 4;

/// Width of a figure. All lengths are in SVG user units, which are pixels on an ordinary screen.
const WIDTH: f64 = 900.0;
const LEFT: f64 = 84.0;
const RIGHT: f64 = 36.0;
/// Height above the first panel's heading: title and subject.
const TOP: f64 = 66.0;
/// Height of a panel's heading, the name of the vertical axis.
const PANEL_HEAD: f64 = 26.0;
/// Height of the numbers and the name of the horizontal axis.
const PANEL_FOOT: f64 = 50.0;
/// Height of a single panel, and of one of several.
const ALONE: f64 = 340.0;
const ONE_OF_SEVERAL: f64 = 230.0;
const LEGEND_LINE: f64 = 22.0;
const NOTE_LINE: f64 = 17.0;
const BOTTOM: f64 = 16.0;

const TITLE_SIZE: f64 = 21.0;
const TEXT_SIZE: f64 = 15.0;
const NOTE_SIZE: f64 = 13.0;
const BADGE_RADIUS: f64 = 9.0;
/// Length of a dash, and of the space after it.
const DASH: (f64, f64) = (5.0, 4.0);

const BLACK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const GREY: RGBColor = RGBColor(0x66, 0x66, 0x66);
const GRID: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);
/// The colours of Okabe and Ito, which colour-blind readers can tell apart; in black and white their shades differ.
const COLORS: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
];

fn color(key: Key) -> RGBColor {
    match key {
        Key::Whole => BLACK,
        Key::Part(number) => COLORS[number.saturating_sub(1) % COLORS.len()],
    }
}

type Result<DB> = std::result::Result<(), DrawingAreaErrorKind<<DB as DrawingBackend>::ErrorType>>;

fn panel_height(figure: &Figure) -> f64 {
    if figure.panels.len() > 1 { ONE_OF_SEVERAL } else { ALONE }
}

fn notes(figure: &Figure) -> Vec<String> {
    let lines = |note: &String| letters::wrap(note, NOTE_SIZE, WIDTH - 2.0 * BOTTOM);
    figure.notes.iter().flat_map(lines).collect()
}

/// Width and height of a figure in units of the backend.
pub fn size(figure: &Figure) -> (u32, u32) {
    let panels = figure.panels.len() as f64 * (PANEL_HEAD + panel_height(figure) + PANEL_FOOT);
    let below = figure.legend.len() as f64 * LEGEND_LINE + notes(figure).len() as f64 * NOTE_LINE;
    (WIDTH as u32 * SCALE, (TOP + panels + below + BOTTOM).ceil() as u32 * SCALE)
}

/// Draws a figure onto an area of its [`size`]. `lower` says how far this backend must shift texts down so that their
/// middle is in the right place, as a share of the text size.
///
/// # Errors
/// The backend failed.
pub fn draw<DB: DrawingBackend>(figure: &Figure, area: &DrawingArea<DB, Shift>, lower: f64) -> Result<DB> {
    let sheet = Sheet { area, lower };
    sheet.area.fill(&plotters::style::WHITE)?;
    let available = WIDTH - 2.0 * BOTTOM;
    sheet.text(&letters::clip(&figure.title, TITLE_SIZE, available), (BOTTOM, 20.0), TITLE_SIZE, BLACK, HPos::Left)?;
    sheet.text(&letters::clip(&figure.subject, TEXT_SIZE, available), (BOTTOM, 46.0), TEXT_SIZE, GREY, HPos::Left)?;
    let mut top = TOP;
    for panel in &figure.panels {
        let frame = Frame { top: top + PANEL_HEAD, bottom: top + PANEL_HEAD + panel_height(figure) };
        sheet.panel(panel, &frame)?;
        top = frame.bottom + PANEL_FOOT;
    }
    for entry in &figure.legend {
        let middle = top + LEGEND_LINE / 2.0;
        sheet.badge(entry.key, (BOTTOM + BADGE_RADIUS, middle))?;
        let begin = BOTTOM + 2.0 * BADGE_RADIUS + 8.0;
        let about = letters::width(&entry.about, TEXT_SIZE);
        let name = letters::clip(&entry.name, TEXT_SIZE, WIDTH - BOTTOM - begin - about - 14.0);
        sheet.text(&name, (begin, middle), TEXT_SIZE, BLACK, HPos::Left)?;
        sheet.text(&entry.about, (WIDTH - BOTTOM, middle), TEXT_SIZE, GREY, HPos::Right)?;
        top += LEGEND_LINE;
    }
    for note in notes(figure) {
        sheet.text(&note, (BOTTOM, top + NOTE_LINE / 2.0 + 4.0), NOTE_SIZE, GREY, HPos::Left)?;
        top += NOTE_LINE;
    }
    Ok(())
}

/// Where a panel lies.
struct Frame {
    top: f64,
    bottom: f64,
}

impl Frame {
    fn x(axis: &Axis, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * axis.position(value)
    }

    fn y(&self, axis: &Axis, value: f64) -> f64 {
        self.bottom - (self.bottom - self.top) * axis.position(value)
    }

    fn place(&self, panel: &Panel, (x, y): (f64, f64)) -> (f64, f64) {
        (Self::x(&panel.x, x), self.y(&panel.y, y))
    }
}

/// A drawing area that takes lengths in units of the figure.
struct Sheet<'a, DB: DrawingBackend> {
    area: &'a DrawingArea<DB, Shift>,
    lower: f64,
}

fn unit(length: f64) -> i32 {
    (length * f64::from(SCALE)).round() as i32
}

fn units((x, y): (f64, f64)) -> (i32, i32) {
    (unit(x), unit(y))
}

impl<DB: DrawingBackend> Sheet<'_, DB> {
    /// A text that is centred vertically on a point.
    fn text(&self, text: &str, at: (f64, f64), size: f64, color: RGBColor, side: HPos) -> Result<DB> {
        let font = (FAMILY, size * f64::from(SCALE));
        let style = TextStyle::from(font).color(&color).pos(Pos::new(side, VPos::Center));
        let at = (at.0, at.1 + self.lower * size);
        self.area.draw(&Text::new(text.to_owned(), units(at), style))
    }

    fn line(&self, points: &[(f64, f64)], color: RGBColor, width: f64) -> Result<DB> {
        let points: Vec<(i32, i32)> = points.iter().copied().map(units).collect();
        self.area.draw(&PathElement::new(points, color.stroke_width(unit(width).max(1) as u32)))
    }

    fn dashed(&self, points: &[(f64, f64)], color: RGBColor, width: f64) -> Result<DB> {
        let points: Vec<(i32, i32)> = points.iter().copied().map(units).collect();
        let style = color.stroke_width(unit(width).max(1) as u32);
        self.area.draw(&DashedPathElement::new(points, unit(DASH.0), unit(DASH.1), style))
    }

    fn badge(&self, key: Key, at: (f64, f64)) -> Result<DB> {
        let sign = match key {
            Key::Whole => "Σ".to_owned(),
            Key::Part(number) => number.to_string(),
        };
        self.area.draw(&Circle::new(units(at), unit(BADGE_RADIUS), color(key).filled()))?;
        self.text(&sign, at, NOTE_SIZE, plotters::style::WHITE, HPos::Center)
    }

    fn panel(&self, panel: &Panel, frame: &Frame) -> Result<DB> {
        let (right, middle) = (WIDTH - RIGHT, f64::midpoint(LEFT, WIDTH - RIGHT));
        for (value, text) in panel.y.ticks() {
            let y = frame.y(&panel.y, value);
            self.line(&[(LEFT, y), (right, y)], GRID, 1.0)?;
            self.text(&text, (LEFT - 8.0, y), TEXT_SIZE, GREY, HPos::Right)?;
        }
        for (value, text) in panel.x.ticks() {
            let x = Frame::x(&panel.x, value);
            self.line(&[(x, frame.top), (x, frame.bottom)], GRID, 1.0)?;
            self.text(&text, (x, frame.bottom + 14.0), TEXT_SIZE, GREY, HPos::Center)?;
        }
        self.text(&panel.y.label, (BOTTOM, frame.top - 15.0), TEXT_SIZE, BLACK, HPos::Left)?;
        self.text(&panel.x.label, (middle, frame.bottom + 35.0), TEXT_SIZE, BLACK, HPos::Center)?;
        self.line(&[(LEFT, frame.bottom), (right, frame.bottom)], GREY, 1.0)?;
        for mark in &panel.marks {
            let x = Frame::x(&panel.x, mark.x);
            self.dashed(&[(x, frame.top), (x, frame.bottom)], GREY, 1.5)?;
        }
        for curve in &panel.curves {
            self.band(panel, frame, curve)?;
        }
        for curve in &panel.curves {
            self.curve(panel, frame, curve)?;
        }
        for mark in &panel.marks {
            self.mark_text(&mark.text, Frame::x(&panel.x, mark.x), frame)?;
        }
        self.badges(panel, frame)
    }

    /// The text of a vertical line, at its foot, on a white background because curves may pass there.
    fn mark_text(&self, text: &str, x: f64, frame: &Frame) -> Result<DB> {
        let y = frame.bottom - 14.0;
        let width = letters::width(text, NOTE_SIZE);
        let left = if x > f64::midpoint(LEFT, WIDTH - RIGHT) { x - 6.0 - width } else { x + 6.0 };
        let corners = [(left - 2.0, y - 9.0), (left + width + 2.0, y + 9.0)].map(units);
        self.area.draw(&Rectangle::new(corners, plotters::style::WHITE.filled()))?;
        self.text(text, (left, y), NOTE_SIZE, BLACK, HPos::Left)
    }

    fn band(&self, panel: &Panel, frame: &Frame, curve: &Curve) -> Result<DB> {
        for part in curve.points.chunk_by(|a, b| a.band.is_some() == b.band.is_some()) {
            let end = |of: fn((f64, f64)) -> f64| -> Vec<Point> {
                let point = |point: &Point| Some(Point { y: of(point.band?), ..*point });
                part.iter().filter_map(point).collect()
            };
            let upper = corners(&end(|band| band.1), curve.steps);
            let lower = corners(&end(|band| band.0), curve.steps);
            let outline = upper.into_iter().chain(lower.into_iter().rev());
            let outline: Vec<(i32, i32)> = outline.map(|at| units(frame.place(panel, at))).collect();
            if outline.len() > 2 {
                self.area.draw(&Polygon::new(outline, color(curve.key).mix(0.16)))?;
            }
        }
        Ok(())
    }

    fn curve(&self, panel: &Panel, frame: &Frame, curve: &Curve) -> Result<DB> {
        let width = if curve.key == Key::Whole { 3.0 } else { 2.5 };
        let color = color(curve.key);
        let dashed_from = curve.dashed_from.unwrap_or(f64::INFINITY);
        let all = corners(&curve.points, curve.steps);
        let whole: Vec<_> = all.iter().filter(|(x, _)| *x <= dashed_from).map(|at| frame.place(panel, *at)).collect();
        let dashed: Vec<_> = all.iter().filter(|(x, _)| *x >= dashed_from).map(|at| frame.place(panel, *at)).collect();
        self.line(&whole, color, width)?;
        self.dashed(&dashed, color, width)?;
        for &at in &curve.strokes {
            let (x, y) = frame.place(panel, at);
            self.line(&[(x, y - 5.0), (x, y + 5.0)], color, 1.5)?;
        }
        for point in curve.points.iter().filter(|_| curve.dots) {
            let at = frame.place(panel, (point.x, point.y));
            self.area.draw(&Circle::new(units(at), unit(3.5), color.filled()))?;
        }
        Ok(())
    }

    /// The badges at the ends of the curves, moved apart where they would overlap.
    fn badges(&self, panel: &Panel, frame: &Frame) -> Result<DB> {
        let end = |curve: &Curve| {
            let last = curve.points.last()?;
            let (x, y) = frame.place(panel, (last.x, last.y));
            Some((curve.key, x + BADGE_RADIUS + 4.0, y))
        };
        let mut ends: Vec<(Key, f64, f64)> = panel.curves.iter().filter_map(end).collect();
        ends.sort_by(|a, b| a.2.total_cmp(&b.2));
        spread(&mut ends, frame);
        for (key, x, y) in ends {
            // A curve may end inside the panel, where other curves continue.
            let halo = BADGE_RADIUS + 1.5;
            self.area.draw(&Circle::new(units((x, y)), unit(halo), plotters::style::WHITE.filled()))?;
            self.badge(key, (x, y))?;
        }
        Ok(())
    }
}

/// Moves badges, sorted from top to bottom, so that none covers another. They move up if there is no space below.
fn spread(ends: &mut [(Key, f64, f64)], frame: &Frame) {
    let apart = 2.0 * BADGE_RADIUS + 2.0;
    let beside = |a: &(Key, f64, f64), b: &(Key, f64, f64)| (a.1 - b.1).abs() < apart;
    for index in 1..ends.len() {
        let above = ends[..index].iter().filter(|other| beside(other, &ends[index])).map(|other| other.2);
        let lowest = above.fold(f64::NEG_INFINITY, f64::max);
        ends[index].2 = ends[index].2.max(lowest + apart);
    }
    let mut limit = frame.bottom;
    for index in (0..ends.len()).rev() {
        let below = ends[index + 1..].iter().filter(|other| beside(other, &ends[index])).map(|other| other.2);
        limit = below.fold(limit, |limit, y| limit.min(y - apart)).min(frame.bottom);
        ends[index].2 = ends[index].2.min(limit);
        limit = frame.bottom;
    }
}

/// The corners of a curve: its points, plus the corners of its steps.
fn corners(points: &[Point], steps: bool) -> Vec<(f64, f64)> {
    let mut corners = Vec::with_capacity(points.len() * 2);
    for point in points {
        if let Some(&(_, before)) = corners.last()
            && steps
        {
            corners.push((point.x, before));
        }
        corners.push((point.x, point.y));
    }
    corners
}
