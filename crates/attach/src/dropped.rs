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
