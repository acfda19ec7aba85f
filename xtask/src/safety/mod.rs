//! `cargo xtask unsafe`: writes docs/unsafe.md, the list of all `unsafe` code that is shipped and of what holds it sound.

mod scan;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, ensure};

use scan::Place;

use crate::context::Context;
use crate::shell::say;
use crate::source::crates::{self, Kind, Package};
use crate::source::tree::Tree;

/// Packages of which nothing is part of a release.
const NOT_SHIPPED: &[&str] = &["heapbpf-bench", "heapbpf-own-process", "heapbpf-testing", "heapbpf-tests", "xtask"];

/// The inventory.
const INVENTORY: &str = "docs/unsafe.md";

const HEAD: &str = "\
# Unsafe code

Every `unsafe` block, function and implementation that is part of a release, and what holds it sound: the `// SAFETY:` comment
above it or the section *Safety* of a function's documentation. `cargo xtask unsafe` writes this file. CI runs
`cargo xtask unsafe --check`, which fails if the file is stale or a place has no note.

Attributes such as `#[unsafe(no_mangle)]`, which name the BPF programs and maps, are not listed, nor is test code.
";

/// Writes the inventory; with `check`, only says whether the committed one is true.
///
/// # Errors
/// Unsafe code has no note, or the committed inventory is another.
pub fn unsafe_code(context: &Context, check: bool) -> anyhow::Result<()> {
    let mut packages = Vec::new();
    for package in crates::packages(context)? {
        if !NOT_SHIPPED.contains(&package.name.as_str()) {
            let places = places(&package, &context.root)?;
            packages.push((package.name, places));
        }
    }
    let all = || {
        packages.iter().flat_map(|(_, files)| files).flat_map(|(file, places)| places.iter().map(move |it| (file, it)))
    };
    let bare: Vec<String> = all()
        .filter(|(_, place)| place.note.is_none())
        .map(|(file, place)| format!("{file}:{}: {}", place.line, place.code))
        .collect();
    ensure!(bare.is_empty(), "unsafe code without a SAFETY note:\n{}", bare.join("\n"));
    let (path, text) = (context.root.join(INVENTORY), render(&packages));
    if check {
        let committed = fs::read_to_string(&path).with_context(|| INVENTORY.to_owned())?;
        ensure!(committed == text, "{INVENTORY} is stale: run `cargo xtask unsafe` and commit it");
    } else {
        fs::write(&path, text).with_context(|| INVENTORY.to_owned())?;
    }
    say!("{} places of unsafe code, each with its note", all().count());
    Ok(())
}

/// The unsafe code of a package by file, relative to the workspace.
fn places(package: &Package, root: &Path) -> anyhow::Result<BTreeMap<String, Vec<Place>>> {
    let mut files: BTreeMap<String, Vec<Place>> = BTreeMap::new();
    for krate in package.crates.iter().filter(|krate| matches!(krate.kind, Kind::Library | Kind::Program)) {
        let tree = Tree::load(&krate.root, &|path| fs::read_to_string(path))?;
        for module in &tree.modules {
            let text = fs::read_to_string(&module.file)?;
            let file = module.file.strip_prefix(root).unwrap_or(&module.file).display().to_string();
            let places = files.entry(file).or_default();
            places.extend(scan::scan(&module.items, &text));
            places.sort_by_key(|place| place.line);
            // A file may be part of a library and of a program.
            places.dedup();
        }
    }
    files.retain(|_, places| !places.is_empty());
    Ok(files)
}

fn render(packages: &[(String, BTreeMap<String, Vec<Place>>)]) -> String {
    let mut text = HEAD.to_owned();
    let mut write = |line: String| writeln!(text, "{line}").expect("writing to a string cannot fail");
    let (with, without): (Vec<_>, Vec<_>) = packages.iter().partition(|(_, files)| !files.is_empty());
    let names: Vec<String> = without.iter().map(|(name, _)| format!("`{name}`")).collect();
    write(format!("\nWithout unsafe code: {}.", names.join(", ")));
    for (name, files) in with {
        write(format!("\n## {name}: {}", files.values().map(Vec::len).sum::<usize>()));
        for (file, places) in files {
            write(format!("\n`{file}`\n"));
            for Place { within, code, note, .. } in places {
                let within = if within.is_empty() { String::new() } else { format!("`{within}`: ") };
                write(format!("- {within}`{}` — {}", code.replace('`', "'"), note.as_deref().unwrap_or("no note")));
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inventory_has_a_line_for_each_place_and_names_crates_without() {
        let place =
            |within: &str| Place { line: 3, within: within.into(), code: "f()".into(), note: Some("It is so.".into()) };
        let files = BTreeMap::from([("a/src/lib.rs".to_owned(), vec![place("T::m"), place("")])]);
        let text = render(&[("a".into(), files), ("b".into(), BTreeMap::new())]);
        let expected = "\nWithout unsafe code: `b`.\n\n## a: 2\n\n`a/src/lib.rs`\n\n\
                        - `T::m`: `f()` — It is so.\n- `f()` — It is so.\n";
        assert_eq!(text.strip_prefix(HEAD), Some(expected));
    }
}
