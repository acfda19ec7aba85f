//! Custom allocators, as described by the user: `lib.so:my_alloc(size=arg0)->ret,free=my_free(arg0)`.

use sampler_ebpf::abi::{ARGUMENTS, NO_ARGUMENT};

use crate::allocators::Shape;

/// Maximum functions in one specification.
const FUNCTIONS_MAX: usize = 64;

/// A function of a custom allocator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomFunction {
    /// Its symbol.
    pub symbol: String,
    /// Its shape.
    pub shape: Shape,
}

/// An allocator in one file, described by the user. Parsed from
/// `FILE:FUNCTION[,FUNCTION…]`; see [`from_str`](#method.from_str).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomAllocator {
    /// Name or path of the file.
    pub file: String,
    /// Its functions, at least one.
    pub functions: Vec<CustomFunction>,
}

impl CustomAllocator {
    /// Whether it describes the file at `path`: it has the same path, or the same file name if only a name was given.
    #[must_use]
    pub fn is_for(&self, path: &str) -> bool {
        path == self.file || (!self.file.contains('/') && path.rsplit('/').next() == Some(self.file.as_str()))
    }
}

/// Why a specification of a custom allocator is invalid, and at which character.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--alloc {text:?}: {problem} at character {at}; write it like 'lib.so:my_alloc(size=arg0)->ret,free=my_free(arg0)'"
)]
pub struct CustomError {
    text: String,
    problem: String,
    at: usize,
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl std::str::FromStr for CustomAllocator {
    type Err = CustomError;

    /// Parses `FILE:FUNCTION[,FUNCTION…]`. FUNCTION is `[alloc=]name(size=argN[,times=argN][,old=argN])->ret` or
    /// `free=name(argN)`. `old` is the block to reallocate; `->*argN` in place of `->ret` says that the result is
    /// stored where argN points.
    fn from_str(text: &str) -> Result<Self, CustomError> {
        let mut parser = Parser { text, at: 0 };
        // The last colon before the first parenthesis: paths may contain colons.
        let head = text.split('(').next().unwrap_or(text);
        let Some(colon) = head.rfind(':') else { return Err(parser.error("no 'FILE:' before the functions")) };
        if colon == 0 {
            return Err(parser.error("the file's name is missing"));
        }
        parser.at = colon + 1;
        let mut functions: Vec<CustomFunction> = Vec::new();
        loop {
            let start = parser.at;
            let function = parser.function()?;
            if functions.iter().any(|f| f.symbol == function.symbol) {
                return Err(parser.error_at(start, "this function is named twice"));
            }
            functions.push(function);
            if parser.rest().is_empty() {
                return Ok(Self { file: text[..colon].to_owned(), functions });
            }
            parser.expect(",")?;
            if functions.len() >= FUNCTIONS_MAX {
                return Err(parser.error("too many functions"));
            }
        }
    }
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error(&self, problem: impl Into<String>) -> CustomError {
        self.error_at(self.at, problem)
    }

    fn error_at(&self, at: usize, problem: impl Into<String>) -> CustomError {
        let at = self.text[..at].chars().count() + 1;
        CustomError { text: self.text.to_owned(), problem: problem.into(), at }
    }

    fn eat(&mut self, token: &str) -> bool {
        self.at += self.rest().len() - self.rest().trim_start().len();
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    fn expect(&mut self, token: &str) -> Result<(), CustomError> {
        if self.eat(token) { Ok(()) } else { Err(self.error(format!("expected {token:?}"))) }
    }

    fn word(&mut self, what: &str) -> Result<&'a str, CustomError> {
        self.eat("");
        let rest = self.rest();
        let end = rest.find(|c: char| !(c.is_alphanumeric() || "_.$@".contains(c))).unwrap_or(rest.len());
        if end == 0 {
            return Err(self.error(format!("expected {what}")));
        }
        self.at += end;
        Ok(&rest[..end])
    }

    fn argument(&mut self) -> Result<u8, CustomError> {
        let start = self.at;
        let word = self.word("an argument, arg0 to arg5")?;
        let number = word.strip_prefix("arg").and_then(|n| n.parse::<u8>().ok());
        number
            .filter(|n| *n < ARGUMENTS)
            .ok_or_else(|| self.error_at(start, format!("{word:?} is not an argument (arg0 to arg5)")))
    }

    fn function(&mut self) -> Result<CustomFunction, CustomError> {
        let mut frees = false;
        let mut start = self.at;
        let mut symbol = self.word("a function's name")?;
        if self.eat("=") {
            frees = symbol == "free";
            if !frees && symbol != "alloc" {
                return Err(self.error_at(start, format!("{symbol:?} is neither \"alloc\" nor \"free\"")));
            }
            start = self.at;
            symbol = self.word("a function's name")?;
        }
        let mut shape = self.arguments(frees)?;
        if self.eat("->") {
            if frees {
                return Err(self.error("a function that frees takes no ->"));
            }
            if self.eat("*") {
                shape = shape.out(self.argument()?);
            } else if self.word("\"ret\"")? != "ret" {
                return Err(self.error("expected \"ret\" or \"*argN\""));
            }
        }
        if !frees && shape.arguments.size == NO_ARGUMENT {
            return Err(self.error_at(start, format!("{symbol:?} has no size=argN")));
        }
        Ok(CustomFunction { symbol: symbol.to_owned(), shape })
    }

    fn arguments(&mut self, frees: bool) -> Result<Shape, CustomError> {
        self.expect("(")?;
        if frees {
            if self.eat("old") {
                self.expect("=")?;
            }
            let shape = Shape::frees(self.argument()?);
            self.expect(")")?;
            return Ok(shape);
        }
        let mut shape = Shape::allocates(NO_ARGUMENT);
        loop {
            let start = self.at;
            let key = self.word("size=argN")?;
            self.expect("=")?;
            let argument = self.argument()?;
            let place = match key {
                "size" => &mut shape.arguments.size,
                "times" => &mut shape.arguments.times,
                "old" => &mut shape.arguments.old,
                _ => {
                    return Err(self.error_at(start, format!("{key:?} is not one of \"size\", \"times\", \"old\"")));
                }
            };
            if *place != NO_ARGUMENT {
                return Err(self.error_at(start, format!("{key:?} is given twice")));
            }
            *place = argument;
            if self.eat(")") {
                return Ok(shape);
            }
            self.expect(",")?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_contract_s_example_parses() {
        let spec: CustomAllocator = "lib.so:my_alloc(size=arg0)->ret,free=my_free(arg0)".parse().unwrap();
        let functions = vec![
            CustomFunction { symbol: "my_alloc".to_owned(), shape: Shape::allocates(0) },
            CustomFunction { symbol: "my_free".to_owned(), shape: Shape::frees(0) },
        ];
        assert_eq!(spec, CustomAllocator { file: "lib.so".to_owned(), functions });
        assert!(spec.is_for("/usr/lib/lib.so") && spec.is_for("lib.so") && !spec.is_for("/usr/lib/mylib.so"));
    }

    #[test]
    fn every_form_parses() {
        let spec: CustomAllocator =
            " /opt/a:b/x.so:take( size = arg1 , times = arg0 )->*arg2, alloc=grow(old=arg0,size=arg5)->ret, free=drop(old=arg1)"
                .trim()
                .parse()
                .unwrap();
        assert_eq!(spec.file, "/opt/a:b/x.so");
        let shapes: Vec<Shape> = spec.functions.iter().map(|f| f.shape).collect();
        assert_eq!(shapes, [Shape::allocates(1).times(0).out(2), Shape::allocates(5).old(0), Shape::frees(1)],);
        assert!(spec.is_for("/opt/a:b/x.so") && !spec.is_for("/usr/lib/x.so"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_place() {
        for (text, problem, at) in [
            ("my_alloc(size=arg0)", "no 'FILE:'", 1),
            (":f(size=arg0)", "the file's name is missing", 1),
            ("a.so:", "expected a function's name", 6),
            ("a.so:f", "expected \"(\"", 7),
            ("a.so:f()", "expected size=argN", 8),
            ("a.so:f(size=arg6)", "\"arg6\" is not an argument", 13),
            ("a.so:f(size=rdi)", "\"rdi\" is not an argument", 13),
            ("a.so:f(bytes=arg0)", "\"bytes\" is not one of", 8),
            ("a.so:f(size=arg0,size=arg1)", "\"size\" is given twice", 18),
            ("a.so:f(old=arg0)->ret", "\"f\" has no size", 6),
            ("a.so:f(size=arg0)->rax", "expected \"ret\"", 23),
            ("a.so:f(size=arg0)->ret;", "expected \",\"", 23),
            ("a.so:f(size=arg0),f(size=arg0)", "named twice", 19),
            ("a.so:release=f(arg0)", "\"release\" is neither", 6),
            ("a.so:free=f(arg0)->ret", "takes no ->", 20),
            ("ä.so:f(ö", "expected \"=\"", 9),
        ] {
            let error = text.parse::<CustomAllocator>().unwrap_err();
            assert!(error.problem.contains(problem) && error.at == at, "{text}: {error}");
        }
    }
}
