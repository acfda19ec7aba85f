//! The advice at the end of a report's answer: which command, or which recording, to continue with.

use super::stacks::Group;
use super::suspects::{FEW_IN_USE, Suspect};
use super::{Context, plural};
use crate::model::Criterion;
use crate::report::text::clip;
use crate::value::Value;

/// Placeholder for a file that does not exist yet.
const NO_FILE: &str = "FILE";
/// With fewer samples, error bars are wide.
const FEW_SAMPLES: u64 = 30;
/// Number of samples in use that a suggested interval aims at.
const ENOUGH_SAMPLES: u64 = 256;
/// Share of unnamed stacks from which getting names is the first suggestion.
const UNNAMED: f64 = 0.1;

/// The file for suggested commands: the one that was read or written, or a placeholder.
pub(super) fn readable_file(context: &Context) -> String {
    let options = context.options;
    let readable = |(file, command): &&(String, String)| command == &format!("heapbpf report {file}");
    let written = || options.files.iter().find(readable).map(|(file, _)| file.clone());
    clip(options.source.clone().or_else(written).as_deref().unwrap_or(NO_FILE), context.width / 2)
}

/// A command to continue with.
pub(super) fn next(context: &Context, groups: &[Group], suspects: &[Suspect]) -> Option<String> {
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
