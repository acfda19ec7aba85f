//! Finds the `unsafe` code of a file, and the note that says why each place is sound.

use proc_macro2::{Span, TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, ExprUnsafe, ImplItem, Item, Lit, Meta, Safety};

use crate::source::test_code;

/// Most characters of code that an inventory shows.
const MOST_CODE: usize = 60;

/// One unsafe block, function, implementation or declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Line in the file.
    pub line: usize,
    /// The function or item that it is in; empty outside of all.
    pub within: String,
    /// The beginning of its code.
    pub code: String,
    /// What holds it sound, from `// SAFETY:` or the section `# Safety` of its documentation. `None`: nothing says so.
    pub note: Option<String>,
}

/// The unsafe code in items of a file with this text. Test code is left out.
pub fn scan(items: &[Item], text: &str) -> Vec<Place> {
    let mut scanner = Scanner { lines: text.lines().collect(), within: Vec::new(), found: Vec::new() };
    items.iter().for_each(|item| scanner.visit_item(item));
    scanner.found
}

struct Scanner<'a> {
    lines: Vec<&'a str>,
    within: Vec<String>,
    found: Vec<Place>,
}

impl Scanner<'_> {
    fn add(&mut self, span: Span, attributes: &[Attribute]) {
        let line = span.start().line;
        let note = section(attributes).or_else(|| note_above(&self.lines, line));
        let code = beginning(&self.lines[line - 1..], span.start().column);
        self.found.push(Place { line, within: self.within.join("::"), code, note });
    }

    fn inside(&mut self, name: String, visit: impl FnOnce(&mut Self)) {
        self.within.push(name);
        visit(self);
        self.within.pop();
    }

    /// Unsafe code in what a macro is given or makes.
    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(group) => self.add_tokens(group.stream()),
                // Followed by parentheses it is an attribute: `#[unsafe(no_mangle)]`.
                TokenTree::Ident(word)
                    if word == "unsafe"
                        && !matches!(tokens.peek(), Some(TokenTree::Group(group))
                            if group.delimiter() == proc_macro2::Delimiter::Parenthesis) =>
                {
                    self.add(word.span(), &[]);
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Scanner<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if test_code::is_test_only(test_code::attributes(item)) {
            return;
        }
        match item {
            Item::Fn(function) => self.inside(function.sig.ident.to_string(), |this| {
                if let Safety::Unsafe(word) = &function.sig.safety {
                    this.add(word.span, &function.attrs);
                }
                visit::visit_item(this, item);
            }),
            Item::Impl(block) => {
                let name = self.lines[block.self_ty.span().start().line - 1];
                let (start, end) = (block.self_ty.span().start().column, block.self_ty.span().end().column);
                let name: String = name.chars().skip(start).take(end.saturating_sub(start)).collect();
                self.inside(name, |this| {
                    if let Some(word) = &block.unsafety {
                        this.add(word.span, &block.attrs);
                    }
                    visit::visit_item(this, item);
                });
            }
            Item::ForeignMod(block) => block.unsafety.iter().for_each(|word| self.add(word.span, &block.attrs)),
            Item::Trait(definition) => self.inside(definition.ident.to_string(), |this| {
                if let Some(word) = &definition.unsafety {
                    this.add(word.span, &definition.attrs);
                }
                visit::visit_item(this, item);
            }),
            Item::Macro(rules) => {
                let name = rules.ident.as_ref().map_or_else(String::new, |name| format!("{name}!"));
                self.inside(name, |this| visit::visit_item(this, item));
            }
            _ => visit::visit_item(self, item),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if test_code::is_test_only(test_code::attributes_in_impl(item)) {
            return;
        }
        let ImplItem::Fn(function) = item else { return visit::visit_impl_item(self, item) };
        self.inside(function.sig.ident.to_string(), |this| {
            if let Safety::Unsafe(word) = &function.sig.safety {
                this.add(word.span, &function.attrs);
            }
            visit::visit_impl_item(this, item);
        });
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        self.inside(function.sig.ident.to_string(), |this| {
            if let Safety::Unsafe(word) = &function.sig.safety {
                this.add(word.span, &function.attrs);
            }
            visit::visit_trait_item_fn(this, function);
        });
    }

    fn visit_expr_unsafe(&mut self, block: &'ast ExprUnsafe) {
        self.add(block.unsafe_token.span, &[]);
        visit::visit_expr_unsafe(self, block);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.add_tokens(call.tokens.clone());
    }
}

/// The section `# Safety` of a documentation.
fn section(attributes: &[Attribute]) -> Option<String> {
    let lines = attributes.iter().filter_map(|attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    });
    let lines = lines.map(|line| line.trim().to_owned());
    let text: Vec<String> = lines.skip_while(|line| line != "# Safety").skip(1).collect();
    let section: Vec<&str> = text.iter().map(String::as_str).take_while(|line| !line.starts_with("# ")).collect();
    joined(&section)
}

/// The `SAFETY:` comment above the statement that has an `unsafe` in this line.
fn note_above(lines: &[&str], line: usize) -> Option<String> {
    let comment = |at: usize| lines[at].trim().strip_prefix("//");
    let mut at = line - 1;
    loop {
        at = at.checked_sub(1)?;
        if comment(at).is_some() {
            let begin = (0..=at).rev().take_while(|at| comment(*at).is_some()).last()?;
            let text: Vec<&str> =
                (begin..=at).filter_map(comment).map(|text| text.trim_start_matches('/').trim()).collect();
            if let Some(first) = text.iter().position(|text| text.starts_with("SAFETY:")) {
                let mut text = text[first..].to_vec();
                text[0] = text[0].trim_start_matches("SAFETY:").trim();
                return joined(&text);
            }
            at = begin;
        } else if lines[at].trim().is_empty() || [';', '{', '}'].iter().any(|end| lines[at].trim().ends_with(*end)) {
            return None;
        }
    }
}

fn joined(lines: &[&str]) -> Option<String> {
    let text = lines.join(" ");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (!text.is_empty()).then_some(text)
}

/// The first characters of code that begins in a column of the first of these lines: up to the end of a short block.
fn beginning(lines: &[&str], column: usize) -> String {
    let rest: String = lines[0].chars().skip(column).collect();
    let more = lines[1..].iter().take(4).map(|line| line.trim()).filter(|line| !line.starts_with("//"));
    let text = std::iter::once(rest.trim()).chain(more).collect::<Vec<_>>().join(" ");
    let text = text.trim_start_matches("unsafe").trim_start_matches([' ', '{']).to_owned();
    let mut depth = 0_i32;
    let end = text.char_indices().find(|(_, c)| {
        depth += i32::from("({[".contains(*c)) - i32::from(")}]".contains(*c));
        depth < 0 || depth == 0 && *c == ';'
    });
    let text = text[..end.map_or(text.len(), |(at, _)| at)].trim();
    if text.chars().count() <= MOST_CODE {
        return text.to_owned();
    }
    text.chars().take(MOST_CODE).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, String, String, Option<String>)> {
        let items = syn::parse_file(text).expect("it parses").items;
        scan(&items, text).into_iter().map(|it| (it.line, it.within, it.code, it.note)).collect()
    }

    #[test]
    fn blocks_have_the_note_above_their_statement() {
        let text = "fn f() {\n    // Why.\n    // SAFETY: It is\n    // so.\n    let a =\n        unsafe { g(1) };\n    unsafe { h() };\n}\n";
        let within = || "f".to_owned();
        assert_eq!(
            found(text),
            [(6, within(), "g(1)".into(), Some("It is so.".into())), (7, within(), "h()".into(), None)]
        );
    }

    #[test]
    fn functions_implementations_and_macros_are_found_and_tests_are_not() {
        let text = "/// Does.\n///\n/// # Safety\n/// The caller\n/// knows.\npub unsafe fn f() {}\n\
                    // SAFETY: Plain data.\nunsafe impl Send for T {}\n\
                    impl T {\n    fn m(&self) {\n        // SAFETY: As above.\n        unsafe { f() }\n    }\n}\n\
                    macro_rules! m {\n    () => {\n        unsafe { f() }\n    };\n}\n\
                    #[unsafe(no_mangle)]\nfn g() {}\n\
                    #[cfg(test)]\nmod tests {\n    fn t() {\n        unsafe { f() }\n    }\n}\n";
        let expected: Vec<(usize, &str, Option<&str>)> = vec![
            (6, "f", Some("The caller knows.")),
            (8, "T", Some("Plain data.")),
            (12, "T::m", Some("As above.")),
            (17, "m!", None),
        ];
        let places = found(text);
        let shown: Vec<_> =
            places.iter().map(|(line, within, _, note)| (*line, within.as_str(), note.as_deref())).collect();
        assert_eq!(shown, expected);
    }

    #[test]
    fn code_is_shown_to_its_end_or_shortened() {
        assert_eq!(beginning(&["    x(unsafe { *a(b) }, c)"], 6), "*a(b)");
        assert_eq!(beginning(&["unsafe {", "    // Why.", "    a(", "        b", "    )", "}"], 0), "a( b )");
        let long = format!("unsafe {{ {} }}", "a".repeat(100));
        assert_eq!(beginning(&[&long], 0).chars().count(), MOST_CODE + 1);
    }
}
