//! Names of frames and modules.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::Hash;

use super::model::{Frame, Profile};

/// Name of a frame: its function; else `libc.so.6+0x9a1a0` if only the function's start is known; else the frame's
/// location as `[libc.so.6+0x9a1b2]` or `[0x7f12…]`; else `[unknown]`.
pub fn frame_name<'a>(profile: &Profile, frame: &'a Frame) -> Cow<'a, str> {
    if let Some(function) = function_name(profile, frame) {
        return function;
    }
    let module = profile.module_of(frame);
    Cow::Owned(match (module, frame.file_offset) {
        (Some(module), Some(offset)) => format!("[{}+{offset:#x}]", bare_name(&module.path)),
        (Some(module), None) => format!("[{}]", bare_name(&module.path)),
        (None, _) if frame.address != 0 => format!("[{:#x}]", frame.address),
        (None, _) => "[unknown]".into(),
    })
}

/// The function of a frame: its name, otherwise the module and the function's start in it, as `git+0x281b40`.
pub fn function_name<'a>(profile: &Profile, frame: &'a Frame) -> Option<Cow<'a, str>> {
    if let Some(function) = &frame.function {
        return Some(Cow::Borrowed(function));
    }
    let module = profile.module_of(frame)?;
    Some(Cow::Owned(format!("{}+{:#x}", bare_name(&module.path), frame.function_start?)))
}

/// What tells the functions of a profile apart. Names that are shown are shorter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FunctionKey<'a> {
    /// The full name, as [`lasting_name`] has it.
    pub name: Cow<'a, str>,
    /// Name of the module, or path of the source file if there is no module.
    pub home: Cow<'a, str>,
}

impl<'a> FunctionKey<'a> {
    /// The function of a frame.
    pub fn of(profile: &'a Profile, frame: &'a Frame) -> Self {
        let module = profile.module_of(frame).map(|module| &*module.path);
        let home = home(module.unwrap_or_default(), frame.file.as_deref().unwrap_or_default());
        let name = match frame_name(profile, frame) {
            Cow::Borrowed(name) => Cow::Borrowed(lasting_name(name)),
            made => made,
        };
        Self { name, home: home.into() }
    }

    /// Something that its name alone tells apart.
    pub fn named(name: impl Into<Cow<'a, str>>) -> Self {
        Self { name: name.into(), home: Cow::Borrowed("") }
    }

    /// The name to show: the short one; the full one where another function has the same short name; and that with
    /// its module, if known, where another has the same full name.
    pub fn shown(&self, short: &str, is_short_shared: bool, is_full_shared: bool) -> String {
        match &self.home {
            home if is_full_shared && !home.is_empty() => format!("{} ({home})", self.name),
            _ if is_full_shared || is_short_shared => self.name.clone().into_owned(),
            _ => short.to_owned(),
        }
    }

    /// The same key without a profile.
    pub fn into_owned(self) -> FunctionKey<'static> {
        FunctionKey { name: self.name.into_owned().into(), home: self.home.into_owned().into() }
    }
}

/// The module that tells functions apart: its name, or the path of the source file if there is none.
pub fn home<'a>(module: &'a str, file: &'a str) -> &'a str {
    if module.is_empty() { file } else { base_name(module) }
}

/// The names under which the functions of a list are shown: short ones; where rows would look alike, full ones; and
/// where those are alike, too, with their modules. Each row has its function, its short name, and what else it shows.
pub fn told_apart<T: Eq + Hash>(rows: &[(&FunctionKey, &str, T)]) -> Vec<String> {
    let (mut short, mut full) = (HashMap::new(), HashMap::new());
    for (function, name, beside) in rows {
        *short.entry((*name, beside)).or_insert(0) += 1;
        *full.entry((&function.name, beside)).or_insert(0) += 1;
    }
    let name = |(function, name, beside): &(&FunctionKey, &str, T)| {
        function.shown(name, short[&(*name, beside)] > 1, full[&(&function.name, beside)] > 1)
    };
    rows.iter().map(name).collect()
}

/// Start of a function, parsed from the name that [`function_name`] gives to functions without a name.
pub(crate) fn function_start(name: &str, path: &str) -> Option<u64> {
    let digits = name.strip_prefix(bare_name(path))?.strip_prefix("+0x")?;
    u64::from_str_radix(digits, 16).ok().filter(|start| format!("{start:x}") == digits)
}

/// Short name of a module: the last component of its path, without brackets (`anonymous` for `[anonymous]`).
fn bare_name(path: &str) -> &str {
    let name = base_name(path);
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
}

/// The last component of a path.
pub fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a function belongs to an allocator or is C++'s `operator new`. Such frames at the inner end of a stack carry
/// no information.
pub fn is_allocator_function(name: &str) -> bool {
    let name = name.split('(').next().unwrap_or(name).trim_end();
    if matches!(
        name,
        "operator new" | "operator new[]" | "operator delete" | "operator delete[]" | "__rust_alloc" | "__rust_realloc"
    ) {
        return true;
    }
    let name = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix)).unwrap_or(name);
    FUNCTIONS.split(' ').any(|function| function == name)
}

/// The functions of [`is_allocator_function`] as a regular expression for pprof's `drop_frames`. pprof anchors it at
/// both ends and matches it against names without arguments.
pub fn drop_frames() -> String {
    format!(
        r"(?:{})?(?:{})|operator (?:new|delete)(?:\[\])?|__rust_(?:re)?alloc",
        PREFIXES.join("|"),
        FUNCTIONS.replace(' ', "|")
    )
}

/// Prefixes under which allocators export their functions; a longer one precedes its own prefixes.
const PREFIXES: [&str; 8] = ["__GI___libc_", "__libc_", "__GI_", "__interceptor_", "je_", "tc_", "mi_", "rp"];

const FUNCTIONS: &str = "malloc calloc realloc reallocarray memalign aligned_alloc posix_memalign valloc pvalloc \
    free cfree mallocx";

/// A function name as people write it, without template arguments, parameters, return type, and the hash at the end of
/// Rust symbols: `std::vector<int, std::allocator<int> >::push_back(int&&)` becomes `std::vector::push_back`. For
/// display only; functions are still distinguished by their full names.
pub fn short_function(name: &str) -> Cow<'_, str> {
    if !name.contains(['<', '(', '[', '{', '$', '\'']) && !name.contains("::h") {
        return Cow::Borrowed(name);
    }
    let name = lasting_name(name);
    let mut short = String::with_capacity(name.len());
    let mut rest = name;
    while let Some(next) = rest.chars().next() {
        if let Some(kept) = KEPT_WHOLE.iter().find(|kept| rest.starts_with(**kept)) {
            short.push_str(kept);
            rest = &rest[kept.len()..];
            continue;
        }
        match next {
            // Python, Java (`<init>`) and Go (`(*Server)`), where brackets are part of a name.
            '<' | '(' if let Some(kept) = part_of_name(&short, rest) => {
                short.push_str(kept);
                rest = &rest[kept.len()..];
            }
            // In Rust's `<Type as Trait>::method`, the type is kept.
            '<' if short.is_empty() => match balanced(rest) {
                Some(inside) => {
                    let subject = inside.split(" as ").next().unwrap_or(inside);
                    short.push_str(&short_function(subject));
                    rest = &rest[inside.len() + 2..];
                }
                None => break,
            },
            '<' | '(' => match balanced(rest) {
                Some(inside) => {
                    // Rust writes `path::<T>`.
                    if next == '<' && short.ends_with("::") {
                        short.truncate(short.len() - 2);
                    }
                    rest = &rest[inside.len() + 2..];
                }
                None => break,
            },
            _ => {
                short.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    let short = short.strip_suffix(" const").unwrap_or(&short).trim();
    if short.is_empty() { Cow::Borrowed(name) } else { Cow::Owned(with_plain_lambdas(short)) }
}

/// The bracket at the start of a text, if it is part of the name: `<module>`, `<locals>`, `(*Server)`.
fn part_of_name<'t>(before: &str, text: &'t str) -> Option<&'t str> {
    let inside = balanced(text)?;
    let (kept, after) = text.split_at(inside.len() + 2);
    let is_plain = |c: char| c.is_alphanumeric() || c == '_';
    let is_kept = if text.starts_with('(') {
        before.ends_with('.')
    } else {
        matches!(before.chars().last(), None | Some('.' | '~'))
            && inside.chars().all(is_plain)
            && !after.starts_with("::")
    };
    is_kept.then_some(kept)
}

/// A function's name without what other builds or formats lack: the suffixes of clones (` [clone .isra.0]`), the hash at
/// the end of Rust symbols, and the return type.
pub fn lasting_name(name: &str) -> &str {
    without_return_type(strip_rust_hash(name.split(" [clone ").next().unwrap_or(name)))
}

/// `shop::f<int>(int)` for `void shop::f<int>(int)`: the demangled name of a template instance starts with its return
/// type.
pub fn without_return_type(name: &str) -> &str {
    let (mut depth, mut start, mut previous) = (0_usize, 0, ' ');
    if !name.contains('<') {
        return name;
    }
    for (at, character) in name.char_indices() {
        let (before, rest) = name.split_at(at);
        let is_inside = |c: char| c.is_alphanumeric() || c == '_';
        match character {
            'o' if depth == 0 && rest.starts_with("operator") && !is_inside(previous) => return &name[start..],
            // The parameters begin.
            '(' if depth == 0
                && !rest.starts_with("(anonymous namespace)")
                && !before.trim_end().ends_with("decltype") =>
            {
                return &name[start..];
            }
            '<' | '(' | '{' | '[' => depth += 1,
            // The arrow of a function type does not close a bracket.
            '>' if previous == '-' => {}
            '>' | ')' | '}' | ']' => depth = depth.saturating_sub(1),
            ' ' if depth == 0 => start = at + 1,
            _ => {}
        }
        previous = character;
    }
    name
}

/// A name in which C++ lambdas become `{lambda}` and Rust closures `{closure}`.
fn with_plain_lambdas(name: &str) -> String {
    let is_lambda = |part: &str| part.starts_with("{lambda") || part.starts_with("'lambda") || part.starts_with("$_");
    let mut parts: Vec<&str> = Vec::new();
    for part in name.split("::") {
        match part {
            "operator()" if parts.last() == Some(&"{lambda}") => {}
            "{{closure}}" => parts.push("{closure}"),
            part if is_lambda(part) => parts.push("{lambda}"),
            part => parts.push(part),
        }
    }
    parts.join("::")
}

/// Names in which brackets are part of the name.
const KEPT_WHOLE: [&str; 9] = [
    "(anonymous namespace)",
    "operator()",
    "operator<=>",
    "operator<<=",
    "operator<<",
    "operator<=",
    "operator<",
    "operator->",
    "operator>",
];

/// The contents of the bracket at the start of `text`, if it is closed.
fn balanced(text: &str) -> Option<&str> {
    let mut depth = 0usize;
    let mut previous = ' ';
    for (index, character) in text.char_indices() {
        match character {
            '<' | '(' => depth += 1,
            // The arrow of a function type does not close a bracket.
            '>' if previous == '-' => {}
            '>' | ')' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return Some(&text[1..index]);
                }
            }
            _ => {}
        }
        previous = character;
    }
    None
}

/// `path::function::h0123456789abcdef` without the hash.
fn strip_rust_hash(name: &str) -> &str {
    match name.rsplit_once("::h") {
        Some((path, hash)) if hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => path,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn a_frame_without_a_function_is_named_by_its_place() {
        let profile = testing::small();
        let frame = Frame { module: Some(0), file_offset: Some(0x1234), address: 7, ..Frame::default() };
        assert_eq!(frame_name(&profile, &frame), "[server+0x1234]");
        assert_eq!(frame_name(&profile, &Frame { address: 0x10, ..Frame::default() }), "[0x10]");
        assert_eq!(frame_name(&profile, &Frame::default()), "[unknown]");
        assert_eq!(frame_name(&profile, &Frame { module: Some(99), ..Frame::default() }), "[unknown]");
        let start = Frame { function_start: Some(0x1200), ..frame };
        assert_eq!(frame_name(&profile, &start), "server+0x1200");
        assert_eq!(frame_name(&profile, &Frame { function: Some("main".into()), ..start }), "main");
    }

    #[test]
    fn the_start_of_a_function_is_read_from_its_name() {
        assert_eq!(function_start("git+0x281b40", "/usr/bin/git"), Some(0x28_1b40));
        assert_eq!(function_start("vdso+0x0", "[vdso]"), Some(0));
        for other in ["git", "git+0x", "git+0x01", "git+0x1G", "git+0X1", "cat+0x1", "git+0x11112222333344445"] {
            assert_eq!(function_start(other, "/usr/bin/git"), None, "{other}");
        }
    }

    #[test]
    fn short_names_keep_what_identifies_a_function() {
        for (name, short) in [
            ("main", "main"),
            ("std::vector<int, std::allocator<int> >::push_back(int&&)", "std::vector::push_back"),
            ("(anonymous namespace)::grow(unsigned long)", "(anonymous namespace)::grow"),
            ("ns::operator<<(std::ostream&, X const&)", "ns::operator<<"),
            ("Foo::operator()(int) const", "Foo::operator()"),
            ("<alloc::vec::Vec<T,A> as core::clone::Clone>::clone", "alloc::vec::Vec::clone"),
            ("core::iter::collect::<Vec<u8>>", "core::iter::collect"),
            ("app::parse::h0123456789abcdef", "app::parse"),
            ("call<int (*)(char) -> x>::run", "call::run"),
            ("void shop::fill<int>(std::vector<int>&)", "shop::fill"),
            ("std::vector<int> (anonymous namespace)::made<int>() const", "(anonymous namespace)::made"),
            ("int Foo::operator()<int>(int) const", "Foo::operator()"),
            ("Foo<int>::operator unsigned long() const", "Foo::operator unsigned long"),
            ("operator new(unsigned long)", "operator new"),
            ("main::{lambda(int)#1}::operator()(int) const", "main::{lambda}"),
            ("main::'lambda'(int)::operator()(int) const", "main::{lambda}"),
            ("main::$_0::operator()(int) const", "main::{lambda}"),
            ("app::main::{{closure}}::h0123456789abcdef", "app::main::{closure}"),
            ("grow(unsigned long) [clone .isra.0]", "grow"),
            ("<module>", "<module>"),
            ("<listcomp>", "<listcomp>"),
            ("outer.<locals>.inner", "outer.<locals>.inner"),
            ("java.util.ArrayList.<init>", "java.util.ArrayList.<init>"),
            ("main.(*Server).handle", "main.(*Server).handle"),
            ("<shop::Cart>::add", "shop::Cart::add"),
            ("odd<name", "odd"),
            ("<", "<"),
            ("", ""),
        ] {
            assert_eq!(short_function(name), short, "{name}");
        }
    }

    #[test]
    fn return_types_are_found_before_the_parameters() {
        for (name, expected) in [
            (
                "void shop::fill<int>(std::vector<int, std::allocator<int> >&)",
                "shop::fill<int>(std::vector<int, std::allocator<int> >&)",
            ),
            ("std::map<int, long> const& shop::all<int>()", "shop::all<int>()"),
            ("unsigned long (anonymous namespace)::f<int>(int)", "(anonymous namespace)::f<int>(int)"),
            ("decltype(auto) shop::f<void (*)(int)>(int)", "shop::f<void (*)(int)>(int)"),
            (
                "int* shop::Pool<int>::operator new<int>(unsigned long)",
                "shop::Pool<int>::operator new<int>(unsigned long)",
            ),
            ("std::vector<int, a b>::push_back(int&&) const", "std::vector<int, a b>::push_back(int&&) const"),
            ("shop::Cart::operator<(shop::Cart const&)", "shop::Cart::operator<(shop::Cart const&)"),
            ("<fn(A) -> B as shop::Call<C>>::call", "<fn(A) -> B as shop::Call<C>>::call"),
            ("LazyCompile:~<anonymous> /srv/app.js:3", "LazyCompile:~<anonymous> /srv/app.js:3"),
            ("operator new(unsigned long)", "operator new(unsigned long)"),
        ] {
            assert_eq!(without_return_type(name), expected);
        }
    }

    #[test]
    fn names_are_short_unless_rows_would_look_alike() {
        let key =
            |name: &'static str, home: &'static str| FunctionKey { home: home.into(), ..FunctionKey::named(name) };
        let keys = ["f(int)", "f(long)", "g(int)"].map(|name| key(name, "a.so"));
        let [f, other, g] = &keys;
        let (elsewhere, foreign) = (key("g(int)", "b.so"), key("h<int>()", "b.so"));
        let rows =
            [(f, "f", 1), (other, "f", 1), (g, "g", 1), (&elsewhere, "g", 1), (other, "f", 2), (&foreign, "h", 1)];
        let shown = ["f(int)", "f(long)", "g(int) (a.so)", "g(int) (b.so)", "f", "h"];
        assert_eq!(told_apart(&rows), shown);
        let nowhere = key("g(int)", "");
        assert_eq!(told_apart(&[(g, "g", 1), (&nowhere, "g", 1)]), ["g(int) (a.so)", "g(int)"]);
    }

    #[test]
    fn a_function_stays_the_same_in_other_builds() {
        let profile = testing::small();
        let of = |name: &str| Frame { function: Some(name.into()), module: Some(0), ..Frame::default() };
        for (name, other) in [
            ("grow(int)", "grow(int) [clone .isra.0]"),
            ("grow(int)", "grow(int) [clone .part.0] [clone .cold]"),
            ("app::grow", "app::grow::h0123456789abcdef"),
            ("grow<int>(int)", "void grow<int>(int)"),
        ] {
            assert_eq!(FunctionKey::of(&profile, &of(name)), FunctionKey::of(&profile, &of(other)), "{other}");
        }
        assert_ne!(FunctionKey::of(&profile, &of("grow(int)")), FunctionKey::of(&profile, &of("grow(long)")));
    }

    #[test]
    fn allocators_are_known_by_name() {
        for name in ["malloc", "__libc_calloc", "je_malloc", "operator new[](unsigned long)", "mi_free", "rpmalloc"] {
            assert!(is_allocator_function(name), "{name}");
        }
        for name in ["my_malloc", "mallocate", "operator new_thing", "parse"] {
            assert!(!is_allocator_function(name), "{name}");
        }
    }
}
