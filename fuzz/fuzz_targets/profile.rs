//! Profile files of every readable format: what can be read can be symbolized (with the feature `daemon`), shown and
//! written.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/profile.rs"]
mod shared;

#[cfg(feature = "daemon")]
fn symbolize(profile: &mut heapbpf_profile::model::Profile) {
    use heapbpf_symbols::{offline, options::Options, progress::Progress};

    offline::symbolize(
        profile,
        Options { debug_directories: vec![], ..Options::default() },
        Progress::default().into(),
    );
}

#[cfg(not(feature = "daemon"))]
fn symbolize(_: &mut heapbpf_profile::model::Profile) {}

fn check(data: &[u8]) {
    shared::check(data, false, symbolize);
}

heapbpf_fuzz::fuzz_target!(check);
