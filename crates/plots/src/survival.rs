//! Survival curves: the share of a stack's blocks that is still in use at each age.

use heapbpf_profile::model::{Lifetimes, Octave, Profile};
use heapbpf_profile::report::{FigureText, ReportOptions, StackFigures, figures_of_stacks, subject};
use heapbpf_profile::units;
use heapbpf_profile::value::Value;
use heapbpf_statistics::survival_band::{Band, band};

use crate::axis::{Axis, Unit};
use crate::error::PlotError;
use crate::figure::{Curve, Entry, Figure, Key, Panel, Point};
use crate::{PlotOptions, stack_name};

/// Shortest age shown, in seconds.
const SHORTEST: f64 = 1e-6;

/// The survival curves of the stacks with the largest value.
///
/// # Errors
/// No stack has lifetimes.
pub fn survival(profile: &Profile, options: &PlotOptions) -> Result<Figure, PlotError> {
    let PlotOptions { value, group_by, frames, .. } = *options;
    let report = ReportOptions { sort: value, group_by, frames, ..ReportOptions::default() };
    let known = |stack: &StackFigures| {
        stack.lifetimes.as_ref().is_some_and(|lives| !lives.survival.is_empty() || has_ages(lives))
    };
    let stacks: Vec<StackFigures> =
        figures_of_stacks(profile, &report).into_iter().filter(known).take(options.stacks).collect();
    if stacks.is_empty() {
        return Err(PlotError::NoLifetimes);
    }
    let recorded = profile.header.duration.as_secs_f64();
    let drawn: Vec<(Curve, Entry)> = stacks
        .iter()
        .enumerate()
        .filter_map(|(index, stack)| {
            let (key, lives) = (Key::Part(index + 1), stack.lifetimes.as_ref()?);
            Some((
                curve(key, lives, stack.design_effect, options.confidence, recorded),
                entry(key, profile, stack, lives, options),
            ))
        })
        .collect();
    let (curves, legend): (Vec<Curve>, Vec<Entry>) = drawn.into_iter().unzip();
    let ages = || curves.iter().flat_map(|curve| &curve.points).map(|point| point.x).filter(|age| *age > 0.0);
    let lowest = ages().fold(f64::INFINITY, f64::min);
    let low = 10_f64.powf((lowest * 0.5).clamp(SHORTEST, 1e3).log10().floor());
    let x = Axis::logarithmic("age of the block", Unit::Seconds, low, ages().fold(low * 10.0, f64::max));
    Ok(Figure {
        title: "Blocks still in use, by age".into(),
        subject: format!("{} · from {}", subject(profile), crate::moment(profile.header.started)),
        panels: vec![Panel { x, y: Axis::up_to("share still in use", Unit::Share, 1.0), curves, marks: Vec::new() }],
        legend,
        notes: vec![format!(
            "Kaplan–Meier: a curve falls where sampled blocks were freed. Cross-strokes are ages of blocks that are in use yet, or \
             were when their process ended; dashed, nothing was seen to be freed. Shaded: pointwise {} confidence intervals.",
            units::percent(options.confidence)
        )],
    })
}

fn has_ages(lives: &Lifetimes) -> bool {
    lives.ages.iter().any(|octave| octave.freed.max(octave.left) > 0)
}

fn curve(key: Key, lives: &Lifetimes, design_effect: f64, confidence: f64, recorded: f64) -> Curve {
    let known: Vec<Octave> = lives.ages.iter().copied().filter(|octave| octave.freed.max(octave.left) > 0).collect();
    let is_possible = |(age, share): &&(f64, f64)| *age >= 0.0 && age.is_finite() && (0.0..=1.0).contains(share);
    let survival: Vec<(f64, f64)> = lives.survival.iter().filter(is_possible).copied().collect();
    let bands: Vec<Band> = band(&survival, &known, design_effect, confidence);
    let share_at = |age: f64| {
        let before = survival.iter().take_while(|(at, _)| *at <= age).last();
        before.map_or(1.0, |(_, share)| *share)
    };
    let last_fall = survival.last().map_or(0.0, |(age, _)| *age);
    // No block is older than the recording.
    let begin = |octave: &Octave| Octave::begin_seconds(octave.exponent);
    let oldest = known.iter().rfind(|octave| octave.left > 0).map_or(last_fall, |octave| {
        let end = 2.0 * begin(octave);
        if recorded > begin(octave) { end.min(recorded) } else { end }
    });
    let mut at: Vec<f64> = vec![0.0];
    at.extend(survival.iter().map(|(age, _)| *age));
    at.extend(bands.iter().map(|band| band.age_seconds));
    at.push(last_fall.max(oldest));
    at.retain(|age| *age <= last_fall.max(oldest));
    at.sort_by(f64::total_cmp);
    at.dedup();
    let point = |age: f64| {
        let band = bands.iter().take_while(|band| band.age_seconds <= age).last();
        Point { x: age, y: share_at(age), band: band.map(|band| (band.low, band.high)) }
    };
    let strokes = known.iter().filter(|octave| octave.left > 0).map(|octave| {
        let age = (begin(octave) * std::f64::consts::SQRT_2).min(last_fall.max(oldest));
        (age, share_at(age))
    });
    Curve {
        steps: true,
        dashed_from: (oldest > last_fall).then_some(last_fall),
        strokes: strokes.collect(),
        ..Curve::through(key, at.into_iter().map(point).collect())
    }
}

fn entry(key: Key, profile: &Profile, stack: &StackFigures, lives: &Lifetimes, options: &PlotOptions) -> Entry {
    let value = options.value.unwrap_or_else(|| Value::default_of(profile));
    let figure = FigureText::new(profile, &stack.pool, value, options.confidence).figure;
    let half = lives.median_seconds.map_or_else(
        || "more than half are not freed".to_owned(),
        |seconds| format!("half are freed within {}", units::seconds(seconds)),
    );
    let (what, no_band) = (value.title(), if has_ages(lives) { "" } else { " · no interval: the file has no ages" });
    let figure =
        if value.is_bytes() { format!("{figure}{}", &what["bytes".len()..]) } else { format!("{figure} {what}") };
    Entry { key, name: stack_name(stack), about: format!("{half} · {figure}{no_band}") }
}
