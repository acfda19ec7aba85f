//! What plain tests do with the seeds of a fuzz target.

use std::path::Path;

/// Runs `check` on each of the target's seeds.
pub fn replay(target: &str, check: impl Fn(&[u8])) {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let folder = above.find_map(|folder| folder.join("fuzz/seeds").read_dir().ok().map(|_| folder.join("fuzz/seeds")));
    let folder = folder.expect("the seeds are in the workspace").join(target);
    let mut seeds = 0;
    for entry in folder.read_dir().expect("a folder of seeds").map(|entry| entry.expect("an entry")) {
        let seed = std::fs::read(entry.path()).expect("a readable seed");
        println!("{target}: {:?}", entry.file_name());
        check(&seed);
        seeds += 1;
    }
    assert!(seeds > 0, "{target} has no seeds");
}
