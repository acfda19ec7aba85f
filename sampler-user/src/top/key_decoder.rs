//! Decodes the view's keys from what a terminal sends (ECMA-48, and what xterm adds).

use heapbpf_top::Key;

const ESCAPE: u8 = 0x1b;
/// Maximum length of an incomplete sequence that is kept, in bytes.
const LONGEST: usize = 32;

/// Decodes keys. A sequence that a read cuts off is completed by the next read.
#[derive(Debug, Default)]
pub struct KeyDecoder {
    rest: Vec<u8>,
}

impl KeyDecoder {
    /// Returns those keys in the input that the view knows.
    pub fn of(&mut self, read: &[u8]) -> Vec<Key> {
        let mut bytes = std::mem::take(&mut self.rest);
        bytes.extend_from_slice(read);
        let (mut keys, mut left) = (Vec::new(), &bytes[..]);
        while !left.is_empty() {
            let Some((key, length)) = first(left) else {
                self.rest = if left.len() > LONGEST { Vec::new() } else { left.to_vec() };
                break;
            };
            keys.extend(key);
            left = &left[length..];
        }
        keys
    }
}

/// Returns the first key, if the view knows it, and its length. `None` if its end has not arrived yet.
fn first(bytes: &[u8]) -> Option<(Option<Key>, usize)> {
    match bytes {
        // The Escape key itself: terminals send sequences whole.
        [ESCAPE] | [ESCAPE, ESCAPE, ..] => Some((Some(Key::Escape), bytes.len().min(2))),
        [ESCAPE, b'[', rest @ ..] => {
            let end = rest.iter().position(|byte| matches!(byte, 0x40..=0x7e))?;
            Some((sequence(&rest[..end], rest[end]), end + 3))
        }
        [ESCAPE, b'O', rest @ ..] => rest.first().map(|last| (sequence(b"", *last), 3)),
        // With Alt.
        [ESCAPE, rest @ ..] => first(rest).map(|(key, length)| (key, length + 1)),
        [byte, ..] if byte.is_ascii() => Some((control(*byte), 1)),
        _ => {
            let length = bytes.len().min(4);
            let text = bytes[..length].utf8_chunks().next()?;
            match text.valid().chars().next() {
                Some(c) => Some((Some(Key::Char(c)), c.len_utf8())),
                None if text.invalid().len() == bytes.len() && length < 4 => None,
                None => Some((None, text.invalid().len())),
            }
        }
    }
}

/// Returns the key of an ASCII character.
fn control(byte: u8) -> Option<Key> {
    match byte {
        0x03 => Some(Key::Interrupt),
        b'\t' => Some(Key::Tab),
        0x0c => Some(Key::Redraw),
        b'\r' => Some(Key::Enter),
        0x7f => Some(Key::Backspace),
        b' '..=b'~' => Some(Key::Char(char::from(byte))),
        _ => None,
    }
}

/// Returns the key of a sequence with these parameters and this final byte. Combinations with Control are not keys of
/// the view.
fn sequence(parameters: &[u8], end: u8) -> Option<Key> {
    let mut parameters = parameters.split(|byte| *byte == b';').map(|number| str::from_utf8(number).ok()?.parse().ok());
    let (number, modifiers): (Option<u32>, Option<u32>) = (parameters.next().flatten(), parameters.next().flatten());
    if modifiers.is_some_and(|modifiers| modifiers.wrapping_sub(1) & 4 != 0) {
        return None;
    }
    match (end, number) {
        (b'A', _) => Some(Key::Up),
        (b'B', _) => Some(Key::Down),
        (b'C', _) => Some(Key::Right),
        (b'D', _) => Some(Key::Left),
        (b'H', _) | (b'~', Some(1 | 7)) => Some(Key::Home),
        (b'F', _) | (b'~', Some(4 | 8)) => Some(Key::End),
        (b'~', Some(5)) => Some(Key::PageUp),
        (b'~', Some(6)) => Some(Key::PageDown),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_terminals_send_are_keys() {
        for (sent, keys) in [
            ("cF/", &[Key::Char('c'), Key::Char('F'), Key::Char('/')][..]),
            ("\x03\x0c\x18", &[Key::Interrupt, Key::Redraw]),
            ("\r\t\x7fé→", &[Key::Enter, Key::Tab, Key::Backspace, Key::Char('é'), Key::Char('→')]),
            ("\x1b[A\x1b[B\x1bOC\x1bOD", &[Key::Up, Key::Down, Key::Right, Key::Left]),
            ("\x1b[H\x1b[4~\x1b[5~\x1b[6~q", &[Key::Home, Key::End, Key::PageUp, Key::PageDown, Key::Char('q')]),
            // With Shift, with Control, with Alt; F1 and F5.
            ("\x1b[1;2A\x1b[1;5A\x1bx\x1bOP\x1b[15~", &[Key::Up, Key::Char('x')]),
            ("\x1b", &[Key::Escape]),
            ("j\x1b\x1bk", &[Key::Char('j'), Key::Escape, Key::Char('k')]),
        ] {
            assert_eq!(KeyDecoder::default().of(sent.as_bytes()), keys, "{sent:?}");
        }
    }

    #[test]
    fn what_is_cut_off_waits_and_nonsense_is_left_out() {
        let mut keys = KeyDecoder::default();
        assert_eq!(keys.of(b"\x1b["), []);
        assert_eq!(keys.of(b"5"), []);
        assert_eq!(keys.of(b"~\xe2\x86"), [Key::PageUp]);
        assert_eq!(keys.of(b"\x92a"), [Key::Char('→'), Key::Char('a')]);
        assert_eq!(keys.of(b"\xffa\x80\xe2b"), [Key::Char('a'), Key::Char('b')]);
        assert_eq!(keys.of(&[&b"\x1b["[..], &[b'1'; 100]].concat()), []);
        assert_eq!(keys.of(b"q"), [Key::Char('q')]);
    }
}
