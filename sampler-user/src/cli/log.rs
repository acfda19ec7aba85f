//! heapbpf's log on standard error. `-v` sets its level; `-q` does not hide warnings.

use std::io::{IsTerminal, Write};

use heapbpf_profile::escape::escaped;
use log::{LevelFilter, Log, Metadata, Record};

/// Writes this crate's messages up to a level, and warnings of other crates.
struct StandardError {
    level: LevelFilter,
    /// Clears a status line that may be there.
    begin: &'static str,
}

impl Log for StandardError {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let own = ["heapbpf", "sampler_user"].iter().any(|ours| metadata.target().starts_with(ours));
        metadata.level() <= if own { self.level } else { LevelFilter::Warn }
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            // If standard error cannot be written, there is nowhere to report that.
            let _ = std::io::stderr().write_all(line(self.begin, &record.args().to_string()).as_bytes());
        }
    }

    fn flush(&self) {}
}

/// Starts logging.
pub fn start(verbose: u8) {
    let level = match verbose {
        0 => LevelFilter::Warn,
        1 => LevelFilter::Info,
        2 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    let begin = if std::io::stderr().is_terminal() { "\r\x1b[K" } else { "" };
    log::set_max_level(level);
    // Fails only if logging was started before.
    let _ = log::set_logger(Box::leak(Box::new(StandardError { level, begin })));
}

/// Formats a message as one line. Names of processes and files are escaped, so they cannot add lines.
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
