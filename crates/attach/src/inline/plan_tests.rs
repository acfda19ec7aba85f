use std::time::{Duration, Instant};

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
fn code_that_is_shared_or_writable_or_cannot_be_read_is_refused() {
    let refused = |access: &[&str]| {
        let lines = access.iter().map(|access| format!("1000-5000 {access} 00000000 fe:00 5 /a\n"));
        let maps = Maps::parse(&lines.collect::<String>(), 0);
        check_access(&maps.as_slice().iter().collect::<Vec<_>>()).err().map(|refused| refused.to_string())
    };
    assert_eq!(refused(&["r-xp", "r-xp"]), None);
    for (access, words) in [("r-xs", "MAP_SHARED"), ("--xp", "not read"), ("rwxp", "writable")] {
        let why = refused(&["r-xp", access]);
        assert!(why.as_ref().is_some_and(|why| why.contains(words)), "{access}: {why:?}");
    }
}

#[test]
fn runs_end_where_mappings_do() {
    let bytes = |numbers: std::ops::Range<u8>| numbers.collect::<Vec<u8>>();
    assert_eq!(split(100, bytes(0..8), &[0, 100, 108, 200]), [(100, bytes(0..8))]);
    let parts = [(100, bytes(0..2)), (102, bytes(2..7)), (107, bytes(7..8))];
    assert_eq!(split(100, bytes(0..8), &[90, 107, 102]), parts);
}

#[test]
fn a_page_is_not_replaced_alone_unless_it_is_its_mapping() {
    let place = |starts: &[u64]| Place {
        mapping: Mapping { range: 0x1000..0x5000, ..Mapping::default() },
        starts: starts.to_vec(),
        bias: 0,
        end: 0x5000,
    };
    let read = |address: u64, bytes: &mut [u8]| {
        bytes.fill((address / PAGE_BYTES) as u8);
        true
    };
    let page = |start| Pages { start, original: vec![9; 4096], edited: vec![8; 4096] };
    let replaced = |start, starts: &[u64]| {
        let pages = not_alone(page(start), &place(starts), &read);
        (pages.start, pages.original.chunks(4096).zip(pages.edited.chunks(4096)).map(|(a, b)| [a[0], b[0]]).collect())
    };
    let with_next: (u64, Vec<[u8; 2]>) = (0x1000, vec![[9, 8], [2, 2]]);
    assert_eq!(replaced(0x1000, &[0x1000]), with_next);
    assert_eq!(replaced(0x4000, &[0x1000]), (0x3000, vec![[3, 3], [9, 8]]), "the last one");
    assert_eq!(replaced(0x2000, &[0x1000, 0x3000]), (0x1000, vec![[1, 1], [9, 8]]), "the next is another mapping's");
    assert_eq!(replaced(0x2000, &[0x1000, 0x2000, 0x3000]), (0x2000, vec![[9, 8]]), "alone in its mapping");
    let two = Pages { start: 0x1000, original: vec![9; 8192], edited: vec![8; 8192] };
    assert_eq!(not_alone(two.clone(), &place(&[0x1000]), &read), two);
}

/// A process that had just executed another program used to be refused permanently, as if its code were mapped in
/// pieces.
#[test]
fn a_file_that_is_not_mapped_is_waited_for() {
    let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
    let file = File::open(std::env::current_exe().expect("this program")).expect("it is there");
    let look = || Target::look(child.id()).map(|target| texts(&target, &file).map(|texts| texts.len()));
    // The loader may not have mapped everything yet.
    let until = Instant::now() + Duration::from_secs(60);
    let mut found = look();
    while found.is_err() && Instant::now() < until {
        found = look();
    }
    child.kill().and_then(|()| child.wait()).expect("it ends");
    let refused = found.expect("a child can be looked at").expect_err("it runs another program");
    assert!(matches!(refused, Refused::Unmapped) && refused.may_pass(), "{refused}");
}
