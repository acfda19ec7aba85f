//! `cargo xtask deny`: checks the licences and sources of all dependencies against deny.toml.

use std::path::Path;
use std::process::Command;

use crate::cargo_tools::installed;
use crate::context::Context;
use crate::shell::run;

/// The version of cargo-deny that is installed.
const VERSION: &str = "0.20.2";

/// Always checked. Advisories need a database, which is a git repository.
const ALWAYS: &[&str] = &["licenses", "bans", "sources"];

/// Checks licences, banned crates and sources. With `advisories`, fetches the database of known vulnerabilities and
/// checks these as well.
///
/// # Errors
/// A dependency is not allowed, or cargo-deny cannot be installed.
pub fn deny(context: &Context, advisories: bool) -> anyhow::Result<()> {
    let program = installed(context, "cargo-deny", VERSION)?;
    run(&mut check(&program, &context.root, advisories), context.options.verbose)
}

fn check(program: &Path, root: &Path, advisories: bool) -> Command {
    let mut command = Command::new(program);
    // Several versions of a crate cause only warnings, and there are many of these.
    command.current_dir(root).args(["--log-level", "error", "--locked"]);
    command.arg("check").args(ALWAYS).args(if advisories { ["advisories"].as_slice() } else { &[] });
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advisories_are_checked_on_request_only() {
        let words = |advisories| {
            let command = check(Path::new("deny"), Path::new("/"), advisories);
            let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
            words.join(" ")
        };
        assert_eq!(words(false), "--log-level error --locked check licenses bans sources");
        assert_eq!(words(true), "--log-level error --locked check licenses bans sources advisories");
    }
}
