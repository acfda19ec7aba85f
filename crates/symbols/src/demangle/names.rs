//! Demangles names in this process.

use std::fmt::Write;

use super::messages::MAX_TEXT_BYTES;

/// Maximum length of a mangled name that is demangled, bytes.
const MAX_MANGLED_BYTES: usize = 4 << 10;
/// Maximum length of a demangled name, bytes. Back references can make the demangled form exponentially longer.
const MAX_DEMANGLED_BYTES: usize = MAX_TEXT_BYTES;

/// A text buffer that accepts no more than [`MAX_DEMANGLED_BYTES`].
#[derive(Default)]
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        if self.0.len() + text.len() > MAX_DEMANGLED_BYTES {
            return Err(std::fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// The language whose mangling a name uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Rust,
    Cpp,
}

impl Kind {
    /// Returns the kind of a name. `None` if the name is not mangled or is too long.
    pub fn of(name: &str) -> Option<Self> {
        let mangled = without_version(name);
        if mangled.len() > MAX_MANGLED_BYTES {
            None
        } else if rustc_demangle::try_demangle(mangled).is_ok() {
            Some(Self::Rust)
        } else {
            (mangled.starts_with("_Z") || mangled.starts_with("__Z")).then_some(Self::Cpp)
        }
    }
}

/// Returns the demangled form of `name` (Rust without the hash), or `None` if it is not a mangled name. A C++ name may
/// take forever.
pub fn demangle(name: &str) -> Option<String> {
    let mangled = without_version(name);
    let mut text = Bounded::default();
    match Kind::of(name)? {
        Kind::Rust => write!(text, "{:#}", rustc_demangle::try_demangle(mangled).ok()?).ok()?,
        Kind::Cpp => {
            let symbol = cpp_demangle::BorrowedSymbol::new(mangled.as_bytes()).ok()?;
            symbol.structured_demangle(&mut text, &cpp_demangle::DemangleOptions::default()).ok()?;
        }
    }
    Some(text.0)
}

/// The name without the symbol version that the linker appends.
fn without_version(name: &str) -> &str {
    name.split_once('@').map_or(name, |(mangled, _)| mangled)
}

/// Whether a name is a mapping symbol of the Arm or RISC-V ABI. Such a symbol marks where code (`$x`, `$a`, `$t`) or
/// data (`$d`) begins, and may be followed by a dot and more text. It does not name a function.
pub fn is_mapping_symbol(name: &str) -> bool {
    let Some(rest) = name.strip_prefix('$') else { return false };
    rest.starts_with(['x', 'd', 'a', 't']) && matches!(rest.as_bytes().get(1), None | Some(b'.'))
}

#[cfg(test)]
mod tests {
    use super::{demangle, is_mapping_symbol};

    #[test]
    fn mapping_symbols_are_not_functions() {
        for mark in ["$x", "$d", "$x.12", "$d.realdata", "$a", "$t.0"] {
            assert!(is_mapping_symbol(mark), "{mark}");
        }
        for name in ["", "$", "x", "$x_of_somebody", "$u", "$xyz", "main"] {
            assert!(!is_mapping_symbol(name), "{name}");
        }
    }

    #[test]
    fn both_languages_with_and_without_hash() {
        let legacy = "_ZN5alloc3vec12Vec$LT$T$GT$4push17h0123456789abcdefE";
        assert_eq!(demangle(legacy).as_deref(), Some("alloc::vec::Vec<T>::push"));
        assert_eq!(demangle("_RNvC6_123foo3bar").as_deref(), Some("123foo::bar"));
        assert_eq!(
            demangle("_ZNSt6vectorIiSaIiEE9push_backEOi").as_deref(),
            Some("std::vector<int, std::allocator<int> >::push_back(int&&)")
        );
        assert_eq!(demangle("_Znwm@GLIBCXX_3.4").as_deref(), Some("operator new(unsigned long)"));
        for plain in ["main", "", "_start", "malloc@@GLIBC_2.2.5", "_Z", "_ZN", "_R"] {
            assert_eq!(demangle(plain), None, "{plain}");
        }
    }

    #[test]
    fn demangled_names_are_bounded() {
        // Each template argument refers twice to everything before it, which makes 2^60 copies of `int`.
        let mut name = String::from("_Z1fI1AIiiE");
        for at in 0..60 {
            let back = if at == 0 {
                "_".to_owned()
            } else {
                format!("{}_", char::from_digit((at - 1) % 36, 36).unwrap_or('0').to_ascii_uppercase())
            };
            name.push_str(&format!("1BIS{back}S{back}E"));
        }
        name.push_str("Evv");
        assert!(demangle(&name).is_none_or(|text| text.len() <= super::MAX_DEMANGLED_BYTES));
        assert_eq!(demangle(&format!("_Z{}f", "N".repeat(10_000))), None);
    }
}
