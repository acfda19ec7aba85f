//! Why functions of a module have no names, and what the user can do about it.

use std::path::Path;
use std::sync::Arc;

use heapbpf_elf::Elf;
use heapbpf_host::mappings::ModuleId;
use heapbpf_profile::naming::base_name;

use super::packages::{self, KnownOwners};

/// A module that lacks names because it is stripped.
pub struct Stripped {
    /// The module.
    pub module: ModuleId,
    /// Its path.
    pub path: Arc<str>,
    /// Why no debuginfod server had its debug file, if any was asked.
    pub refusal: Option<String>,
}

/// Returns, for those modules whose debug symbols are in a package, the reason with that package.
pub fn with_packages(stripped: &[Stripped], owners: &mut KnownOwners) -> Vec<(ModuleId, String)> {
    owners.learn(Path::new(packages::DPKG_LISTS), stripped.iter().map(|it| &*it.path));
    let has_archive = !stripped.is_empty() && packages::has_debug_archive(Path::new(packages::APT_LISTS));
    let with_package = |it: &Stripped| {
        let package = packages::debug_package(owners.get(&it.path)?, has_archive)?;
        Some((it.module, stripped_text(&it.path, &package, it.refusal.as_deref())))
    };
    stripped.iter().filter_map(with_package).collect()
}

/// Whether a file has section headers, but no symbols.
pub fn is_stripped(elf: &Elf) -> bool {
    !elf.sections.is_empty() && elf.section(".symtab").is_none()
}

/// Returns the text about a stripped module: `package` has its debug symbols, and no debuginfod server does
/// (`refusal`).
fn stripped_text(path: &str, package: &str, refusal: Option<&str>) -> String {
    let name = base_name(path);
    match refusal {
        None => format!("{name} is stripped: install {package}, or set DEBUGINFOD_URLS"),
        Some(why) => format!("{name} is stripped: install {package} ({why})"),
    }
}

/// Returns why a function of a file has no name. `refusal`: why no debuginfod server had its debug file, if any was
/// asked.
pub fn why_unnamed(path: &str, elf: &Elf, refusal: Option<&str>) -> String {
    if elf.sections.is_empty() {
        format!("{path} has no section headers")
    } else if is_stripped(elf) {
        stripped_text(path, "its debug symbols", refusal)
    } else {
        format!("no readable symbol of {path} covers this address")
    }
}
