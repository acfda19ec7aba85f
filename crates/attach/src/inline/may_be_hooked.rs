//! May a process be hooked inline? Every reason why not. An attempt (`preparation`) and a preview (`preview`) check:
//! did its program die of hooks before (`crashes`), can its allocator be patched (`known`), do old hooks stay
//! (`left`), can it be stopped (`heapbpf_remote::Target`), does the administrator forbid it (`forbidden`), is its code
//! in one place and as in its file (`plan`), does it have space (`limits`).

use std::borrow::Cow;
use std::io;
use std::time::Duration;

use heapbpf_inline::ForeignBlob;
use heapbpf_kernel::KernelError;
use heapbpf_probes::AttachError;
use heapbpf_remote::{Busy, Error as Remote, PlanError, Refusal};

use super::attempts::SPARED_FOR;

/// A pause after which a loader has most likely mapped all of a file's code.
const MAPPED_WITHIN: Duration = Duration::from_millis(200);

/// Why a process is not hooked inline.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// Inline hooks are x86-64 code.
    #[error("inline hooks need an x86-64 machine")]
    Machine,
    /// The allocator cannot be hooked.
    #[error(transparent)]
    Allocator(#[from] AttachError),
    /// The process must not be stopped.
    #[error(transparent)]
    Target(#[from] heapbpf_remote::Refusal),
    /// Hooking failed.
    #[error(transparent)]
    Hook(#[from] heapbpf_remote::Error),
    /// The plan does not fit the process.
    #[error(transparent)]
    Place(#[from] PlanError),
    /// The allocator's functions cannot be patched.
    #[error("{0}")]
    Plan(String),
    /// No executable mapping: the process has just executed a program whose loader has not mapped the file yet, or it
    /// has unloaded the file.
    #[error("it no longer maps the allocator's file")]
    Unmapped,
    /// Several executable mappings that are not adjacent.
    #[error("the allocator's code is not mapped in one piece")]
    Mappings,
    /// Pages of such code are not replaced, and it stays as it is.
    #[error("the allocator's code {0}")]
    Text(&'static str),
    /// The same, but its loader, or a tool that patches it, may be about to change that.
    #[error("the allocator's code is writable, so it may change while it is hooked")]
    Writable,
    /// There is no space.
    #[error("there is no free address range within 2 GiB of the allocator's code")]
    NoSpace,
    /// Code of earlier recordings stays mapped, but was made for other settings or another allocator.
    #[error(
        "it has hook code of {0} earlier recordings mapped, none of which fits these settings; restart it to hook it \
         inline"
    )]
    Full(usize),
    /// The file and the process differ.
    #[error("the allocator's file has changed since it was mapped")]
    Changed,
    /// Another tool's patch.
    #[error("its code at {0:#x} differs from the allocator's file: another tool has patched it in memory")]
    Patched(u64),
    /// Another recording's hooks.
    #[error("another recording counts it from inside; its calls are not counted until that recording ends")]
    Hooked,
    /// What was mapped for us looked abandoned, because it was not locked yet.
    #[error("another heapbpf is removing old inline hooks from it")]
    Claimed,
    /// Hooks that a killed heapbpf left and that cannot be removed.
    #[error(
        "a killed heapbpf left inline hooks in it, which are not touched: {0}; its calls are not counted until it is \
         restarted"
    )]
    Left(ForeignBlob),
    /// The same, but they could not be removed yet.
    #[error("a killed heapbpf left inline hooks in it that could not be removed; its calls are not counted")]
    Stays,
    /// The same, and they can never be removed, for example because the kernel refuses to change the mappings.
    #[error(
        "old inline hooks cannot be removed from it, because its mappings are sealed (mseal) or another tool has \
         changed its code; its calls are not counted until it is restarted"
    )]
    Sealed,
    /// The same, and they must be removed first.
    #[error("a killed heapbpf left inline hooks in it; the next recording or heapbpf doctor --clean removes them")]
    Abandoned,
    /// Mappings that we add count against the process's limits.
    #[error("it has only {left} of {allowed} {name} left, so hooking might make its own requests fail")]
    Limit {
        /// What the limit is on.
        name: &'static str,
        /// How much of it is left.
        left: u64,
        /// How much is allowed.
        allowed: u64,
    },
    /// Our mappings would be locked in memory, and its own replaced code would be unlocked.
    #[error("it locks its memory (mlock), and replaced code would not be locked")]
    LocksMemory,
    /// Our readable and writable mappings would be executable as well.
    #[error("all its memory is executable (personality READ_IMPLIES_EXEC)")]
    ExecutesAll,
    /// A translator reads its code once and executes its own version of it.
    #[error("{0} executes its code by translation, and hooks would crash it")]
    Translated(&'static str),
    /// A rule of the host's administrator forbids it.
    #[error("{path}, line {line}, forbids it: {rule}")]
    Forbidden {
        /// The file with the rule.
        path: &'static str,
        /// The line of the rule.
        line: usize,
        /// The rule.
        rule: String,
    },
    /// The first process of the host. The host stops without it.
    #[error("it is the first process of the host (PID 1), which never gets inline hooks")]
    First,
    /// The program died of inline hooks before.
    #[error("it died of inline hooks before: {0} (heapbpf doctor --forget-crashes allows hooking it again)")]
    Crashed(String),
    /// Another process died of inline hooks in this recording.
    #[error("inline hooks are removed from all processes: {0}")]
    Tripped(String),
    /// The rules cannot be used. Nothing is recorded then.
    #[error("{0}")]
    Rules(String),
    /// The process has exited.
    #[error("it has ended")]
    Ended,
    /// Each allocator has its own counts, and the number of allocators is limited.
    #[error("it has more allocators than inline hooks can count")]
    Allocators,
    /// The set of sampled blocks is too small.
    #[error("probes sampled more of its blocks than inline hooks can take over")]
    Blocks,
    /// The kernel refuses a link or a site.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// Something cannot be read or written.
    #[error("{what} could not be read or written: {}", plainly(source))]
    Read {
        /// What.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// The error of a read or a write in plain words.
fn plainly(source: &io::Error) -> Cow<'static, str> {
    match (source.kind(), source.raw_os_error()) {
        (io::ErrorKind::UnexpectedEof, _) => {
            "it is gone (the process has ended or executed another program, or the file was truncated)".into()
        }
        (_, Some(libc::EIO)) => "a part of it is gone (the process has unmapped it, or a disk failed)".into(),
        _ => source.to_string().into(),
    }
}

/// Whether memory changed while it was read, as it does while a loader maps a library or unloads one.
fn has_changed(source: &io::Error) -> bool {
    source.kind() == io::ErrorKind::UnexpectedEof || source.raw_os_error() == Some(libc::EIO)
}

impl Refused {
    /// Whether another heapbpf's inline hooks are in the process, so that probes see nothing of it.
    pub const fn blinds_probes(&self) -> bool {
        matches!(self, Self::Hooked | Self::Left(_) | Self::Stays | Self::Sealed)
    }

    /// Whether another attempt may succeed after a pause. While a loader is mapping a file, its code looks as if it
    /// were in pieces, but not for long. A thread that writes to a full pipe may do so as long as it runs.
    pub fn may_pass_in(&self, pause: Duration) -> bool {
        match self {
            Self::Mappings | Self::Writable => pause <= MAPPED_WITHIN,
            Self::Read { source, .. } if has_changed(source) => pause <= MAPPED_WITHIN,
            Self::Hook(Remote::Busy { why: Busy::InCall, .. }) => pause <= SPARED_FOR,
            _ => self.may_pass(),
        }
    }

    /// Whether another attempt may succeed, because a thread did not get a CPU in time, or the process was changing.
    pub fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Hook(Remote::Busy { .. } | Remote::Refused(Refusal::SharedMemory(_) | Refusal::Heapbpf(_)))
                | Self::Target(Refusal::SharedMemory(_) | Refusal::Heapbpf(_))
                | Self::Place(PlanError::Occupied(_) | PlanError::NotText(_))
                | Self::Unmapped
                | Self::Claimed
                | Self::Stays
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_within_moments_is_tried_again_and_what_stays_is_not() {
        let twice = |refusal: fn() -> Refusal| [Refused::Target(refusal()), Refused::Hook(Remote::Refused(refusal()))];
        let passing = twice(|| Refusal::Heapbpf(7)).into_iter().chain([Refused::Place(PlanError::Occupied(1..2))]);
        passing.for_each(|refused| assert!(refused.may_pass_in(Duration::from_secs(4)), "{refused}"));
        let staying = [Refused::Text("is mapped shared"), Refused::Place(PlanError::Shape("all that is replaced"))];
        let staying = twice(|| Refusal::Traced(7)).into_iter().chain(twice(|| Refusal::Frozen)).chain(staying);
        staying.for_each(|refused| assert!(!refused.may_pass_in(Duration::from_millis(10)), "{refused}"));
        assert!(Refused::Writable.may_pass_in(MAPPED_WITHIN) && !Refused::Writable.may_pass_in(2 * MAPPED_WITHIN));
    }

    #[test]
    fn what_could_not_be_read_is_said_in_plain_words_and_tried_again_if_it_changed() {
        let read = |source: io::Error| Refused::Read { what: "the target's memory", source };
        let soon = Duration::from_millis(10);
        for (source, why, may_pass) in [
            (io::ErrorKind::UnexpectedEof.into(), "the process has ended or executed another program", true),
            (io::Error::from_raw_os_error(libc::EIO), "the process has unmapped it", true),
            (io::Error::from_raw_os_error(libc::EACCES), "ermission denied", false),
        ] {
            let refused = read(source);
            let text = refused.to_string();
            assert!(text.starts_with("the target's memory could not be read") && text.contains(why), "{text}");
            assert_eq!(
                (refused.may_pass_in(soon), refused.may_pass_in(2 * MAPPED_WITHIN)),
                (may_pass, false),
                "{text}"
            );
        }
    }
}
