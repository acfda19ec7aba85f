//! `heapbpf doctor`: what the kernel, the targets and their allocators allow.

use anyhow::Context;
use heapbpf_attach::files::Sources;
use heapbpf_attach::hooks::Hooks;
use heapbpf_attach::inline::{crashes, forbidden};
use heapbpf_attach::rules;
use heapbpf_audit::Missing;
use heapbpf_host::process::select;
use heapbpf_host::{Host, limits};
use heapbpf_kernel::object;
use heapbpf_probes::Table;
use heapbpf_profile::escape::pretty_json;
use heapbpf_record::cost::measure;
use heapbpf_record::plan::PythonObjects;
use heapbpf_record::progress_line::during;
use heapbpf_symbols::debug_files;

use super::args::DoctorArgs;
use super::compare::print;
use super::error::PlanError;
use super::{allocators, plan, targets};
use crate::doctor::{Diagnosis, KernelSide, clean, command, hooking, processes};
use crate::view::TableOptions;

/// Examines the host and prints the result. Returns the exit status: 0 if nothing would be missed, 1 otherwise.
///
/// # Errors
/// A target cannot be examined, or the output cannot be written.
pub fn run(args: &DoctorArgs) -> anyhow::Result<u8> {
    if args.clean {
        return clean_processes(args);
    }
    if args.forget_crashes {
        return forget_crashes();
    }
    let _ = limits::raise();
    let forbidden = forbidden::rules().map_err(PlanError::from)?;
    plan::check_debug_dirs(&args.debug_dir)?;
    let custom = allocators::resolve(&args.target.allocators).map_err(PlanError::from)?;
    let targets = select(&targets::targets(&args.target)?).map_err(PlanError::from)?;
    let mut kernel = KernelSide::look();
    let no_inline = limits::forbid_inline_hooks();
    kernel.audit.checks.extend(hooking(no_inline, forbidden));
    let counts_inside = args.target.python_objects != PythonObjects::Never && no_inline.is_none();
    let rules = rules::of_this_kernel(kernel.loaded.as_ref().map(|(programs, _)| programs));
    let table = Table::new(&custom).with_objects(args.target.python_objects == PythonObjects::Always);
    let mut hooks = Hooks::new(rules, table, true);
    hooks.files.sources = Sources::AllocatorsOrAnnouncements;
    let mut debug_dirs = args.debug_dir.clone();
    debug_dirs.push(debug_files::DEFAULT_DIRECTORY.into());

    let mut audits = Vec::new();
    if !targets.is_empty() {
        let mut host = Host::snapshot().context("cannot read the list of processes")?;
        audits = processes(&targets, &mut host, &mut hooks, &debug_dirs, kernel.loaded.as_mut(), counts_inside);
    }
    if !args.target.command.is_empty() {
        audits.push(command(&args.target.command, &mut hooks, &debug_dirs, kernel.audit.link, counts_inside));
    }
    hooks.release_all();
    if let Some(reason) = hooks.files.misdescribed() {
        return Err(PlanError::Usage(format!("--alloc: {reason}")).into());
    }
    let unseen = custom.iter().filter(|it| !audits.is_empty() && !hooks.files.has_seen(|path| it.is_for(path)));
    let unseen = unseen.map(|it| Missing::new("--alloc", format!("no target mapped a file {}", it.file))).collect();
    let costs = match object::object() {
        // This binary has no BPF programs to measure. The kernel section has already reported that.
        None => None,
        Some(object) if args.measure => {
            let measured = during(|| "measuring what probes cost".into(), || measure::measured_anew(object, None));
            Some(measured.context("cannot measure what probes cost")?)
        }
        Some(object) => measure::known(object, None),
    };
    let found = Diagnosis::new(kernel.audit, audits).without(unseen).with_costs(costs);
    let text = if args.json {
        pretty_json(&found).context("cannot write the diagnosis as JSON")?
    } else {
        let TableOptions { width, color, .. } = TableOptions::of_output(args.color);
        crate::view::doctor::diagnosis(&found, width, color)
    };
    print(&text)?;
    Ok(u8::from(!found.ok))
}

/// Forgets the programs that crashed under inline hooks, and prints how many there were. Returns the exit status.
fn forget_crashes() -> anyhow::Result<u8> {
    let path = crashes::path();
    let known = crashes::forget(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    let programs = if known == 1 { "1 program that".to_owned() } else { format!("{known} programs that") };
    print(&format!("forgot {programs} crashed under inline hooks\n"))?;
    Ok(0)
}

/// Removes leftovers of inline hooks, and prints what was done. Returns the exit status: 0 if nothing remains.
fn clean_processes(args: &DoctorArgs) -> anyhow::Result<u8> {
    let target = &args.target;
    if target.comm.is_some() || target.cgroup.is_some() || !target.command.is_empty() {
        return Err(PlanError::Usage("--clean works on all processes, or on those named by --pid".into()).into());
    }
    let pids: &[u32] = if target.all { &[] } else { &target.pids };
    let mut cleaned = clean::clean(pids);
    if cleaned.lines.is_empty() {
        cleaned.lines.push("nothing to remove: no ended heapbpf has left inline hooks".into());
    }
    print(&(cleaned.lines.join("\n") + "\n"))?;
    Ok(u8::from(cleaned.something_stays))
}
