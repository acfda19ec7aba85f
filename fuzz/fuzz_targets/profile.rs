//! Profile files of every format that is read: what can be read can be symbolized (with the feature `daemon`), shown
//! and written.
#![no_main]

use heapbpf_profile::formats::{FORMATS, WriteOptions};
use heapbpf_profile::read;
use heapbpf_profile::report::{ReportOptions, report};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    #[cfg_attr(not(feature = "daemon"), expect(unused_mut, reason = "only symbolization changes the profile"))]
    let Ok(mut profile) = read::parse(data) else { return };
    #[cfg(feature = "daemon")]
    {
        use sampler_user::symbols::{offline, symbolizer::Options};
        offline::symbolize(&mut profile, Options { debug_directories: vec![], ..Options::default() });
    }
    let text = report(&profile, &ReportOptions { color: false, ..ReportOptions::default() });
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "no escape sequence of a file reaches a terminal");
    for format in FORMATS {
        // A format may refuse a profile, with a reason.
        let _ = format.write(&profile, &WriteOptions::default(), &mut std::io::sink());
    }
});
