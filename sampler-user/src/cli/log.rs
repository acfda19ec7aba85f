//! Diagnostics on standard error, as talkative as `-v` says.

use log::LevelFilter;

/// Starts logging.
pub fn start(verbose: u8, quiet: bool) {
    let level = match (quiet, verbose) {
        (true, _) => LevelFilter::Error,
        (false, 0) => LevelFilter::Warn,
        (false, 1) => LevelFilter::Info,
        (false, 2) => LevelFilter::Debug,
        (false, _) => LevelFilter::Trace,
    };
    // Only a second call could fail.
    let _ = env_logger::Builder::new()
        .filter_level(LevelFilter::Warn)
        .filter_module("sampler_user", level)
        .format_target(false)
        .format_timestamp(None)
        .try_init();
}
