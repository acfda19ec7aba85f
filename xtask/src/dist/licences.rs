//! The licences of all third-party code in the binary, in one text: MIT, BSD and others require that.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context as _, ensure};

use super::components::Component;
use crate::context::Context;

const HEAD: &str = "\
Licences of what heapbpf's binary contains and others wrote. The list of these parts with versions and checksums is the file
heapbpf-VERSION.cdx.json beside the release.

The binary is linked statically with the GNU C library (LGPL-2.1). Its source, which everybody may change and link again, is
heapbpf's own source with `cargo xtask dist`.
";

const RULE: &str = "================================================================================";

/// Returns the text: first the parts with their licences, then each licence text once.
pub fn text(context: &Context, components: &[Component]) -> anyhow::Result<String> {
    let apache = fs::read_to_string(context.root.join("LICENSE-APACHE")).context("cannot read LICENSE-APACHE")?;
    let mut licences = Vec::new();
    let of_repository = |component: &Component| {
        let same = |other: &&Component| other.repository == component.repository && !other.texts.is_empty();
        component.repository.as_ref().and(components.iter().find(same)).map(|other| other.texts.clone())
    };
    for component in components.iter().filter(|component| !component.is_own) {
        // Some packages do not include their licence text. It is taken from another package of the same repository, or
        // from packaging/licences.
        let kept = context.root.join("packaging/licences").join(format!("{}.txt", component.name));
        let files = match (component.texts.is_empty(), kept.is_file()) {
            (false, _) => component.texts.clone(),
            (true, true) => vec![kept.clone()],
            (true, false) => of_repository(component).unwrap_or_default(),
        };
        let mut texts = Vec::new();
        for file in &files {
            let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            texts.push(String::from_utf8_lossy(&bytes).into_owned());
        }
        if texts.is_empty() && component.licence.contains("Apache-2.0") {
            texts.push(apache.clone());
        }
        ensure!(
            !texts.is_empty(),
            "the package of {} has no text of its licence, {}: write it to {}",
            component.name,
            component.licence,
            kept.display()
        );
        licences.push((component, texts));
    }
    Ok(compose(&licences))
}

fn compose(licences: &[(&Component, Vec<String>)]) -> String {
    let mut all = HEAD.to_owned();
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (component, texts) in licences {
        let name = format!("{} {}", component.name, component.version);
        // Writing to a string cannot fail.
        let _ = write!(all, "\n{name}: {}", component.licence);
        for text in texts {
            // Texts that differ only in line ends and the like count as the same.
            let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
            users.entry(lines.join("\n").trim_matches('\n').to_owned()).or_default().push(name.clone());
        }
    }
    let mut texts: Vec<(Vec<String>, String)> = users
        .into_iter()
        .map(|(text, mut names)| {
            names.dedup();
            (names, text)
        })
        .collect();
    texts.sort();
    all.push('\n');
    for (names, text) in texts {
        let _ = write!(all, "\n{RULE}\n{}\n{RULE}\n\n{text}\n", names.join(", "));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_appear_once_with_all_who_use_them() {
        let component = |name: &str| Component {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            licence: "MIT".to_owned(),
            ..Component::default()
        };
        let (a, b, c) = (component("a"), component("b"), component("c"));
        let licences =
            [(&a, vec!["Be kind.\n".to_owned()]), (&b, vec!["Be kind. \r\n\r\n".to_owned()]), (&c, Vec::new())];
        let text = compose(&licences);
        assert_eq!(text.matches("Be kind.").count(), 1, "{text}");
        assert!(text.contains("\na 1.0.0, b 1.0.0\n"), "{text}");
        assert!(text.contains("\nc 1.0.0: MIT\n"), "{text}");
    }
}
