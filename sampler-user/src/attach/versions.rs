//! Which version of an allocator a file holds, from the texts that its makers left in it.

use super::elf::FileImage;

/// `2.36`, from glibc's banner, else from the newest symbol version that it defines.
pub(super) fn glibc(image: &FileImage) -> Option<String> {
    let from_banner = image.text_after(b" release version ", 32).and_then(leading_version);
    from_banner.or_else(|| {
        let newest = image.versions.iter().filter_map(|v| v.strip_prefix("GLIBC_")).filter_map(|v| {
            let mut parts = v.split('.').map(str::parse::<u32>);
            Some((parts.next()?.ok()?, parts.next()?.ok()?))
        });
        newest.max().map(|(major, minor)| format!("{major}.{minor}"))
    })
}

/// Digits and dots at the beginning of a text.
fn leading_version(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let version = text[..end].trim_end_matches('.');
    (!version.is_empty()).then(|| version.to_owned())
}
