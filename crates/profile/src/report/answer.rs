//! The answer at the head of a report of one process, after how much there is and how sure that is: where, growing or not, what was
//! missed, and what to do next.

use super::chain;
use super::stacks::{Group, groups};
use super::summary::{given_up, listed_in};
use super::suspects::{Growing, Suspect, ages, in_use, only_growing, suspects};
use super::{Context, plural};
use crate::model::Profile;
use crate::report::text::{Style, clip, wrap};
use crate::units;
use crate::value::Value;
use heapbpf_audit::Missing;

/// Places that are named, if they have at least this share.
const PLACES: usize = 3;
const LEAST_SHARE: f64 = 0.01;
/// Fewer samples have wide error bars.
const FEW_SAMPLES: u64 = 30;
/// Share of stacks without names from which on names come first.
const UNNAMED: f64 = 0.1;
/// What remarks say of calls that are in no figure.
const IS_MISSING: &str = "is missing";
/// Columns of a line's title.
const TITLE: usize = 13;

/// Lines of the answer.
pub(super) fn lines(context: &Context) -> Vec<String> {
    let groups = groups(context);
    let (suspects, judged) = suspects(&groups);
    let growing = only_growing(context, &groups);
    let mut lines = Vec::new();
    let places = places(context, &groups);
    if !places.is_empty() {
        lines.extend(listed_in(context, "where", places, 2));
    }
    if context.profile.header.live {
        lines.extend(said(context, "growing", &growth(context, &groups, &suspects, judged, &growing), Style::Plain));
    }
    let mut missed = given_up(context);
    let not_hooked =
        context.profile.processes.iter().flat_map(|process| &process.missing).map(|missing| &*missing.what);
    // That has been named already.
    let not_hooked: Vec<&str> = not_hooked.filter(|what| *what != Missing::UNSEEN).collect();
    if let [first, rest @ ..] = not_hooked.as_slice() {
        let more = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        missed.push(format!("{first}{more} (heapbpf doctor)"));
    }
    let told = context.profile.notes.iter().filter(|note| note.contains(IS_MISSING)).count() as u64;
    if told > 0 {
        let say = if told == 1 { "says" } else { "say" };
        missed.push(format!("what {} below {say}", plural(told, "remark")));
    }
    if missed.is_empty() {
        lines.extend(said(context, "missed", "nothing", Style::Dim));
    } else {
        lines.extend(listed_in(context, "missed", missed.into_iter().map(|text| (Style::Warning, text)).collect(), 1));
    }
    if let Some(next) = next(context, &groups, !suspects.is_empty(), !growing.is_empty()) {
        lines.extend(said(context, "next", &next, Style::Bold));
    }
    lines
}

/// A title and a text in one line.
fn said(context: &Context, title: &str, text: &str, style: Style) -> Vec<String> {
    let lines = wrap(text, context.width - TITLE);
    let first = lines.first().map_or("", String::as_str);
    let first = if lines.len() > 1 { clip(&format!("{first} …"), context.width - TITLE) } else { first.to_owned() };
    vec![format!("  {title:<0$} {1}", TITLE - 3, context.paint(style, &first))]
}

/// The innermost functions of the largest stacks, with their shares.
fn places(context: &Context, groups: &[Group]) -> Vec<(Style, String)> {
    let total = context.whole.total(context.sort);
    let place = |group: &Group| {
        let share = group.pool.total(context.sort) / total;
        let chain = group.chain(context);
        let (call, _) = chain.first()?;
        let at = if call.place.is_empty() { String::new() } else { format!(" {}", call.place) };
        let name = clip(&format!("{}{at}", call.name), context.width / 2);
        (share >= LEAST_SHARE).then(|| (Style::Plain, format!("{name} {}", units::share(share))))
    };
    if total > 0.0 { groups.iter().take(PLACES).filter_map(place).collect() } else { Vec::new() }
}

fn growth(context: &Context, groups: &[Group], suspects: &[Suspect], judged: u64, growing: &[Growing]) -> String {
    let bytes = |groups: &mut dyn Iterator<Item = &Group>| units::bytes(groups.map(in_use).sum());
    if !suspects.is_empty() {
        let held = bytes(&mut suspects.iter().map(|suspect| suspect.group));
        let (number, verb) = (suspects.len() as u64, if suspects.len() == 1 { "keeps" } else { "keep" });
        return format!("likely: {} {verb} blocks far beyond their usual ages ({held})", plural(number, "stack"));
    }
    if !growing.is_empty() {
        let held = bytes(&mut growing.iter().map(|growing| growing.group));
        let (number, verb) = (growing.len() as u64, if growing.len() == 1 { "has" } else { "have" });
        return format!("{} {verb} freed nothing yet ({held}): a leak, or a cache that fills", plural(number, "stack"));
    }
    if groups.iter().any(|group| !ages(group).is_empty()) {
        return format!("nothing stands out ({} judged)", plural(judged, "stack"));
    }
    if context.whole.samples(Value::InuseSpace) == 0 && context.profile.header.samples_known {
        return "no: nothing that was sampled is in use".into();
    }
    "not known: only .json has ages of blocks; `heapbpf diff` compares two files".into()
}

/// A command that leads on from here.
fn next(context: &Context, groups: &[Group], suspects: bool, growing: bool) -> Option<String> {
    let (profile, options) = (context.profile, context.options);
    let readable = |(file, command): &&(String, String)| command == &format!("heapbpf report {file}");
    let written = || options.files.iter().find(readable).map(|(file, _)| file.clone());
    let file = options.source.clone().or_else(written);
    // If files were written, but none of these, there is none that has them.
    let has_ages = |file: &String| file.ends_with(".json") || file.ends_with(".json.gz");
    let has_ages = file.as_ref().map_or(options.files.is_empty(), has_ages);
    let file = clip(file.as_deref().unwrap_or("FILE"), context.width / 2);
    let samples = context.whole.samples(context.sort).max(context.whole.samples(Value::AllocSpace));
    if profile.header.samples_known && profile.header.interval > 1 && (1..FEW_SAMPLES).contains(&samples) {
        return Some(format!("heapbpf plan {file} (few samples: which interval shows more?)"));
    }
    if unnamed_share(profile, context.sort) > UNNAMED {
        let is_missing = profile.modules.iter().any(|module| module.reason.is_some());
        return Some(if is_missing {
            "install the debug symbols that the remarks below name, and record again".into()
        } else {
            format!("heapbpf report --symbolize {file} (many functions have no name)")
        });
    }
    if (suspects || growing) && !options.suspects && profile.header.live {
        return Some(if has_ages {
            format!("heapbpf report --suspects {file}")
        } else {
            "record with -o x.json, then heapbpf report --suspects x.json".into()
        });
    }
    let chain = groups.first()?.chain(context);
    let function = chain.first().map(|(call, _)| call.name.clone()).filter(|name| is_plain(name))?;
    Some(format!("heapbpf report --callers {function} {file} (who calls it?)"))
}

/// Whether a name needs no quotes in a shell, and means itself in an expression.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
}

/// Share of a value whose innermost function of the program has no name.
fn unnamed_share(profile: &Profile, value: Value) -> f64 {
    let (mut all, mut unnamed) = (0.0, 0.0);
    for row in &profile.rows {
        let stack = &row.key.stack;
        let of = value.of(row);
        all += of;
        if stack.frames.get(chain::allocator_frames(stack)).is_some_and(|frame| frame.function.is_none()) {
            unnamed += of;
        }
    }
    if all > 0.0 { unnamed / all } else { 0.0 }
}
