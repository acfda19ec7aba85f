//! Programs that a hooked process executes. They are held at their entry point until they are hooked, if heapbpf sees
//! them in time.

use crate::output::{Process, Profile};

/// Number of recordings, in one of which most programs must be held. If on a busy machine a single program were held
/// only in two of five recordings, all twenty would miss it in one of 27,000 runs.
const ATTEMPTS: u32 = 20;

/// Repeats a recording until it has counted at least 80 % of its programs completely. Without real-time priority, the
/// thread that holds them gets a CPU too late for some. `record` checks its results, and returns how many programs were
/// counted completely, and how many there were.
///
/// # Panics
/// If no recording counts as many.
pub fn most_are_whole(what: &str, mut record: impl FnMut() -> [usize; 2]) {
    for _ in 0..ATTEMPTS {
        let [whole, all] = record();
        println!("{what}: {whole} of {all} counted whole");
        if 100 * whole >= 80 * all {
            return;
        }
    }
    panic!("{what}: less than 80 % of the programs were counted whole, again and again");
}

/// Whether a profile says that part of a process was not counted. The process may not even be in the profile.
pub fn is_reported(profile: &Profile, process: Option<&Process>) -> bool {
    let has_remark = |note: &String| note.contains("ended before") || note.contains("CPU time was counted");
    process.is_some_and(|process| process.coverage < 1.0) || profile.notes.iter().any(has_remark)
}
