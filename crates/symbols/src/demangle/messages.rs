//! Messages between heapbpf and its demangling process: a number, a length and a text, in both directions.

use std::io::{self, Read, Write};

/// Maximum length of a message's text, bytes.
pub const MAX_TEXT_BYTES: usize = 16 << 10;
/// Length that means "no text".
const NO_TEXT: u32 = u32::MAX;

/// A name to demangle, or the result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Number of the request, or of the request that this answers. 0 in an answer means the request that is still open,
    /// because its worker was ended.
    pub number: u32,
    /// The name. In an answer, the demangled name, or `None` if there is none.
    pub text: Option<String>,
}

impl Message {
    /// Writes the message with one call, so that a pipe gets all of it or nothing.
    ///
    /// # Errors
    /// The pipe's, or the text is too long.
    pub fn send(&self, output: &mut impl Write) -> io::Result<()> {
        let text = self.text.as_deref().unwrap_or_default();
        if text.len() > MAX_TEXT_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let length = if self.text.is_some() { text.len() as u32 } else { NO_TEXT };
        let bytes = [&self.number.to_le_bytes(), &length.to_le_bytes(), text.as_bytes()].concat();
        output.write_all(&bytes)
    }

    /// Reads the next message. Returns `None` at the end of the input.
    ///
    /// # Errors
    /// The pipe's, or the input is not a message.
    pub fn receive(input: &mut impl Read) -> io::Result<Option<Self>> {
        let mut head = [0; 8];
        match input.read_exact(&mut head) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (number, length) = (word(0), word(4));
        if length == NO_TEXT {
            return Ok(Some(Self { number, text: None }));
        }
        if length as usize > MAX_TEXT_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = vec![0; length as usize];
        input.read_exact(&mut text)?;
        let text = String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?;
        Ok(Some(Self { number, text: Some(text) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_were_sent() {
        let messages = [
            Message { number: 1, text: Some("_Z1fv".into()) },
            Message { number: 0, text: None },
            Message { number: u32::MAX, text: Some("x".repeat(MAX_TEXT_BYTES)) },
            Message { number: 2, text: Some(String::new()) },
        ];
        let mut sent = Vec::new();
        for message in &messages {
            message.send(&mut sent).expect("memory");
        }
        let mut input = sent.as_slice();
        for message in messages {
            assert_eq!(Message::receive(&mut input).expect("whole"), Some(message));
        }
        assert_eq!(Message::receive(&mut input).expect("the end"), None);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let long = Message { number: 1, text: Some("x".repeat(MAX_TEXT_BYTES + 1)) };
        assert!(long.send(&mut Vec::new()).is_err());
        for bytes in
            [&[1, 0, 0, 0, 1, 64, 0, 0, b'x'][..], &[1, 0, 0, 0, 2, 0, 0, 0, b'x'], &[1, 0, 0, 0, 1, 0, 0, 0, 0xff]]
        {
            assert!(Message::receive(&mut &*bytes).is_err(), "{bytes:?}");
        }
    }
}
