//! Runs the seeds of a fuzz target in ordinary tests.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use lzma_rust2::XzReader;

/// Size of a tar header in bytes. File contents are padded to a multiple of it.
const BLOCK: usize = 512;

/// Runs `check` on each of the target's seeds.
pub fn replay(target: &str, check: impl Fn(&[u8])) {
    let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let mut archives = above.map(|dir| dir.join("fuzz/seeds").join(target).with_extension("tar.xz"));
    let archive = archives.find(|archive| archive.is_file()).expect("the seeds are in the workspace");
    let (mut unpacked, mut seeds) = (Vec::new(), 0);
    let file = File::open(archive).expect("it is readable");
    XzReader::new(file, false).read_to_end(&mut unpacked).expect("it is xz");
    let mut rest = unpacked.as_slice();
    // An empty block marks the end.
    while let Some((header, bytes)) = rest.split_at_checked(BLOCK).filter(|(header, _)| header[0] != 0) {
        let text = |range| str::from_utf8(&header[range]).expect("it is text").trim_end_matches('\0');
        let (name, size) = (text(0..100), usize::from_str_radix(text(124..136), 8).expect("octal digits"));
        // The other entry is the directory.
        if header[156] == b'0' {
            println!("{target}: {name}");
            check(&bytes[..size]);
            seeds += 1;
        }
        rest = &bytes[size.next_multiple_of(BLOCK)..];
    }
    assert!(seeds > 0, "{target} has no seeds");
}
