//! Classifies frames for reports: the program's own code, a library, an interpreter, an allocation wrapper, start-up
//! code. A rule looks only at one frame, so a frame has the same class in every stack and every profile.

use std::sync::LazyLock;

use regex::RegexSet;
use thiserror::Error;

use crate::model::{Frame, Profile};
use crate::naming::short_function;

/// The class of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The program's own function.
    Program,
    /// A function of a library.
    Library,
    /// A function of an interpreter or a virtual machine.
    Runtime,
    /// The entry point of the program, such as `main`.
    Entry,
    /// A function that allocates on behalf of its caller: `operator new`, `xmalloc`, C++ containers.
    Wrapper,
    /// Code that runs before `main`, or that starts a thread.
    Startup,
}

impl Origin {
    const ALL: [(&str, Self); 6] = [
        ("program", Self::Program),
        ("library", Self::Library),
        ("runtime", Self::Runtime),
        ("entry", Self::Entry),
        ("wrapper", Self::Wrapper),
        ("startup", Self::Startup),
    ];

    /// Whether the frame is the program's own.
    const fn is_own(self) -> bool {
        matches!(self, Self::Program | Self::Entry)
    }

    /// Priority as the title of a stack. The innermost frame with the lowest number is the title.
    pub(crate) const fn rank(self) -> u8 {
        match self {
            Self::Program => 0,
            Self::Library | Self::Runtime => 1,
            Self::Entry => 2,
            Self::Wrapper => 3,
            Self::Startup => 4,
        }
    }
}

/// Error: a line is not a valid rule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("line {line}, column {column}: {why}")]
pub struct InvalidRule {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1.
    pub column: usize,
    why: String,
}

/// The rules for one field, with their positions in the list of all rules.
#[derive(Clone, Debug, Default)]
struct Patterns {
    set: RegexSet,
    numbers: Vec<usize>,
}

impl Patterns {
    fn first(&self, text: &str) -> Option<usize> {
        if text.is_empty() { None } else { self.set.matches(text).iter().next().map(|at| self.numbers[at]) }
    }
}

/// The rules that classify frames.
#[derive(Clone, Debug)]
pub struct FrameRules {
    origins: Vec<Origin>,
    /// In the order of `FIELDS`.
    patterns: [Patterns; 3],
}

const FIELDS: [&str; 3] = ["function", "module", "file"];

/// heapbpf's built-in rules.
static STANDARD: LazyLock<FrameRules> = LazyLock::new(|| {
    // The rules are compiled in, and tests use them.
    FrameRules::with("").unwrap_or_else(|error| panic!("origin.rules: {error}"))
});

impl FrameRules {
    /// heapbpf's built-in rules.
    pub fn standard() -> &'static Self {
        &STANDARD
    }

    /// The given rules, followed by the built-in ones. The first match wins.
    ///
    /// # Errors
    /// A line is neither empty, nor a comment, nor a rule.
    pub fn with(more: &str) -> Result<Self, InvalidRule> {
        let mut origins = Vec::new();
        let mut by_field: [(Vec<String>, Vec<usize>); 3] = Default::default();
        for text in [more, include_str!("origin.rules")] {
            for (index, line) in text.lines().enumerate() {
                if let Some((origin, field, pattern)) = parse(index + 1, line)? {
                    by_field[field].0.push(expression(pattern, field));
                    by_field[field].1.push(origins.len());
                    origins.push(origin);
                }
            }
        }
        // `expression` returns valid patterns, so the only possible error is their total size.
        let too_large = |error: regex::Error| InvalidRule { line: 1, column: 1, why: error.to_string() };
        let mut patterns: [Patterns; 3] = Default::default();
        for (of_field, (expressions, numbers)) in patterns.iter_mut().zip(by_field) {
            *of_field = Patterns { set: RegexSet::new(expressions).map_err(too_large)?, numbers };
        }
        Ok(Self { origins, patterns })
    }

    /// Classifies a frame.
    pub fn origin(&self, profile: &Profile, frame: &Frame) -> Origin {
        let function = frame.function.as_deref().unwrap_or("");
        let module = profile.module_of(frame).map_or("", |module| &*module.path);
        self.origin_of(function, module, frame.file.as_deref().unwrap_or(""))
    }

    /// Classifies a frame by function, module and source file. Pass an empty string for unknown fields.
    pub fn origin_of(&self, function: &str, module: &str, file: &str) -> Origin {
        let short = short_function(function);
        // The short form of Rust's `<u8 as Trait>::method` drops the trait, so rules also see the full name.
        let whole = if function.starts_with('<') { function } else { "" };
        let [by_function, by_module, by_file] = &self.patterns;
        let texts = [(by_function, &*short), (by_function, whole), (by_module, module), (by_file, file)];
        let first = texts.into_iter().filter_map(|(patterns, text)| patterns.first(text)).min();
        match first {
            Some(rule) => self.origins[rule],
            // An address says less than a named library function.
            None if function.is_empty() => Origin::Library,
            None => Origin::Program,
        }
    }
}

/// Parses a line into origin, field index and pattern. Returns `None` for empty lines and comments.
fn parse(line: usize, text: &str) -> Result<Option<(Origin, usize, &str)>, InvalidRule> {
    let column = |part: &str| part.as_ptr() as usize - text.as_ptr() as usize + 1;
    let error = |column, why: String| Err(InvalidRule { line, column, why });
    let rest = text.trim();
    if rest.is_empty() || rest.starts_with('#') {
        return Ok(None);
    }
    let (origin, rest) = rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()));
    let Some((_, of)) = Origin::ALL.into_iter().find(|(name, _)| *name == origin) else {
        let names = Origin::ALL.map(|(name, _)| name).join(", ");
        return error(column(origin), format!("\"{origin}\" is not one of {names}"));
    };
    let rest = rest.trim_start();
    let (field, pattern) = rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()));
    let Some(index) = FIELDS.iter().position(|name| *name == field) else {
        return error(column(field), format!("\"{field}\" is not one of {}", FIELDS.join(", ")));
    };
    match pattern.trim() {
        "" => error(column(field) + field.len(), "a pattern is missing".into()),
        pattern => Ok(Some((of, index, pattern))),
    }
}

/// Converts a pattern to a regular expression.
fn expression(pattern: &str, field: usize) -> String {
    let any = if FIELDS[field] == "function" { ".*" } else { "[^/]*" };
    let mut expression = String::from("(?s)^");
    let mut rest = pattern;
    while let Some(next) = rest.chars().next() {
        let (text, length) = match next {
            '*' if rest.starts_with("**") => (".*".to_owned(), 2),
            '*' => (any.to_owned(), 1),
            '[' if rest.starts_with("[0-9]") => ("[0-9]".to_owned(), 5),
            '{' if let Some((inside, _)) = rest[1..].split_once('}') => {
                let parts: Vec<String> = inside.split(',').map(regex::escape).collect();
                (format!("(?:{})", parts.join("|")), inside.len() + 2)
            }
            _ => (regex::escape(next.encode_utf8(&mut [0; 4])), next.len_utf8()),
        };
        expression.push_str(&text);
        rest = &rest[length..];
    }
    expression + "$"
}

/// Which frames of a stack a table shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Indices of the frames, innermost first. The first one is the title.
    pub frames: Vec<usize>,
    /// Those of them that are not the program's own.
    pub foreign: Vec<usize>,
    /// Index of the hidden frame that the title frame called, if there is one.
    pub via: Option<usize>,
}

impl Shown {
    /// Selects the frames to show, given the origin of each frame, innermost first. If the program has its own frames,
    /// only those are shown; otherwise library frames are.
    pub fn of(origins: &[Origin]) -> Self {
        let best = origins.iter().map(|origin| origin.rank()).min().unwrap_or(0);
        let Some(first) = origins.iter().position(|origin| origin.rank() == best) else { return Self::default() };
        let is_shown = |origin: Origin| match best {
            0 => origin.is_own(),
            1 | 2 => !matches!(origin, Origin::Wrapper | Origin::Startup),
            _ => true,
        };
        let frames = (first..origins.len()).filter(|at| is_shown(origins[*at])).collect();
        Self::new(frames, origins, first.checked_sub(1))
    }

    /// These frames.
    pub(crate) fn new(frames: Vec<usize>, origins: &[Origin], via: Option<usize>) -> Self {
        let is_foreign = |at: &usize| origins.get(*at).is_none_or(|origin| !origin.is_own());
        let foreign = frames.iter().copied().filter(is_foreign).collect();
        Self { frames, foreign, via }
    }
}

/// Reduces a function that allocates to one word: `vector` for `std::vector<int>::push_back(int&&)`.
pub fn word(profile: &Profile, frame: &Frame) -> String {
    let module = profile.module_of(frame).map(|module| &*module.path);
    let function = frame.function.as_deref().map(short_function);
    let Some(function) = function else {
        return module.map_or_else(String::new, |path| library(path).to_owned());
    };
    let parts: Vec<&str> = function.split("::").filter(|part| !part.is_empty() && !NAMESPACES.contains(part)).collect();
    match parts.as_slice() {
        [] => function.into_owned(),
        [only] => (*only).to_owned(),
        [.., class, _] => match *class {
            "basic_string" => "string".into(),
            class => class.trim_start_matches('_').to_owned(),
        },
    }
}

/// Namespaces that are left out of that word.
const NAMESPACES: [&str; 8] = ["std", "__cxx11", "__1", "__gnu_cxx", "__detail", "alloc", "core", "boost"];

/// `libxml2` for `/usr/lib/libxml2.so.2.9`.
fn library(path: &str) -> &str {
    let name = crate::naming::base_name(path);
    name.split_once(".so").map_or(name, |(stem, _)| stem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Origin::{Entry, Library, Program, Runtime, Startup, Wrapper};

    /// Examples from several languages: function, module, source file.
    #[test]
    fn frames_are_what_people_take_them_for() {
        let (app, libc, cpp) =
            ("/srv/app/server", "/usr/lib/x86_64-linux-gnu/libc.so.6", "/usr/include/c++/12/bits/alloc_traits.h");
        let (python, rust) = ("/usr/bin/python3.11", "/rustc/59807616e/library/alloc/src/alloc.rs");
        for (origin, function, module, file) in [
            // C++
            (Program, "shop::Session::load(std::string const&)", app, "/src/session.cc"),
            (Program, "void shop::fill<int>(std::vector<int>&)", app, ""),
            (Wrapper, "std::vector<int, std::allocator<int> >::push_back(int&&)", app, cpp),
            (Wrapper, "void std::vector<int>::_M_realloc_insert<int>(int*, int&&)", app, ""),
            (Wrapper, "std::__new_allocator<int>::allocate(unsigned long, void const*)", app, cpp),
            (Wrapper, "allocate", app, cpp),
            (Wrapper, "__gnu_cxx::new_allocator<char>::allocate(unsigned long)", app, ""),
            (Wrapper, "operator new(unsigned long)", "/usr/lib/x86_64-linux-gnu/libstdc++.so.6", ""),
            (Library, "boost::asio::detail::thread_info_base::allocate", app, ""),
            (Startup, "std::thread::_Invoker<std::tuple<void (*)()> >::operator()()", app, ""),
            (Program, "(anonymous namespace)::grow(unsigned long)", app, ""),
            // C
            (Entry, "main", app, "main.c"),
            (Startup, "__libc_start_main_impl", libc, ""),
            (Startup, "start_thread", libc, ""),
            (Startup, "__clone3", libc, ""),
            (Wrapper, "__GI___libc_malloc", libc, ""),
            (Wrapper, "my_malloc", app, "mem.c"),
            (Wrapper, "xmalloc", "/usr/bin/git", ""),
            (Wrapper, "g_malloc0", "/usr/lib/x86_64-linux-gnu/libglib-2.0.so.0", ""),
            (Wrapper, "zmalloc_usable", "/usr/bin/redis-server", ""),
            (Wrapper, "xstrdup", "/usr/bin/git", ""),
            (Library, "xmlNewNode", "/usr/lib/x86_64-linux-gnu/libxml2.so.2", ""),
            (Library, "", app, ""),
            (Program, "mallocate", app, ""),
            (Program, "nsGlobalWindow::Init", "/usr/lib/firefox/libxul.so", ""),
            // Rust
            (Program, "shop::cart::add::h0123456789abcdef", app, "/src/cart.rs"),
            (Program, "core::Engine::run()", app, "/src/engine.cc"),
            (Program, "<shop::Cart as core::clone::Clone>::clone", app, "/src/cart.rs"),
            (Wrapper, "<alloc::vec::Vec<T,A> as core::clone::Clone>::clone", app, rust),
            (Wrapper, "<u8 as alloc::vec::spec_from_elem::SpecFromElem>::from_elem::<alloc::alloc::Global>", app, ""),
            (Wrapper, "alloc", app, rust),
            (Wrapper, "hashbrown::raw::RawTable<T,A>::reserve_rehash", app, ""),
            (Startup, "std::sys::backtrace::__rust_begin_short_backtrace", app, ""),
            (Startup, "std::rt::lang_start::{{closure}}", app, ""),
            (Library, "serde_json::de::from_str", app, "/build/.cargo/registry/src/index/serde_json-1/src/de.rs"),
            // Python
            (Program, "Session.load", "", "/srv/app/session.py"),
            (Program, "<module>", "", "/srv/app/main.py"),
            (Library, "loads", "", "/usr/lib/python3.11/json/__init__.py"),
            (Library, "read_csv", "", "/srv/venv/lib/python3.11/site-packages/pandas/io.py"),
            (Library, "_find_and_load", "", "<frozen importlib._bootstrap>"),
            (Runtime, "_PyObject_GC_NewVar", "/opt/lib/libpython3.13.so.1.0", "/build/Python/gc.c"),
            (Runtime, "unicode_decode_utf8", python, "unicodeobject.c"),
            (
                Library,
                "scanstring_unicode",
                "/usr/lib/python3.11/lib-dynload/_json.cpython-311-x86_64-linux-gnu.so",
                "",
            ),
            // Go
            (Program, "shop.(*Server).handle", app, "/src/server.go"),
            (Entry, "main.main", app, "/src/main.go"),
            (Runtime, "runtime.mallocgc", app, "/usr/local/go/src/runtime/malloc.go"),
            (Startup, "runtime.goexit", app, "/usr/local/go/src/runtime/asm_amd64.s"),
            (Library, "encoding/json.Unmarshal", app, "/usr/local/go/src/encoding/json/decode.go"),
            (Library, "github.com/x/y.F", app, "/build/go/pkg/mod/github.com/x/y@v1/f.go"),
            // Java
            (Program, "com.shop.Session.load", "", ""),
            (Library, "java.util.ArrayList.grow", "", ""),
            (Runtime, "AllocateHeap", "/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so", ""),
            (Startup, "JavaMain", "/usr/lib/jvm/java-17-openjdk-amd64/lib/libjli.so", ""),
            (Runtime, "Java_java_util_zip_Inflater_init", "/usr/lib/jvm/java-17-openjdk-amd64/lib/libzip.so", ""),
            (Startup, "JavaThread::run", "/usr/lib/jvm/java-17-openjdk-amd64/lib/server/libjvm.so", ""),
            // Node
            (Program, "LazyCompile:~load /srv/app/session.js:10", "", ""),
            (Library, "LazyCompile:*emit node:events:465", "", ""),
            (Runtime, "v8::internal::Factory::NewString", "/usr/bin/node", ""),
        ] {
            assert_eq!(FrameRules::standard().origin_of(function, module, file), origin, "{function} {module} {file}");
        }
    }

    #[test]
    fn a_stack_is_titled_by_the_innermost_frame_of_the_program() {
        let shown = |origins: &[Origin]| {
            let Shown { frames, via, .. } = Shown::of(origins);
            (frames, via)
        };
        let stack = [Wrapper, Wrapper, Library, Program, Wrapper, Library, Program, Entry, Startup];
        assert_eq!(shown(&stack), (vec![3, 6, 7], Some(2)));
        // If `main` is the program's only frame, the title is the library function that it called.
        assert_eq!(shown(&[Wrapper, Library, Library, Entry, Startup]), (vec![1, 2, 3], Some(0)));
        assert_eq!(shown(&[Wrapper, Entry, Startup]), (vec![1], Some(0)));
        assert_eq!(shown(&[Wrapper, Startup]), (vec![0, 1], None));
        assert_eq!(shown(&[Startup]), (vec![0], None));
        assert_eq!(shown(&[]), (vec![], None));
    }

    #[test]
    fn the_users_rules_come_first_and_are_checked() {
        let rules =
            FrameRules::with("# ours\n\nlibrary function shop::base::*\nprogram file /opt/*/lib.py\n").expect("valid");
        assert_eq!(rules.origin_of("shop::base::grow", "/srv/app", ""), Library);
        assert_eq!(rules.origin_of("f", "", "/opt/x/lib.py"), Program);
        assert_eq!(rules.origin_of("shop::grow", "/srv/app", ""), Program);
        for (text, why) in [
            (
                "\nplumbing function f",
                "line 2, column 1: \"plumbing\" is not one of program, library, runtime, entry, wrapper, startup",
            ),
            ("library  name f", "line 1, column 10: \"name\" is not one of function, module, file"),
            ("library function", "line 1, column 17: a pattern is missing"),
            ("library", "line 1, column 8: \"\" is not one of function, module, file"),
        ] {
            assert_eq!(FrameRules::with(text).map(drop).map_err(|error| error.to_string()), Err(why.into()), "{text}");
        }
    }

    #[test]
    fn what_allocates_is_one_word() {
        let profile = crate::testing::small();
        for (function, expected) in [
            ("std::vector<int, std::allocator<int> >::push_back(int&&)", "vector"),
            ("std::__cxx11::basic_string<char>::_M_create(unsigned long&, unsigned long)", "string"),
            ("std::make_unique<int>()", "make_unique"),
            ("alloc::vec::Vec<T,A>::push", "Vec"),
            ("<alloc::vec::Vec<T,A> as core::clone::Clone>::clone", "Vec"),
            ("xmalloc", "xmalloc"),
            ("std::_Rb_tree<int, int>::_M_insert_", "Rb_tree"),
        ] {
            let frame = Frame { function: Some(function.into()), ..Frame::default() };
            assert_eq!(word(&profile, &frame), expected, "{function}");
        }
        let unnamed = Frame { module: Some(1), ..Frame::default() };
        assert_eq!(word(&profile, &unnamed), "libjson");
    }
}
