//! The dependencies between modules, and the cycles among them.
//!
//! Dependencies are compared among siblings, the modules that one parent declares. A sibling depends on another if a
//! path in it or in a module below it names something that is defined in the other or in a module below that. A
//! re-exported item belongs to the module that defines it.
//!
//! A parent and its children may use each other, as is normal in Rust: neither paths in the parent's own file nor paths
//! to types defined there are dependencies among siblings. But a function, constant, type alias or macro of the
//! parent's file stands for what its body uses: if a child calls a function of its parent that calls a sibling, the
//! child depends on that sibling.

use std::collections::{BTreeMap, BTreeSet};

use petgraph::algo::tarjan_scc;
use petgraph::graphmap::DiGraphMap;

use super::names::{Names, Target};
use super::references::Reference;
use super::tree::{ModuleId, Tree};

/// A place in the source that makes one module depend on another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The module that contains the path.
    pub module: ModuleId,
    /// The path's line in the module's file.
    pub line: usize,
    /// The path as written.
    pub path: String,
    /// The module that defines what the path stands for.
    pub defined_in: ModuleId,
    /// If the path names a function or the like in the parent's file: the place in its body.
    pub through: Option<Box<Place>>,
}

/// A strongly connected component: siblings that all depend on each other, directly or not.
#[derive(Debug, PartialEq, Eq)]
pub struct Cycle {
    /// The module that declares the siblings.
    pub parent: ModuleId,
    /// The siblings, sorted by name.
    pub modules: Vec<ModuleId>,
    /// The dependencies among them.
    pub edges: Edges,
}

/// Dependencies of one module on another, with the places that cause each.
pub type Edges = BTreeMap<(ModuleId, ModuleId), Vec<Place>>;

/// The dependencies in a crate: for each module, those among its children.
pub fn dependencies(tree: &Tree) -> BTreeMap<ModuleId, Edges> {
    let names = Names::new(tree);
    let mut graph = Graph { tree, names: &names, levels: BTreeMap::new() };
    for module in 0..tree.modules.len() {
        graph.add_module(module);
    }
    for edges in graph.levels.values_mut() {
        for places in edges.values_mut() {
            places.sort();
            places.dedup_by(|a, b| (a.module, a.line, a.defined_in) == (b.module, b.line, b.defined_in));
        }
    }
    graph.levels
}

/// The cycles among these dependencies.
pub fn cycles(tree: &Tree, levels: &BTreeMap<ModuleId, Edges>) -> Vec<Cycle> {
    let mut found = Vec::new();
    for (parent, edges) in levels {
        let graph: DiGraphMap<ModuleId, ()> = edges.keys().copied().collect();
        for mut modules in tarjan_scc(&graph).into_iter().filter(|modules| modules.len() > 1) {
            modules.sort_by_key(|module| &tree.modules[*module].name);
            let inside = |module: &ModuleId| modules.contains(module);
            let edges = edges.iter().filter(|((from, to), _)| inside(from) && inside(to));
            let edges = edges.map(|(pair, places)| (*pair, places.clone())).collect();
            found.push(Cycle { parent: *parent, modules, edges });
        }
    }
    found.sort_by_key(|cycle| (cycle.parent, tree.modules[cycle.modules[0]].name.clone()));
    found
}

struct Graph<'a> {
    tree: &'a Tree,
    names: &'a Names<'a>,
    levels: BTreeMap<ModuleId, Edges>,
}

impl Graph<'_> {
    fn add_module(&mut self, module: ModuleId) {
        let found = &self.names.modules[module];
        for (index, import) in found.imports.iter().enumerate() {
            self.add(module, &import.reference, &self.names.resolve_import(module, index));
        }
        // An imported name counts at its `use` declaration. A path that starts with it counts again only if it leads to
        // a module that no import names.
        let imported = self.pairs_from(module);
        for (reference, targets) in self.names.uses(module, |_| true) {
            if !self.names.is_imported(module, &reference.path[0]) {
                self.add(module, reference, &targets);
            } else if reference.path.len() > 1 {
                let pair = |target: &Target| self.siblings(module, target.module).map(|(_, pair)| pair);
                let is_new = |target: &Target| pair(target).is_none_or(|pair| !imported.contains(&pair));
                self.add(module, reference, &targets.into_iter().filter(is_new).collect());
            }
        }
    }

    fn add(&mut self, module: ModuleId, reference: &Reference, targets: &BTreeSet<Target>) {
        for target in targets {
            let place = |defined_in, through| Place {
                module,
                line: reference.line,
                path: reference.path.join("::"),
                defined_in,
                through,
            };
            self.insert(place(target.module, None));
            if self.is_above(target.module, module) {
                for used in self.content(target, &mut BTreeSet::new()) {
                    self.insert(place(used.defined_in, Some(Box::new(used))));
                }
            }
        }
    }

    fn insert(&mut self, place: Place) {
        if let Some((parent, pair)) = self.siblings(place.module, place.defined_in) {
            self.levels.entry(parent).or_default().entry(pair).or_default().push(place);
        }
    }

    /// The places where a function, constant, type alias or macro uses children of its module, followed through others
    /// of the same module. What it uses outside of its module is a dependency of that module already.
    fn content(&self, target: &Target, seen: &mut BTreeSet<Target>) -> Vec<Place> {
        let (module, Some(item)) = (target.module, &target.item) else { return Vec::new() };
        if !self.names.modules[module].transparent.contains(item) || !seen.insert(target.clone()) {
            return Vec::new();
        }
        let mut places = Vec::new();
        for (reference, targets) in self.names.uses(module, |owner| owner == Some(item)) {
            for next in targets {
                if next.module == module {
                    places.append(&mut self.content(&next, seen));
                } else if self.is_above(module, next.module) {
                    let (line, path) = (reference.line, reference.path.join("::"));
                    places.push(Place { module, line, path, defined_in: next.module, through: None });
                }
            }
        }
        places
    }

    /// The two siblings that contain these modules, after their parent; `None` if one module contains the other.
    fn siblings(&self, from: ModuleId, to: ModuleId) -> Option<(ModuleId, (ModuleId, ModuleId))> {
        let line = |module| {
            let mut line: Vec<ModuleId> = self.tree.ancestors(module).collect();
            line.reverse();
            line
        };
        let (from, to) = (line(from), line(to));
        let shared = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
        Some((*from.get(shared.checked_sub(1)?)?, (*from.get(shared)?, *to.get(shared)?)))
    }

    fn is_above(&self, module: ModuleId, other: ModuleId) -> bool {
        module != other && self.tree.ancestors(other).any(|above| above == module)
    }

    fn pairs_from(&self, module: ModuleId) -> BTreeSet<(ModuleId, ModuleId)> {
        let edges = self.levels.values().flatten();
        let of_module = edges.filter(|(_, places)| places.iter().any(|place| place.module == module));
        of_module.map(|(pair, _)| *pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::tree::testing::tree;

    /// The cycles of a crate, formatted as `parent: siblings`, with the places of each dependency.
    fn found(files: &[(&str, &str)]) -> Vec<(String, Vec<String>)> {
        let tree = tree(files);
        let cycles = cycles(&tree, &dependencies(&tree));
        let shown = cycles.into_iter().map(|cycle| {
            let names: Vec<&str> = cycle.modules.iter().map(|module| tree.modules[*module].name.as_str()).collect();
            let places = cycle.edges.iter().flat_map(|((from, to), places)| {
                let (from, to) = (&tree.modules[*from].name, &tree.modules[*to].name);
                places.iter().map(move |place| (format!("{from} -> {to}"), place)).collect::<Vec<_>>()
            });
            let places = places.map(|(edge, place)| {
                let through = place.through.as_ref();
                let through = through.map(|used| format!(" through {}:{}", tree.path(used.module), used.line));
                format!("{edge} at {}:{}{}", tree.path(place.module), place.line, through.unwrap_or_default())
            });
            (format!("{}: {}", tree.path(cycle.parent), names.join(" ")), places.collect())
        });
        shown.collect()
    }

    fn cycles_of(files: &[(&str, &str)]) -> Vec<String> {
        found(files).into_iter().map(|(cycle, _)| cycle).collect()
    }

    #[test]
    fn dependencies_in_one_direction_are_no_cycle() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; pub struct Shared;"),
            ("src/a.rs", "use crate::b::f; use crate::c::g; use crate::Shared;"),
            ("src/b.rs", "use crate::c::g; pub fn f() {}"),
            ("src/c.rs", "pub fn g() {}"),
        ];
        assert_eq!(cycles_of(&files), [""; 0]);
    }

    #[test]
    fn a_cycle_has_its_places() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c; mod d;"),
            ("src/a.rs", "use crate::b::f;\nuse crate::d::h;\nfn x() { f(); f(); }\npub fn y() {}"),
            ("src/b.rs", "pub fn f() {\n  crate::c::g();\n}"),
            ("src/c.rs", "pub fn g() {}\nmod deep { fn z() { super::super::a::y() } }"),
            ("src/d.rs", "pub fn h() {}"),
        ];
        let places = ["a -> b at a:1", "b -> c at b:2", "c -> a at c::deep:2"];
        assert_eq!(found(&files), [("crate: a b c".to_owned(), places.map(str::to_owned).to_vec())]);
    }

    #[test]
    fn a_parent_and_its_children_may_use_each_other() {
        let files = [
            ("src/lib.rs", "mod p;"),
            ("src/p.rs", "mod a; mod b; pub use a::A; pub struct P { a: A, b: b::B } pub fn made() -> P { b::make() }"),
            ("src/p/a.rs", "use super::P; use crate::p::P as Q; pub struct A; impl P { fn f() { super::made(); } }"),
            ("src/p/b.rs", "use super::P; pub struct B; pub fn make() -> P {}"),
        ];
        assert_eq!(cycles_of(&files), [""; 0]);
    }

    #[test]
    fn cycles_are_found_at_every_level_and_behind_re_exports() {
        let files = [
            ("src/lib.rs", "mod p; mod q;"),
            ("src/p.rs", "mod a; mod b; pub use a::A; pub use b::*;"),
            ("src/p/a.rs", "use super::B; pub struct A;"),
            ("src/p/b.rs", "use crate::p::A; pub struct B;"),
            ("src/q.rs", "use crate::p::{A, B};"),
        ];
        let places = ["a -> b at p::a:1", "b -> a at p::b:1"];
        assert_eq!(found(&files), [("p: a b".to_owned(), places.map(str::to_owned).to_vec())]);
    }

    #[test]
    fn a_re_exported_item_belongs_to_the_module_that_defines_it() {
        let files = [
            ("src/lib.rs", "mod a; mod b; mod c;"),
            ("src/a.rs", "pub use crate::b::B;"),
            ("src/b.rs", "pub struct B; use crate::c::C;"),
            ("src/c.rs", "use crate::a::B; pub struct C;"),
        ];
        assert_eq!(cycles_of(&files), ["crate: b c"]);
    }

    #[test]
    fn functions_of_the_parent_do_not_hide_cycles_and_types_make_none() {
        let through = |in_parent: &'static str, in_child: &'static str| {
            let files = [
                ("src/lib.rs", "mod p;"),
                ("src/p.rs", in_parent),
                ("src/p/a.rs", in_child),
                ("src/p/b.rs", "use super::a::f; pub struct B; pub fn g() { f() }"),
            ];
            found(&files)
        };
        let a = "pub fn f() { super::help() }";
        let expected = ["a -> b at p::a:1 through p:2", "b -> a at p::b:1"].map(str::to_owned).to_vec();
        let expected = vec![("p: a b".to_owned(), expected)];
        assert_eq!(through("mod a; mod b; fn help() { more(); }\nfn more() { b::g(); }", a), expected);
        assert_eq!(through("mod a; mod b; use b::g;\nfn help() { help(); g(); }", a), expected);
        assert_eq!(
            through("mod a; mod b;\nmacro_rules! help { () => { $crate::p::b::g() } }", "fn f() { help!() }"),
            expected
        );
        assert_eq!(through("mod a; mod b; fn help() { let more = 1; more; }\nfn more() { b::g(); }", a), []);
        assert_eq!(through("mod a; mod b;\npub struct P { b: b::B }", "use super::P; pub fn f() {}"), []);
    }

    #[test]
    fn test_code_makes_no_dependency() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "use crate::b::f; pub fn g() {}"),
            ("src/b.rs", "pub fn f() {} #[cfg(test)] use crate::a::g; #[cfg(test)] mod tests { use crate::a::g; }"),
        ];
        assert_eq!(cycles_of(&files), [""; 0]);
    }
}
