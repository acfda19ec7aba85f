//! Profile files of every format that is read: what can be read can be symbolized (with the feature `daemon`), shown
//! and written.
#![no_main]

#[path = "../shared/profile.rs"]
mod shared;

use libfuzzer_sys::fuzz_target;

#[cfg(feature = "daemon")]
fn symbolize(profile: &mut heapbpf_profile::model::Profile) {
    use sampler_user::symbols::{offline, options::Options, progress::Progress};

    offline::symbolize(profile, Options { debug_directories: vec![], ..Options::default() }, Progress::default().into());
}

#[cfg(not(feature = "daemon"))]
fn symbolize(_: &mut heapbpf_profile::model::Profile) {}

fuzz_target!(|data: &[u8]| shared::check(data, false, symbolize));
