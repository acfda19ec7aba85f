//! Collects what one module defines and refers to: its items, its imports, and the paths in code, macros and
//! attributes.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Attribute, ExprPath, Field, ImplItem, Item, ItemMacro, ItemUse, Local, Macro, Meta, PatIdent, Path, UseTree,
    VisRestricted,
};

use super::test_code::{attributes, attributes_in_impl, is_test_only};
use super::tokens;

/// A path in a module, as written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Its segments, without generic arguments.
    pub path: Vec<String>,
    /// Its line in the module's file.
    pub line: usize,
    /// The function, constant, type alias or macro of the module that contains it.
    pub owner: Option<String>,
}

/// A name, or with `*` all names of a module, that a `use` declaration imports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// The name inside the importing module: `None` for `*`, and `_` for `as _`.
    pub name: Option<String>,
    /// The imported path.
    pub reference: Reference,
}

/// What a module defines and refers to.
#[derive(Debug, Default)]
pub struct References {
    /// Names of the items that it defines.
    pub items: BTreeSet<String>,
    /// Those of its items that stand for what their body uses: functions, constants, type aliases, macros.
    pub transparent: BTreeSet<String>,
    /// Those of its macros that have `#[macro_export]`, which makes them items of the crate's root.
    pub exported: BTreeSet<String>,
    /// Imports, those inside of functions included.
    pub imports: Vec<Import>,
    /// Paths in code.
    pub code: Vec<Reference>,
    /// Macro calls without a path, such as `say!(…)`.
    pub macros: Vec<Reference>,
}

/// Collects the references in the items of a module.
pub fn read(items: &[Item]) -> References {
    let mut visitor = Visitor::default();
    for item in items {
        visitor.define(item);
        visitor.visit_item(item);
        visitor.owner = None;
        visitor.bound.clear();
    }
    visitor.found
}

#[derive(Default)]
struct Visitor {
    found: References,
    owner: Option<String>,
    /// Names of local variables in the owner.
    bound: BTreeSet<String>,
}

impl Visitor {
    /// Records the name that a top-level item defines, and makes the item the owner of what follows.
    fn define(&mut self, item: &Item) {
        let (name, transparent) = match item {
            Item::Const(item) => (&item.ident, true),
            Item::Fn(item) => (&item.sig.ident, true),
            Item::Static(item) => (&item.ident, true),
            Item::Type(item) => (&item.ident, true),
            Item::Enum(item) => (&item.ident, false),
            Item::Struct(item) => (&item.ident, false),
            Item::Trait(item) => (&item.ident, false),
            Item::TraitAlias(item) => (&item.ident, false),
            Item::Union(item) => (&item.ident, false),
            Item::Macro(ItemMacro { ident: Some(ident), attrs, .. }) => {
                if attrs.iter().any(|attribute| attribute.path().is_ident("macro_export")) {
                    self.found.exported.insert(tokens::name(ident));
                }
                (ident, true)
            }
            _ => return,
        };
        let name = tokens::name(name);
        self.found.items.insert(name.clone());
        if transparent {
            self.found.transparent.insert(name.clone());
            self.owner = Some(name);
            let mut variables = Variables(BTreeSet::new());
            variables.visit_item(item);
            self.bound = variables.0;
        }
    }

    fn reference(&self, path: Vec<String>, line: usize) -> Reference {
        Reference { path, line, owner: self.owner.clone() }
    }

    fn import(&mut self, tree: &UseTree, prefix: &[String]) {
        let (name, last) = match tree {
            UseTree::Path(part) => {
                let prefix = [prefix, &[tokens::name(&part.ident)]].concat();
                return self.import(&part.tree, &prefix);
            }
            UseTree::Group(group) => return group.items.iter().for_each(|tree| self.import(tree, prefix)),
            UseTree::Name(part) => (Some(&part.ident), Some(&part.ident)),
            UseTree::Rename(part) => (Some(&part.rename), Some(&part.ident)),
            UseTree::Glob(_) => (None, None),
        };
        let mut path = prefix.to_vec();
        // `use a::{self}` imports `a`.
        path.extend(last.map(tokens::name).filter(|last| prefix.is_empty() || last != "self"));
        let name =
            name.map(tokens::name).map(|name| if name == "self" { path.last().cloned().unwrap_or(name) } else { name });
        let reference = self.reference(path, tree.span().start().line);
        self.found.imports.push(Import { name, reference });
    }

    fn scan(&mut self, text: proc_macro2::TokenStream, strings: bool) {
        for (path, line) in tokens::paths(text, strings) {
            let reference = self.reference(path, line);
            self.found.code.push(reference);
        }
    }
}

impl<'ast> Visit<'ast> for Visitor {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test_only(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !is_test_only(attributes_in_impl(item)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast Field) {
        if !is_test_only(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if !is_test_only(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, &[]);
        }
    }

    fn visit_expr_path(&mut self, expression: &'ast ExprPath) {
        let variable = expression.path.get_ident().is_some_and(|name| self.bound.contains(&tokens::name(name)));
        if !variable {
            visit::visit_expr_path(self, expression);
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        if path.leading_colon.is_none() {
            let segments = path.segments.iter().map(|segment| tokens::name(&segment.ident)).collect();
            let reference = self.reference(segments, path.span().start().line);
            self.found.code.push(reference);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast Macro) {
        if let Some(name) = call.path.get_ident() {
            let reference = self.reference(vec![tokens::name(name)], name.span().start().line);
            self.found.macros.push(reference);
        } else {
            self.visit_path(&call.path);
        }
        self.scan(call.tokens.clone(), false);
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if let Meta::List(list) = &attribute.meta {
            self.scan(list.tokens.clone(), true);
        }
    }

    fn visit_vis_restricted(&mut self, _: &'ast VisRestricted) {
        // The path in `pub(in path)` always names an ancestor.
    }
}

/// Collects the names of local variables and parameters.
struct Variables(BTreeSet<String>);

impl<'ast> Visit<'ast> for Variables {
    fn visit_pat_ident(&mut self, pattern: &'ast PatIdent) {
        let name = tokens::name(&pattern.ident);
        // A constant in a pattern parses as a variable.
        if name.chars().any(char::is_lowercase) {
            self.0.insert(name);
        }
        visit::visit_pat_ident(self, pattern);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn references(text: &str) -> References {
        read(&syn::parse_file(text).expect("it parses").items)
    }

    /// Formats references as `owner: line path`.
    fn shown<'a>(references: impl IntoIterator<Item = &'a Reference>) -> Vec<String> {
        let shown = |reference: &Reference| {
            let owner = reference.owner.as_ref().map(|owner| format!("{owner}: ")).unwrap_or_default();
            format!("{owner}{} {}", reference.line, reference.path.join("::"))
        };
        references.into_iter().map(shown).collect()
    }

    #[test]
    fn every_form_of_use_is_understood() {
        let found = references(
            "use a::{b, c::d as e,\n  self};\nuse super::x::*;\nuse crate::T as _;\nuse r#type::y;\nuse ::outside::z;\nfn f() { use g::h; }",
        );
        let names: Vec<Option<&str>> = found.imports.iter().map(|import| import.name.as_deref()).collect();
        assert_eq!(names, [Some("b"), Some("e"), Some("a"), None, Some("_"), Some("y"), Some("h")]);
        let expected = ["1 a::b", "1 a::c::d", "2 a", "3 super::x", "4 crate::T", "5 type::y", "f: 7 g::h"];
        assert_eq!(shown(found.imports.iter().map(|import| &import.reference)), expected);
    }

    #[test]
    fn paths_are_found_in_types_expressions_patterns_macros_and_attributes() {
        let found = references(
            "struct S { field: crate::a::A<crate::b::B> }\n\
             impl super::T for S { fn f(&self) -> i32 { match self.x { crate::c::K => x::y(), _ => 0 } } }\n\
             fn g() { println!(\"{}\", crate::d::e(super::F)); }\n\
             #[serde(with = \"crate::hex\")] struct U;\n\
             #[arg(value_parser = values::bytes)] struct V;",
        );
        let paths = shown(&found.code);
        for expected in [
            "1 crate::a::A",
            "1 crate::b::B",
            "2 super::T",
            "2 crate::c::K",
            "2 x::y",
            "g: 3 crate::d::e",
            "g: 3 super::F",
            "4 crate::hex",
            "5 values::bytes",
        ] {
            assert!(paths.iter().any(|path| path == expected), "{expected} is not in {paths:?}");
        }
    }

    #[test]
    fn items_are_classified() {
        let found = references(
            "const C: u8 = 0; static D: u8 = 0; fn f() {} type T = u8; struct S; enum E {} trait R {} union U { x: u8 }\n\
             macro_rules! m { () => { $crate::a::b() } }\n#[macro_export] macro_rules! n { () => {} }\nimpl S { fn method() {} }",
        );
        let list = |names: &BTreeSet<String>| names.iter().cloned().collect::<Vec<_>>().join(" ");
        assert_eq!(list(&found.items), "C D E R S T U f m n");
        assert_eq!(list(&found.transparent), "C D T f m n");
        assert_eq!(list(&found.exported), "n");
        assert!(shown(&found.code).contains(&"m: 2 crate::a::b".to_owned()));
    }

    #[test]
    fn local_variables_and_test_code_are_ignored() {
        let found = references(
            "fn f(count: u8) -> u8 { let other = g(count); other }\n\
             impl S { #[cfg(test)] fn t() { crate::gone::x() } }\n#[cfg(test)] fn u() { crate::gone::y() }\n\
             pub(in crate::gone) fn v() {}",
        );
        let paths: Vec<String> = found.code.iter().map(|reference| reference.path.join("::")).collect();
        assert!(paths.contains(&"g".to_owned()), "{paths:?}");
        for absent in ["count", "other", "crate::gone", "crate::gone::x", "crate::gone::y"] {
            assert!(!paths.contains(&absent.to_owned()), "{absent} is in {paths:?}");
        }
    }
}
