//! A second build, from a copy of the source in another directory.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::dist::{Made, Release, git, make};
use crate::shell::{read, say};

/// Builds again and compares all files and the binary.
pub fn compare(context: &Context, release: &Release, made: &Made) -> anyhow::Result<()> {
    // The directory's name has a different length, which would show in debug information and in string tables.
    let dir = release.work().join("again/in-another-directory");
    copy_source(&context.root, &dir)?;
    let elsewhere = Context { root: dir.clone(), options: context.options.clone(), ..*context };
    let second = Release { out: dir.join("target/dist"), version: release.version.clone(), ..*release };
    let made_again = make(&elsewhere, &second)?;
    let pairs = release.files().into_iter().zip(second.files());
    let pairs = std::iter::once((made.binary.clone(), made_again.binary)).chain(pairs);
    let mut different = Vec::new();
    for (first, second) in pairs {
        let read = |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let name = first.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match first_difference(&read(&first)?, &read(&second)?) {
            None => say!("{name}: the same bytes"),
            Some(place) => different.push(format!("{name} from byte {place} on ({} is the second)", second.display())),
        }
    }
    if !different.is_empty() {
        bail!("differs: {}", different.join("; "));
    }
    // It takes gigabytes. If something differs, it is kept for inspection.
    fs::remove_dir_all(&dir).with_context(|| format!("cannot remove {}", dir.display()))
}

/// Returns the first position at which two files differ.
fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    let place = one.iter().zip(other).position(|(a, b)| a != b);
    place.or((one.len() != other.len()).then(|| one.len().min(other.len())))
}

/// Copies the files that git tracks or would add, in their current state.
fn copy_source(root: &Path, dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    let names = read(git(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]))?;
    for name in names.split('\0').filter(|name| root.join(name).is_file()) {
        let copy = dir.join(name);
        fs::create_dir_all(copy.parent().context("a file has a directory")?)?;
        fs::copy(root.join(name), &copy).with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_a_byte_or_the_end() {
        assert_eq!(first_difference(b"abc", b"abc"), None);
        assert_eq!(first_difference(b"abc", b"abd"), Some(2));
        assert_eq!(first_difference(b"ab", b"abd"), Some(2));
        assert_eq!(first_difference(b"abc", b""), Some(0));
    }
}
