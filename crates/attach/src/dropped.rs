//! Describes, for a process's audit, the mappings that were not kept because there are too many.

use heapbpf_audit::Missing;
use heapbpf_host::mappings::{AddressSpace, Dropped, MAX_MAPPINGS};
use heapbpf_host::modules::ModuleTable;

/// Maximum number of files to name.
const MOST_NAMES: usize = 3;

/// What is missing from an address space, by the kind of mapping, and what that means.
pub fn dropped_mappings(space: &AddressSpace, modules: &ModuleTable) -> Vec<Missing> {
    let Dropped { anonymous, files, replaced } = space.dropped;
    let mut missing = Vec::new();
    let mut say = |what: String, count: u64, consequence: &str| {
        if count > 0 {
            let why = format!("{count} are not kept, as there are more than {MAX_MAPPINGS}: {consequence}");
            missing.push(Missing::new(what, why));
        }
    };
    say("mappings of code made at run time".into(), anonymous, "stacks end there");
    say(format!("executable mappings of files{}", names(space, modules)), files, "stacks may end there");
    let consequence = "older stacks may end where one of them was";
    say("executable mappings that were replaced".into(), replaced, consequence);
    missing
}

/// The first files with missing mappings, in brackets.
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
    use heapbpf_host::mappings::{Kind, Mapping};
    use heapbpf_host::record::MapEvent;

    use super::*;

    #[test]
    fn each_kind_is_reported_by_its_name_and_its_first_files() {
        let (mut modules, mut space) = (ModuleTable::new(1), AddressSpace::default());
        assert_eq!(dropped_mappings(&space, &modules), []);
        for inode in 1..=MAX_MAPPINGS as u64 + 4 {
            let map = MapEvent { inode, path: format!("/gone/{inode}").into_bytes().into(), ..MapEvent::default() };
            let (module, _) = modules.intern(&map, true);
            let start = inode << 13;
            space.insert(Mapping { start, end: start + 4096, file_offset: 0, module, since_ns: 1 }, &|_| Kind::File);
        }
        (space.dropped.anonymous, space.dropped.replaced) = (5, 6);
        let missing = dropped_mappings(&space, &modules);
        let said: Vec<_> = missing.iter().map(|it| (&*it.what, it.why.split(' ').next().unwrap_or_default())).collect();
        let expected = [
            ("mappings of code made at run time", "5"),
            ("executable mappings of files (/gone/8193, /gone/8194, /gone/8195, …)", "4"),
            ("executable mappings that were replaced", "6"),
        ];
        assert_eq!(said, expected);
    }
}
