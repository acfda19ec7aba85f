//! The answer at the top of a report about one process, after the totals and their error bars: where memory is used,
//! whether it grows, what was missed, and what to do next.

use std::collections::BTreeSet;

use super::chain::Call;
use super::stacks::{Group, groups, judged_groups};
use super::summary::{MOST_LINES, listed_in, missed_lines};
use super::suspects::{FEW_IN_USE, Suspect, SuspectFindings, Why, ages, find, holders, in_use, rate, without_suspects};
use super::{Context, FrameView, ReportOptions, plural};
use crate::estimates::Pool;
use crate::intern::NO_STACK;
use crate::model::{Criterion, Profile, Row};
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
/// Placeholder for a file that does not exist yet.
const NO_FILE: &str = "FILE";
/// With fewer samples, error bars are wide.
const FEW_SAMPLES: u64 = 30;
/// Number of samples in use that a suggested interval aims at.
const ENOUGH_SAMPLES: u64 = 256;
/// Share of unnamed stacks from which getting names is the first suggestion.
const UNNAMED: f64 = 0.1;

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

/// The file for suggested commands: the one that was read or written, or a placeholder.
pub(super) fn readable_file(context: &Context) -> String {
    let options = context.options;
    let readable = |(file, command): &&(String, String)| command == &format!("heapbpf report {file}");
    let written = || options.files.iter().find(readable).map(|(file, _)| file.clone());
    clip(options.source.clone().or_else(written).as_deref().unwrap_or(NO_FILE), context.width / 2)
}

/// A command to continue with.
fn next(context: &Context, groups: &[Group], suspects: &[Suspect]) -> Option<String> {
    let (profile, options) = (context.profile, context.options);
    let file = readable_file(context);
    let (first, file) = if file == NO_FILE { ("record with -o x.json, then ", "x.json") } else { ("", &*file) };
    let has_ages = first.is_empty() && (file.ends_with(".json") || file.ends_with(".json.gz"));
    let samples = context.whole.samples(context.sort).max(context.whole.samples(Value::AllocSpace));
    if profile.header.samples_known && profile.header.interval > 1 && (1..FEW_SAMPLES).contains(&samples) {
        return Some(format!("{first}heapbpf plan {file} (few samples: find a better interval)"));
    }
    if suspects.is_empty()
        && let Some(few) = few_in_use(context)
    {
        return Some(few);
    }
    let is_leaking = !suspects.is_empty() && !options.suspects && profile.header.live;
    // A leak comes first, unless nobody could tell where it is.
    let is_named = suspects.first().and_then(|first| first.stacks.first()).is_some_and(|it| !is_unnamed(context, it));
    let leak_first = is_leaking && is_named;
    if !leak_first && unnamed_share(context, groups) > UNNAMED {
        let is_missing = profile.modules.iter().any(|module| module.reason.is_some());
        return Some(if is_missing {
            "install the debug symbols named in the remarks below, then record again".into()
        } else {
            format!("{first}heapbpf report --symbolize {file} (many functions have no name)")
        });
    }
    if is_leaking {
        let suspects = "heapbpf report --suspects";
        return Some(if has_ages {
            format!("{suspects} {file}")
        } else {
            format!("record with -o x.json, then {suspects} x.json")
        });
    }
    let chain = groups.first()?.chain(context);
    match chain.first().map(|(call, _)| &call.name).filter(|name| is_plain(name)) {
        Some(function) => Some(format!("{first}heapbpf report --callers {function} {file} (who calls it?)")),
        None => options.brief.then(|| format!("{first}heapbpf report --details {file} (whole stacks)")),
    }
}

/// What to do about few samples in use, if they are few.
fn few_in_use(context: &Context) -> Option<String> {
    let header = &context.profile.header;
    let samples = context.whole.samples(Value::InuseSpace);
    let is_few = (1..FEW_IN_USE).contains(&samples) && header.samples_known && header.interval > 1;
    // The interval of Go's runtime is not ours to choose.
    let is_ours = !context.profile.rows.iter().any(|row| row.is_of_go_runtime());
    (is_few && is_ours && header.live && context.sort.needs_frees()).then(|| {
        let interval = match header.criterion {
            Criterion::Bytes => format!("-i {}", finer(header.interval, samples)),
            Criterion::Allocations | Criterion::SizeClass => "a smaller -i".to_owned(),
        };
        format!("only {} in use: try {interval} or record longer", plural(samples, "sample"))
    })
}

/// The interval, in bytes as `-i` takes them, with which so many samples would have been about enough: a power of two.
fn finer(interval: u64, samples: u64) -> String {
    let bytes = 1_u64 << (interval.saturating_mul(samples) / ENOUGH_SAMPLES).max(1).ilog2();
    match bytes.ilog2() {
        20.. => format!("{}MiB", bytes >> 20),
        10.. => format!("{}KiB", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Whether a name needs no quotes in a shell and has no special characters as a regular expression.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '.'))
}

/// Whether a stack's title has no name but may still get one through the build ID of its file.
fn is_unnamed(context: &Context, group: &Group) -> bool {
    let title = group.shown.frames.first().map(|at| &group.row.key.stack.frames[*at]);
    let file = title.filter(|title| title.function.is_none()).and_then(|title| title.module);
    file.and_then(|file| context.profile.modules.get(file)).is_some_and(|file| file.build_id.is_some())
}

/// Share of the sorted value in stacks that are unnamed.
fn unnamed_share(context: &Context, groups: &[Group]) -> f64 {
    let (mut all, mut unnamed) = (0.0, 0.0);
    for group in groups {
        let of = group.pool.total(context.sort);
        all += of;
        if is_unnamed(context, group) {
            unnamed += of;
        }
    }
    if all > 0.0 { unnamed / all } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::finer;

    #[test]
    fn suggested_intervals_are_powers_of_two_that_the_command_line_takes() {
        assert_eq!(finer(512 << 10, 4), "8KiB");
        assert_eq!(finer(512 << 10, 9), "16KiB");
        assert_eq!(finer(1 << 30, 1), "4MiB");
        assert_eq!((finer(4 << 10, 9).as_str(), finer(2, 1).as_str()), ("128", "1"));
        for samples in 1..10 {
            let bytes = crate::units::parse_size(&finer(64 << 10, samples)).expect("a size");
            assert!(bytes < 64 << 10 && bytes * 256 <= (64 << 10) * samples, "{samples}: {bytes}");
        }
    }
}
