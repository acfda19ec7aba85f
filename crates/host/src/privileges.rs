//! Drops what a running recording does not need: capabilities, system calls, and core dumps of its memory. A command
//! that heapbpf starts inherits none of these restrictions.

mod calls;
mod memory;

use std::io;

use rustix::thread::{
    CapabilitySet, capabilities, remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter, apply_filter_all_threads};

pub use self::memory::{hide_memory, show_memory_of_command};

/// What a recording still does after its probes are in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// It writes files, possibly in directories of another user.
    pub writes_files: bool,
    /// It forwards signals to a command, which may run as another user.
    pub has_command: bool,
    /// It writes into processes (inline hooks). The cleaner stops them for this; without a cleaner, the recording stops
    /// them itself.
    pub writes_into_processes: bool,
    /// It stops processes and changes words in their memory (Python's objects).
    pub stops_processes: bool,
    /// The kernel requires CAP_SYS_ADMIN for its links.
    pub links_as_admin: bool,
}

impl Needs {
    /// The capabilities to keep. New processes and files are hooked as they appear, so most of what the start needed is
    /// kept.
    fn capabilities(self) -> CapabilitySet {
        // To read other users' processes and files, including deleted ones.
        let mut kept = READING;
        // For programs, maps and links.
        kept |= CapabilitySet::BPF | CapabilitySet::PERFMON;
        // A cut must be on time on a busy host.
        kept |= CapabilitySet::SYS_NICE;
        let optional = [
            (self.writes_files, CapabilitySet::DAC_OVERRIDE | CapabilitySet::CHOWN | CapabilitySet::FOWNER),
            (self.has_command, CapabilitySet::KILL),
            // To open memory of other users' processes for writing.
            (self.writes_into_processes, CapabilitySet::DAC_OVERRIDE),
            (self.links_as_admin, CapabilitySet::SYS_ADMIN),
        ];
        for (is_needed, capability) in optional {
            if is_needed {
                kept |= capability;
            }
        }
        kept
    }
}

/// The capabilities needed to read any process and its files.
const READING: CapabilitySet =
    CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH).union(CapabilitySet::CHECKPOINT_RESTORE);

/// Restricts the daemon: this thread's capabilities, and the system calls of all its threads. Must be called after a
/// command's process has been created, and before other threads are started.
pub fn restrict_daemon(needs: Needs) {
    log_refused("capabilities", keep_only(needs.capabilities()));
    log_refused("new privileges", set_no_new_privs(true).map_err(Into::into));
    let may_stop = needs.writes_into_processes || needs.stops_processes;
    let refused = calls::REFUSED.iter().copied().filter(|call| !may_stop || !calls::STOPPING.contains(call));
    log_refused("system calls", refuse(&refused.collect::<Vec<_>>()));
}

/// Restricts the thread that makes profiles. It reads files and may write some.
pub fn restrict_worker(writes_files: bool) {
    let needs = Needs { writes_files, ..Needs::default() };
    log_refused("capabilities", keep_only(needs.capabilities() - CapabilitySet::BPF - CapabilitySet::PERFMON));
    log_refused("new privileges", set_no_new_privs(true).map_err(Into::into));
}

/// Restricts the thread that answers clients, and the threads that it starts. They get no capabilities, and only the
/// system calls that answering needs. They open no files, make no connections and touch no processes.
pub fn restrict_server() {
    log_refused("capabilities", keep_only(CapabilitySet::empty()));
    log_refused("system calls", allow_alone(calls::ANSWERING));
}

/// Restricts the guardian. It makes links to files that it is given, and closes them.
pub fn restrict_guardian(links_as_admin: bool) {
    let admin = if links_as_admin { CapabilitySet::SYS_ADMIN } else { CapabilitySet::empty() };
    log_refused("capabilities", keep_only(CapabilitySet::BPF | CapabilitySet::PERFMON | admin));
    log_refused("system calls", allow_alone(calls::GUARDING));
}

/// Restricts the cleaner. It reads, stops and writes into processes, and does not use BPF. It suspends their seccomp
/// filters, which the kernel permits to a process with CAP_SYS_ADMIN and without a filter of its own.
pub fn restrict_cleaner() {
    let needs = Needs { writes_into_processes: true, ..Needs::default() };
    let kept = needs.capabilities() - CapabilitySet::BPF - CapabilitySet::PERFMON;
    log_refused("capabilities", keep_only(kept | CapabilitySet::SYS_ADMIN));
    log_refused("new privileges", set_no_new_privs(true).map_err(Into::into));
}

/// Restricts the process that has names demangled: no capabilities, neither for it nor for its workers.
pub fn restrict_demangler() {
    log_refused("capabilities", keep_only(CapabilitySet::empty()));
    log_refused("new privileges", set_no_new_privs(true).map_err(Into::into));
}

/// Restricts a process that demangles names. It may only use the system calls needed for reading, writing and memory.
pub fn restrict_to_demangling() {
    restrict_demangler();
    log_refused("system calls", allow_alone(calls::DEMANGLING));
}

/// Restricts a thread that delivers profiles: no capabilities.
pub fn restrict_sender() {
    log_refused("capabilities", keep_only(CapabilitySet::empty()));
}

/// Logs a restriction that the kernel refuses. The recording goes on.
fn log_refused(what: &str, restricted: io::Result<()>) {
    if let Err(error) = restricted {
        log::warn!("cannot drop {what} that are not needed: {error}");
    }
}

/// Keeps only these capabilities of the calling thread, as far as it has them.
fn keep_only(kept: CapabilitySet) -> io::Result<()> {
    let mut own = capabilities(None)?;
    if own.permitted.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter().filter(|capability| !kept.contains(*capability)) {
            // The kernel may not know all of them.
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    own.permitted &= kept;
    own.effective &= kept;
    own.inheritable &= kept;
    Ok(set_capabilities(None, own)?)
}

/// Makes these system calls fail with EPERM, in all threads.
fn refuse(calls: &[i64]) -> io::Result<()> {
    let program = filter(calls, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32))?;
    apply_filter_all_threads(&program).map_err(io::Error::other)
}

/// Makes all other system calls fail with EPERM, in this thread.
fn allow_alone(calls: &[i64]) -> io::Result<()> {
    let calls = [calls, calls::OF_PROBES].concat();
    let program = filter(&calls, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?;
    apply_filter(&program).map_err(io::Error::other)
}

fn filter(calls: &[i64], others: SeccompAction, these: SeccompAction) -> io::Result<BpfProgram> {
    let machine = std::env::consts::ARCH.try_into().map_err(io::Error::other)?;
    let rules = calls.iter().map(|call| (*call, Vec::new())).collect();
    let filter = SeccompFilter::new(rules, others, these, machine).map_err(io::Error::other)?;
    filter.try_into().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_what_is_needed() {
        let bare = Needs::default().capabilities();
        let never = CapabilitySet::SYS_ADMIN
            | CapabilitySet::SYS_MODULE
            | CapabilitySet::SYS_RAWIO
            | CapabilitySet::SETUID
            | CapabilitySet::DAC_OVERRIDE
            | CapabilitySet::NET_ADMIN;
        assert!((bare & never).is_empty(), "{bare:?}");
        let all = Needs {
            writes_files: true,
            has_command: true,
            writes_into_processes: true,
            stops_processes: true,
            links_as_admin: true,
        };
        assert_eq!(all.capabilities().bits().count_ones(), bare.bits().count_ones() + 5);
    }

    /// In a thread of its own, because restrictions are permanent.
    #[test]
    fn a_restricted_thread_answers_and_does_nothing_else() {
        if heapbpf_testing::is_emulated("no seccomp(2)") {
            return;
        }
        let restricted = std::thread::spawn(|| {
            restrict_server();
            let opened = std::fs::File::open("/proc/self/status").map_err(|error| error.raw_os_error());
            let connected = std::net::TcpStream::connect("127.0.0.1:9").map_err(|error| error.raw_os_error());
            let started = std::process::Command::new("/bin/true").spawn().map_err(|error| error.raw_os_error());
            // What it needs to compute still works: memory, time, threads.
            let other = std::thread::spawn(|| vec![1_u8; 64 << 20].len());
            let computed = other.join().ok();
            (opened.err(), connected.err(), started.map(|_| ()).err(), computed)
        });
        let (opened, connected, started, computed) = restricted.join().expect("no panic");
        assert_eq!(opened, Some(Some(libc::EPERM)));
        assert_eq!(connected, Some(Some(libc::EPERM)));
        assert_eq!(started, Some(Some(libc::EPERM)));
        assert_eq!(computed, Some(64 << 20));
        assert!(std::fs::File::open("/proc/self/status").is_ok(), "other threads are as they were");
    }
}
