//! Names and paths from files, which may be as long as the files.

use std::borrow::Cow;

/// Maximum length of a name or path, bytes.
pub const MOST_BYTES: usize = 4 << 10;

/// Stands for what is cut off.
const ELLIPSIS: &str = "…";

/// Returns a name or path as text. One that is too long is cut after a character and ends with `…`.
pub fn shortened(text: &[u8]) -> Cow<'_, str> {
    // Invalid bytes become longer.
    let beginning = String::from_utf8_lossy(&text[..text.len().min(MOST_BYTES + 1)]);
    if beginning.len() <= MOST_BYTES {
        return beginning;
    }
    let kept = beginning.floor_char_boundary(MOST_BYTES - ELLIPSIS.len());
    Cow::Owned(format!("{}{ELLIPSIS}", &beginning[..kept]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_too_long_is_cut_and_no_character_is_divided() {
        let fits = "é".repeat(MOST_BYTES / 2);
        assert_eq!(shortened(fits.as_bytes()), fits);
        for (character, most) in [("x", MOST_BYTES - 3), ("é", (MOST_BYTES - 3) / 2), ("€", (MOST_BYTES - 3) / 3)] {
            let long = character.repeat(MOST_BYTES + 1);
            assert_eq!(shortened(long.as_bytes()), character.repeat(most) + "…");
        }
        let invalid = shortened(&[0xff; MOST_BYTES]);
        assert!(invalid.len() <= MOST_BYTES && invalid.ends_with("\u{fffd}…"), "{}", invalid.len());
    }
}
