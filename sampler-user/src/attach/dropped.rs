//! Mappings of a process that are not kept because there are too many, for its audit.

use crate::host::mappings::{AddressSpace, Dropped, MAX_MAPPINGS};
use crate::host::modules::ModuleTable;
use heapbpf_audit::Missing;

/// Most files that are named.
const MOST_NAMES: usize = 3;

/// What is missing of an address space, by the kind of mapping, and what that means.
pub fn dropped_mappings(space: &AddressSpace, modules: &ModuleTable) -> Vec<Missing> {
    let Dropped { anonymous, files, replaced } = space.dropped();
    let mut missing = Vec::new();
    let mut say = |what: String, count: u64, consequence: &str| {
        if count > 0 {
            let why = format!("{count} are not kept, as there are more than {MAX_MAPPINGS}: {consequence}");
            missing.push(Missing::new(what, why));
        }
    };
    say("mappings of code made at run time".into(), anonymous, "stacks end in these");
    say(format!("executable mappings of files{}", names(space, modules)), files, "stacks can end in these");
    let consequence = "older stacks can end where one of these was";
    say("executable mappings that were replaced".into(), replaced, consequence);
    missing
}

/// The first files of which mappings are missing, in brackets.
fn names(space: &AddressSpace, modules: &ModuleTable) -> String {
    let files = space.files_only();
    let named = files.iter().filter_map(|module| modules.get(*module)).take(MOST_NAMES);
    let mut names: Vec<&str> = named.map(|module| &*module.path).collect();
    if files.len() > names.len() {
        names.push("…");
    }
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::mappings::{Kind, Mapping, ModuleId};
    use crate::host::record::MapEvent;

    #[test]
    fn each_kind_is_told_by_its_name_and_its_files() {
        let mut modules = ModuleTable::new(1);
        let mut ids = Vec::new();
        for inode in 1..=MAX_MAPPINGS as u64 + 5 {
            let map = MapEvent { inode, path: format!("/gone/{inode}").into_bytes().into(), ..MapEvent::default() };
            ids.push(modules.intern(&map, true).0);
        }
        let page = |index: u64, module| Mapping {
            start: index << 13,
            end: (index << 13) + 4096,
            file_offset: 0,
            module,
            since_ns: 1,
        };
        let anonymous = ModuleId(u32::MAX);
        let kind_of = |module| if module == anonymous { Kind::Anonymous } else { modules.kind_of_mappings(module) };
        let mut space = AddressSpace::default();
        assert!(dropped_mappings(&space, &modules).is_empty());
        for (index, module) in (0..).zip(&ids) {
            space.insert(page(index, *module), &kind_of);
            space.insert(page(1_000_000 + index, anonymous), &kind_of);
        }
        let missing = dropped_mappings(&space, &modules);
        assert_eq!(missing.len(), 2, "{missing:?}");
        assert_eq!(missing[0].what, "mappings of code made at run time");
        assert_eq!(missing[1].what, "executable mappings of files (/gone/8193, /gone/8194, /gone/8195, …)");
        assert!(
            missing.iter().all(|it| it.why.starts_with("5 are not kept, as there are more than 8192: ")),
            "{missing:?}"
        );
    }
}
