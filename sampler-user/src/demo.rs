//! A program with a leak, for a first try: `heapbpf demo` records heapbpf itself, run as this program.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};

/// Argument that makes heapbpf run as the program.
pub const WORD: &str = "leak-for-demonstration";
/// Name of the process.
const NAME: &str = "demo";
/// Number of requests between two pauses, and length of a pause: about 10,000 requests a second.
const REQUESTS_AT_ONCE: u64 = 10;
const PAUSE: Duration = Duration::from_millis(1);
/// One request in this many leaves data behind.
const SESSION_EVERY: u64 = 5;
/// Number of recent pages kept.
const RECENT: usize = 64;

/// What a client leaves behind. Nothing removes it: this is the leak.
struct Session {
    _user: String,
    _payload: Box<[u8]>,
}

/// Returns how long to run as the program, if the arguments ask for that.
///
/// They are not parsed with the rest of the command line, because the allocations of that would be in the profile.
pub fn asked_for(arguments: impl Iterator<Item = OsString>) -> Option<Duration> {
    let mut arguments = arguments.skip(1);
    let milliseconds = arguments.next().filter(|word| word == WORD).and(arguments.next())?.to_str()?.parse().ok()?;
    Some(Duration::from_millis(milliseconds))
}

/// Runs for a time, or until the recording ends.
///
/// # Errors
/// It cannot set its name, or cannot make sure that it ends with the recording.
pub fn run(length: Duration) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    std::fs::write("/proc/self/comm", NAME)?;
    let (mut sessions, mut recent) = (Vec::new(), VecDeque::new());
    let begun = Instant::now();
    for id in 0.. {
        handle_request(id, &mut sessions, &mut recent);
        if id % REQUESTS_AT_ONCE == 0 {
            if begun.elapsed() >= length {
                break;
            }
            std::thread::sleep(PAUSE);
        }
    }
    // Keep the leak until the end.
    std::mem::forget(sessions);
    Ok(())
}

#[inline(never)]
fn handle_request(id: u64, sessions: &mut Vec<Session>, recent: &mut VecDeque<String>) {
    let page = render_page(id);
    remember_page(recent, page);
    if id.is_multiple_of(SESSION_EVERY) {
        begin_session(sessions, id);
    }
}

#[inline(never)]
fn render_page(id: u64) -> String {
    let mut page = String::with_capacity(256);
    for line in 0..id % 64 {
        page.push_str(black_box("one line of a page\n"));
        black_box(line);
    }
    page
}

/// Frees older pages.
#[inline(never)]
fn remember_page(recent: &mut VecDeque<String>, page: String) {
    recent.push_back(page);
    if recent.len() > RECENT {
        recent.pop_front();
    }
}

#[inline(never)]
fn begin_session(sessions: &mut Vec<Session>, id: u64) {
    let session = Session { _user: format!("user-{id}"), _payload: vec![1; 480].into() };
    sessions.push(black_box(session));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_its_own_word_asks_for_the_program() {
        let asked = |words: &[&str]| asked_for(["heapbpf"].iter().chain(words).map(OsString::from));
        assert_eq!(asked(&[WORD, "1500"]), Some(Duration::from_millis(1500)));
        for words in [&[][..], &["doctor"], &[WORD], &[WORD, "x"], &["--", WORD, "1500"]] {
            assert_eq!(asked(words), None, "{words:?}");
        }
    }
}
