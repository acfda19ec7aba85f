//! Profile files of every format that is read: what can be read can be symbolized, shown and written.

use heapbpf_profile::formats::{FORMATS, WriteOptions};
use heapbpf_profile::model::Profile;
use heapbpf_profile::read;
use heapbpf_profile::report::{ReportOptions, report};

/// Checks a file. `symbolize` may change the profile in it.
pub fn check(data: &[u8], symbolize: impl FnOnce(&mut Profile)) {
    let Ok(mut profile) = read::parse(data) else { return };
    symbolize(&mut profile);
    let text = report(&profile, &ReportOptions { color: false, ..ReportOptions::default() });
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "no escape sequence of a file reaches a terminal");
    for format in FORMATS {
        // A format may refuse a profile, with a reason.
        let _ = format.write(&profile, &WriteOptions::default(), &mut std::io::sink());
    }
}
