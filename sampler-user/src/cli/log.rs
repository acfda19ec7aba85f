//! heapbpf's log on standard error. `-v` sets its level; `-q` hides no warnings.

use std::io::{IsTerminal, Write};

use heapbpf_profile::escape::escaped;
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
        .format(move |out, record| out.write_all(line(begin, &record.args().to_string()).as_bytes()))
        .try_init();
}

/// A message as a line: names of processes and files bring none along.
fn line(begin: &str, message: &str) -> String {
    format!("{begin}heapbpf: {}\n", escaped(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_line_without_control_characters() {
        assert_eq!(line("", "plain"), "heapbpf: plain\n");
        let hostile = line("\r\x1b[K", "of a\nheapbpf: all is well\r\x1b[2J (7)");
        assert_eq!(hostile, "\r\x1b[Kheapbpf: of a\\nheapbpf: all is well\\r\\u{1b}[2J (7)\n");
    }
}
