//! The token file: which client may see what.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use subtle::ConstantTimeEq;

use super::filter::{Filter, KEYS};

/// Maximum size of a token file, in bytes.
const LARGEST_FILE: u64 = 1 << 20;
/// Minimum length of a token. A shorter one can be guessed.
const SHORTEST_TOKEN: usize = 16;

/// The tokens, each with the processes that its bearer may see.
#[derive(Debug)]
pub struct Tokens(Vec<(Box<[u8]>, Filter)>);

/// What a line of a token file has.
const LINE: &str = "a line is `TOKEN [pid=PID] [comm=GLOB] [cgroup=PATH] [container=ID] [pod=UID] [unit=UNIT]`";

/// Why a token file cannot be used. The message contains no token.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TokenError(String);

impl Tokens {
    /// Reads a token file.
    ///
    /// # Errors
    /// See [`TokenError`]. No message contains a token.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        let shown = path.display();
        let failed = |error: io::Error| TokenError(format!("cannot read the token file {shown}: {error}"));
        let unfit = |reason: &str| TokenError(format!("the token file {shown} {reason}; {LINE}"));
        let file = File::open(path).map_err(failed)?;
        // Check the open file, so that the file checked is the file read.
        let metadata = file.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(unfit("is not a file"));
        }
        if metadata.mode() & 0o077 != 0 {
            let mode = metadata.mode() & 0o777;
            return Err(TokenError(format!(
                "the token file {shown} can be read by others (mode {mode:03o}): chmod 600 {shown}"
            )));
        }
        let mut text = String::new();
        let length = file.take(LARGEST_FILE + 1).read_to_string(&mut text).map_err(failed)?;
        if length as u64 > LARGEST_FILE {
            return Err(unfit("is larger than 1 MiB"));
        }
        let tokens = Self::parse(&text)
            .map_err(|(line, reason)| TokenError(format!("the token file {shown}, line {line}: {reason}")))?;
        if tokens.0.is_empty() { Err(unfit("has no token")) } else { Ok(tokens) }
    }

    /// Parses the text of a token file.
    ///
    /// # Errors
    /// Returns a line, counted from 1, and what is wrong with it. The message does not contain the token.
    pub fn parse(text: &str) -> Result<Self, (usize, String)> {
        let mut tokens = Vec::new();
        for (line, text) in (1..).zip(text.lines()) {
            let mut words = text.split_ascii_whitespace();
            let Some(token) = words.next().filter(|word| !word.starts_with('#')) else { continue };
            if token.len() < SHORTEST_TOKEN {
                return Err((line, format!("a token must have at least {SHORTEST_TOKEN} characters")));
            }
            let mut filter = Filter::default();
            for word in words {
                let known = match word.split_once('=') {
                    Some((key, value)) => filter.set(key, value).map_err(|reason| (line, reason))?,
                    None => false,
                };
                if !known {
                    return Err((line, format!("after the token, NAME=VALUE is expected, with one of {KEYS}")));
                }
            }
            tokens.push((token.as_bytes().into(), filter));
        }
        Ok(Self(tokens))
    }

    /// Returns the number of a token, below [`Self::count`], and what its bearer may see. `None` if the token is
    /// unknown.
    pub fn scope(&self, token: &str) -> Option<(usize, &Filter)> {
        // Compare with every token in constant time, so that timing reveals nothing about the tokens.
        let mut found = None;
        for (number, (known, filter)) in self.0.iter().enumerate() {
            if bool::from(known.ct_eq(token.as_bytes())) {
                found = Some((number, filter));
            }
        }
        found
    }

    /// The first token.
    pub fn first(&self) -> Option<&str> {
        self.0.first().and_then(|(token, _)| std::str::from_utf8(token).ok())
    }

    /// The number of tokens.
    pub const fn count(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use heapbpf_profile::model::Process;

    use super::*;

    fn file(mode: u32, text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(mode)).unwrap();
        file
    }

    #[test]
    fn a_token_sees_its_part() {
        let text = "# fleet\n\n0123456789abcdef\nfedcba9876543210 comm=web* cgroup=/a\n";
        let tokens = Tokens::read(file(0o600, text).path()).unwrap();
        assert!(tokens.scope("0123456789abcdef").unwrap().1.is_everything());
        let (number, scope) = tokens.scope("fedcba9876543210").unwrap();
        assert_eq!((number, tokens.count()), (1, 2));
        let process =
            |comm: &str, cgroup: &str| Process { comm: comm.into(), cgroup: cgroup.into(), ..Process::default() };
        assert!(scope.matches(&process("web-1", "/a/b")));
        assert!(!scope.matches(&process("web-1", "/b")) && !scope.matches(&process("db", "/a")));
        for unknown in ["", "0123456789abcdeF", "0123456789abcde", "0123456789abcdef0", "# fleet", "#"] {
            assert!(tokens.scope(unknown).is_none(), "{unknown}");
        }
    }

    #[test]
    fn what_others_can_read_is_refused() {
        for mode in [0o644, 0o640, 0o604, 0o620] {
            let error = Tokens::read(file(mode, "0123456789abcdef\n").path()).unwrap_err().to_string();
            assert!(error.contains("chmod 600") && !error.contains("0123456789abcdef"), "{error}");
        }
        assert!(Tokens::read(file(0o400, "0123456789abcdef\n").path()).is_ok());
    }

    #[test]
    fn bad_files_are_explained_without_their_tokens() {
        for (text, part) in [
            ("", "no token"),
            ("# only a comment\n", "no token"),
            ("short\n", "line 1"),
            ("\n0123456789abcdef everything\n", "line 2"),
            ("0123456789abcdef pid=x\n", "pid"),
        ] {
            let error = Tokens::read(file(0o600, text).path()).unwrap_err().to_string();
            assert!(error.contains(part) && !error.contains("0123456789abcdef"), "{error}");
        }
        let large = "0123456789abcdef\n".repeat(70_000);
        assert!(Tokens::read(file(0o600, &large).path()).unwrap_err().to_string().contains("1 MiB"));
        assert!(Tokens::read(Path::new("/")).is_err() && Tokens::read(Path::new("/no/such")).is_err());
    }
}
