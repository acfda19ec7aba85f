//! Messages to the user on standard error, one line at a time.
//!
//! `eprintln!` panics if it cannot write: the reader of a pipe may be gone, or a disk full. That must not cost anyone a
//! profile.

use std::io::Write;

/// Prints a line that starts with heapbpf's name. Does nothing if it cannot be written.
pub fn say(line: impl AsRef<str>) {
    write_line(&mut std::io::stderr().lock(), line.as_ref());
}

/// The first `most` of these, and an ellipsis if there are others.
pub fn first_of<T: ToString>(items: impl IntoIterator<Item = T>, most: usize) -> String {
    let mut items = items.into_iter();
    let mut named: Vec<String> = items.by_ref().take(most).map(|item| item.to_string()).collect();
    named.extend(items.next().map(|_| "…".to_owned()));
    named.join(", ")
}

/// Writes the line in one call, so that output of the command does not end up in the middle of it.
fn write_line(out: &mut impl Write, line: &str) {
    let _ = out.write_all(format!("heapbpf: {line}\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_our_name() {
        let mut said = Vec::new();
        write_line(&mut said, "listening");
        assert_eq!(said, b"heapbpf: listening\n");
    }

    #[test]
    fn nobody_hears_and_nothing_happens() {
        let (reader, mut pipe) = std::io::pipe().unwrap();
        drop(reader);
        write_line(&mut pipe, "into a closed pipe");
        write_line(&mut std::fs::File::options().write(true).open("/dev/full").unwrap(), "onto a full disk");
    }
}
