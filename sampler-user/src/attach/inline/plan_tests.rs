use heapbpf_remote::Maps;

use super::*;

fn whole(lines: &str) -> Option<Mapping> {
    let maps = Maps::parse(lines, 0);
    joined(&maps.as_slice().iter().collect::<Vec<_>>())
}

#[test]
fn text_in_pieces_is_one_if_they_follow_each_other() {
    let pieces =
        "7f0000001000-7f0000005000 r-xp 00009000 fe:00 5 /a\n7f0000005000-7f0000007000 r-xp 0000d000 fe:00 5 /a";
    let mapping = whole(pieces).expect("they follow each other");
    assert_eq!((mapping.range, mapping.offset), (0x7f00_0000_1000..0x7f00_0000_7000, 0x9000));
    for apart in [
        "7f0000001000-7f0000005000 r-xp 00009000 fe:00 5 /a\n7f0000006000-7f0000007000 r-xp 0000d000 fe:00 5 /a",
        "7f0000001000-7f0000005000 r-xp 00009000 fe:00 5 /a\n7f0000005000-7f0000007000 r-xp 0000c000 fe:00 5 /a",
        "7f0000001000-7f0000005000 r-xp 00009000 fe:00 5 /a\n7f0000005000-7f0000007000 r-xs 0000d000 fe:00 5 /a",
        "",
    ] {
        assert_eq!(whole(apart), None, "{apart}");
    }
}

#[test]
fn runs_end_where_mappings_do() {
    let bytes = |numbers: std::ops::Range<u8>| numbers.collect::<Vec<u8>>();
    assert_eq!(split(100, bytes(0..8), &[0, 100, 108, 200]), [(100, bytes(0..8))]);
    let parts = [(100, bytes(0..2)), (102, bytes(2..7)), (107, bytes(7..8))];
    assert_eq!(split(100, bytes(0..8), &[90, 107, 102]), parts);
}
