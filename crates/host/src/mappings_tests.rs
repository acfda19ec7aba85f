use heapbpf_testing::own_process::{OwnProcess, Random, captured, unwind};
use heapbpf_unwind::dwarf::Unwinder;

use super::*;

const A: ModuleId = ModuleId(1);
const B: ModuleId = ModuleId(2);

fn mapping(start: u64, end: u64, file_offset: u64, module: ModuleId, since_ns: u64) -> Mapping {
    Mapping { start, end, file_offset, module, since_ns }
}

fn files(_: ModuleId) -> Kind {
    Kind::File
}

fn found(space: &AddressSpace, address: u64, time_ns: u64) -> Option<(ModuleId, u64)> {
    space.resolve(address, time_ns).map(|mapping| (mapping.module, mapping.offset_of(address)))
}

#[test]
fn the_same_again_changes_nothing_and_growth_keeps_its_own_time() {
    let mut space = AddressSpace::default();
    space.insert(mapping(0x1000, 0x3000, 0x1000, A, 1), &files);
    let shared = space.clone();
    assert_eq!(space.insert(mapping(0x1000, 0x2000, 0x1000, A, 5), &files), Inserted::Known);
    assert_eq!(Arc::strong_count(&space.current), 2, "a known mapping must not unshare the list");
    assert_eq!(space.insert(mapping(0x1000, 0x5000, 0x1000, A, 6), &files), Inserted::New);
    assert_eq!(space.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1), mapping(0x3000, 0x5000, 0x3000, A, 6)]);
    assert_eq!(shared.current(), [mapping(0x1000, 0x3000, 0x1000, A, 1)]);
    assert!(space.replaced.is_empty());
}

#[test]
fn reading_proc_again_ends_mappings_that_are_gone() {
    let mut space = AddressSpace::default();
    space.insert(mapping(0x1000, 0x2000, 0, A, 1), &files);
    space.insert(mapping(0x5000, 0x6000, 0, B, 2), &files);
    space.replace_all([mapping(0x5000, 0x6000, 0, B, 0), mapping(0x7000, 0x8000, 0, A, 0)], 50, &files);
    assert_eq!(found(&space, 0x1000, 49), Some((A, 0)));
    assert_eq!(found(&space, 0x1000, 50), None);
    assert_eq!(found(&space, 0x5000, 60), Some((B, 0)));
    assert_eq!(found(&space, 0x7000, 10), Some((A, 0)));
}

#[test]
fn the_number_of_mappings_kept_is_bounded() {
    let mut space = AddressSpace::default();
    for index in 0..3 * MAX_MAPPINGS as u64 {
        space.insert(mapping(index * 0x2000, index * 0x2000 + 0x1000, 0, A, 1), &files);
    }
    let dropped = Dropped { files: 2 * MAX_MAPPINGS as u64, ..Dropped::default() };
    assert_eq!((space.current().len(), space.dropped), (MAX_MAPPINGS, dropped));
    for time in 2..3 * MAX_MAPPINGS as u64 {
        space.insert(mapping(0, 0x1000, time << 12, A, time), &files);
    }
    assert!(space.replaced.len() <= MAX_MAPPINGS && space.dropped.replaced > 0);
    assert_eq!(space.insert(mapping(5, 5, 0, A, 0), &files), Inserted::Dropped);
    // A mapping that is cut into pieces uses capacity, too.
    let mut pieces = AddressSpace::default();
    pieces.insert(mapping(0, 1 << 40, 0, A, 1), &files);
    for index in 0..MAX_ALL as u64 {
        pieces.insert(mapping(index * 0x2000, index * 0x2000 + 0x1000, 0x7000, B, 2), &files);
    }
    assert!(pieces.current().len() <= MAX_ALL + 2, "{}", pieces.current().len());
}

/// A program that creates many mappings of one kind, anonymous or of files, does not push out its libraries.
#[test]
fn mappings_of_one_kind_leave_space_for_the_others_and_files_with_allocators_have_space_in_any_case() {
    const CODE: ModuleId = ModuleId(u32::MAX);
    const LIBC: ModuleId = ModuleId(u32::MAX - 1);
    let unknown = |module| if module == CODE { Kind::Anonymous } else { Kind::File };
    let known = |module| if module == LIBC { Kind::Essential } else { unknown(module) };
    let page = |index: u64, module| mapping(index * 0x2000, index * 0x2000 + 0x1000, 0, module, 1);
    let (many, libc) = (12_000, page(30_000, LIBC));
    let over = many - MAX_MAPPINGS as u64;

    let mut space = AddressSpace::default();
    (0..many).for_each(|index| _ = space.insert(page(index, CODE), &unknown));
    assert_eq!(space.dropped, Dropped { anonymous: over, ..Dropped::default() });
    assert_eq!(space.insert(libc, &unknown), Inserted::New);
    assert!(space.files_only().is_empty());

    // The same number of file mappings, in address order: the files beyond the bound are recorded as mapped.
    let files = (0..many).map(|index| page(index, ModuleId(index as u32)));
    space.replace_all(files.chain([libc]), 5, &unknown);
    assert_eq!(space.dropped, Dropped { files: over + 1, ..space.dropped });
    assert_eq!((found(&space, libc.start, 9), space.files_only().len() as u64), (None, over + 1));
    assert!(space.modules().any(|module| module == LIBC));
    assert_eq!(space.insert(page(20_000, ModuleId(8_500)), &unknown), Inserted::Dropped, "told once");
    assert_eq!(space.insert(page(20_000, ModuleId(12_500)), &unknown), Inserted::FileOnly);
    space.keep(LIBC, [libc], &known);
    assert_eq!(found(&space, libc.start, 9), Some((LIBC, 0)));
    assert_eq!(space.dropped.files, over + 2);
    assert!(!space.files_only().contains(&LIBC));
    // Once it is known to have an allocator, it is kept right away.
    space.replace_all((0..many).map(|index| page(index, B)).chain([libc]), 9, &known);
    assert_eq!(found(&space, libc.start, 9), Some((LIBC, 0)));
    // The pieces of such a file are bounded, too. Pieces that do not fit stay listed.
    let pieces: Vec<_> = (40_000..60_000).map(|index| page(index, LIBC)).collect();
    pieces.iter().for_each(|piece| _ = space.insert(*piece, &known));
    assert_eq!(space.current().len(), 2 * MAX_MAPPINGS);
    space.keep(LIBC, pieces.last().copied(), &known);
    assert!(space.files_only().contains(&LIBC));
}

/// Compares with a model that records every page at every time (seeded, 300 spaces).
#[test]
fn agrees_with_a_page_by_page_model() {
    const PAGES: u64 = 24;
    let mut numbers = Random(1);
    let mut random = |below: u64| numbers.next_u64() % below;
    for _ in 0..300 {
        let mut space = AddressSpace::default();
        let mut model: Vec<Vec<Option<(ModuleId, u64)>>> = vec![vec![None; PAGES as usize]];
        for time in 1..40 {
            let start = random(PAGES);
            let end = start + 1 + random(PAGES - start);
            let mut pages = model.last().expect("never empty").clone();
            if random(5) == 0 {
                space.remove(start << 12, end << 12, time, &files);
                pages[start as usize..end as usize].fill(None);
            } else {
                let (module, offset) = (ModuleId(random(3) as u32), random(4) << 12);
                space.insert(mapping(start << 12, end << 12, offset, module, time), &files);
                for page in start..end {
                    pages[page as usize] = Some((module, offset + ((page - start) << 12)));
                }
            }
            model.push(pages);
        }
        for (time, pages) in model.iter().enumerate() {
            for (page, expected) in pages.iter().enumerate() {
                assert_eq!(found(&space, (page as u64) << 12, time as u64), *expected);
            }
        }
    }
}

#[test]
fn a_stack_is_resolved_against_the_mappings_of_its_time() {
    let mut process = OwnProcess::read().expect("/proc");
    let capture = captured(10);
    let input = capture.input();
    let expected = unwind(&process, &capture);
    let mut space = AddressSpace::default();
    space.replace_all(process.mappings().iter().copied(), 0, &files);
    let key = process.space().key;
    let mut unwinder = Unwinder::default();
    assert_eq!(unwinder.unwind(&mut process, &AtTime::new(&space, 500).view(key), input), expected);

    // At time 1000 another module replaces this program's code.
    let code = *process.mappings().iter().find(|mapping| mapping.contains(capture.registers.ip)).expect("mapped");
    space.insert(Mapping { module: ModuleId(u32::MAX), since_ns: 1000, ..code }, &files);
    let before = unwinder.unwind(&mut process, &AtTime::new(&space, 999).view(key), input);
    assert_eq!(before, expected);
    let after = unwinder.unwind(&mut process, &AtTime::new(&space, 1000).view(key), input);
    assert_eq!(after.frames[0].module, Some(ModuleId(u32::MAX)));
}
