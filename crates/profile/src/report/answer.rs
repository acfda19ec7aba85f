//! The answer at the top of a report about one process, after the totals and their error bars: where memory is used,
//! whether it grows, what was missed, and what to do next.

use std::collections::BTreeSet;

use super::chain::Call;
use super::next_step::next;
use super::stacks::{Group, groups, judged_groups};
use super::summary::{MOST_LINES, listed_in, missed_lines};
use super::suspects::{Suspect, SuspectFindings, Why, ages, find, holders, in_use, rate, without_suspects};
use super::{Context, FrameView, ReportOptions, plural};
use crate::estimates::Pool;
use crate::intern::NO_STACK;
use crate::model::{Profile, Row};
use crate::naming::{FunctionKey, told_apart};
use crate::report::text::{Style, clip, clip_middle};
use crate::units;
use crate::value::Value;
use heapbpf_statistics::estimate::Estimate;
use indexmap::IndexMap;
use serde::{Serialize, Serializer};

/// Maximum number of places named; each needs at least this share.
const PLACES: usize = 3;
const LEAST_SHARE: f64 = 0.01;

/// Lines of the answer.
pub(super) fn lines(context: &Context) -> Vec<String> {
    let groups = groups(context);
    let places = places(context, &groups);
    let mut lines = if places.is_empty() { Vec::new() } else { listed_in(context, "where", places, MOST_LINES) };
    lines.extend(without_places(context, &groups));
    lines
}

/// Lines of the answer, without the line of the largest functions.
pub(super) fn without_places<'a>(context: &Context<'a>, groups: &[Group<'a>]) -> Vec<String> {
    let all = judged_groups(context);
    let found = find(context, &all);
    let mut lines = Vec::new();
    // The table of processes needs space, too.
    let most = if context.profile.number_of_targets() > 1 { 1 } else { MOST_LINES };
    if context.profile.header.live {
        lines.extend(context.titled("growing", &growth(context, &all, &found), Style::Plain, most));
    }
    lines.extend(missed_lines(context, most));
    if let Some(next) = next(context, groups, &found.suspects) {
        lines.extend(context.titled("next", &next, Style::Bold, most));
    }
    lines
}

/// The largest functions with their shares.
fn places<'a>(context: &Context<'a>, groups: &[Group<'a>]) -> Vec<(Style, String)> {
    let total = context.whole.total(context.sort);
    if total <= 0.0 {
        return Vec::new();
    }
    // The groups are sorted, so the first place found for a function is the one of its largest stack.
    let mut functions: IndexMap<FunctionKey, (Call, f64)> = IndexMap::new();
    for group in groups {
        let Some((call, _)) = group.chain(context).into_iter().next() else { continue };
        functions.entry(group.function(context)).or_insert((call, 0.0)).1 += group.pool.total(context.sort);
    }
    functions.sort_by(|_, a, _, b| b.1.total_cmp(&a.1));
    functions.truncate(PLACES);
    let names: Vec<_> = functions.iter().map(|(key, (call, _))| (key, call.name.as_str(), &call.place)).collect();
    let large = functions.values().zip(told_apart(&names)).filter(|((_, of), _)| of / total >= LEAST_SHARE);
    let text = |((Call { place, .. }, of), name): (&(Call, f64), String)| {
        let at = if place.is_empty() { String::new() } else { format!(" {place}") };
        format!("{} {}", clip_middle(&format!("{name}{at}"), context.width / 2), units::share(of / total))
    };
    large.map(|function| (Style::Plain, text(function))).collect()
}

/// What grows most, and why it is suspected.
fn growth<'a>(context: &Context<'a>, groups: &[Group<'a>], found: &SuspectFindings<'a>) -> String {
    if let [first, others @ ..] = found.suspects.as_slice() {
        let Growing { program, name, how_much, why, .. } = growing_of(context, groups, first);
        // Of several programs, the first question is which one grows.
        let is_only = program.is_empty() || context.profile.number_of_processes() == 1;
        let lead = if is_only { String::new() } else { clip(&program, context.width / 4) + ": " };
        let name = lead + &clip_middle(&name, context.width / 3);
        let more = match others.len() as u64 {
            0 => String::new(),
            more => format!("; and {}", plural(more, "other function")),
        };
        return format!("{name} {how_much}, {why}{more}");
    }
    if groups.iter().any(|group| !ages(group).is_empty()) {
        return without_suspects(context, groups, found, "nothing stands out");
    }
    if context.whole.samples(Value::InuseSpace) == 0 && context.profile.header.samples_known {
        return "no: no sampled block is in use".into();
    }
    "not known: only .json has the ages of blocks; compare two files with `heapbpf diff`".into()
}

/// A description of something that grows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Growing {
    /// Name of its program; empty if the stacks of all programs are put together.
    pub program: String,
    /// Name of the function, as it is shown.
    pub name: String,
    /// The function, without regard to what else grows. A page finds it by its full name.
    #[serde(rename = "full_name", serialize_with = "full_name")]
    pub function: FunctionKey<'static>,
    /// How fast it grows, with the ends of its interval, or how much is kept.
    pub how_much: String,
    /// Why it is suspected.
    pub why: String,
    /// Its growth in bytes per second; `None` if the profile does not contain it.
    #[serde(skip)]
    pub per_second: Option<Estimate>,
    /// Its bytes in use, if it was filled and does not grow any more.
    #[serde(skip)]
    pub full: Option<Estimate>,
    /// Indices of the processes whose memory it is.
    #[serde(skip)]
    pub processes: BTreeSet<usize>,
}

fn full_name<S: Serializer>(function: &FunctionKey, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&function.name)
}

/// What grows in a profile: its report's leak suspects, followed by what is full, at most `most` in all. `None` if the
/// profile cannot tell.
pub fn growing(profile: &Profile, confidence: f64, frames: FrameView, most: usize) -> Option<Vec<Growing>> {
    let options = ReportOptions { confidence, frames, ..ReportOptions::default() };
    let context = Context::new(profile, &options);
    let groups = judged_groups(&context);
    let found = find(&context, &groups);
    let has_ages = || groups.iter().any(|group| !ages(group).is_empty());
    let is_known = profile.header.live && (profile.header.growth_over.is_some() || has_ages());
    let growing = found.suspects.iter().map(|suspect| growing_of(&context, &groups, suspect));
    is_known.then(|| growing.chain(full_of(&context, &found)).take(most).collect())
}

/// Functions with stacks that were filled and have not changed since, unless they are suspected because of others.
fn full_of<'a>(context: &Context<'a>, found: &SuspectFindings<'a>) -> Vec<Growing> {
    let mut functions: IndexMap<(&str, FunctionKey), (String, Vec<&Group>, f64)> = IndexMap::new();
    for (group, seconds) in &found.full {
        let key = (&*group.name, group.function(context));
        if found.suspects.iter().any(|suspect| suspect.is_of(key.0, &key.1)) {
            continue;
        }
        let (_, stacks, since) = functions.entry(key).or_insert_with(|| {
            let first = group.chain(context).into_iter().next();
            (first.map_or_else(|| NO_STACK.into(), |(call, _)| call.name), Vec::new(), *seconds)
        });
        stacks.push(group);
        *since = since.min(*seconds);
    }
    let names: Vec<_> = functions.iter().map(|((of, key), (short, ..))| (key, short.as_str(), of)).collect();
    let names = told_apart(&names);
    let full = functions.into_iter().zip(names).map(|(((program, function), (_, stacks, since)), name)| {
        let mut pool = Pool::default();
        let rows: Vec<&Row> = stacks.iter().flat_map(|group| group.rows.iter().copied()).collect();
        rows.iter().for_each(|row| pool.add(row));
        pool.allow_for(&context.intervals);
        let held = units::bytes(stacks.iter().map(|group| in_use(group)).sum());
        Growing {
            program: program.to_owned(),
            name,
            function: function.into_owned(),
            how_much: format!("full at {held} since {}", units::seconds(since)),
            why: "nothing freed, and no longer growing".into(),
            per_second: None,
            full: Some(pool.estimate(context.profile, Value::InuseSpace, context.options.confidence)),
            processes: rows.iter().map(|row| row.key.process).collect(),
        }
    });
    full.collect()
}

fn growing_of<'a>(context: &Context<'a>, groups: &[Group<'a>], suspect: &Suspect<'a>) -> Growing {
    let how_much = match &suspect.grown {
        Some(grown) => {
            let (rate, bounds) = rate(grown);
            format!("{rate}{bounds}")
        }
        None => format!("keeps {}", units::bytes(suspect.inuse_bytes())),
    };
    let why = match suspect.why {
        Why::FreesNothing { .. } => {
            let where_it_grows = if suspect.frees_elsewhere(context, groups) { " where it grows" } else { "" };
            format!("nothing freed in {}{where_it_grows}", units::duration(context.profile.header.duration))
        }
        Why::Outlives { .. } => "some blocks far outlive the others".to_owned(),
        Why::Grows => format!("{} in use", units::bytes(suspect.inuse_bytes())),
    };
    let holders = holders(context, suspect).map_or_else(String::new, |holders| format!(", {holders}"));
    let rows = suspect.stacks.iter().flat_map(|group| &group.rows);
    Growing {
        program: suspect.stacks.first().map_or_else(String::new, |group| group.name.clone().into_owned()),
        name: suspect.name.clone(),
        function: suspect.function.clone().into_owned(),
        how_much,
        why: why + &holders,
        per_second: suspect.grown.map(|grown| grown.per_second),
        full: None,
        processes: rows.map(|row| row.key.process).collect(),
    }
}
