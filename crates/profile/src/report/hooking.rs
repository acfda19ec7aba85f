//! How the calls of processes were counted, and why inline hooks were not used.

use std::collections::BTreeMap;

use super::{Context, plural};
use crate::group::process_name;
use crate::model::{Process, Profile};
use crate::report::text::clip;
use heapbpf_audit::Hook;

/// Maximum number of reasons, maximum number of processes named for each, and width of a name in columns.
const MOST_REASONS: usize = 5;
const MOST_NAMED: usize = 3;
const NAME: usize = 30;

/// Lines of the section. Empty if nothing is known, or if the only process was hooked inline, which is shown with its
/// name.
pub(super) fn section(context: &Context) -> Vec<String> {
    let profile = context.profile;
    let mut ways = BTreeMap::<&str, u64>::new();
    each(profile).for_each(|process| *ways.entry(way(process)).or_default() += process.count());
    let is_one_inline = profile.number_of_processes() == 1 && profile.processes[0].hook == Some(Hook::Inline);
    if is_one_inline || profile.processes.iter().all(|process| process.hook.is_none()) {
        return Vec::new();
    }
    let mut lines = vec![context.heading("How calls were counted")];
    lines.extend(
        most_first(ways, |number| *number).map(|(way, number)| format!("  {way}: {}", plural(number, "process"))),
    );
    let (refusals, more) = refusals(profile);
    lines.extend(refusals.iter().flat_map(|text| context.marked(text)));
    lines.extend((more > 0).then(|| format!("    and for {}", plural(more as u64, "more reason"))));
    lines
}

/// Why processes were not hooked inline, a line for each reason; and the number of further reasons.
pub(super) fn refusals(profile: &Profile) -> (Vec<String>, usize) {
    let mut reasons = BTreeMap::<&str, (u64, Vec<&Process>)>::new();
    for process in each(profile) {
        let Some(why) = &process.not_inline else { continue };
        let (number, some) = reasons.entry(why).or_default();
        *number += process.count();
        some.extend((some.len() < MOST_NAMED).then_some(process));
    }
    let more = reasons.len().saturating_sub(MOST_REASONS);
    let text = |(why, (number, some)): (&str, (u64, Vec<&Process>))| {
        let were = if number == 1 { "was" } else { "were" };
        let mut names: Vec<String> = some.iter().map(|process| clip(&process_name(process), NAME)).collect();
        names.extend((number > names.len() as u64).then(|| "…".to_owned()));
        format!("{} {were} not counted from inside: {why} ({})", plural(number, "process"), names.join(", "))
    };
    (most_first(reasons, |reason| reason.0).take(MOST_REASONS).map(text).collect(), more)
}

/// All processes, including those whose rows were merged.
fn each(profile: &Profile) -> impl Iterator<Item = &Process> {
    profile.processes.iter().flat_map(|process| {
        let itself = process.members.is_empty().then_some(process);
        itself.into_iter().chain(process.members.iter().map(|member| &member.process))
    })
}

/// How the calls of a process were counted.
fn way(process: &Process) -> &'static str {
    match (process.hook, process.own_links) {
        (Some(Hook::Inline), _) => "by inline hooks, from inside",
        (Some(Hook::Usdt), _) => "by their own samples (USDT)",
        (Some(Hook::GoRuntime), _) => "by Go's runtime",
        (Some(Hook::Probe), Some(true)) => "by probes of their own",
        // If processes are to be hooked inline, no link serves all of them.
        (Some(Hook::Probe), Some(false)) if process.not_inline.is_none() => "by probes that serve every process",
        (Some(Hook::Probe), None) => "by probes",
        (Some(Hook::Probe), Some(false)) | (None, _) => "not counted",
    }
}

fn most_first<T>(groups: BTreeMap<&str, T>, number: impl Fn(&T) -> u64) -> impl Iterator<Item = (&str, T)> {
    let mut groups = Vec::from_iter(groups);
    groups.sort_by_key(|(_, group)| std::cmp::Reverse(number(group)));
    groups.into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ReportOptions, report};
    use crate::testing;

    fn lines(profile: &Profile) -> Vec<String> {
        section(&Context::new(profile, &ReportOptions { width: 200, ..ReportOptions::default() }))
    }

    #[test]
    fn reasons_are_grouped_and_those_of_most_processes_come_first() {
        let mut profile = testing::small();
        let refused = |pid, why: &str| Process {
            pid,
            comm: "x".into(),
            hook: Some(Hook::Probe),
            own_links: Some(pid % 2 == 0),
            not_inline: Some(why.into()),
            ..Process::default()
        };
        profile.processes.extend((10..15).map(|pid| refused(pid, "it is traced")));
        profile.processes.extend((20..26).map(|pid| refused(pid, &format!("reason {pid}"))));
        let found = lines(&profile);
        assert_eq!(
            found[..6],
            [
                "How calls were counted",
                "  by probes of their own: 7 processes",
                "  not counted: 5 processes",
                "  by inline hooks, from inside: 1 process",
                "  ! 5 processes were not counted from inside: it is traced (x (10), x (11), x (12), …)",
                "  ! 1 process was not counted from inside: it runs with shadow stacks (worker \"x\" (4300))",
            ]
        );
        assert_eq!((found.len(), &*found[9]), (10, "    and for 3 more reasons"));
        let together = lines(&crate::programs::put_together(&profile, false));
        assert_eq!(together, found, "processes of one program are told apart");
    }

    #[test]
    fn one_process_that_is_hooked_inline_needs_no_line() {
        let profile = testing::small();
        assert_eq!(lines(&profile.only_process(0)), [""; 0]);
        for brief in [false, true] {
            let text = report(&profile.only_process(1), &ReportOptions { brief, ..ReportOptions::default() });
            let remark = "! 1 process was not counted from inside: it runs with shadow stacks (worker \"x\" (4300))";
            assert!(text.contains(remark), "{text}");
        }
        let mut unknown = testing::small();
        unknown.processes.iter_mut().for_each(|process| process.hook = None);
        assert_eq!(lines(&unknown), [""; 0]);
    }
}
