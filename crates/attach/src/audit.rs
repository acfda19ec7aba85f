//! The audit of a file: what of its plan is hooked, or would be.

use std::collections::BTreeMap;

use heapbpf_audit::{AttachEntry, FileAudit, LinkKind, Missing};
use heapbpf_probes::{AllocatorFile, EndSeen, ReturnProbe};

/// Why a function is a risk without session links, and a conditional risk with them.
const MAY_SWITCH: &str = "it may call code that switches to another stack before it returns, and not all its return \
                          instructions can be found: a probe on its return address would crash the program";
/// What is unknown about a function that may throw and whose returns are not probed.
const RESULT_UNSEEN: &str = "it may throw, and its return instructions cannot be found: sampled calls count as \
                             successful, and whether their blocks are in use is unknown";

/// The audit of a file that is hooked with links of kind `link`. `frees` says whether freeing functions are hooked.
/// `refused` lists instructions (file offsets) where the kernel refuses a probe, with its error.
pub(super) fn file_audit(
    file: &str,
    plan: &AllocatorFile,
    link: LinkKind,
    frees: bool,
    refused: &BTreeMap<u64, String>,
) -> FileAudit {
    let mut missing = plan.missing.clone();
    let mut limits = plan.limits.clone();
    let mut attach = Vec::new();
    for site in plan.sites.iter().filter(|site| frees || site.return_needed) {
        let offset = site.site.offset;
        if let Some(error) = refused.get(&offset) {
            let why = format!("the kernel refuses a probe at {offset:#x} ({}): {error}", site.reason);
            missing.push(Missing::new(site.function.clone(), why));
            continue;
        }
        let end = site.end_seen(link == LinkKind::Session);
        match (end, site.return_probe) {
            _ if !site.return_needed => {}
            (EndSeen::Unhookable, _) => {
                let why = format!("{MAY_SWITCH}; it needs Linux 6.13, without --link multi or perf");
                missing.push(Missing::new(site.function.clone(), why));
                continue;
            }
            (EndSeen::Never, _) => limits.push(Missing::new(site.function.clone(), RESULT_UNSEEN)),
            (EndSeen::Returning, ReturnProbe::OneAtATime) => {
                limits.push(Missing::new(
                    site.function.clone(),
                    format!("{MAY_SWITCH} if another thread continued on that stack"),
                ));
            }
            _ => {}
        }
        attach.push(AttachEntry {
            file: file.to_owned(),
            allocator: plan.allocator.clone(),
            function: site.function.clone(),
            offset,
            kind: site.kind,
            // A session link also probes the return. Freeing functions do not need that, and some other functions do
            // not tolerate it.
            link: match link {
                LinkKind::Session if !site.return_needed || end != EndSeen::Returning => LinkKind::Multi,
                link => link,
            },
            reason: site.reason.clone(),
        });
    }
    FileAudit {
        file: file.to_owned(),
        allocator: plan.allocator.clone(),
        kind: plan.kind,
        build_id: plan.build_id.iter().map(|b| format!("{b:02x}")).collect(),
        attach,
        covered: plan.covered.clone(),
        missing,
        limits,
    }
}
