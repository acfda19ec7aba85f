//! heapbpf's log on standard error. `-v` sets its level; `-q` hides no warnings.

use std::io::{IsTerminal, Write};

use heapbpf_profile::escape::escaped_lines;
use log::LevelFilter;

/// Starts logging.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    // Clears a status line that may be there.
    let begin = if std::io::stderr().is_terminal() { "\r\x1b[K" } else { "" };
    // Fails only if logging was started before.
    let _ = env_logger::Builder::new()
        .filter_level(LevelFilter::Warn)
        .filter_module("sampler_user", level)
        .format(move |out, record| writeln!(out, "{begin}heapbpf: {}", escaped_lines(&record.args().to_string())))
        .try_init();
}
