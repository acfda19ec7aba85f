//! What the reader must know with the figures: losses, incomplete stacks, coverage, notes.

use std::collections::BTreeMap;

use super::processes::{checked, pools};
use super::{Context, plural};
use crate::profile::estimates::{NO_SAMPLES, Pool, TIME_WINDOWS};
use crate::profile::group::process_name;
use crate::profile::model::Profile;
use crate::profile::stats::LOST_PREFIX;
use crate::profile::value::Value;
use crate::view::text::{Style, wrap};
use crate::view::units;

/// Most remarks of one kind (a host has thousands of processes).
const MOST: usize = 5;

/// Lines of the section; empty if there is nothing to remark.
pub(super) fn section(context: &Context) -> Vec<String> {
    let mut remarks = Vec::new();
    remarks.extend(unread(context.profile));
    remarks.extend(losses(context));
    remarks.extend(incomplete(context));
    remarks.extend(limited(distant(context)));
    remarks.extend(limited(coverage(context)));
    if !context.profile.samples_known {
        remarks.push(format!("no error bars: {NO_SAMPLES}"));
    } else if context.profile.time_windows {
        remarks.push(format!("no error bars of allocations: {TIME_WINDOWS}"));
    }
    remarks.extend(limited(context.profile.notes.clone()));
    let mark = context.paint(Style::Warning, "!");
    let line =
        |(index, line): (usize, String)| if index == 0 { format!("  {mark} {line}") } else { format!("    {line}") };
    remarks.iter().flat_map(|remark| wrap(remark, context.width - 4).into_iter().enumerate().map(line)).collect()
}

fn limited(mut remarks: Vec<String>) -> Vec<String> {
    let more = remarks.len().saturating_sub(MOST);
    remarks.truncate(MOST);
    if more > 0 {
        remarks.push(format!("and {} of this kind", plural(more as u64, "more remark")));
    }
    remarks
}

/// What was sent before the figures' moment and is not in them.
fn unread(profile: &Profile) -> Option<String> {
    let unread = profile.unread?;
    let missing = if unread.records == 0 { "some".to_owned() } else { units::percent(unread.share()) };
    let moment = units::time_of_day(profile.time);
    Some(format!("figures are as of {moment}; {missing} of the records sent by then could not be read in time"))
}

fn losses(context: &Context) -> Option<String> {
    let counters = &context.profile.counters;
    let lost: Vec<(&str, u64)> = counters
        .iter()
        .filter_map(|(name, &count)| Some((name.strip_prefix(LOST_PREFIX)?, count)).filter(|lost| lost.1 > 0))
        .collect();
    let total = lost.iter().fold(0u64, |sum, (_, count)| sum.saturating_add(*count));
    if total == 0 {
        return None;
    }
    let submitted = counters.get("submitted").copied();
    let share = submitted.map_or_else(String::new, |submitted| {
        format!(" ({} of all)", units::percent(total as f64 / (total as f64 + submitted as f64)))
    });
    let reasons: Vec<String> = lost
        .iter()
        .map(|(name, count)| format!("{} {}", name.replace('_', " "), units::count(*count as f64)))
        .collect();
    Some(format!("{} lost{share}: {}", plural(total, "sample"), reasons.join(", ")))
}

fn incomplete(context: &Context) -> Option<String> {
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    for row in &context.profile.rows {
        if let Some(cut) = &row.stack.cut {
            *reasons.entry(cut).or_default() += row.alloc.samples;
        }
    }
    let samples = context.whole.samples(Value::AllocSpace);
    let cut: u64 = reasons.values().sum();
    if cut == 0 {
        return None;
    }
    let mut reasons: Vec<(&str, u64)> = reasons.into_iter().collect();
    reasons.sort_by_key(|reason| std::cmp::Reverse(reason.1));
    let named: Vec<String> = reasons
        .iter()
        .take(MOST)
        .map(|(reason, count)| format!("{reason} ({})", units::count(*count as f64)))
        .collect();
    Some(format!(
        "{} of {} ({}) have an incomplete stack: {}",
        units::count(cut as f64),
        plural(samples, "sample"),
        units::percent(cut as f64 / samples.max(1) as f64),
        named.join(", ")
    ))
}

/// Processes whose samples cannot have come from what was counted, with the counters that tell why.
fn distant(context: &Context) -> Vec<String> {
    let remark = |(index, pool): (usize, Pool)| {
        let check = checked(context, index, &pool).filter(|check| check.alarming)?;
        let apart = check.z.map_or_else(
            || "differ where they must be equal".to_owned(),
            |z| format!("are {:.1} standard deviations apart", z.abs()),
        );
        Some(format!(
            "{}: estimate and exact count {apart}, which chance does not explain ({}); do not trust this process's figures",
            process_name(&context.profile.processes[index]),
            cause(context.profile)
        ))
    };
    pools(context).into_iter().enumerate().filter_map(remark).collect()
}

/// Counters of what keeps samples and counts apart.
fn cause(profile: &Profile) -> String {
    let moved: Vec<String> = profile
        .counters
        .iter()
        .filter(|(name, count)| **count > 0 && (name.starts_with(LOST_PREFIX) || *name == "records_unknown"))
        .map(|(name, count)| format!("{name} is {}", units::count(*count as f64)))
        .collect();
    if moved.is_empty() { "no loss was counted, so a probe or a counter is broken".into() } else { moved.join(", ") }
}

fn coverage(context: &Context) -> Vec<String> {
    if context.profile.time_windows {
        // Most of what is missing is between windows, for which figures are corrected; a note says so.
        return Vec::new();
    }
    let short = context.profile.processes.iter().filter(|process| process.coverage < 0.9995);
    let remark = |process| {
        let process: &crate::profile::model::Process = process;
        format!(
            "{}: its allocators were hooked for {} of its time in the recording; what it did before is missing",
            process_name(process),
            units::percent(process.coverage)
        )
    };
    short.map(remark).collect()
}
