//! Versions of allocators, from texts in their files.

use crate::elf::FileImage;

/// `2.36`, from glibc's banner, or else from the newest symbol version that it defines.
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

/// The digits and dots at the beginning of a text.
fn leading_version(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let version = text[..end].trim_end_matches('.');
    (!version.is_empty()).then(|| version.to_owned())
}

/// `5.3.0`, from `5.3.0-0-g54eaed1…`.
pub(super) fn jemalloc(image: &FileImage) -> Option<String> {
    let text = image.text_where(|text| {
        let mut parts = text.split('-');
        let version = parts.next().is_some_and(is_version);
        version
            && parts.next().is_some_and(|n| n.parse::<u32>().is_ok())
            && parts.next().is_some_and(|g| g.starts_with('g'))
    })?;
    leading_version(text)
}

/// `2.10`, from `gperftools 2.10`.
pub(super) fn tcmalloc(image: &FileImage) -> Option<String> {
    image.text_after(b"gperftools ", 16).and_then(leading_version)
}

/// `2.0`, from the library's name: the file itself has no text with its version.
pub(super) fn mimalloc(image: &FileImage) -> Option<String> {
    let names = [Some(image.path.as_str()), image.soname.as_deref()];
    names.into_iter().flatten().find_map(|name| leading_version(name.split_once(".so.")?.1))
}

/// `1.2.3`, a separate text in the shared library.
pub(super) fn musl(image: &FileImage) -> Option<String> {
    image.text_after(b"musl libc", 1)?;
    image.text_where(is_version).map(str::to_owned)
}

/// Whether the text is three numbers with dots between them.
fn is_version(text: &str) -> bool {
    text.split('.').count() == 3 && text.split('.').all(|n| n.len() < 4 && n.parse::<u32>().is_ok())
}
