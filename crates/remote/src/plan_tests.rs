use super::*;

const MAPS: &str = "7f0000000000-7f0000010000 r-xp 00001000 fe:00 9 /lib/libc.so.6\n\
                    7f0000010000-7f0000020000 rw-p 00011000 fe:00 9 /lib/libc.so.6\n";
const LIBC: u64 = 0x7f00_0000_0000;
const BASE: u64 = 0x7e00_0000_0000;

fn draft() -> Draft {
    let page = |start| Pages { start, original: vec![1; 4096], edited: vec![2; 4096] };
    Draft {
        name: "heapbpf-test".into(),
        base: BASE,
        bytes: 0x4000,
        text: vec![0x90; 0x1000],
        data: vec![
            Data { range: 0x1000..0x2000, is_wiped_on_fork: false, initial: vec![7] },
            Data { range: 0x3000..0x4000, is_wiped_on_fork: true, initial: vec![] },
        ],
        pages: vec![page(LIBC + 0x2000), page(LIBC + 0x1000)],
        displaced: vec![Displaced { range: LIBC + 0x2010..LIBC + 0x2016, copies: vec![(LIBC + 0x2012, BASE + 0x20)] }],
    }
}

fn plan(change: impl FnOnce(&mut Draft)) -> Result<Plan, PlanError> {
    let mut draft = draft();
    change(&mut draft);
    Plan::new(draft, &Maps::parse(MAPS, 0))
}

#[test]
fn adjacent_data_is_mapped_at_once() {
    let data = |range| Data { range, is_wiped_on_fork: true, initial: vec![1] };
    let plan = plan(|draft| {
        draft.bytes = 0x6000;
        draft.data = vec![data(0x1000..0x2000), data(0x2000..0x3000), data(0x4000..0x5000), data(0x5000..0x6000)];
    });
    let plan = plan.expect("it is right");
    let steps = plan.steps(Part::Map);
    let mapped = steps.iter().filter_map(|step| if let Step::MapData(at) = step { Some(*at) } else { None });
    let mapped: Vec<_> = mapped.map(|at| (at, plan.adjacent_data(at))).collect();
    assert_eq!(mapped, [(0, 0x1000..0x3000), (2, 0x4000..0x6000)]);
    let of_each = steps.iter().filter(|step| matches!(step, Step::WipeOnFork(_) | Step::FillData(_)));
    assert_eq!(of_each.count(), 8);
}

#[test]
fn data_comes_before_text_and_text_before_jumps() {
    let plan = plan(|_| {}).expect("it is right");
    let expected = [
        Step::Create,
        Step::Reserve,
        Step::MapData(0),
        Step::FillData(0),
        Step::MapData(1),
        Step::WipeOnFork(1),
        Step::MapCopy(0),
        Step::MapCopy(1),
        Step::MapText,
        Step::Close,
    ];
    assert_eq!(plan.steps(Part::Map), expected);
    let expected =
        [Step::SetAside(0), Step::Replace(0), Step::SetAside(1), Step::Replace(1), Step::MoveThreads, Step::Write];
    assert_eq!(plan.steps(Part::Replace), expected);
    assert_eq!(plan.range(), BASE..BASE + 0xc000, "a page apart");
    assert_eq!(plan.memfd_name(), "heapbpf-test-7e0000000000-c000");
    let offsets: Vec<u64> = plan.contents().map(|(offset, _)| offset).collect();
    assert_eq!(offsets, [0, 0x4000, 0x10000, 0x8000, 0x14000], "what is to be there is behind all that is mapped");
    assert_eq!(plan.mappings(), [LIBC..LIBC + 0x10000, LIBC..LIBC + 0x10000]);
}

/// The mappings of a process after the plan's jumps have been removed again, and the memfd's content.
fn let_go(plan: &Plan) -> (String, Vec<u8>) {
    let (name, mut memfd) = (plan.memfd_name(), vec![0; 0x18000]);
    for (offset, bytes) in plan.contents() {
        memfd[offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    let line = |at: u64, bytes: u64, access, offset| {
        format!("{:x}-{:x} {access} {offset:08x} 00:01 5 /memfd:{name} (deleted)\n", BASE + at, BASE + at + bytes)
    };
    let data = |at: u64| format!("{:x}-{:x} rw-p 00000000 00:00 0\n", BASE + at, BASE + at + 0x1000);
    let ours = [line(0, 0x1000, "r-xp", 0), data(0x1000), line(0x2000, 0x1000, "---p", 0x2000), data(0x3000)];
    let copies = [0x4000, 0x8000].map(|spare| line(spare + 0x2000, 0x1000, "r-xp", spare));
    (format!("{}{}{MAPS}", ours.concat(), copies.concat()), memfd)
}

#[test]
fn what_is_mapped_is_used_again_if_it_is_the_same() {
    let plan = plan(|_| {}).expect("it is right");
    let (maps, memfd) = let_go(&plan);
    let again = |maps: &str, change: fn(&mut Draft), memfd: &[u8]| {
        let (maps, mut draft) = (Maps::parse(maps, 0), draft());
        change(&mut draft);
        let found = crate::found::find(&maps);
        let read = |at: u64, into: &mut [u8]| {
            memfd.get(at as usize..at as usize + into.len()).is_some_and(|bytes| {
                into.copy_from_slice(bytes);
                true
            })
        };
        Plan::again(draft, &maps, found.first()?, read)
    };
    let same = again(&maps, |draft| draft.data[0].initial = vec![9], &memfd).expect("the control page is written anew");
    assert_eq!(same.steps(Part::Map), [Step::Empty(1), Step::FillData(0)]);
    assert_eq!((same.steps(Part::Replace), same.range()), (plan.steps(Part::Replace), plan.range()));
    assert_eq!(again(&maps, |draft| draft.text[7] = 1, &memfd), None);
    assert_eq!(again(&maps, |draft| draft.pages[1].edited[7] = 1, &memfd), None);
    assert_eq!(again(&maps, |draft| draft.base += 0x1000, &memfd), None);
    assert_eq!(again(&maps, |draft| draft.pages.truncate(1), &memfd), None);
    for (from, to) in [
        ("r-xp 00004000", "r--p 00004000"),
        ("rw-p 00000000 00:00", "r--p 00000000 00:00"),
        ("r-xp 00000000 00:01 5", "r-xp 00000000 00:01 6"),
    ] {
        assert_eq!(again(&maps.replacen(from, to, 1), |_| {}, &memfd), None, "{from}");
    }
    // Not while jumps lead to it, or while the original pages may not be back.
    let hooked = format!(
        "{maps}{:x}-{:x} r-xp 00004000 00:01 5 /memfd:{} (deleted)\n",
        LIBC + 0x2_0000,
        LIBC + 0x2_1000,
        plan.memfd_name()
    );
    assert_eq!(again(&hooked, |_| {}, &memfd), None);
    assert_eq!(again(&maps, |_| {}, &memfd[..0x14000]), None, "it is shorter");
}

#[test]
fn every_step_that_leaves_something_has_an_undo() {
    let plan = plan(|_| {}).expect("it is right");
    let undo = |part| plan.steps(part).into_iter().rev().filter_map(|step| plan.undo(step)).collect::<Vec<Undo>>();
    let kept = |start, spare| Undo::PutBack(Kept { start, spare, bytes: 0x1000, offset: 0x1000 + start - LIBC });
    let expected =
        [Undo::Restore, Undo::MoveBack, kept(LIBC + 0x1000, BASE + 0x8000), kept(LIBC + 0x2000, BASE + 0x4000)];
    assert_eq!(undo(Part::Replace), expected);
    assert_eq!(undo(Part::Map), [Undo::Unmap, Undo::Close]);
}

#[test]
fn threads_within_displaced_instructions_move_to_the_copy() {
    let plan = plan(|_| {}).expect("it is right");
    assert_eq!(plan.moved(LIBC + 0x2010), Ok(None), "the jump itself");
    assert_eq!(plan.moved(LIBC + 0x2012), Ok(Some(BASE + 0x20)));
    assert_eq!(plan.moved(LIBC + 0x2013), Err(LIBC + 0x2013));
    assert_eq!(plan.moved(LIBC + 0x2016), Ok(None));
}

#[test]
fn drafts_that_do_not_fit_are_no_plans() {
    let shape = |change: fn(&mut Draft)| matches!(plan(change), Err(PlanError::Shape(_)));
    assert!(shape(|draft| draft.base += 1));
    assert!(shape(|draft| draft.base = u64::MAX - 4095));
    assert!(shape(|draft| draft.bytes = MAX_BYTES));
    assert!(shape(|draft| draft.text.clear()));
    assert!(shape(|draft| draft.text.resize(0x5000, 0)));
    assert!(shape(|draft| draft.data[0].range.start = 0));
    assert!(shape(|draft| draft.data[1].range.end = 0x5000));
    assert!(shape(|draft| draft.data[0].initial.resize(0x1001, 0)));
    assert!(shape(|draft| draft.pages[0].edited.push(0)));
    assert!(shape(|draft| draft.pages[0].start = draft.pages[1].start));
    let too_much = vec![1; MAX_REPLACED_BYTES as usize];
    let refused = plan(|draft| draft.pages[0].original = too_much).map(drop);
    assert_eq!(refused, Err(PlanError::Shape("all that is replaced")));
    assert!(matches!(plan(|draft| draft.name = "other".into()), Err(PlanError::Name(_))));
    assert!(matches!(plan(|draft| draft.name.push('/')), Err(PlanError::Name(_))));
    let occupied = |draft: &mut Draft| {
        draft.base = LIBC - 0x1000;
        draft.displaced.clear();
    };
    assert!(matches!(plan(occupied), Err(PlanError::Occupied(_))));
    assert!(matches!(plan(|draft| draft.pages[0].start = LIBC + 0x10000), Err(PlanError::NotText(_))));
    assert!(matches!(plan(|draft| draft.pages[0].start = LIBC - 0x1000), Err(PlanError::NotText(_))));
    assert!(matches!(plan(|draft| draft.displaced[0].copies[0].1 = BASE + 0x1000), Err(PlanError::Displaced(_))));
    assert!(matches!(plan(|draft| draft.displaced[0].range = LIBC..LIBC + 5), Err(PlanError::Displaced(_))));
}

#[test]
fn a_jump_is_one_write() {
    let (before, mut after) = ([1; 24], [1; 24]);
    assert_eq!(writes(0x1000, &before, &after), []);
    after[3..8].fill(2);
    after[22] = 3;
    assert_eq!(
        writes(0x1000, &before, &after),
        [(0x1003, [2, 2, 2, 2, 2, 1, 1, 1]), (0x1010, [1, 1, 1, 1, 1, 1, 3, 1])]
    );
}

#[test]
fn probes_of_others_do_not_make_code_another() {
    let file = [0x55, 0x0f, 0x1f, 0x44, 0, 0, 0x90];
    assert!(is_same_code(&file, &file));
    assert!(is_same_code(&file, &[0xcc, 0x0f, 0x1f, 0x44, 0, 0, 0x90]));
    assert!(is_same_code(&file, &[0x55, 0xe8, 1, 2, 3, 4, 0x90]));
    assert!(!is_same_code(&file, &[0xe9, 1, 2, 3, 4, 0, 0x90]));
    assert!(!is_same_code(&file, &file[..6]));
}

/// What Linux does to a ten-byte nop with a probe, step by step (`int3_update_optimize`, `int3_update_unoptimize`).
#[test]
fn a_probe_puts_two_instructions_into_a_ten_byte_nop() {
    let code = |nop: [u8; 10]| [&[0x90], &nop[..], &[0xc3]].concat();
    let file = code(NOP10);
    for memory in [
        NOP10,
        [0xcc, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0],
        [0xcc, 0x8d, 0x64, 0x24, 0x80, 0xe8, 1, 2, 3, 4],
        [0x48, 0x8d, 0x64, 0x24, 0x80, 0xe8, 1, 2, 3, 4],
        [0xcc, 0x2e, 0x0f, 0x1f, 0x84, 0xe8, 1, 2, 3, 4],
        [0x66, 0x2e, 0x0f, 0x1f, 0x84, 0xe8, 1, 2, 3, 4],
    ] {
        assert_eq!(other_code(&file, &code(memory)), None, "{memory:x?}");
    }
    for (memory, at) in [
        ([0x48, 0x8d, 0x64, 0x24, 0x80, 0xe9, 1, 2, 3, 4], 1),
        ([0x48, 0x8d, 0x64, 0x24, 0x88, 0xe8, 1, 2, 3, 4], 1),
        ([0x66, 0x2e, 0x0f, 0x1f, 0x84, 1, 2, 3, 4, 5], 6),
        ([0xe8, 1, 2, 3, 4, 0, 0, 0, 0, 0], 1),
    ] {
        assert_eq!(other_code(&file, &code(memory)), Some(at), "{memory:x?}");
    }
    assert_eq!(other_code(&file, &file[..8]), Some(8));
}

#[test]
fn nobody_is_left_before_the_call_in_a_ten_byte_nop() {
    let plan = plan(|draft| draft.pages[0].original[0x40..0x4a].copy_from_slice(&NOP10)).expect("it is right");
    let address = LIBC + 0x2045;
    assert_eq!((plan.moved(address), plan.moved(address - 5)), (Err(address), Ok(None)));
}
