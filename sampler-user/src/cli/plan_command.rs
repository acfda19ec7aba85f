//! `heapbpf plan`: what sampling intervals would observe in a program, and what they would cost it. Works from a saved
//! profile or from a short recording.

use std::path::Path;

use anyhow::Context;
use clap::Parser;
use heapbpf_attach::inline::service;
use heapbpf_kernel::object;
use heapbpf_profile::escape::{escaped, pretty_json};
use heapbpf_profile::model::{Process, Profile};
use heapbpf_profile::read;
use heapbpf_profile::report::subject;
use heapbpf_profile::units;
use heapbpf_profile::workload::workload;
use heapbpf_record::cost::measure;
use heapbpf_record::cost::probe_costs::ProbeCosts;
use heapbpf_record::output::{self, OutputError};
use heapbpf_record::plan::Hook;
use heapbpf_record::progress_line::during;
use heapbpf_record::remarks::say;
use heapbpf_statistics::plan::{ClassPlan, Costs};

use super::args::{Cli, PlanArgs};
use super::compare::print;
use super::error::PlanError;
use super::pictures::Picture;
use super::plan;
use super::profiles;
use super::record_args::TargetArgs;
use super::values::Interval;
use crate::run;
use crate::view::TableOptions;
use crate::view::plan::{CostsFrom, Preview, Priced, text};

/// CPU time of the probes on an allocation and its free, and that a sample adds, measured on heapbpf's development
/// machine (AMD EPYC, virtual); and that of inline hooks on the two calls, measured on another one (Intel Xeon,
/// virtual).
const ELSEWHERE: Costs = Costs { probe_ns: 1_050.0, inline_ns: 1.0, sample_ns: 2_000.0 };
/// Sampling interval R of the short recording, in bytes. It is small because the recording is short.
const LOOK_INTERVAL: u64 = 64 << 10;

/// Shows the plan. Returns the exit status.
///
/// # Errors
/// The profile or process does not exist, another recording counts the process, or a file cannot be written.
pub fn run(args: &PlanArgs) -> anyhow::Result<u8> {
    let Interval::Size(interval @ 1..) = args.interval else {
        return Err(PlanError::Usage("plan -i: the interval to compare with must be from 1 to 64MiB".into()).into());
    };
    if args.hook == Hook::Usdt {
        return Err(PlanError::Usage("plan --hook usdt: processes choose their interval themselves".into()).into());
    }
    let picture = args.plot.as_deref().map(|path| Picture::new(path, None, args.force)).transpose()?;
    let profile = match &args.profile {
        Some(path) if !args.target.is_some() => open(path)?,
        Some(_) => return Err(PlanError::Usage("plan takes a profile or running processes, not both".into()).into()),
        None => {
            let time = units::duration(args.duration);
            during(move || format!("recording for {time} to see what is allocated"), || look(args))?
        }
    };
    check_seen(&profile, &args.target)?;
    let priced = during(|| "measuring what hooks cost on this machine".into(), || priced(args));
    let workload = workload(&profile, priced.hooks_inline);
    let classes = ClassPlan::best(&workload, interval, heapbpf_record::sampling::size_classes::first_size_like);
    if let Some(path) = &args.classes {
        write_classes(path, args.force, &classes)?;
    }
    if let Some(picture) = &picture {
        picture.write(&heapbpf_plots::plan(&subject(&profile), &workload, priced.costs))?;
    }
    let preview = Preview::new(&profile, &workload, priced, &classes);
    print(&if args.json {
        pretty_json(&preview).context("cannot write the plan as JSON")?
    } else {
        text(&preview, TableOptions::of_output(args.color))
    })
}

/// Reads the profile to plan from. A number that is not the name of a file is most likely a process.
fn open(path: &Path) -> anyhow::Result<Profile> {
    let number = path.to_str().and_then(|name| name.parse::<u32>().ok());
    if let Some(pid) = number.filter(|_| !path.exists()) {
        let tip = format!("there is no file {}; to plan for process {pid}, use '--pid {pid}'", path.display());
        return Err(PlanError::Usage(tip).into());
    }
    Ok(profiles::open(path)?)
}

/// Checks that calls were seen. Where a plan is still possible, a line says whose calls it lacks.
fn check_seen(profile: &Profile, target: &TargetArgs) -> Result<(), PlanError> {
    let Some((process, is_plannable)) = unseen(profile, &target.pids) else { return Ok(()) };
    // A saved profile may be of another host, or of a process that has ended.
    let (counts, service) =
        if target.is_some() { ("counts", service::pointer_to(process.pid)) } else { ("counted", String::new()) };
    let Process { pid, comm, .. } = process;
    let what = format!("process {pid} ({comm}): another recording {counts} it from inside, so its calls were not seen");
    if is_plannable {
        say(escaped(&format!("this plan is incomplete: {what}{service}")));
        return Ok(());
    }
    Err(PlanError::Blocked(format!("no plan: {what}{service}; plan from a profile of that recording")))
}

/// A process whose calls another recording hid, if there is one, and whether a plan is possible all the same: the user
/// did not name it by its process ID (`pids`), and allocations of other processes were seen.
fn unseen<'a>(profile: &'a Profile, pids: &[u32]) -> Option<(&'a Process, bool)> {
    let unseen = || profile.processes.iter().filter(|process| process.was_unseen());
    let named = unseen().find(|process| pids.contains(&process.pid));
    let process = named.or_else(|| unseen().next())?;
    let is_seen = |index: usize| profile.processes.get(index).is_some_and(|process| !process.was_unseen());
    let sees_others = profile.rows.iter().any(|row| row.alloc.objects > 0.0 && is_seen(row.key.process));
    Some((process, named.is_none() && sees_others))
}

/// Returns what hooks and samples cost: the given values, or those measured on this machine, or those of others. The
/// user who plans need not be the one who records, so inline hooks count as possible wherever the machine allows them.
fn priced(args: &PlanArgs) -> Priced {
    let hooks_inline = args.hook != Hook::Probe && cfg!(target_arch = "x86_64");
    let given = |costs: Costs| Costs {
        probe_ns: args.probe_ns.unwrap_or(costs.probe_ns),
        inline_ns: args.inline_ns.unwrap_or(costs.inline_ns),
        sample_ns: args.sample_ns.unwrap_or(costs.sample_ns),
    };
    let of = |costs, from| Priced { costs: given(costs), from, inline_is_bound: false, hooks_inline };
    let are_all_given = [args.probe_ns, args.sample_ns].iter().all(Option::is_some);
    if are_all_given && (args.inline_ns.is_some() || !hooks_inline) {
        return of(ELSEWHERE, CostsFrom::User);
    }
    let measured = object::object()
        .context("built without the BPF programs")
        .and_then(|object| measure::known_or_measured(object, None));
    match measured {
        Ok(measured) => {
            let ProbeCosts { allocation_ns, free_ns, sample_ns } = measured.costs.in_programs();
            let inline_ns = measured.inline_pair_ns.unwrap_or(ELSEWHERE.inline_ns);
            let costs = Costs { probe_ns: allocation_ns + free_ns, inline_ns, sample_ns };
            let is_measured = args.inline_ns.or(measured.inline_pair_ns).is_some() || !hooks_inline;
            let inline_is_bound = measured.inline_is_bound && args.inline_ns.is_none();
            Priced { inline_is_bound, ..of(costs, if is_measured { CostsFrom::Machine } else { CostsFrom::Partly }) }
        }
        Err(error) => {
            log::info!("cannot measure what hooks cost: {error:#}");
            of(ELSEWHERE, CostsFrom::Elsewhere)
        }
    }
}

/// Makes a short recording of running processes. Its profile is written to a temporary directory, which is removed
/// afterwards.
fn look(args: &PlanArgs) -> anyhow::Result<Profile> {
    if !args.target.is_some() {
        let needed = "what should be planned for? a PROFILE, --pid PID, --all, --comm GLOB, --cgroup PATH or --container ID (see --help)";
        return Err(PlanError::Usage(needed.into()).into());
    }
    if !args.target.command.is_empty() {
        let refusal = "plan cannot start a command: record a profile of it, then plan from that";
        return Err(PlanError::Usage(refusal.into()).into());
    }
    let dir = tempfile::tempdir().context("cannot create a temporary directory")?;
    let file = dir.path().join("look.json");
    let mut options = Cli::parse_from(["heapbpf"]).record;
    options.target = args.target.clone();
    options.sampling.interval = Interval::Size(LOOK_INTERVAL);
    options.limits.hook = args.hook;
    options.duration = Some(args.duration);
    options.display.quiet = true;
    options.stacks.no_symbolize = true;
    options.output.outputs = vec![file.clone().into_os_string().into()];
    run::run(plan::plan(&options)?)?;
    Ok(read::open(&file)?)
}

fn write_classes(path: &Path, force: bool, classes: &ClassPlan) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(classes).context("cannot write the intervals as JSON")?;
    output::check_new_file(path, force)?;
    output::write_whole(path, force, |out| {
        out.write_all(&text).map_err(|source| OutputError::Io { path: path.to_path_buf(), source })
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use heapbpf_audit::Missing;
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn there_is_no_plan_for_calls_that_another_recording_hid() {
        let mut profile = testing::small();
        let found = |profile: &Profile, pids: &[u32]| unseen(profile, pids).map(|(process, plan)| (process.pid, plan));
        let [first, second] = [profile.processes[0].pid, profile.processes[1].pid];
        assert_eq!(found(&profile, &[first]), None);
        profile.processes[1].missing.push(Missing::unseen());
        assert_eq!(found(&profile, &[]), Some((second, true)), "the other process was seen");
        assert_eq!(found(&profile, &[first]), Some((second, true)));
        assert_eq!(found(&profile, &[first, second]), Some((second, false)), "the user named it");
        let target = TargetArgs { pids: vec![second], ..TargetArgs::default() };
        let error = check_seen(&profile, &target).unwrap_err();
        assert!(error.exit_status() == 1 && error.to_string().contains("another recording counts it"), "{error}");
        profile.rows.retain(|row| row.key.process == 1);
        assert_eq!(found(&profile, &[]), Some((second, false)), "nothing else was seen");
    }

    #[test]
    fn a_number_that_is_no_file_is_a_process() {
        let error = |name: &str| open(Path::new(name)).map(|_| ()).unwrap_err().to_string();
        let number = error("4294967295");
        assert!(number.contains("use '--pid 4294967295'"), "{number}");
        let file = error("/no/such/4294967295");
        assert!(file.starts_with("cannot read") && !file.contains("--pid"), "{file}");
    }
}
