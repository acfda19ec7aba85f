//! The circuit breaker: a process that dies of its inline hooks ends inline hooking in all processes.

use std::sync::Arc;

use heapbpf_attach::inline::crashes::{self, Blamed, Crash, signal_name};
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::process::NO_USER;
use heapbpf_inline::fault::Place;
use heapbpf_kernel::generations::threads;
use sampler_ebpf::abi::{CrashRecord, ProcessKey};

use super::probes::Attaching;

/// Inline hooks are taken out of all processes.
#[derive(Debug)]
pub(super) struct Tripped {
    /// The remark about it.
    pub(super) remark: String,
    /// Since when they sample nothing (CLOCK_MONOTONIC).
    pub(super) at_ns: u64,
    /// The process that died last.
    last: ProcessKey,
}

impl Attaching {
    /// Handles a process that died of a fault. If its inline hooks caused the fault, they are taken out of all
    /// processes, none is hooked from now on, and the program is remembered.
    pub(crate) fn note_crash(&mut self, crash: &CrashRecord, host: &mut Host) {
        let file = |key| self.hooks.files.get(key).and_then(|examined| examined.file.clone());
        let Some(blamed) = self.inline.as_ref().and_then(|inline| inline.blamed(crash, &file)) else { return };
        let pid = crash.process.tgid;
        let program = host.processes().at(pid, crash.time_ns).map(|generation| &generation.info);
        let [comm, exe] = program.map(|info| [&info.comm, &info.exe].map(Arc::clone)).unwrap_or_default();
        let user = program.map_or(NO_USER, |info| info.uid);
        let what = format!("{} {}", signal_name(crash.signal), self.place_of(&blamed));
        let died = format!("process {pid} ({comm}) died of {what}");
        match &mut self.tripped {
            None => self.trip((crash.process, user), &died, host),
            // The kernel may report it twice.
            Some(tripped) if tripped.last == crash.process => return,
            Some(tripped) => {
                tripped.last = crash.process;
                log::warn!("{died}, too");
            }
        }
        let Some(builds) = blamed.builds else {
            return log::warn!(
                "cannot remember {exe}: it or its allocator has no build ID; it may get inline hooks again"
            );
        };
        let path = crashes::path();
        if let Err(error) = crashes::remember(&path, &Crash { builds, what: format!("{exe} died of {what}") }) {
            log::info!("cannot remember {exe} in {}: {error}", path.display());
        }
    }

    /// Takes the inline hooks out of all processes because one, of this user, died of them, and reports it.
    fn trip(&mut self, (process, user): (ProcessKey, u32), died: &str, host: &mut Host) {
        let now_ns = monotonic_ns();
        // Up to now they were counted.
        if let Ok(threads) = threads(self.programs.process_iterator_link()) {
            let counted = self.note_heirs();
            self.look_at_activity(host, &threads, &counted, now_ns);
        }
        let mut had = self.inline.as_mut().map(|inline| inline.trip(died)).unwrap_or_default();
        had.retain(|other| *other != process);
        had.iter().for_each(|other| self.note_given_up(*other, now_ns));
        // No process needs to wait for hooks any more.
        self.execs = None;
        let others = if had.len() == 1 { "1 other is".to_owned() } else { format!("{} others are", had.len()) };
        let at_rest = match self.inline.as_ref().map_or(0, |inline| inline.counted.at_rest.len()) {
            0 => String::new(),
            1 => "; 1 process is frozen or stopped, and loses its hooks once it continues".to_owned(),
            count => format!("; {count} processes are frozen or stopped, and lose their hooks once they continue"),
        };
        let remark = format!(
            "{died}: inline hooks are removed from all processes; {others} no longer counted, and no process gets inline hooks from now on{at_rest}"
        );
        log::warn!("{remark}; please report this{}", if_on_purpose(user));
        self.tripped = Some(Tripped { remark, at_ns: now_ns, last: process });
    }

    fn place_of(&self, blamed: &Blamed) -> String {
        match blamed.place {
            Place::Code(offset) => format!("in the code of inline hooks (offset {offset:#x})"),
            Place::Page(offset) => {
                let path = self.hooks.files.path(blamed.key).unwrap_or_default();
                format!("in a page of {path} that inline hooks had replaced (offset {offset:#x})")
            }
        }
    }
}

/// What to do if a user made a program die of its hooks on purpose, which ends them for everyone. Root need not.
fn if_on_purpose(user: u32) -> String {
    match user {
        0 | NO_USER => String::new(),
        user => format!(", or write `never-inline user {user}` into /etc/heapbpf.conf if this user did it on purpose"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_have_done_it_on_purpose_is_named() {
        assert_eq!([0, NO_USER].map(if_on_purpose), ["", ""]);
        assert!(if_on_purpose(1000).contains("`never-inline user 1000`"));
    }
}
