//! What heapbpf has to say while it works, on standard error, as talkative as `-v` says. `-q` hides no warning.

use std::io::{IsTerminal, Write};

use log::LevelFilter;

/// Starts logging.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    // A status line may stand there.
    let begin = if std::io::stderr().is_terminal() { "\r\x1b[K" } else { "" };
    // Only a second call could fail.
    let _ = env_logger::Builder::new()
        .filter_level(LevelFilter::Warn)
        .filter_module("sampler_user", level)
        .format(move |out, record| writeln!(out, "{begin}heapbpf: {}", record.args()))
        .try_init();
}
