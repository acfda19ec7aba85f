//! Finds paths in unparsed tokens: macro arguments, `macro_rules!` bodies, attributes.

use proc_macro2::{Delimiter, Ident, Literal, Spacing, TokenStream, TokenTree};

/// An identifier as text, without `r#`.
pub fn name(ident: &Ident) -> String {
    let text = ident.to_string();
    text.strip_prefix("r#").map_or_else(|| text.clone(), str::to_owned)
}

/// The paths in a token stream, with their lines. A single identifier counts only if it is called or written in
/// capitals, because otherwise it may be a local variable. With `strings`, so do string literals that parse as a path
/// of two or more segments, such as serde's `with = "…"`.
pub fn paths(tokens: TokenStream, strings: bool) -> Vec<(Vec<String>, usize)> {
    let mut found = Vec::new();
    collect(tokens, strings, &mut found);
    found
}

fn collect(tokens: TokenStream, strings: bool, found: &mut Vec<(Vec<String>, usize)>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        let begun = at;
        at += 1;
        match &tokens[begun] {
            TokenTree::Group(group) => collect(group.stream(), strings, found),
            TokenTree::Literal(literal) if strings => found.extend(quoted(literal)),
            TokenTree::Ident(first) => {
                let mut path = vec![name(first)];
                while let [colon, second, TokenTree::Ident(next), ..] = &tokens[at..]
                    && is_path_separator(colon, second)
                {
                    path.push(name(next));
                    at += 3;
                }
                let known = path.len() > 1 || is_called(&tokens[at..]) || is_constant(&path[0]);
                if known && begins_path(&tokens[..begun], &path[0]) {
                    found.push((path, first.span().start().line));
                }
            }
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

fn quoted(literal: &Literal) -> Option<(Vec<String>, usize)> {
    let line = literal.span().start().line;
    let text: syn::LitStr = syn::parse_str(&literal.to_string()).ok()?;
    let path: syn::Path = text.parse().ok()?;
    let segments: Vec<String> = path.segments.iter().map(|segment| name(&segment.ident)).collect();
    (segments.len() > 1 && path.leading_colon.is_none()).then_some((segments, line))
}

fn is(token: Option<&TokenTree>, wanted: char) -> bool {
    matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == wanted)
}

fn is_path_separator(first: &TokenTree, second: &TokenTree) -> bool {
    let joint = matches!(first, TokenTree::Punct(punct) if punct.spacing() == Spacing::Joint);
    joint && is(Some(first), ':') && is(Some(second), ':')
}

/// Whether an identifier that follows these tokens starts a path. It does not if it is a field, a lifetime, a macro
/// variable, or the continuation of a path that starts with a type or with `::`.
fn begins_path(before: &[TokenTree], first: &str) -> bool {
    if let [.., first, second] = before
        && is_path_separator(first, second)
    {
        return false;
    }
    let last = before.last();
    // In `a..b` the dots are a range operator.
    let field = is(last, '.') && !is(before.len().checked_sub(2).and_then(|index| before.get(index)), '.');
    !field && !is(last, '\'') && (!is(last, '$') || first == "crate")
}

fn is_called(after: &[TokenTree]) -> bool {
    let group = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Group(_)));
    match after.first() {
        Some(TokenTree::Group(group)) => group.delimiter() == Delimiter::Parenthesis,
        first => is(first, '!') && group(after.get(1)),
    }
}

fn is_constant(name: &str) -> bool {
    name.len() > 1 && !name.chars().any(char::is_lowercase) && name.chars().any(char::is_uppercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, strings: bool) -> String {
        let tokens = text.parse().expect("tokens");
        let shown = paths(tokens, strings).into_iter().map(|(path, line)| format!("{line} {}", path.join("::")));
        shown.collect::<Vec<_>>().join(", ")
    }

    #[test]
    fn fields_lifetimes_and_variables_are_not_paths() {
        assert_eq!(found("a::b(c, &d.e::<f>, LIMIT)\n{ $crate::g }", false), "1 a::b, 1 LIMIT, 2 crate::g");
        assert_eq!(found("::std::x, <T>::y, $m::z, &'static s, w: u8", false), "");
        assert_eq!(found("call(x), inner!(y), a != (b), 0..end(z)", false), "1 call, 1 inner, 1 end");
        assert_eq!(found("key: crate::r#type::v", false), "1 crate::type::v");
    }

    #[test]
    fn strings_are_paths_only_on_request() {
        assert_eq!(found("with = \"crate::hex\", default = \"one\", \"of words\"", true), "1 crate::hex");
        assert_eq!(found("\"crate::hex\"", false), "");
    }
}
