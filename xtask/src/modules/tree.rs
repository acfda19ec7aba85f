//! The module tree of one crate, read from its root file by following `mod` declarations. Test code is left out.

use std::collections::BTreeMap;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use syn::{Attribute, Expr, ExprLit, Item, ItemMod, Lit, Meta};

use super::test_code;

/// Index of a module in [`Tree::modules`].
pub type ModuleId = usize;

/// The crate's root module.
pub const ROOT: ModuleId = 0;

/// A module.
pub struct Module {
    /// Its name; `crate` for the root module.
    pub name: String,
    /// The module that declares it; `None` for the root module.
    pub parent: Option<ModuleId>,
    /// The modules that it declares.
    pub children: Vec<ModuleId>,
    /// The file that contains its items.
    pub file: PathBuf,
    /// Its items, except child modules and test code.
    pub items: Vec<Item>,
}

/// The module tree of a crate.
#[derive(Default)]
pub struct Tree {
    /// All of them, parents before children.
    pub modules: Vec<Module>,
    /// The lines of test code in each file.
    pub test_lines: BTreeMap<PathBuf, Vec<RangeInclusive<usize>>>,
}

impl Tree {
    /// Loads the crate with this root file; `read` returns the text of a file.
    ///
    /// # Errors
    /// If a file cannot be read or parsed, or a module has no file.
    pub fn load(root: &Path, read: &dyn Fn(&Path) -> io::Result<String>) -> anyhow::Result<Self> {
        let mut loader = Loader { tree: Self::default(), sources: root.parent().unwrap_or(Path::new("")), read };
        let text = read(root).with_context(|| format!("cannot read {}", root.display()))?;
        let module = Module {
            name: "crate".to_owned(),
            parent: None,
            children: Vec::new(),
            file: root.to_path_buf(),
            items: Vec::new(),
        };
        let children = loader.sources.to_path_buf();
        loader.load_file(module, &text, &children)?;
        Ok(loader.tree)
    }

    /// The module itself, its parent, and so on up to the root module.
    pub fn ancestors(&self, module: ModuleId) -> impl Iterator<Item = ModuleId> {
        std::iter::successors(Some(module), |module| self.modules[*module].parent)
    }

    /// The module's path without `crate::`, such as `record::session`; `crate` for the root module.
    pub fn path(&self, module: ModuleId) -> String {
        let mut names: Vec<&str> = self.ancestors(module).map(|module| self.modules[module].name.as_str()).collect();
        if names.len() > 1 {
            names.pop();
        }
        names.reverse();
        names.join("::")
    }
}

struct Loader<'a> {
    tree: Tree,
    /// The folder that contains the root file.
    sources: &'a Path,
    read: &'a dyn Fn(&Path) -> io::Result<String>,
}

impl Loader<'_> {
    /// Parses a module's file. Files of its children are in `folder`.
    fn load_file(&mut self, module: Module, text: &str, folder: &Path) -> anyhow::Result<()> {
        let path = module.file.clone();
        let file = syn::parse_file(text).map_err(|error| {
            let line = error.span().start().line;
            anyhow::anyhow!("{}:{line}: {error}", path.display())
        })?;
        self.tree.test_lines.insert(path.clone(), test_code::line_ranges(&file));
        let beside = path.parent().unwrap_or(Path::new("")).to_path_buf();
        self.add(module, file.items, folder, &beside)
    }

    /// Adds a module. Files of its children are in `folder`, and their `#[path]` attributes are relative to `beside`.
    fn add(&mut self, module: Module, items: Vec<Item>, folder: &Path, beside: &Path) -> anyhow::Result<()> {
        let id = self.tree.modules.len();
        if let Some(parent) = module.parent {
            self.tree.modules[parent].children.push(id);
        }
        self.tree.modules.push(module);
        for item in items {
            if test_code::is_test_only(test_code::attributes(&item)) {
                continue;
            }
            match item {
                Item::Mod(item) => self.declare(id, item, folder, beside)?,
                item => self.tree.modules[id].items.push(item),
            }
        }
        Ok(())
    }

    fn declare(&mut self, parent: ModuleId, item: ItemMod, folder: &Path, beside: &Path) -> anyhow::Result<()> {
        let name = item.ident.to_string();
        let name = name.strip_prefix("r#").unwrap_or(&name).to_owned();
        let declared_in = self.tree.modules[parent].file.clone();
        let line = item.ident.span().start().line;
        let named = path_attribute(&item.attrs);
        let mut module =
            Module { name, parent: Some(parent), children: Vec::new(), file: declared_in, items: Vec::new() };
        if let Some((_, items)) = item.content {
            let folder = named.map_or_else(|| folder.join(&module.name), |path| beside.join(path));
            return self.add(module, items, &folder, &folder);
        }
        let place = format!("{}:{line}", module.file.display());
        // rustc looks for the children of a file that `#[path]` names in the folder of that file.
        let candidates = match named {
            Some(path) => {
                let file = normalized(&beside.join(path));
                let children = file.parent().unwrap_or(Path::new("")).to_path_buf();
                vec![(file, children)]
            }
            None => {
                let own = folder.join(&module.name);
                vec![(own.with_extension("rs"), own.clone()), (own.join("mod.rs"), own)]
            }
        };
        for (file, children) in candidates {
            if test_code::is_test_file(file.strip_prefix(self.sources).unwrap_or(&file)) {
                return Ok(());
            }
            match (self.read)(&file) {
                Ok(text) => {
                    module.file = file;
                    return self.load_file(module, &text, &children);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error).with_context(|| format!("cannot read {}", file.display())),
            }
        }
        bail!("{place}: no file found for module {}", module.name)
    }
}

/// The value of `#[path = "…"]`.
fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}

/// Resolves `..` components lexically.
fn normalized(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        let above = part.as_os_str() == "..";
        if !(above && whole.file_name().is_some() && whole.pop()) {
            whole.push(part);
        }
    }
    whole
}

#[cfg(test)]
pub mod testing {
    //! Source trees in memory.

    use super::*;

    /// Reads from these files (path and text) instead of the file system.
    pub fn reader(files: &[(&str, &str)]) -> impl Fn(&Path) -> io::Result<String> {
        let files: BTreeMap<PathBuf, String> =
            files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        move |path| files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The module tree of a crate whose root file is `src/lib.rs`.
    pub fn tree(files: &[(&str, &str)]) -> Tree {
        Tree::load(Path::new("src/lib.rs"), &reader(files)).expect("the crate is complete")
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{reader, tree};
    use super::*;

    /// The path and the file of each module.
    fn found(tree: &Tree) -> Vec<(String, String)> {
        let modules = (0..tree.modules.len()).map(|id| (tree.path(id), tree.modules[id].file.display().to_string()));
        modules.collect()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(path, file)| ((*path).to_owned(), (*file).to_owned())).collect()
    }

    #[test]
    fn module_files_are_found_where_rustc_looks() {
        let tree = tree(&[
            ("src/lib.rs", "mod a; mod b; mod inline { mod c; }"),
            ("src/a.rs", "mod d; #[path = \"e.rs\"] mod other;"),
            ("src/a/d.rs", ""),
            ("src/e.rs", "mod f;"),
            ("src/f.rs", ""),
            ("src/b/mod.rs", "mod r#type; #[path = \"../far/g.rs\"] mod g; mod in_b { #[path = \"h.rs\"] mod h; }"),
            ("src/b/type.rs", ""),
            ("src/far/g.rs", ""),
            ("src/b/in_b/h.rs", ""),
            ("src/inline/c.rs", ""),
        ]);
        let expected = [
            ("crate", "src/lib.rs"),
            ("a", "src/a.rs"),
            ("a::d", "src/a/d.rs"),
            ("a::other", "src/e.rs"),
            ("a::other::f", "src/f.rs"),
            ("b", "src/b/mod.rs"),
            ("b::type", "src/b/type.rs"),
            ("b::g", "src/far/g.rs"),
            ("b::in_b", "src/b/mod.rs"),
            ("b::in_b::h", "src/b/in_b/h.rs"),
            ("inline", "src/lib.rs"),
            ("inline::c", "src/inline/c.rs"),
        ];
        assert_eq!(found(&tree), pairs(&expected));
    }

    #[test]
    fn test_code_is_left_out_and_its_lines_are_recorded() {
        let tree = tree(&[
            (
                "src/lib.rs",
                "mod a;\n#[cfg(test)]\nmod gone;\nmod a_tests;\nmod tests;\nfn kept() {}\n#[cfg(test)]\nfn f() {}\n",
            ),
            ("src/a.rs", "#[cfg(test)]\n#[path = \"a_tests.rs\"]\nmod tests;\n"),
            ("src/a_tests.rs", "not even Rust"),
        ]);
        assert_eq!(found(&tree), pairs(&[("crate", "src/lib.rs"), ("a", "src/a.rs")]));
        assert_eq!(tree.modules[ROOT].items.len(), 1);
        assert_eq!(tree.test_lines[Path::new("src/lib.rs")], [2..=3, 7..=8]);
        assert_eq!(tree.test_lines[Path::new("src/a.rs")], [1..=3]);
    }

    #[test]
    fn errors_name_the_file_and_line() {
        let error = |files| Tree::load(Path::new("src/lib.rs"), &reader(files)).err().expect("incomplete").to_string();
        assert_eq!(error(&[("src/lib.rs", "\n\nmod a;")]), "src/lib.rs:3: no file found for module a");
        let text = error(&[("src/lib.rs", "mod a;"), ("src/a.rs", "fn f() {}\nfn ()")]);
        assert!(text.starts_with("src/a.rs:2: "), "{text}");
    }
}
