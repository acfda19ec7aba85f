//! The library of the benchmark programs: recordings, the machine, tables in documents, and SQL to keep a database busy.

pub mod quantiles;
pub mod recording;

use std::path::Path;

use anyhow::Context;
use heapbpf_record::cost::cpus::online;

/// A description of the machine, its kernel and its load.
#[must_use]
pub fn describe_machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (info, kernel, load) = (read("/proc/cpuinfo"), read("/proc/sys/kernel/osrelease"), read("/proc/loadavg"));
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    format!(
        "{}{} CPUs ({}), kernel {}, load {}",
        if info.contains("hypervisor") { "virtual machine with " } else { "" },
        online(),
        model.map_or("?", |(_, model)| model),
        kernel.trim(),
        load.split_whitespace().next().unwrap_or("?")
    )
}

/// Replaces the text between two marks of a document, `<!-- NAME -->` and `<!-- end of NAME -->`.
///
/// # Errors
/// If the document cannot be read or written, or a mark is missing.
pub fn replace_in_document(path: &Path, name: &str, text: &str) -> anyhow::Result<()> {
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

/// An SQL script that fills a table with an index.
pub fn sql_rows(count: u64) -> String {
    let mut text = String::from("CREATE TABLE items(id INTEGER PRIMARY KEY, name TEXT, note TEXT, price REAL);\n");
    text += "CREATE INDEX names ON items(name);\nBEGIN;\n";
    for i in 0..count {
        let (name, words) = (i.wrapping_mul(2_654_435_761) % 1_000_003, "word ".repeat((i % 40) as usize));
        text +=
            &format!("INSERT INTO items VALUES({i}, hex('item {name}'), upper('{words}of row {i}'), {i} * 1.25);\n");
    }
    text + "COMMIT;\nSELECT count(*), sum(length(note)) FROM items;\n"
}
