//! Profile files of every readable format: what can be read can be symbolized, shown and written.

use heapbpf_profile::formats::{FORMATS, WriteOptions};
use heapbpf_profile::model::Profile;
use heapbpf_profile::read;
use heapbpf_profile::report::{ReportOptions, report};

/// Checks a file. A seed is written in all formats, an input of the fuzzer only in one, chosen by its bytes, because
/// writing takes much longer than reading. `symbolize` may change the profile before that.
pub fn check(data: &[u8], is_seed: bool, symbolize: impl FnOnce(&mut Profile)) {
    let Ok(mut profile) = read::parse(data) else { return };
    symbolize(&mut profile);
    let text = report(&profile, &ReportOptions { color: false, ..ReportOptions::default() });
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "no escape sequence of a file reaches a terminal");
    let sum: usize = data.iter().map(|byte| usize::from(*byte)).sum();
    let is_chosen = |at: usize| is_seed || at == sum % FORMATS.len();
    let chosen = FORMATS.iter().enumerate().filter(|(at, _)| is_chosen(*at));
    for format in chosen.map(|(_, format)| format) {
        // A format may refuse a profile, with a reason.
        let _ = format.write(&profile, &WriteOptions::default(), &mut std::io::sink());
    }
}
