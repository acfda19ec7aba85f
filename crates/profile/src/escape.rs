//! Escapes text. Names, paths and messages come from other programs; they must not control a terminal, start a new line
//! in a text format, or reverse the direction of text. Everything that writes text escapes it here.

use std::borrow::Cow;
use std::io;

/// Whether a character is written as an escape: control characters (including those above ASCII that terminals obey),
/// line and paragraph separators, and marks that change the text direction.
fn is_escaped(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
        )
}

/// The text on one line, without control characters. They are written as in Rust: `\n`, `\u{1b}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut plain = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if is_escaped(c) { plain.extend(c.escape_default()) } else { plain.push(c) }
    }
    Cow::Owned(plain)
}

/// A message of several lines, each [`escaped`]. Lines after the first are indented, so that no line break in a name
/// can fake a separate message.
pub fn escaped_lines(text: &str) -> String {
    text.lines().map(escaped).collect::<Vec<_>>().join("\n  ")
}

/// A writer of encoded JSON. It replaces characters that JSON allows in strings but terminals obey by JSON's own
/// escapes (`\u009b`). A JSON reader gets the same text back.
pub struct JsonText<W>(pub W);

/// A value as multi-line JSON, for a terminal or a file.
///
/// # Errors
/// The value cannot be encoded.
pub fn pretty_json<T: serde::Serialize>(value: &T) -> serde_json::Result<String> {
    Ok(escaped_json(&serde_json::to_string_pretty(value)?).into_owned() + "\n")
}

/// JSON in the form that [`JsonText`] writes.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    // Most text is plain ASCII, which this check handles many bytes at a time.
    if json.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\n')) {
        return Cow::Borrowed(json);
    }
    // Below the space character, encoded JSON contains only the line feeds of its layout.
    let is_escaped = |c: char| c > ' ' && is_escaped(c);
    if !json.contains(is_escaped) {
        return Cow::Borrowed(json);
    }
    let mut plain = String::with_capacity(json.len() + 8);
    for c in json.chars() {
        // Each of these characters is one UTF-16 unit.
        if is_escaped(c) { plain.push_str(&format!("\\u{:04x}", u32::from(c))) } else { plain.push(c) }
    }
    Cow::Owned(plain)
}

impl<W: io::Write> io::Write for JsonText<W> {
    /// JSON encoders write whole characters at once.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match std::str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(escaped_json(text).as_bytes())?,
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Module, Placement, Profile, Stack};
    use crate::{FORMATS, testing};
    use std::sync::Arc;

    /// A line feed, a terminal escape in seven and in eight bits, a bell, DEL, and a text reversal.
    const HOSTILE: &str = "a\n7f00-8f00 r-xp 0 00:00 0 /b\x1b]0;t\x07\u{9b}2J\x7f\u{202e}\r.so";

    #[test]
    fn what_controls_a_terminal_is_written_out_and_all_else_stays() {
        let plain = escaped(HOSTILE);
        assert_eq!(plain, r"a\n7f00-8f00 r-xp 0 00:00 0 /b\u{1b}]0;t\u{7}\u{9b}2J\u{7f}\u{202e}\r.so");
        for same in ["", "std::vector<int>", r"C:\n", "naïve 漢字 🦀", "a;b \"c\""] {
            assert!(matches!(escaped(same), Cow::Borrowed(text) if text == same), "{same}");
        }
        assert_eq!(escaped_lines("first\n\x1bsecond\r\nthird"), "first\n  \\u{1b}second\n  third");
    }

    #[test]
    fn json_keeps_its_layout_and_its_content() {
        let plain = pretty_json(&[HOSTILE, "naïve"]).expect("texts");
        assert!(plain.chars().all(|c| c == '\n' || !is_escaped(c)), "{plain:?}");
        assert_eq!(plain.lines().count(), 4);
        assert_eq!(serde_json::from_str::<Vec<String>>(&plain).expect("JSON"), [HOSTILE, "naïve"]);
        let mut out = Vec::new();
        serde_json::to_writer_pretty(JsonText(&mut out), &[HOSTILE, "naïve"]).expect("memory");
        assert_eq!(out, plain.trim_end().as_bytes());
    }

    /// A profile of one process in which every text is hostile.
    fn hostile() -> Profile {
        let mut profile = testing::small().only_process(0);
        let process = &mut profile.processes[0];
        (process.comm, process.exe, process.cgroup) = (HOSTILE.into(), HOSTILE.into(), HOSTILE.into());
        process.placement = Placement { container: HOSTILE.into(), pod: HOSTILE.into(), unit: HOSTILE.into() };
        process.allocators = vec![HOSTILE.into()];
        profile.notes = vec![HOSTILE.into()];
        profile.header.host = HOSTILE.into();
        let path: Arc<str> = HOSTILE.into();
        profile.modules.iter_mut().for_each(|module: &mut Module| module.path = Arc::clone(&path));
        for row in &mut profile.rows {
            let mut stack = Stack::clone(&row.key.stack);
            for frame in stack.frames.iter_mut().map(Arc::make_mut) {
                // Named and unnamed frames: the name of an unnamed frame contains the module's path.
                frame.function = frame.function.as_ref().map(|_| Arc::clone(&path));
                (frame.file, frame.reason) = (Some(Arc::clone(&path)), Some(Arc::clone(&path)));
            }
            stack.cut = stack.cut.as_ref().map(|_| Arc::clone(&path));
            row.key.stack = stack.into();
            row.key.thread = Arc::clone(&path);
        }
        profile
    }

    #[test]
    fn no_text_format_passes_on_what_controls_a_terminal() {
        let profile = hostile();
        let mut texts = 0;
        for format in FORMATS {
            let Ok(text) = String::from_utf8(testing::written(&profile, format.name())) else { continue };
            let Some(found) = text.chars().find(|&c| !matches!(c, '\n' | '\t') && is_escaped(c)) else {
                texts += 1;
                continue;
            };
            let binary = ["perfetto", "otlp"];
            assert!(binary.contains(&format.name()), "{found:?} in {}", format.name());
        }
        // folded, heap_v2, html, json, speedscope, svg
        assert!(texts >= 6, "{texts}");
    }

    #[test]
    fn names_bring_no_markup_along() {
        const MARKUP: &str = "</script></title><img src=x onerror=alert(1)>&lt;\"'`]]>";
        let mut profile = hostile();
        profile.processes[0].comm = MARKUP.into();
        profile.notes = vec![MARKUP.into()];
        for row in &mut profile.rows {
            let mut stack = Stack::clone(&row.key.stack);
            stack.frames.iter_mut().map(Arc::make_mut).for_each(|frame| frame.function = Some(MARKUP.into()));
            row.key.stack = stack.into();
        }
        for name in ["html", "svg"] {
            let text = testing::text(&profile, name);
            assert!(text.contains("onerror=alert(1)"), "{name}: the name is in it");
            assert!(!text.contains("<img"), "{name}");
        }
    }

    #[test]
    fn a_path_does_not_add_a_line_to_a_heap_file() {
        let lines = |profile: &Profile| testing::text(profile, "heap_v2").lines().count();
        assert_eq!(lines(&hostile()), lines(&testing::small().only_process(0)));
        let back = crate::read::parse(&testing::written(&hostile(), "heap_v2")).expect("heap_v2");
        assert_eq!(back.modules.len(), testing::small().only_process(0).modules.len());
    }

    #[test]
    fn viewers_of_pprof_on_a_terminal_get_plain_names() {
        let message = crate::formats::encode_pprof(&hostile());
        for text in &message.string_table {
            assert!(!text.contains(is_escaped), "{text:?}");
        }
        assert!(message.string_table.iter().any(|text| text.contains(r"\u{1b}]0;t")));
    }
}
