//! Programs that a hooked process executes: they are held at their entry point until they are hooked, if heapbpf hears of them in
//! time.

use crate::output::{Process, Profile};

/// In one of so many recordings, most programs must have been held. Were a single one held in two of five on a busy machine, twenty
/// recordings would all miss it in one of 27,000 runs.
const ATTEMPTS: u32 = 20;

/// Repeats a recording until it has counted at least 80 % of its programs whole: without a real-time priority the thread that holds
/// them gets a processor too late for some. `record` checks what it finds, and returns how many were counted whole, and how many
/// there were.
///
/// # Panics
/// If that is never so many.
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

/// Whether a profile says that something of a process, which may not even be in it, was not counted.
pub fn is_told(profile: &Profile, process: Option<&Process>) -> bool {
    let tells = |note: &String| note.contains("ended before") || note.contains("CPU time was counted");
    process.is_some_and(|process| process.coverage < 1.0) || profile.notes.iter().any(tells)
}
