//! The font: registers it once and measures texts for the layout.

use std::sync::OnceLock;

use plotters::style::{FontStyle, IntoFont, register_font};

/// Name under which the font is registered. SVG viewers use their own font for it.
pub const FAMILY: &str = "sans-serif";

static FONT: &[u8] = include_bytes!("../fonts/sans.ttf");

/// Registers the font with plotters. Returns whether that worked, which depends only on the font file in this crate.
pub fn register() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| register_font(FAMILY, FontStyle::Normal, FONT).is_ok())
}

/// The width of a text at a font size, in the unit of the size.
pub fn width(text: &str, size: f64) -> f64 {
    // Measured at a large size, because plotters rounds.
    const LARGE: f64 = 200.0;
    if !register() {
        return text.chars().count() as f64 * size * 0.6;
    }
    (FAMILY, LARGE).into_font().box_size(text).map_or(0.0, |(width, _)| f64::from(width) * size / LARGE)
}

/// The text, cut with an ellipsis so that it is at most `available` wide.
pub fn clip(text: &str, size: f64, available: f64) -> String {
    if width(text, size) <= available {
        return text.to_owned();
    }
    let mut clipped: Vec<char> = text.chars().collect();
    // A letter is at least a fifth of the font size wide.
    clipped.truncate((available / size * 5.0).max(0.0) as usize);
    while !clipped.is_empty() {
        let with_end: String = clipped.iter().collect::<String>().trim_end().to_owned() + "…";
        if width(&with_end, size) <= available {
            return with_end;
        }
        clipped.pop();
    }
    "…".into()
}

/// The text, wrapped to lines that are at most `available` wide.
pub fn wrap(text: &str, size: f64, available: f64) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        let longer = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
        if width(&longer, size) > available && !line.is_empty() {
            lines.push(std::mem::replace(&mut line, clip(word, size, available)));
        } else {
            line = clip(&longer, size, available);
        }
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_font_is_there_and_texts_fit() {
        assert!(register());
        assert!(width("wide", 20.0) > width("i", 20.0) && width("", 20.0) == 0.0);
        let text = "cache_insert ← handle_request ← request_loop ← main";
        assert_eq!(clip(text, 13.0, 1e3), text);
        let clipped = clip(text, 13.0, 150.0);
        assert!(clipped.ends_with('…') && width(&clipped, 13.0) <= 150.0 && width(&clipped, 13.0) > 120.0, "{clipped}");
        let lines = wrap(text, 13.0, 150.0);
        assert!(lines.len() > 2 && lines.iter().all(|line| width(line, 13.0) <= 150.0), "{lines:?}");
        assert_eq!(lines.join(" "), text);
    }
}
