//! The cleaner process. It stops other processes for the daemon. If the daemon is killed, it removes the inline hooks
//! that the daemon left.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use heapbpf_attach::inline::cleaner::{WORD, serve};
use heapbpf_host::independent::independent_of;
use heapbpf_host::privileges::{hide_memory, restrict_cleaner};
use rustix::event::{PollFd, PollFlags, poll};

use super::clean::clean;

/// Number of scans of all processes, and the time between them. A process that forks during a scan passes its hooks on.
const ROUNDS: usize = 10;
const PAUSE: Duration = Duration::from_millis(50);

/// Returns the daemon's PID, if the arguments ask for a cleaner.
pub fn asked_for(arguments: impl Iterator<Item = OsString>) -> Option<i32> {
    let mut arguments = arguments.skip(1);
    arguments.next().filter(|word| word == WORD).and(arguments.next())?.to_str()?.parse().ok()
}

/// Runs as the cleaner of a daemon, with the connection to it as standard input.
///
/// # Errors
/// It cannot detach itself from the daemon, or cannot wait for it.
pub fn run(daemon: i32) -> io::Result<()> {
    let daemon = match independent_of(daemon, c"hb-cleaner") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        daemon => Some(daemon?),
    };
    hide_memory();
    restrict_cleaner();
    if serve(io::stdin().as_fd()) {
        return Ok(());
    }
    // The daemon's locks are held until it has ended.
    if let Some(daemon) = daemon {
        poll(&mut [PollFd::new(&daemon, PollFlags::IN)], None)?;
    }
    for _ in 0..ROUNDS {
        if clean(&[]).lines.is_empty() {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_arguments_make_a_cleaner() {
        let asked = |words: &[&str]| asked_for(words.iter().map(OsString::from));
        assert_eq!(asked(&["x", WORD, "12"]), Some(12));
        for none in [&["x"][..], &["x", WORD], &["x", WORD, "y"], &["x", "--pid", "12"], &[WORD, "12"]] {
            assert_eq!(asked(none), None, "{none:?}");
        }
    }
}
