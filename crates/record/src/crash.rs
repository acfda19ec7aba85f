//! Reports of errors inside heapbpf: a line on standard error that contains no data of a target and no token.
//!
//! Probes need no care here: the guardian removes them when this process has ended, however it ends.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::ffi::{c_int, c_void};
use std::io::Write as _;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU32, Ordering};

use heapbpf_profile::escape::escaped;

/// Signals that indicate an error in the program that gets them.
const SIGNALS: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// Maximum number of panics that are reported. Panics of readers of foreign files are caught, and every such file may
/// cause one.
const MOST_REPORTS: u32 = 3;
/// Maximum length of a panic's message, characters.
const MOST_TEXT: usize = 200;

/// Reports panics and fatal signals of this process from now on.
pub fn report_crashes() {
    std::panic::set_hook(Box::new(report));
    // At a file size limit, a write then fails and says why. A command that we run gets the signal as usual: no handler
    // outlives an exec.
    for (signal, handler) in SIGNALS
        .map(|(signal, _)| (signal, on_signal as Handler))
        .into_iter()
        .chain([(libc::SIGXFSZ, on_nothing as Handler)])
    {
        // SAFETY: all zeros are a valid `sigaction` without flags and with an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = handler as usize;
        // A stack that has overflowed cannot be used; Rust threads have another one for signals.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler has the type that SA_SIGINFO asks for, and makes only calls that a handler may make.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// The type of handler that SA_SIGINFO requires.
type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

extern "C" fn on_nothing(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {}

fn report(panic: &PanicHookInfo<'_>) {
    static REPORTS: AtomicU32 = AtomicU32::new(0);
    if REPORTS.fetch_add(1, Ordering::Relaxed) >= MOST_REPORTS {
        return;
    }
    let text = panic.payload_as_str().unwrap_or_default();
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let mut err = std::io::stderr().lock();
    let version = env!("CARGO_PKG_VERSION");
    // Standard error may be gone; then there is no other place to report to.
    let _ =
        writeln!(err, "heapbpf: an error inside heapbpf {version}, please report it: {} ({place})", without_data(text));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        let _ = writeln!(err, "{backtrace}");
    }
}

/// The first line of a panic's message, without anything in quotes, which may be data.
#[must_use]
pub fn without_data(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    let mut kept = String::new();
    let mut quote = None;
    for c in line.chars().take(MOST_TEXT) {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => continue,
            None if matches!(c, '"' | '`') => {
                quote = Some(c);
                kept.push('…');
            }
            None => kept.push(c),
        }
    }
    escaped(&kept).into_owned()
}

/// Reports a fatal signal, then lets it have its usual effect. Makes only calls that a signal handler may make.
extern "C" fn on_signal(signal: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    let name = SIGNALS.iter().find(|(number, _)| *number == signal).map_or("a signal", |(_, name)| name);
    let version = concat!("heapbpf: an error inside heapbpf ", env!("CARGO_PKG_VERSION"), ", please report it: ");
    for part in [version, name, "; probes are removed, inline hooks stay until heapbpf doctor --clean\n"] {
        // SAFETY: the bytes are constants of this program.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: both may be called by a handler. The signal is blocked until the handler returns; then it ends the
    // process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_no_data() {
        let sliced = std::panic::catch_unwind(|| {
            let secret = String::from("sécret token");
            secret[..2].len()
        });
        let payload = sliced.expect_err("not a boundary of a character");
        let message = payload.downcast_ref::<String>().expect("formatted");
        assert!(message.contains("cret token"), "what must not get out: {message}");
        assert!(!without_data(message).contains("cret"), "{}", without_data(message));
        assert_eq!(
            without_data("index out of bounds: the len is 3 but the index is 5"),
            "index out of bounds: the len is 3 but the index is 5"
        );
        assert_eq!(without_data("assertion failed\n  left: [1, 2]"), "assertion failed");
        assert_eq!(without_data("called on an `Err` value: \"/home/me"), "called on an … value: …");
        assert!(without_data(&"x".repeat(10_000)).len() <= MOST_TEXT);
    }
}
