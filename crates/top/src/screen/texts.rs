//! Texts of figures and names.

use heapbpf_profile::report::chain::Call;
use heapbpf_profile::report::text::{clip, width};
use heapbpf_profile::units;

use crate::sums::Tally;
use crate::world::World;

pub(super) fn leaves_name(world: &World, function: u32) -> String {
    world.leaves.function_name(function).to_owned()
}

pub(super) fn figure_of(world: &World, tally: &Tally) -> String {
    let what = if world.is_live() { "in use" } else { "allocated" };
    format!("{} {what}", units::bytes(world.size(&tally.sums)))
}

/// Joins facts into as few lines as possible.
pub(super) fn joined(facts: &[String], columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for fact in facts {
        match lines.last_mut() {
            Some(line) if width(line) + 3 + width(fact) <= columns => line.push_str(&format!(" · {fact}")),
            _ => lines.push(fact.clone()),
        }
    }
    lines
}

/// A call with its source line.
pub(super) fn call_line(call: &Call, columns: usize) -> String {
    clip(&format!("{}  {}", call.name, call.place), columns)
}
