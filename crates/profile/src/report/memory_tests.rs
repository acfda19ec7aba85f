//! Tests of what the report says about resident memory and the heaps in it.

use heapbpf_audit::Missing;

use super::*;
use crate::model::{Glibc, InMemory, Process, PythonArenas, Resident};
use crate::testing;

#[test]
fn resident_memory_is_said_in_parts_that_add_up() {
    let wide = ReportOptions { width: 1_000, ..ReportOptions::default() };
    let text = report(&testing::measured(), &wide);
    assert!(
        text.contains("server (4242) resident: 308 MiB = heap 300 MiB + files 5.00 MiB + other 3.00 MiB"),
        "{text}"
    );
    assert!(text.contains("at most 100 MiB was there before the recording; at most "), "{text}");
    let brief = report(&testing::measured().only_process(0), &ReportOptions { brief: true, ..wide });
    assert!(
        brief.contains("  resident   308 MiB = heap 300 MiB + other 8.00 MiB\n"),
        "small parts are among the others: {brief}"
    );
    let narrow = report(&testing::measured(), &ReportOptions { width: 60, ..ReportOptions::default() });
    let lines: Vec<&str> = narrow.lines().skip_while(|line| *line != "Resident memory").collect();
    assert!(lines.len() > 3 && lines.iter().all(|line| line.chars().count() <= 60), "{narrow}");
    assert!(!report(&testing::small(), &ReportOptions::default()).contains("resident:"), "nothing was measured");
}

/// If glibc's arenas were read, the heap is shown as a sum whose parts add up, and free memory has a remedy.
#[test]
fn a_heap_whose_arenas_were_read_is_a_sum() {
    const MIB: u64 = 1 << 20;
    let mut profile = testing::measured().only_process(0);
    profile.header.live = true;
    let inuse = Pool::of(&profile.rows).estimate(&profile, Value::InuseSpace, 0.95).estimate as u64;
    let glibc = Glibc {
        arenas: 9,
        blocks: 1000,
        inuse_bytes: inuse + 100 * MIB,
        absent_bytes: 4 * MIB,
        free_bytes: 190 * MIB,
        free_resident_bytes: 180 * MIB,
        trimmable_bytes: 120 * MIB,
        resident_bytes: 299 * MIB,
        exact: true,
        ..Glibc::default()
    };
    let said = |profile: &mut Profile, glibc: Glibc| {
        profile.processes[0].resident.as_mut().expect("measured").glibc = Some(glibc);
        let text = report(profile, &ReportOptions { width: 1_000, ..ReportOptions::default() });
        text.lines().find(|line| line.contains("glibc")).expect("a line").to_owned()
    };
    let text = said(&mut profile, glibc);
    for part in [
        "the heap = ",
        " in recorded blocks + ",
        " in older blocks + 180 MiB free inside glibc + ",
        " \u{2212} 4.00 MiB in use but not in memory",
        "; malloc_trim(0) would release 120 MiB of the free memory, MALLOC_ARENA_MAX=2 would leave fewer than 9 arenas",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let brief = report(&profile, &ReportOptions { brief: true, width: 1_000, ..ReportOptions::default() });
    let free = "  resident   308 MiB = heap 300 MiB + other 8.00 MiB\n  free       180 MiB inside glibc; \
                malloc_trim(0) would release 120 MiB of the free memory, MALLOC_ARENA_MAX=2 would leave fewer than 9 \
                arenas\n";
    assert!(brief.contains(free), "{brief}");
    // Inexact figures have bounds and a reason.
    let partly = Glibc { exact: false, unread_bytes: 5 * MIB, inconsistent_bytes: MIB, doubtful_bytes: MIB, ..glibc };
    let text = said(&mut profile, partly);
    for part in [
        "1.00 MiB counted as in use may be in thread caches",
        "5.00 MiB of its arenas was not read",
        "1.00 MiB of its arenas is not consistent",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = said(&mut profile, Glibc { exact: false, ..glibc });
    assert!(text.contains("it changed while it was read"), "{text}");
    // If other allocators were recorded too, only the sum of all blocks is known.
    profile.processes[0].allocators.push("jemalloc 5.3".into());
    let text = said(&mut profile, partly);
    assert!(
        text.contains("of glibc's heap, between ") && text.contains(" is in use in 1,000 blocks; 180 MiB is free"),
        "{text}"
    );
    // Other heaps have bounds: what existed at first may be in mappings in which nothing was sampled.
    let resident = profile.processes[0].resident.as_mut().expect("measured");
    (resident.glibc, resident.heap_bytes, resident.other_bytes) = (None, 0, 30 * MIB);
    let text = report(&profile, &ReportOptions { width: 1_000, ..ReportOptions::default() });
    assert!(text.contains("at most 30.0 MiB was there before the recording"), "{text}");
}

/// A heap that is known exactly.
fn glibc_of_179_mib() -> Glibc {
    const MIB: u64 = 1 << 20;
    Glibc {
        arenas: 1,
        blocks: 1_000,
        inuse_bytes: 150 * MIB,
        free_resident_bytes: 25 * MIB,
        resident_bytes: 179 * MIB,
        exact: true,
        ..Glibc::default()
    }
}

/// The heap of a process in which nothing was counted is a sum, too.
#[test]
fn the_heap_of_an_idle_process_is_a_sum() {
    let mut profile = testing::whole_host();
    profile.idle[0].resident.as_mut().expect("measured").glibc = Some(glibc_of_179_mib());
    let texts = resident_texts(&profile, GroupBy::Program, 0.95);
    let expected = "the heap = 150 MiB in use in 1,000 blocks + 25.0 MiB free inside glibc + 5.00 MiB rounding of \
                    blocks and pages";
    assert_eq!(texts[0].heap, expected);
    // Of another allocator's heap there are bounds, with and without glibc's arenas.
    profile.idle[0].allocators = ["jemalloc 5.3.0", "glibc 2.36", "jemalloc 5.3.0"].map(str::to_owned).into();
    let of = |profile: &Profile| resident_texts(profile, GroupBy::Program, 0.95)[0].heap.clone();
    assert_eq!(of(&profile), format!("{expected}; jemalloc 5.3.0 has at most 431 MiB of the heap and of other memory"));
    profile.idle[0].resident.as_mut().expect("measured").glibc = None;
    let others = "its allocations were not counted; jemalloc 5.3.0 has at most 610 MiB of the heap and of other memory";
    assert_eq!(of(&profile), others);
    // Nor was anything counted where no allocator was found, whether or not the process was named.
    let mut unknown = testing::measured().only_process(0);
    (unknown.processes[0].hook, unknown.processes[0].allocators) = (None, Vec::new());
    assert_eq!(of(&unknown), "its allocations were not counted");
    // Nothing is said of memory that was not divided into parts.
    profile.idle[0].resident.as_mut().expect("measured").undivided_bytes = 1;
    assert_eq!(of(&profile), "its allocations were not counted");
}

#[test]
fn memory_that_was_not_read_is_unknown() {
    let mut profile = testing::whole_host();
    profile.idle[0].resident = None;
    profile.idle[1].resident.as_mut().expect("measured").other_bytes = 5 << 20;
    let text = report(&profile, &ReportOptions { width: 200, ..ReportOptions::default() });
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).expect(name);
    assert_eq!(line("ledgerd (900)").matches("unknown").count(), 2, "all of it, and what is not seen: {text}");
    assert!(line("sh (2 processes)").contains("≥ 5.00 MiB"), "part of it was not divided: {text}");
    assert!(!line("worker").contains("unknown"), "it has ended: {text}");
}

/// An idle process that has ended keeps its last figures, but is no part of what its program has now.
#[test]
fn idle_processes_that_have_ended_are_told_apart() {
    let mut profile = testing::whole_host();
    let said = |profile: &Profile| {
        let text = report(profile, &ReportOptions { width: 200, ..ReportOptions::default() });
        let lines = text.lines().filter(|line| line.trim_start().starts_with("sh ("));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let end = |process: &mut Process| {
        process.ended = true;
        process.resident.as_mut().expect("measured").is_before_end = true;
    };
    end(&mut profile.idle[1]);
    let lines = said(&profile);
    let is_one = |line: &String| line.contains("sh (902)") && line.contains("4.00 MiB") && !line.contains("ended");
    assert!(lines.iter().all(is_one), "{lines:?}");
    end(&mut profile.idle[2]);
    let lines = said(&profile);
    assert!(lines[0].contains("sh (2 processes) ended") && lines[0].contains("8.00 MiB"), "{lines:?}");
    assert!(lines[1].ends_with(" + anonymous 2.00 MiB, of each shortly before it ended"), "{lines:?}");
}

/// The memory of a program is the sum over its processes, in which pages that they share count for each.
#[test]
fn what_processes_share_is_said_if_it_is_much() {
    let mut profile = testing::whole_host();
    let parts = |profile: &Profile| {
        let texts = resident_texts(profile, GroupBy::Program, 0.95);
        texts.into_iter().find(|text| text.name.starts_with("sh (")).expect("it was measured").parts
    };
    for (pss, more) in [(16, "; 32.0 MiB if pages that processes share are divided among them"), (29, "")] {
        for process in &mut profile.idle[1..] {
            let resident = Resident { files_bytes: 30 << 20, pss_bytes: Some(pss << 20), ..Resident::default() };
            process.resident = Some(resident);
        }
        assert_eq!(parts(&profile), format!("60.0 MiB = files 60.0 MiB{more}"));
    }
}

#[test]
fn much_other_memory_has_the_name_of_a_known_runtime() {
    let mut profile = testing::whole_host();
    let parts = |profile: &Profile| {
        let texts = resident_texts(profile, GroupBy::Program, 0.95);
        texts.into_iter().find(|text| text.name.starts_with("ledgerd")).expect("it was measured").parts
    };
    assert!(parts(&profile).ends_with(" + other 430 MiB; 30.0 MiB swapped"), "{}", parts(&profile));
    profile.idle[0].missing.push(Missing::new("V8's own heap (JavaScript)", "not included"));
    let text = parts(&profile);
    assert!(text.ends_with(" + other 430 MiB (perhaps V8's own heap); 30.0 MiB swapped"), "{text}");
    profile.idle[0].resident.as_mut().expect("measured").other_bytes = 7 << 20;
    assert!(parts(&profile).contains(" + other 7.00 MiB;"), "{}", parts(&profile));
    profile.idle[0].resident.as_mut().expect("measured").runtime_bytes = 431 << 20;
    assert!(parts(&profile).contains(" + runtime 431 MiB + other 7.00 MiB;"), "{}", parts(&profile));
    let texts = resident_texts(&profile, GroupBy::Program, 0.95);
    assert!(texts.iter().any(|text| text.not_seen == Some(438 << 20)), "what a runtime has named is not seen either");
    // SBCL's objects lie in executable memory, those of others do not.
    let resident = profile.idle[0].resident.as_mut().expect("measured");
    (resident.runtime_bytes, resident.jit_code_bytes) = (0, 200 << 20);
    assert!(parts(&profile).contains(" + JIT code 200 MiB + other 7.00 MiB;"), "{}", parts(&profile));
    profile.idle[0].missing = vec![Missing::new("SBCL's own heap (dynamic space)", "not included")];
    let text = parts(&profile);
    assert!(text.contains(" + JIT code 200 MiB (perhaps SBCL's own heap) + other 7.00 MiB;"), "{text}");
    // Python's arenas were found.
    profile.idle[0].missing = vec![Missing::new("Python's own heap (objects up to 512 bytes)", "not included")];
    let resident = profile.idle[0].resident.as_mut().expect("measured");
    (resident.other_bytes, resident.python) = (430 << 20, Some(PythonArenas::default()));
    assert!(parts(&profile).contains(" + other 430 MiB;"), "{}", parts(&profile));
}

/// Python's arenas are parts of the sum, whether or not its objects are counted, and never part of glibc's figures.
#[test]
fn pythons_arenas_are_parts_of_the_heap() {
    const MIB: u64 = 1 << 20;
    let glibc = glibc_of_179_mib();
    let (inuse_bytes, resident_bytes) = (100 * MIB, 120 * MIB);
    let python = PythonArenas { blocks: 200_000, inuse_bytes, inconsistent_bytes: 0, resident_bytes };
    let resident = Resident {
        heap_bytes: 300 * MIB,
        at_attach_bytes: Some(0),
        glibc: Some(Glibc { at_attach_bytes: Some(0), at_attach_blocks: Some(0), ..glibc }),
        python: Some(python),
        ..Resident::default()
    };
    let mut profile = testing::whole_host();
    profile.idle[0].resident = Some(resident);
    let of = |profile: &Profile, name: &str| {
        let texts = resident_texts(profile, GroupBy::Program, 0.95);
        texts.into_iter().find(|text| text.name.starts_with(name)).expect("it was measured").heap
    };
    let arenas = "+ 100 MiB in 200,000 objects of Python + 20.0 MiB free in its arenas + 5.00 MiB rounding of blocks \
                  and pages";
    let expected = format!("the heap = 150 MiB in use in 1,000 blocks + 25.0 MiB free inside glibc {arenas}");
    assert_eq!(of(&profile, "ledgerd"), expected);
    // Of the objects that were recorded, nothing is known of the allocator.
    profile.processes[0].resident = Some(resident);
    profile.processes[0].allocators = vec!["glibc 2.36".into(), "Python objects".into()];
    assert_eq!(of(&profile, "server"), expected);
    assert_eq!(profile.processes[0].counted_heap_bytes(), 300 * MIB);
    // They are not counted: all recorded blocks are glibc's.
    profile.processes[0].allocators.pop();
    profile.processes[0].missing.push(Missing::new("Python's own heap (objects up to 512 bytes)", "not included"));
    assert_eq!(profile.processes[0].counted_heap_bytes(), 180 * MIB);
    assert_eq!(profile.processes[0].memory_coverage(), Some(0.6));
    profile.header.live = true;
    let text = of(&profile, "server");
    for part in [" in recorded blocks + ", " free inside glibc + 100 MiB in 200,000 objects of Python + "] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // On the first screen, what is free is one figure.
    let brief = report(&profile.only_process(0), &ReportOptions { brief: true, width: 1_000, ..Default::default() });
    let free = "  free       45.0 MiB inside allocators: 20.0 MiB Python's arenas, 25.0 MiB glibc; Python returns an \
                arena only when all of it is free\n";
    assert!(brief.contains(free), "{brief}");
}

/// Go's heap is not part of an allocator's heap in the same process (cgo).
#[test]
fn what_is_in_gos_heap_is_not_taken_from_an_allocators() {
    let said = |profile: &Profile| {
        let json = testing::json(profile, "json");
        let texts = resident_texts(profile, GroupBy::Program, 0.95);
        (texts[0].heap.clone(), json["processes"][0]["inuse_before"]["estimate"].as_f64())
    };
    let mut profile = testing::measured().only_process(0);
    let inuse = Pool::of(&profile.rows).total(Value::InuseSpace) as u64;
    let go = testing::with_go_heap().rows.pop().expect("its row").with_process(0);
    for glibc in [None, Some(Glibc { blocks: 1_000, inuse_bytes: 2 * inuse, exact: true, ..Glibc::default() })] {
        profile.processes[0].resident.as_mut().expect("measured").glibc = glibc;
        let without = said(&profile);
        assert_eq!(without.1.is_some_and(|before| before > 0.0), glibc.is_some(), "{without:?}");
        profile.rows.push(go.clone());
        assert_eq!(said(&profile), without);
        profile.rows.pop();
    }
    // Nor are mappings in glibc's heap: what else is in use there is not known.
    let is_divided = |profile: &Profile| {
        let (heap, before) = said(profile);
        assert_eq!(heap.contains("older blocks"), before.is_some(), "{heap}");
        before.is_some()
    };
    assert!(is_divided(&profile));
    let reserved = profile.rows[0].inuse;
    profile.rows[0].in_memory = Some(Box::new(InMemory { reserved, ..InMemory::NONE }));
    assert!(!is_divided(&profile));
    profile.rows[0].in_memory = None;
    profile.processes[0].missing.push(Missing::exact_mappings());
    assert!(!is_divided(&profile));
}

/// Other allocators' heaps have no figures of their own. What is recorded says how much of them is in use only if all of
/// it is in them.
#[test]
fn mappings_are_not_taken_from_an_allocators_heap() {
    let said = |profile: &Profile| resident_texts(profile, GroupBy::Program, 0.95)[0].heap.clone();
    let is_divided = |profile: &Profile| {
        let heap = said(profile);
        assert_ne!(heap.contains("is in recorded blocks"), heap.contains("mappings (--mmap)"), "{heap}");
        heap.contains("is in recorded blocks")
    };
    let mut profile = testing::measured().only_process(0);
    profile.header.live = true;
    profile.processes[0].allocators = vec!["jemalloc 5.3.0".into()];
    assert!(is_divided(&profile));
    // What is in use may not be in memory.
    assert!(said(&profile).contains("; at most 303 MiB is held by the allocator"), "{}", said(&profile));
    // The allocator's mappings may all be among the others.
    let mut elsewhere = profile.clone();
    let resident = elsewhere.processes[0].resident.as_mut().expect("measured");
    (resident.heap_bytes, resident.other_bytes) = (0, 40 << 20);
    let text = said(&elsewhere);
    assert!(text.contains("at most 40.0 MiB was there before") && text.contains("at most 40.0 MiB is held"), "{text}");
    let resident = elsewhere.processes[0].resident.as_mut().expect("measured");
    resident.other_bytes = 0;
    let text = said(&elsewhere);
    assert!(text.ends_with("; what was there before the recording is not in memory"), "{text}");
    let whole = profile.clone();
    for row in &mut profile.rows {
        row.in_memory = Some(Box::new(InMemory { resident: row.inuse, ..InMemory::NONE }));
    }
    profile.processes[0].resident.as_mut().expect("measured").other_bytes = 0;
    assert!(said(&profile).contains("; at most 29"), "{}", said(&profile));
    profile = whole;
    // Part of a mapping is in use, or all of it because its pages could not be looked up.
    let reserved = profile.rows[0].inuse;
    profile.rows[0].in_memory = Some(Box::new(InMemory { reserved, ..InMemory::NONE }));
    assert!(!is_divided(&profile));
    profile.rows[0].in_memory = None;
    profile.rows[0].key.function = "mmap".into();
    assert!(!is_divided(&profile));
    profile.rows[0].key.function = "malloc".into();
    assert!(is_divided(&profile));
    // Beside inline hooks, unsampled mappings are not known.
    profile.processes[0].missing.push(Missing::exact_mappings());
    assert!(!is_divided(&profile));
    // Nothing is said of a heap that was not told from other memory.
    profile.processes[0].missing.clear();
    profile.processes[0].resident =
        Some(Resident { undivided_bytes: 30 << 20, at_attach_bytes: Some(30 << 20), ..Resident::default() });
    assert_eq!(said(&profile), "how much of the heap is in use is not known: only the kernel's sums were read");
}

/// Growth of resident memory has a column once any is known. It is unknown of processes that were read only once.
#[test]
fn resident_memory_has_its_growth_per_minute() {
    let mut profile = testing::whole_host();
    let wide = ReportOptions { width: 200, ..ReportOptions::default() };
    assert!(!report(&profile, &wide).contains("PER MINUTE"));
    for (process, growth) in profile.idle.iter_mut().zip([5 << 20, -1024]) {
        process.resident.as_mut().expect("measured").growth_per_minute = Some(growth);
    }
    let text = report(&profile, &wide);
    let line = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name)).expect(name);
    assert!(text.contains("  RESIDENT  PER MINUTE  NOT SEEN"), "{text}");
    assert!(line("ledgerd (900)").contains("622 MiB   +5.00 MiB"), "{text}");
    assert!(line("sh (2 processes)").contains("unknown") && line("server (4242)").contains("unknown"), "{text}");
    assert!(!line("worker").contains("unknown"), "{text}");
    profile.idle[2].resident.as_mut().expect("measured").growth_per_minute = Some(0);
    assert!(report(&profile, &wide).contains("-1.00 KiB"), "both are known");
}
