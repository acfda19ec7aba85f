//! A comparison as CSV.

use super::{Change, Diff, FunctionChange, StackChange};
use crate::escape::escaped;
use heapbpf_statistics::estimate::Estimate;

/// Columns of figures, which follow the columns that identify the line.
const FIGURES: &str = "value,before,before_low,before_high,after,after_low,after_high,change,change_low,change_high,\
direction,p_value,q_value,significant,p_two_sided,verdict";

/// One line per function or per stack. Unknown figures are empty.
///
/// # Errors
/// Writing to memory failed.
pub fn csv(diff: &Diff, stacks: bool) -> Result<Vec<u8>, ::csv::Error> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let keys = ["group", if stacks { "stack" } else { "function" }];
    let more = if stacks { None } else { Some("full_name") };
    writer.write_record(keys.into_iter().chain(FIGURES.split(',')).chain(more))?;
    if stacks {
        for StackChange { group, frames, figures, .. } in &diff.stacks {
            // Outermost to innermost, as in folded stacks.
            let frames: Vec<String> = frames.iter().rev().map(|frame| escaped(&frame.name).replace(';', ":")).collect();
            writer.write_record(line(group, &frames.join(";"), figures))?;
        }
    } else {
        for FunctionChange { group, function, full_name, figures, .. } in &diff.functions {
            let more = Some(escaped(full_name).into_owned());
            writer.write_record(line(group, &escaped(function), figures).into_iter().chain(more))?;
        }
    }
    writer.into_inner().map_err(|error| error.into_error().into())
}

fn line(group: &str, of: &str, figures: &Change) -> Vec<String> {
    let number = |it: Option<f64>| it.map_or_else(String::new, |it| format!("{it:.0}"));
    let probability = |it: Option<f64>| it.map_or_else(String::new, |it| it.to_string());
    let name = |it: serde_json::Result<serde_json::Value>| {
        it.ok().and_then(|name| name.as_str().map(str::to_owned)).unwrap_or_default()
    };
    let mut record = vec![escaped(group).into_owned(), of.to_owned(), figures.value.to_owned()];
    for Estimate { estimate, low, high, .. } in [figures.before, figures.after, figures.change] {
        record.extend([number(Some(estimate)), number(low), number(high)]);
    }
    record.extend([
        name(serde_json::to_value(figures.direction)),
        probability(figures.p_value),
        probability(figures.q_value),
        figures.significant.to_string(),
        probability(figures.p_two_sided),
        name(serde_json::to_value(figures.verdict)),
    ]);
    record
}
