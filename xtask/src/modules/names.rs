//! Resolves a path as written in a module to the module that defines what it names.

use std::collections::BTreeSet;

use super::references::{self, Import, Reference, References};
use super::tree::{ModuleId, ROOT, Tree};

/// The result of resolving a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// The named module, or the module that defines the named item.
    pub module: ModuleId,
    /// The item; `None` if the path names the module itself.
    pub item: Option<String>,
}

/// All names of a crate.
pub struct Names<'a> {
    tree: &'a Tree,
    /// What each module defines and refers to.
    pub modules: Vec<References>,
}

/// Imports being followed, as module and index: an import that leads back to itself resolves to nothing.
type Followed = Vec<(ModuleId, usize)>;

impl<'a> Names<'a> {
    /// Collects the names in all modules of a crate.
    pub fn new(tree: &'a Tree) -> Self {
        Self { tree, modules: tree.modules.iter().map(|module| references::read(&module.items)).collect() }
    }

    /// Resolves a path; re-exports are followed to the definition. The result is empty for paths outside of the crate,
    /// and has several elements if, for example, a module and a function have the same name.
    pub fn resolve(&self, from: ModuleId, path: &[String]) -> BTreeSet<Target> {
        self.walk(from, path, &mut Followed::new())
    }

    /// Resolves an import of a module, given by its index.
    pub fn resolve_import(&self, from: ModuleId, index: usize) -> BTreeSet<Target> {
        self.walk(from, &self.modules[from].imports[index].reference.path, &mut vec![(from, index)])
    }

    /// Resolves a macro that is called by its name alone.
    pub fn resolve_macro(&self, from: ModuleId, name: &str) -> BTreeSet<Target> {
        let found = self.lookup(from, name, &mut Followed::new());
        let found: BTreeSet<Target> = found.into_iter().filter(|target| target.item.is_some()).collect();
        if !found.is_empty() {
            return found;
        }
        // A `macro_rules!` macro is in scope in its module and below, without an import.
        let above = self.tree.ancestors(from).find(|module| self.modules[*module].items.contains(name));
        above.into_iter().map(|module| Target { module, item: Some(name.to_owned()) }).collect()
    }

    /// The paths in a module's code whose owner is `picked`, resolved.
    pub fn uses(&self, module: ModuleId, picked: impl Fn(Option<&str>) -> bool) -> Vec<(&Reference, BTreeSet<Target>)> {
        let found = &self.modules[module];
        let code = found.code.iter().filter(|reference| picked(reference.owner.as_deref())).map(|reference| {
            let mut targets = self.resolve(module, &reference.path);
            // An expression or type is never a module. Paths of several segments in macros and attributes may be.
            if reference.path.len() == 1 || targets.iter().any(|target| target.item.is_some()) {
                targets.retain(|target| target.item.is_some());
            }
            (reference, targets)
        });
        let macros = found.macros.iter().filter(|reference| picked(reference.owner.as_deref()));
        let macros = macros.map(|reference| (reference, self.resolve_macro(module, &reference.path[0])));
        code.chain(macros).collect()
    }

    /// Whether a name in a module comes from a `use` declaration.
    pub fn is_imported(&self, module: ModuleId, name: &str) -> bool {
        self.modules[module].imports.iter().any(|import| import.name.as_deref() == Some(name))
    }

    fn walk(&self, from: ModuleId, path: &[String], followed: &mut Followed) -> BTreeSet<Target> {
        let Some((first, mut rest)) = path.split_first() else { return BTreeSet::new() };
        let module = |module| BTreeSet::from([Target { module, item: None }]);
        let mut found = match first.as_str() {
            "crate" => module(ROOT),
            "self" => module(from),
            "super" => {
                let mut above = self.tree.modules[from].parent;
                while let Some(("super", remaining)) = rest.split_first().map(|(first, rest)| (first.as_str(), rest)) {
                    above = above.and_then(|above| self.tree.modules[above].parent);
                    rest = remaining;
                }
                above.map(module).unwrap_or_default()
            }
            name => self.lookup(from, name, followed),
        };
        for segment in rest {
            let (items, modules): (BTreeSet<Target>, BTreeSet<Target>) =
                found.into_iter().partition(|target| target.item.is_some());
            // The rest of a path after a type names a variant or an associated item. A module has priority, because an
            // item of the same name is a function.
            found = if modules.is_empty() { items } else { BTreeSet::new() };
            for target in modules {
                found.append(&mut self.lookup(target.module, segment, followed));
            }
        }
        found
    }

    fn lookup(&self, module: ModuleId, name: &str, followed: &mut Followed) -> BTreeSet<Target> {
        let mut found = BTreeSet::new();
        let children = self.tree.modules[module].children.iter();
        found.extend(
            children
                .filter(|child| self.tree.modules[**child].name == name)
                .map(|child| Target { module: *child, item: None }),
        );
        let item = |module| Target { module, item: Some(name.to_owned()) };
        if self.modules[module].items.contains(name) {
            found.insert(item(module));
        }
        if module == ROOT {
            let exporting = (0..self.modules.len()).filter(|module| self.modules[*module].exported.contains(name));
            found.extend(exporting.map(item));
        }
        let imports = || self.modules[module].imports.iter().enumerate();
        for (index, import) in imports().filter(|(_, import)| import.name.as_deref() == Some(name)) {
            found.append(&mut self.follow(module, index, import, followed));
        }
        if !found.is_empty() {
            return found;
        }
        for (index, glob) in imports().filter(|(_, import)| import.name.is_none()) {
            let sources = self.follow(module, index, glob, followed);
            for source in sources.into_iter().filter(|source| source.item.is_none()) {
                followed.push((module, index));
                found.append(&mut self.lookup(source.module, name, followed));
                followed.pop();
            }
        }
        found
    }

    fn follow(&self, module: ModuleId, index: usize, import: &Import, followed: &mut Followed) -> BTreeSet<Target> {
        if followed.contains(&(module, index)) {
            return BTreeSet::new();
        }
        followed.push((module, index));
        let found = self.walk(module, &import.reference.path, followed);
        followed.pop();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::tree::testing::tree;

    /// Resolves a path in a module; the result is formatted as `module` or `module.item`.
    fn named(files: &[(&str, &str)], from: &str, path: &str) -> String {
        let tree = tree(files);
        let from = (0..tree.modules.len()).find(|id| tree.path(*id) == from).expect("no such module");
        let path: Vec<String> = path.split("::").map(str::to_owned).collect();
        let found = Names::new(&tree).resolve(from, &path);
        let shown = found
            .into_iter()
            .map(|target| tree.path(target.module) + &target.item.map(|item| format!(".{item}")).unwrap_or_default());
        shown.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn paths_are_resolved() {
        let files = [
            ("src/lib.rs", "mod a; mod b; pub fn top() {}"),
            ("src/a.rs", "mod c; pub struct S; use crate::b as other;"),
            ("src/a/c.rs", "pub enum E { V }"),
            ("src/b.rs", "use crate::a::c::E; pub fn f() {}"),
        ];
        for (from, path, expected) in [
            ("a::c", "crate::b::f", "b.f"),
            ("a::c", "super::S", "a.S"),
            ("a::c", "super::super::top", "crate.top"),
            ("a::c", "super::other::f", "b.f"),
            ("a", "self::c::E", "a::c.E"),
            ("a", "c", "a::c"),
            ("b", "E::V", "a::c.E"),
            ("b", "std::fmt::Debug", ""),
            ("b", "crate::nothing::x", ""),
            ("a", "super::super::x", ""),
        ] {
            assert_eq!(named(&files, from, path), expected, "{path} in {from}");
        }
    }

    #[test]
    fn re_exports_are_followed_to_the_definition() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a/mod.rs", "mod c; mod d; pub use c::One; pub use d::*; pub use crate::b::far as near;"),
            ("src/a/c.rs", "pub struct One;"),
            ("src/a/d.rs", "pub struct Two; pub use super::One as Again;"),
            ("src/b.rs", "pub mod far { pub fn f() {} } pub use std::fmt;"),
        ];
        for (path, expected) in [
            ("crate::a::One", "a::c.One"),
            ("crate::a::Two", "a::d.Two"),
            ("crate::a::Again", "a::c.One"),
            ("crate::a::near::f", "b::far.f"),
            ("crate::b::fmt::Debug", ""),
        ] {
            assert_eq!(named(&files, "crate", path), expected, "{path}");
        }
    }

    #[test]
    fn a_module_and_a_function_may_have_the_same_name() {
        let files = [("src/lib.rs", "mod run; pub fn run() {}"), ("src/run.rs", "pub fn x() {}")];
        assert_eq!(named(&files, "crate", "crate::run"), "crate.run run");
        assert_eq!(named(&files, "run", "super::run::x"), "run.x");
    }

    #[test]
    fn circular_imports_end() {
        let files = [
            ("src/lib.rs", "mod a; mod b; pub use a::*; pub use b::*; pub use x::y; pub use y::x;"),
            ("src/a.rs", "pub use crate::b::*; pub use super::*;"),
            ("src/b.rs", "pub use crate::a::*; pub struct S; macro_rules! say { () => {} } pub use say;"),
        ];
        assert_eq!(named(&files, "a", "S"), "b.S");
        assert_eq!(named(&files, "crate", "a::nothing"), "");
        assert_eq!(named(&files, "crate", "x"), "");
        assert_eq!(named(&files, "crate", "b::say"), "b.say");
    }

    #[test]
    fn macros_are_in_scope_below_their_definition_and_by_export() {
        let files = [
            ("src/lib.rs", "mod a; mod b;"),
            ("src/a.rs", "macro_rules! m { () => {} } mod c; #[macro_export] macro_rules! n { () => {} }"),
            ("src/a/c.rs", ""),
            ("src/b.rs", ""),
        ];
        let tree = tree(&files);
        let names = Names::new(&tree);
        let id = |path: &str| (0..tree.modules.len()).find(|id| tree.path(*id) == path).expect("no such module");
        let module = |from: &str, name: &str| names.resolve_macro(id(from), name).first().map(|target| target.module);
        assert_eq!(module("a::c", "m"), Some(id("a")));
        assert_eq!(module("b", "m"), None);
        assert_eq!(named(&files, "b", "crate::n"), "a.n");
    }
}
