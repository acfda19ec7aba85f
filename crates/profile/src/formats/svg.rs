//! A flame graph as a single SVG file with search and zoom, drawn by inferno.

use std::io;

use inferno::flamegraph::color::{BasicPalette, Palette};
use inferno::flamegraph::{self, TextTruncateDirection};

use super::{FormatError, WriteOptions, folded};
use crate::model::Profile;
use crate::report::subject;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let value = options.value_of(profile)?;
    let mut lines = Vec::new();
    folded::lines(profile, options, |line| {
        lines.push(String::from_utf8_lossy(line).trim_end().to_owned());
        Ok(())
    })?;
    if lines.is_empty() {
        return Ok(write!(out, "{}", nothing(value.title()))?);
    }
    let mut graph = flamegraph::Options::default();
    graph.title = format!("heapbpf: {}", value.title());
    graph.subtitle = Some(subject(profile));
    graph.count_name = if value.is_bytes() { "bytes" } else { "objects" }.into();
    graph.name_type = "Function:".into();
    graph.colors = Palette::Basic(BasicPalette::Mem);
    graph.deterministic = true;
    graph.min_width = 0.05;
    graph.text_truncate_direction = TextTruncateDirection::Right;
    flamegraph::from_lines(&mut graph, lines.iter().map(String::as_str), out)?;
    Ok(())
}

/// The SVG of an empty profile, with a text that says so.
fn nothing(what: &str) -> String {
    format!(
        "<?xml version=\"1.0\" standalone=\"no\"?>\n<svg version=\"1.1\" width=\"600\" height=\"60\" \
         xmlns=\"http://www.w3.org/2000/svg\"><text x=\"20\" y=\"35\" font-family=\"sans-serif\">heapbpf: no {what} \
         in any sample</text></svg>\n"
    )
}

#[cfg(test)]
mod tests {
    use crate::testing;

    #[test]
    fn a_graph_names_functions_and_adds_up() {
        let profile = testing::small();
        let text = testing::text(&profile, "svg");
        let total: f64 = profile.rows.iter().map(|row| row.inuse.bytes).sum();
        let separated = crate::units::count(total.round());
        assert!(text.contains(&format!("<title>all ({separated} bytes, 100%)</title>")), "{total}");
        assert!(text.contains("<title>parse_value (") && text.contains("handle(Request const&amp;)"));
        assert!(!text.contains("href=\"http") && !text.contains("src=\"http"), "nothing is fetched");
    }

    #[test]
    fn an_empty_profile_is_a_picture_too() {
        let mut profile = testing::small();
        profile.rows.clear();
        assert!(testing::text(&profile, "svg").contains("no bytes in use in any sample"));
    }
}
