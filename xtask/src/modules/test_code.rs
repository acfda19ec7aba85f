//! Recognizes test code: items that are compiled for tests only, and files that contain nothing else.

use std::ops::RangeInclusive;
use std::path::Path;

use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, ImplItem, Item, Lit, Meta, MetaList, MetaNameValue, Token};

/// The feature by which a crate offers its test helpers to other crates' tests.
const TEST_FEATURE: &str = "testing";

/// Whether an item with these attributes is compiled for tests only: `#[test]`, or a `#[cfg(…)]` that holds only if
/// `test` or the feature `testing` is set.
pub fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => list.parse_args::<Meta>().is_ok_and(|cfg| requires_test(&cfg)),
        _ => false,
    })
}

/// Whether a `cfg` condition can hold in test builds only.
fn requires_test(condition: &Meta) -> bool {
    let parts = |list: &MetaList| list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::NameValue(MetaNameValue { path, value: Expr::Lit(ExprLit { lit: Lit::Str(name), .. }), .. }) => {
            path.is_ident("feature") && name.value() == TEST_FEATURE
        }
        Meta::List(list) if list.path.is_ident("all") => parts(list).is_ok_and(|parts| parts.iter().any(requires_test)),
        Meta::List(list) if list.path.is_ident("any") => {
            parts(list).is_ok_and(|parts| !parts.is_empty() && parts.iter().all(requires_test))
        }
        _ => false,
    }
}

/// Whether a file contains test code only, judged by its path relative to the crate's source folder: `tests.rs`,
/// `*_tests.rs`, and every file in a folder named `tests`.
pub fn is_test_file(path: &Path) -> bool {
    let folders = path.parent().into_iter().flat_map(Path::components);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    stem == "tests" || stem.ends_with("_tests") || folders.into_iter().any(|folder| folder.as_os_str() == "tests")
}

/// The attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::ExternCrate(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::TraitAlias(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// The attributes of an item inside an `impl` block.
pub fn attributes_in_impl(item: &ImplItem) -> &[Attribute] {
    match item {
        ImplItem::Const(item) => &item.attrs,
        ImplItem::Fn(item) => &item.attrs,
        ImplItem::Type(item) => &item.attrs,
        ImplItem::Macro(item) => &item.attrs,
        _ => &[],
    }
}

/// The lines of test-only items, attributes and doc comments included. The first line of a file is 1.
pub fn line_ranges(file: &syn::File) -> Vec<RangeInclusive<usize>> {
    let mut found = Ranges::default();
    found.visit_file(file);
    found.0
}

#[derive(Default)]
struct Ranges(Vec<RangeInclusive<usize>>);

impl Ranges {
    fn add(&mut self, item: &impl Spanned) {
        let span = item.span();
        self.0.push(span.start().line..=span.end().line);
    }
}

impl<'ast> Visit<'ast> for Ranges {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test_only(attributes(item)) { self.add(item) } else { visit::visit_item(self, item) }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if is_test_only(attributes_in_impl(item)) { self.add(item) } else { visit::visit_impl_item(self, item) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_that_only_test_builds_compile_are_test_code() {
        let is_test = |text: &str| {
            let item: Item = syn::parse_str(&format!("{text} mod m {{}}")).expect("an item");
            is_test_only(attributes(&item))
        };
        for text in [
            "#[cfg(test)]",
            "#[cfg(all(unix, test))]",
            "#[cfg(all(all(test), unix))]",
            "#[cfg(any(test, feature = \"testing\"))]",
            "#[allow(x)] #[test]",
        ] {
            assert!(is_test(text), "{text}");
        }
        for text in [
            "",
            "#[cfg(any(test, unix))]",
            "#[cfg(not(test))]",
            "#[cfg(unix)]",
            "#[cfg(feature = \"svg\")]",
            "#[cfg(any())]",
        ] {
            assert!(!is_test(text), "{text}");
        }
    }

    #[test]
    fn test_files_are_recognized_by_their_path() {
        for path in ["tests.rs", "a/b_tests.rs", "a/tests/c.rs", "tests/mod.rs"] {
            assert!(is_test_file(Path::new(path)), "{path}");
        }
        for path in ["test.rs", "a/testing.rs", "a/tests_of.rs", "latests.rs", "lib.rs"] {
            assert!(!is_test_file(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn line_ranges_include_attributes_and_exclude_other_items() {
        let text = "fn a() {}\n/// For tests.\n#[cfg(test)]\nfn b() {\n}\nimpl A {\n    #[cfg(test)]\n    fn c() {}\n    fn d() {}\n}\n\
                    mod m {\n    #[test]\n    fn e() {}\n}\n";
        let file = syn::parse_file(text).expect("it parses");
        assert_eq!(line_ranges(&file), [2..=5, 7..=8, 12..=13]);
    }
}
