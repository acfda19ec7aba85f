//! What a recording is of: rules, processes and a command, checked before anything is attached.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;

use sampler_ebpf::abi::target_rule;
use sampler_ebpf::glob::NAME_BYTES;

use super::args::TargetArgs;
use super::plan::PlanError;
use crate::attach::CustomAllocator;
use crate::attach::libraries::find_program;
use crate::host::cgroup::Cgroup;
use crate::host::process::{CommGlob, ProcessInfo, Target};

/// What is profiled.
#[derive(Debug)]
pub struct Targets {
    /// Rules and names, for processes present and future.
    pub rules: Vec<Target>,
    /// Processes that run already.
    pub running: Vec<ProcessInfo>,
    /// A command to be started.
    pub command: Vec<OsString>,
    /// Whether children of targets are targets.
    pub follow: bool,
    /// Allocators that the user describes.
    pub allocators: Vec<CustomAllocator>,
}

impl Targets {
    /// Whether every target is named: then probes are put into these processes only.
    pub fn are_named(&self) -> bool {
        self.rules.iter().all(|rule| matches!(rule, Target::Pid(_)))
    }
}

pub(super) type Rules = (Vec<Target>, [u8; NAME_BYTES], Option<Cgroup>);

pub(super) fn rules(args: &TargetArgs) -> Result<Rules, PlanError> {
    let mut rules: Vec<Target> = args.pids.iter().map(|pid| Target::Pid(*pid)).collect();
    let mut pattern = [0; NAME_BYTES];
    if let Some(text) = &args.comm {
        if text.is_empty() || text.len() > NAME_BYTES || text.contains(['[', ']', '{', '}', '\0']) {
            return Err(PlanError::Usage(format!(
                "--comm {text}: a pattern of 1 to {NAME_BYTES} bytes with `*` and `?` is needed (names have at most 15)"
            )));
        }
        pattern[..text.len()].copy_from_slice(text.as_bytes());
        let glob = CommGlob::new(text).map_err(|error| PlanError::Usage(format!("--comm {text}: {error}")))?;
        rules.push(Target::Comm(glob));
    }
    let mut cgroup = None;
    if let Some(path) = &args.cgroup {
        let found = Cgroup::find(&path.to_string_lossy())?;
        rules.push(Target::Cgroup(found.clone()));
        cgroup = Some(found);
    }
    if args.all {
        if !rules.is_empty() || !args.command.is_empty() {
            return Err(PlanError::Usage("--all is every process already: leave the other targets out".into()));
        }
        rules.push(Target::All);
    }
    Ok((rules, pattern, cgroup))
}

/// Rules and names of the targets; none if there is a command only, or nothing.
///
/// # Errors
/// They do not fit together, or a cgroup is not there.
pub fn targets(args: &TargetArgs) -> Result<Vec<Target>, PlanError> {
    rules(args).map(|(rules, _, _)| rules)
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

/// Depth below the root of the hierarchy.
pub(super) fn level_of(cgroup: &Cgroup) -> u64 {
    cgroup.path.split('/').filter(|part| !part.is_empty()).count() as u64
}

/// Whether a command can be started at all, before anything is attached for it.
pub(super) fn check_program(program: &OsStr) -> Result<(), PlanError> {
    let name = program.to_string_lossy();
    let path = find_program(program).ok_or_else(|| PlanError::Blocked(format!("there is no command {name}")))?;
    let executable = path.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    if executable { Ok(()) } else { Err(PlanError::Blocked(format!("{name} cannot be executed: no permission"))) }
}
