//! Tables that programs write into documents, between marks.

use std::path::Path;

use anyhow::Context;

/// Replaces the text between two marks of a document, `<!-- NAME -->` and `<!-- end of NAME -->`.
///
/// # Errors
/// If the document cannot be read or written, or a mark is missing.
pub fn replace_in(path: &Path, name: &str, text: &str) -> anyhow::Result<()> {
    let document = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let replaced = replace(&document, name, text).with_context(|| format!("in {}", path.display()))?;
    std::fs::write(path, replaced).with_context(|| format!("cannot write {}", path.display()))
}

fn replace(document: &str, name: &str, text: &str) -> anyhow::Result<String> {
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
    let missing = || format!("the marks {} and {end} are missing", begin.trim());
    let (before, rest) = document.split_once(&begin).with_context(missing)?;
    let (_, after) = rest.split_once(&end).with_context(missing)?;
    Ok(format!("{before}{begin}\n{}\n{end}{after}", text.trim()))
}
