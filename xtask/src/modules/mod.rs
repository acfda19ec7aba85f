//! `cargo xtask modules`: checks that the modules of each crate depend on each other in one direction.

mod graph;
mod names;
mod references;
mod test_code;
mod tokens;
mod tree;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use graph::{Cycle, Place};
use tree::{ModuleId, ROOT, Tree};

use crate::context::Context;
use crate::crates::{self, Crate, Kind, Package};
use crate::shell::say;

/// Checks every crate of the workspace except integration tests. Prints the cycles; the exit code is a failure if there
/// is one.
pub fn check(context: &Context) -> anyhow::Result<ExitCode> {
    let (mut crates, mut modules, mut cycles) = (0, 0, 0);
    for package in crates::packages(context)? {
        for krate in package.crates.iter().filter(|krate| krate.kind != Kind::Test) {
            let tree = Tree::load(&krate.root, &|path| fs::read_to_string(path))?;
            let found = graph::cycles(&tree, &graph::dependencies(&tree));
            for cycle in &found {
                println!("{}", describe(&label(&package, krate), &tree, &context.root, cycle));
            }
            crates += 1;
            modules += tree.modules.len();
            cycles += found.len();
        }
    }
    let checked = format!("{modules} modules in {crates} crates");
    if cycles == 0 {
        say!("no cycles between modules ({checked})");
        return Ok(ExitCode::SUCCESS);
    }
    say!("{} between modules ({checked})", counted(cycles, "cycle"));
    say!("to break a cycle, move what several modules need into one that depends on none of them");
    Ok(ExitCode::FAILURE)
}

/// The package's name, followed by the crate's file if it is not the library.
fn label(package: &Package, krate: &Crate) -> String {
    match krate.kind {
        Kind::Library => package.name.clone(),
        _ => format!("{} ({})", package.name, krate.root.display()),
    }
}

/// A cycle with all its dependencies and their places. Those with the fewest places, often the easiest to remove, come
/// first. Paths of files are relative to `root`.
fn describe(krate: &str, tree: &Tree, root: &Path, cycle: &Cycle) -> String {
    let name = |module: ModuleId| tree.modules[module].name.as_str();
    let inside = if cycle.parent == ROOT { String::new() } else { format!(", in {}", tree.path(cycle.parent)) };
    let names: Vec<&str> = cycle.modules.iter().map(|module| name(*module)).collect();
    let mut edges: Vec<_> = cycle.edges.iter().collect();
    edges.sort_by_key(|((from, to), places)| (places.len(), name(*from), name(*to)));
    let mut text = format!("{krate}{inside}: cycle between {}\n", names.join(", "));
    let mut write = |line: String| writeln!(text, "{line}").expect("writing to a string cannot fail");
    for ((from, to), places) in edges {
        write(format!("  {} -> {} ({})", name(*from), name(*to), counted(places.len(), "place")));
        for place in places {
            write(format!("    {}", describe_place(tree, root, place)));
        }
    }
    text
}

fn describe_place(tree: &Tree, root: &Path, place: &Place) -> String {
    let position = |place: &Place| {
        let file = &tree.modules[place.module].file;
        format!("{}:{}", file.strip_prefix(root).unwrap_or(file).display(), place.line)
    };
    let through = place.through.as_ref().map(|used| format!(", which uses {} ({})", used.path, position(used)));
    format!("{}: {}{}", position(place), place.path, through.unwrap_or_default())
}

fn counted(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

#[cfg(test)]
mod tests {
    use super::tree::testing::tree;
    use super::*;

    #[test]
    fn a_cycle_is_reported_with_files_and_lines() {
        let tree = tree(&[
            ("src/lib.rs", "mod p;"),
            ("src/p/mod.rs", "mod a;\nmod b;\nfn help() { b::g() }"),
            ("src/p/a.rs", "use super::b::g;\npub fn f() {\n super::help(); }"),
            ("src/p/b.rs", "pub fn g() { super::a::f() }"),
        ]);
        let cycles = graph::cycles(&tree, &graph::dependencies(&tree));
        let text: Vec<String> =
            cycles.iter().map(|cycle| describe("crate-of-ours", &tree, Path::new("src"), cycle)).collect();
        let expected = "crate-of-ours, in p: cycle between a, b\n\
                        \x20 b -> a (1 place)\n\
                        \x20   p/b.rs:1: super::a::f\n\
                        \x20 a -> b (2 places)\n\
                        \x20   p/a.rs:1: super::b::g\n\
                        \x20   p/a.rs:3: super::help, which uses b::g (p/mod.rs:3)\n";
        assert_eq!(text, [expected]);
    }
}
