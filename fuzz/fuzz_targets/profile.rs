//! Profile files of every kind that is read: what can be read can be symbolized, shown and written again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sampler_user::profile::formats::{FORMATS, WriteOptions};
use sampler_user::profile::read;
use sampler_user::symbols::offline;
use sampler_user::symbols::symbolizer::Options;
use sampler_user::view::report::{ReportOptions, report};

fuzz_target!(|data: &[u8]| {
    let Ok(mut profile) = read::parse(data) else { return };
    offline::symbolize(&mut profile, Options { debug_directories: vec![], ..Options::default() });
    let text = report(&profile, &ReportOptions { color: false, ..ReportOptions::default() });
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "no escape sequence of a file reaches a terminal");
    for format in FORMATS {
        // A format may refuse a profile, with a reason.
        let _ = format.write(&profile, &WriteOptions::default(), &mut std::io::sink());
    }
});
