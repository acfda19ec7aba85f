//! The targets of a recording: rules, processes and a command, checked before anything is attached.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;

use heapbpf_attach::libraries::find_program;
use heapbpf_host::cgroup::Cgroup;
use heapbpf_host::process::{CommGlob, Target};
use heapbpf_record::plan::Targets;
use sampler_ebpf::abi::target_rule;
use sampler_ebpf::glob::NAME_BYTES;

use super::error::PlanError;
use super::record_args::TargetArgs;

/// The target rules, and their values for the BPF programs.
pub(super) struct Rules {
    /// The rules.
    pub(super) targets: Vec<Target>,
    /// The pattern of `--comm`, in the form that the BPF programs use.
    pub(super) comm_pattern: [u8; NAME_BYTES],
    /// The cgroup of `--cgroup`.
    pub(super) cgroup: Option<Cgroup>,
}

pub(super) fn rules(args: &TargetArgs) -> Result<Rules, PlanError> {
    let mut rules: Vec<Target> = args.pids.iter().map(|pid| Target::Pid(*pid)).collect();
    let mut pattern = [0; NAME_BYTES];
    if let Some(text) = &args.comm {
        if text.is_empty() || text.len() > NAME_BYTES || text.contains(['[', ']', '{', '}', '\0']) {
            return Err(PlanError::Usage(format!(
                "--comm {text}: the pattern must have 1 to {NAME_BYTES} bytes; only `*` and `?` are special (names have at most 15)"
            )));
        }
        pattern[..text.len()].copy_from_slice(text.as_bytes());
        let glob = CommGlob::new(text).map_err(|error| PlanError::Usage(format!("--comm {text}: {error}")))?;
        rules.push(Target::Comm(glob));
    }
    let mut cgroup = None;
    let named = args.cgroup.as_ref().map(|path| Cgroup::find(&path.to_string_lossy()));
    if let Some(found) = named.or_else(|| args.container.as_deref().map(Cgroup::of_container)).transpose()? {
        rules.push(Target::Cgroup(found.clone()));
        cgroup = Some(found);
    }
    if args.all {
        rules.push(Target::All);
    }
    Ok(Rules { targets: rules, comm_pattern: pattern, cgroup })
}

/// Returns the target rules. Empty if there is only a command, or no target.
///
/// # Errors
/// The rules contradict each other, or a cgroup does not exist.
pub fn targets(args: &TargetArgs) -> Result<Vec<Target>, PlanError> {
    rules(args).map(|rules| rules.targets)
}

pub(super) fn target_rules(targets: &Targets) -> u32 {
    targets.rules.iter().fold(0, |bits, rule| {
        bits | match rule {
            Target::Pid(_) => 0,
            Target::All => target_rule::ALL,
            Target::Comm(_) => target_rule::COMM,
            Target::Cgroup(_) => target_rule::CGROUP,
        }
    })
}

/// Depth of the cgroup below the root of the hierarchy.
pub(super) fn level_of(cgroup: &Cgroup) -> u64 {
    cgroup.path.split('/').filter(|part| !part.is_empty()).count() as u64
}

/// Checks that a command can be started, before anything is attached for it.
pub(super) fn check_program(program: &OsStr) -> Result<(), PlanError> {
    let name = program.to_string_lossy();
    let path = find_program(program).ok_or_else(|| PlanError::NoCommand(name.clone().into_owned()))?;
    let executable = path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    if executable { Ok(()) } else { Err(PlanError::NotExecutable(name.into_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_target_can_be_combined_with_every_other() {
        let args = TargetArgs {
            pids: vec![7, 8],
            all: true,
            comm: Some("a*".into()),
            command: vec!["true".into()],
            ..TargetArgs::default()
        };
        let found = rules(&args).unwrap();
        let targets = Targets {
            rules: found.targets,
            running: Vec::new(),
            command: args.command,
            follow: true,
            from_first_call: false,
            allocators: Vec::new(),
            objects: heapbpf_record::plan::PythonObjects::Inline,
        };
        assert_eq!(target_rules(&targets), target_rule::ALL | target_rule::COMM);
        assert!(targets.name(7) && targets.name(8) && !targets.name(9));
        assert!(targets.have_changing_members() && !targets.are_named());
    }
}
