//! Recognizes files that are not profiles by their first bytes.

/// Magic numbers of files that users might mistake for profiles.
const KNOWN: &[(&[u8], &str)] = &[
    (b"<", "HTML, XML or SVG"),
    (b"\x7fELF", "a program"),
    (b"PERFILE2", "perf's data"),
    (b"[", "a JSON array"),
    (b"group,stack,incomplete,", "a table (CSV)"),
];

/// Maximum length of a first line, and maximum part of a text that is examined, in bytes.
const LONGEST_LINE: usize = 64 << 10;

/// What kind of file starts with these bytes; `None` if it may be a pprof profile, or something else.
pub(super) fn kind(bytes: &[u8]) -> Option<&'static str> {
    // A name may start like JSON: `[unknown]`.
    if is_folded(bytes) {
        return Some("folded stacks, for flame graphs");
    }
    let start = bytes.trim_ascii_start();
    if let Some((_, what)) = KNOWN.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Some(what);
    }
    // A pprof profile starts with a value type (field 1) whose fields 1 and 2 are integers.
    let [0x0a, rest @ ..] = bytes else { return None };
    let length = rest.iter().position(|byte| byte & 0x80 == 0)? + 1;
    match rest.get(length..)? {
        // A resource (field 1) with attributes (field 1), each with a key (field 1).
        [0x0a, inner @ ..] => is_attributes(inner).then_some("an OpenTelemetry profile (OTLP)"),
        // A clock snapshot: field 6.
        [0x32, ..] => Some("a Perfetto trace"),
        _ => None,
    }
}

/// Whether a file starts like text: UTF-8, with no control characters other than line breaks, tabs, form feeds and
/// escapes for colours.
pub(super) fn is_text(bytes: &[u8]) -> bool {
    let start = &bytes[..bytes.len().min(LONGEST_LINE)];
    let text = match std::str::from_utf8(start) {
        Ok(text) => text,
        // The limit may fall inside a character.
        Err(error) if error.error_len().is_none() && start.len() < bytes.len() => {
            std::str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    !text.is_empty() && !text.contains(|c: char| c.is_control() && !matches!(c, '\t' | '\n' | '\r' | '\x0c' | '\x1b'))
}

/// Whether a message has a message in field 1 whose own field 1 is length-delimited.
fn is_attributes(mut bytes: &[u8]) -> bool {
    for _ in 0..2 {
        let Some(length) = bytes.iter().position(|byte| byte & 0x80 == 0) else { return false };
        let Some([0x0a, inner @ ..]) = bytes.get(length + 1..) else { return false };
        bytes = inner;
    }
    true
}

/// Whether the first line is `function;function;… number`.
fn is_folded(bytes: &[u8]) -> bool {
    let start = &bytes[..bytes.len().min(LONGEST_LINE)];
    let Some(end) = start.iter().position(|byte| *byte == b'\n') else { return false };
    let Ok(line) = std::str::from_utf8(&start[..end]) else { return false };
    let Some((stack, value)) = line.rsplit_once(' ') else { return false };
    let is_number = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit());
    is_number && !stack.is_empty() && !stack.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::FORMATS;
    use crate::testing;

    /// Every format that heapbpf writes is either read or named.
    #[test]
    fn formats_that_are_not_read_are_named() {
        let mut named = 0;
        for format in FORMATS {
            let out = testing::written(&testing::small().only_process(0), format.name());
            let expected = match format.name() {
                "folded" => "it is folded stacks",
                "otlp" => "it is an OpenTelemetry profile",
                "perfetto" => "it is a Perfetto trace",
                "csv" => "it is a table (CSV)",
                "svg" | "html" => "it is HTML, XML or SVG",
                "speedscope" => "it is a profile for speedscope",
                "dhat" | "firefox" | "firefox.json" => "it is JSON, but not a profile of heapbpf",
                _ => {
                    super::super::parse(&out).expect("a format that is read");
                    continue;
                }
            };
            let text = super::super::parse(&out).map(|_| ()).expect_err("no format that is read").to_string();
            assert!(text.starts_with(expected), "{}: {text}", format.name());
            named += 1;
        }
        assert!(named >= 6, "{named}");
    }

    #[test]
    fn text_is_told_from_what_is_none() {
        let long = format!("x{}", "ü".repeat(LONGEST_LINE));
        let passwd = "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n";
        for text in [passwd, "\x1b[1mbold\x1b[0m\r\n", "naïve", &long] {
            assert!(is_text(text.as_bytes()), "{text:.40}");
            let message = super::super::parse(text.as_bytes()).map(|_| ()).expect_err("no profile").to_string();
            assert!(message.starts_with("it is text, no profile; heapbpf reads"), "{message}");
        }
        for other in [&b""[..], b"a\0b", b"\x0a\x04\x08\x01\x10\x02", b"\xff\xfe", b"na\xc3"] {
            assert!(!is_text(other), "{other:?}");
        }
    }

    #[test]
    fn text_with_a_number_at_its_end_is_folded_stacks() {
        for folded in ["main;f 12\n", "[unknown];std::vector<int, a b> 1\nx"] {
            assert_eq!(kind(folded.as_bytes()), Some("folded stacks, for flame graphs"), "{folded}");
        }
        for other in
            ["", "\n", "main;f\n", "main;f x\n", " 12\n", "main;\x01 12\n", "main;f 12", "\x0a\x04\x08\x01\x10\x02"]
        {
            assert_eq!(kind(other.as_bytes()), None, "{other:?}");
        }
    }
}
