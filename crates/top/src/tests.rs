//! Tests of whole screens. `HEAPBPF_BLESS=1` rewrites the expected files; check them before you commit them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use heapbpf_profile::report::FrameView;
use heapbpf_profile::testing::{large, small, sums};
use heapbpf_profile::{Frame, Process, Profile, Stack};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Color;

use crate::{Action, Key, Options, Status, Theme, Top};

/// The small profile at a given second, with the given number of samples in use on its first stack.
fn profile(second: u64, samples: u64) -> Arc<Profile> {
    let mut profile = small();
    let interval = profile.header.interval;
    profile.header.duration = Duration::from_secs(second);
    profile.rows[0].inuse = sums(samples, 70_000, interval);
    profile.rows[0].alloc = sums(samples * 2, 70_000, interval);
    Arc::new(profile)
}

fn top(color: bool) -> Top {
    Top::new(Options {
        source: "2 processes".into(),
        confidence: 0.95,
        theme: Theme { color },
        frames: FrameView::default(),
    })
}

/// A screen after a minute during which something grew.
fn grown() -> Top {
    let mut top = top(false);
    for tens in 0..=6 {
        top.take(profile(tens * 10, 20 + tens * 20));
    }
    top
}

fn buffer(top: &mut Top, width: u16, height: u16) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    top.draw(&mut buffer);
    buffer
}

fn screen(top: &mut Top, width: u16, height: u16) -> String {
    let buffer = buffer(top, width, height);
    let mut text = String::new();
    for y in 0..height {
        let line: String = (0..width).filter_map(|x| buffer.cell((x, y))).map(|cell| cell.symbol()).collect();
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn press(top: &mut Top, keys: &str) {
    for key in keys.chars() {
        let key = match key {
            '⏎' => Key::Enter,
            '⎋' => Key::Escape,
            '⇥' => Key::Tab,
            '↓' => Key::Down,
            '↑' => Key::Up,
            '→' => Key::Right,
            '←' => Key::Left,
            other => Key::Char(other),
        };
        assert_eq!(top.key(key), None, "{key:?}");
    }
}

/// Also looks for words of the code, which tell a user nothing.
fn check(name: &str, found: &str) {
    for word in ["session link", "criterion", "hooked", "given up", "σ", "q <", "q ="] {
        assert!(!found.to_lowercase().contains(word), "{word}: {found}");
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/golden").join(format!("{name}.txt"));
    if std::env::var_os("HEAPBPF_BLESS").is_some() {
        std::fs::write(&path, found).expect("writable");
    }
    let kept = std::fs::read_to_string(&path).expect("HEAPBPF_BLESS=1 writes it");
    assert_eq!(kept, found, "{name}:\n{found}");
}

#[test]
fn screens_look_as_they_should() {
    let mut top = grown();
    check("programs_80x24", &screen(&mut top, 80, 24));
    press(&mut top, "⏎");
    check("functions_80x24", &screen(&mut top, 80, 24));
    press(&mut top, "⇥");
    check("stacks_80x24", &screen(&mut top, 80, 24));
    press(&mut top, "t↓");
    check("tree_80x24", &screen(&mut top, 80, 24));
    press(&mut top, "⎋F");
    check("flame_80x24", &screen(&mut top, 80, 24));
    press(&mut top, "?");
    check("help_80x24", &screen(&mut top, 80, 24));
}

/// In a profile of a whole host, the programs with most resident memory come first, idle or not. Keys choose another
/// order; inside a program, memory in use decides.
#[test]
fn idle_programs_have_a_row() {
    let mut top = top(false);
    top.take(Arc::new(heapbpf_profile::testing::whole_host()));
    check("host_80x24", &screen(&mut top, 80, 24));
    assert!(screen(&mut top, 100, 24).contains("PER MINUTE") && screen(&mut top, 100, 24).contains(" unknown "));
    let first = |top: &mut Top| screen(top, 80, 24).lines().nth(4).unwrap_or_default().to_owned();
    for (key, expected) in
        [("", "ledgerd"), ("1", "server"), ("7", "ledgerd"), ("r", "worker"), ("r", "ledgerd"), ("s", "server")]
    {
        press(&mut top, key);
        assert!(first(&mut top).contains(expected), "{key}: {}", first(&mut top));
    }
    press(&mut top, "7⏎");
    assert!(screen(&mut top, 80, 24).contains("nothing was sampled"));
    press(&mut top, "⎋↓⏎");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("server (4242) › functions") && text.contains(" IN USE↓"), "{text}");
}

/// Workers that idle do not change the order of programs. Programs that idle do, for good.
#[test]
fn programs_keep_their_order_while_workers_idle() {
    let mut top = top(false);
    let host = heapbpf_profile::testing::whole_host();
    let mut workers = host.clone();
    for worker in &mut workers.idle {
        let Process { comm, exe, .. } = &host.processes[0];
        (worker.comm, worker.exe) = (comm.clone(), exe.clone());
    }
    let busy = Profile { idle: Vec::new(), ..host.clone() };
    for (profile, is_by_memory) in [(&workers, false), (&busy, false), (&host, true), (&workers, true), (&busy, true)] {
        top.take(Arc::new(profile.clone()));
        let text = screen(&mut top, 80, 24);
        assert_eq!((text.contains("RESIDENT↓"), text.contains("IN USE↓")), (is_by_memory, !is_by_memory), "{text}");
    }
}

#[test]
fn totals_come_first_and_what_is_not_measured_yet_says_so() {
    let mut top = top(false);
    let mut totals = small();
    (totals.header.duration, totals.header.growth_over) = (Duration::from_millis(20), None);
    for row in &mut totals.rows {
        (row.key.stack, row.growth) = Default::default();
    }
    top.take_totals(Arc::new(totals.clone()));
    let text = screen(&mut top, 80, 24);
    assert!(text.contains(" measuring  WAITING FOR NAMES") && !text.contains("0 ms"), "{text}");
    let head = text.lines().nth(1).unwrap_or_default();
    assert!(head.contains("MiB [") && head.contains(" · growth: measuring"), "{text}");
    assert!(text.contains("server (4242)"), "{text}");
    // There are no functions that could be entered, and no stacks that could be written.
    press(&mut top, "⏎w");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("all › programs") && text.contains("the names of functions are awaited"), "{text}");
    top.take(profile(1, 20));
    top.take_totals(Arc::new(totals));
    press(&mut top, "⏎⇥");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("  1 s  LIVE") && text.contains("grow") && !text.contains("no stack"), "{text}");
    // The same figure as in a report, over the same time.
    let growing = text.lines().nth(4).unwrap_or_default();
    assert!(growing.contains("B/s ["), "{text}");
}

#[test]
fn long_names_lose_their_middle() {
    let mut top = top(false);
    top.take(Arc::new(large(100, 20)));
    press(&mut top, "⏎");
    let text = screen(&mut top, 80, 24);
    let rows: Vec<&str> = text.lines().skip(4).take_while(|line| !line.starts_with('─') && !line.is_empty()).collect();
    assert!(!rows.is_empty() && rows.iter().all(|row| row.contains("operation_") && !row.ends_with('…')), "{text}");
}

#[test]
fn what_grew_since_the_mark_is_significant_and_noise_is_not() {
    let mut top = top(false);
    top.take(profile(10, 20));
    press(&mut top, "⏎⇥m");
    top.take(profile(20, 21));
    let text = screen(&mut top, 100, 24);
    assert!(text.contains("SINCE MARK") && text.contains("may be chance"), "{text}");
    top.take(profile(30, 400));
    let text = screen(&mut top, 100, 24);
    check("marked_100x24", &text);
    assert!(text.contains("since the mark +") && text.contains(": significant"), "{text}");
    assert_eq!(text.matches("MiB* ").count(), 1, "{text}");
    press(&mut top, "⇥⎋");
    let text = screen(&mut top, 100, 24);
    assert!(text.contains("server (4242)") && text.contains('*'), "programs as well: {text}");
    press(&mut top, "M");
    assert!(screen(&mut top, 100, 24).contains("GROWING"));
    // Rows are sorted by what the column shows: it has shrunk since, although it grew over a longer time.
    press(&mut top, "m2");
    top.take(profile(40, 10));
    let text = screen(&mut top, 100, 24);
    assert!(text.lines().nth(5).is_some_and(|row| row.contains("server (4242)")), "{text}");
}

/// Which of several processes of one program grows?
#[test]
fn processes_of_a_program_have_rows_of_their_own_on_request() {
    let mut profile = small();
    profile.processes[1] = profile.processes[0].clone();
    profile.processes[1].pid = 4243;
    profile.rows[4].growth = None;
    let mut top = top(false);
    top.take(Arc::new(profile));
    let text = screen(&mut top, 80, 24);
    assert!(!text.contains("server (4243)"), "one program, which is entered at once: {text}");
    press(&mut top, "⎋");
    assert!(screen(&mut top, 80, 24).contains("server (2 processes)"));
    press(&mut top, "p2");
    let text = screen(&mut top, 80, 24);
    let rows: Vec<&str> = text.lines().skip(4).take(2).collect();
    assert!(text.contains("all › processes") && rows[0].contains("server (4242)"), "{text}");
    assert!(rows[1].contains("server (4243)") && rows[1].contains(" 0 B/s"), "{text}");
    press(&mut top, "p");
    assert!(screen(&mut top, 80, 24).contains("server (2 processes)"));
    press(&mut top, "mp");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("all › processes") && text.contains("marked at"), "the baseline stays: {text}");
}

#[test]
fn rows_are_sorted_filtered_and_searched() {
    let mut top = grown();
    press(&mut top, "⏎6");
    let names = |text: &str| -> Vec<String> {
        let rows = text.lines().skip(4).take_while(|line| !line.starts_with('─') && !line.is_empty());
        rows.map(|line| line.split_whitespace().last().unwrap_or_default().to_owned()).collect()
    };
    let all = names(&screen(&mut top, 80, 24));
    let mut sorted = all.clone();
    sorted.sort();
    assert_eq!(all, sorted);
    press(&mut top, "r");
    sorted.reverse();
    assert_eq!(names(&screen(&mut top, 80, 24)), sorted);
    press(&mut top, "fparse");
    assert_eq!(names(&screen(&mut top, 80, 24)), ["parse_value"], "while it is typed");
    press(&mut top, "⏎⎋");
    assert_eq!(names(&screen(&mut top, 80, 24)).len(), all.len(), "Esc takes the filter away first");
    press(&mut top, "1/MAIN⏎");
    assert!(screen(&mut top, 80, 24).contains("\n main\n"), "{}", screen(&mut top, 80, 24));
    press(&mut top, "/nowhere⏎");
    assert!(screen(&mut top, 80, 24).contains("not found: \"nowhere\""));
    press(&mut top, "fnowhere⏎");
    assert!(screen(&mut top, 80, 24).contains("nothing matches"));
    press(&mut top, "⎋s");
    assert!(screen(&mut top, 80, 24).contains("GROWING"));
    for key in "12345".chars() {
        press(&mut top, &key.to_string());
        assert_eq!(names(&screen(&mut top, 140, 24)).len(), all.len(), "{key}");
    }
}

#[test]
fn a_frozen_screen_stays_until_it_goes_on() {
    let mut top = grown();
    press(&mut top, " ");
    let before = screen(&mut top, 80, 24);
    top.take(profile(90, 3_000));
    assert!(before.contains("FROZEN"));
    assert_eq!(screen(&mut top, 80, 24), before);
    press(&mut top, " ");
    let after = screen(&mut top, 80, 24);
    assert!(after.contains("LIVE") && after.contains("1 min 30 s"), "{after}");
}

#[test]
fn trees_and_flames_lead_to_callers_and_callees() {
    let mut top = grown();
    press(&mut top, "⏎/handle⏎c");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("callers of handle") && text.contains("▾ handle") && text.contains("  main"), "{text}");
    press(&mut top, "←");
    assert!(screen(&mut top, 80, 24).contains("▸ handle"), "closed");
    press(&mut top, "→⎋d");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("callees of handle") && text.contains("parse_value"), "{text}");
    press(&mut top, "s");
    assert!(screen(&mut top, 80, 24).contains("always sorted by size"));
    press(&mut top, "⎋F");
    screen(&mut top, 80, 24);
    press(&mut top, "↓↓");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("main › handle"), "{text}");
    press(&mut top, "⏎");
    assert!(!screen(&mut top, 80, 24).lines().nth(3).unwrap_or_default().contains("server"), "zoomed in");
    press(&mut top, "↓→←↑⎋⎋c⎋⎋");
    assert!(screen(&mut top, 80, 24).contains("functions"));
}

#[test]
fn one_program_is_entered_at_once_and_its_stacks_show_their_lines() {
    let mut top = top(false);
    let mut one = small().only_process(0);
    one.header.duration = Duration::from_secs(3);
    // The first samples may arrive later.
    let mut nothing = one.clone();
    (nothing.processes, nothing.rows) = Default::default();
    top.take(Arc::new(nothing));
    top.take(Arc::new(one));
    assert!(screen(&mut top, 80, 24).contains("server (4242) › functions"));
    press(&mut top, "/grow⏎⏎");
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("grow › stacks") && text.contains("grow json.c:31 ← parse_value json.c:99"), "{text}");
    assert!(text.contains("median lifetime 1.5 s"), "{text}");
    press(&mut top, "⏎");
    assert!(screen(&mut top, 80, 24).contains("handle  server.cc:20"), "{}", screen(&mut top, 80, 24));
    press(&mut top, "⎋⎋⎋");
    assert!(screen(&mut top, 80, 24).contains("programs"));
}

#[test]
fn profiles_may_be_empty() {
    for processes in 0..=2 {
        let mut empty = small();
        empty.rows.clear();
        empty.processes.truncate(processes);
        let mut top = top(false);
        top.take(Arc::new(empty));
        for keys in ["", "⏎", "⇥", "t", "⎋c", "F", "↓⏎⎋⎋m", "n/x⏎", "6", "5", "?"] {
            press(&mut top, keys);
            assert!(screen(&mut top, 80, 24).contains("LIVE"), "{keys}");
        }
        top.take(profile(40, 20));
        assert!(screen(&mut top, 80, 24).contains("40 s"));
    }
}

#[test]
fn keys_that_the_caller_acts_on() {
    let mut top = top(false);
    assert_eq!(top.key(Key::Char('w')), Some(Action::Write));
    assert_eq!(top.key(Key::Interrupt), Some(Action::Quit));
    assert_eq!(top.key(Key::Redraw), Some(Action::Redraw));
    assert!(top.profile().is_none() && screen(&mut top, 80, 24).contains("waiting for the first profile"));
    top.set_status(Status::Away("http://host does not answer".into()));
    assert!(screen(&mut top, 80, 24).contains("http://host does not answer"));
    top.take(profile(1, 5));
    top.set_status(Status::Away("gone for now".into()));
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("AWAY") && text.contains("gone for now") && text.contains("server (4242)"), "{text}");
    top.say("wrote x".into());
    assert!(screen(&mut top, 80, 24).contains("wrote x"));
    press(&mut top, "fq");
    assert_eq!(top.key(Key::Escape), None, "q is a letter while a text is typed");
    press(&mut top, "?");
    assert_eq!(top.key(Key::Char('q')), Some(Action::Quit));
}

/// The small profile with hostile names: control sequences, direction marks, long texts, zero-width marks, markup.
fn hostile() -> Arc<Profile> {
    let long = "x".repeat(10_000);
    let marks = format!("a{}", "\u{301}".repeat(10_000));
    let names =
        ["\x1b[2J\x1b]0;t\x07\u{9b}31m\r\nnew line", "\u{202e}evil\u{2066}", &long, &marks, "שלום", "<b>&amp;</b>"];
    let mut profile = small();
    for (index, process) in profile.processes.iter_mut().enumerate() {
        process.comm = names[index].into();
    }
    for (index, row) in profile.rows.iter_mut().enumerate() {
        let mut stack = Stack::clone(&row.key.stack);
        for (depth, frame) in stack.frames.iter_mut().enumerate() {
            let name = names[(index + depth) % names.len()];
            let renamed = Frame { function: Some(name.into()), file: Some(name.into()), ..Frame::clone(frame) };
            *frame = renamed.into();
        }
        row.key.stack = stack.into();
    }
    profile.header.host = names[0].into();
    Arc::new(profile)
}

#[test]
fn hostile_names_do_not_leave_their_cells() {
    for (width, height) in [(80, 24), (200, 50), (30, 8)] {
        let mut top = top(true);
        top.take(hostile());
        for keys in ["", "⏎", "⇥", "⏎", "t", "⎋F↓", "⎋⎋⎋f\u{1b}"] {
            press(&mut top, keys);
            let buffer = buffer(&mut top, width, height);
            for cell in buffer.content() {
                let symbol = cell.symbol();
                assert!(symbol.len() <= 40, "{} bytes in a cell", symbol.len());
                assert!(
                    !symbol.contains(|c: char| c.is_control() || matches!(c, '\u{202e}' | '\u{2066}')),
                    "{symbol:?}"
                );
            }
        }
    }
}

#[test]
fn every_size_is_drawn() {
    let mut top = grown();
    for keys in ["", "⏎", "⇥", "⏎", "⎋t", "⎋F", "⎋?"] {
        press(&mut top, keys);
        for (width, height) in [(1, 1), (10, 3), (20, 6), (25, 7), (40, 10), (79, 14), (80, 24), (132, 43), (250, 70)] {
            let text = screen(&mut top, width, height);
            assert_eq!(text.lines().count(), usize::from(height));
        }
    }
}

#[test]
fn colours_are_the_terminals_own_or_none() {
    for color in [false, true] {
        let mut top = top(color);
        top.take(profile(1, 5));
        let mut used = 0;
        for keys in ["", "⏎", "F"] {
            press(&mut top, keys);
            for cell in buffer(&mut top, 80, 24).content() {
                let colored = [cell.fg, cell.bg].into_iter().filter(|it| *it != Color::Reset);
                for found in colored {
                    used += 1;
                    assert!(!matches!(found, Color::Rgb(..) | Color::Indexed(_)), "{found:?}");
                }
            }
        }
        assert_eq!(used > 0, color);
    }
}

#[test]
fn what_a_service_remembers_is_shown_for_programs() {
    let mut top = grown();
    assert!(!screen(&mut top, 80, 24).contains("last hour"));
    top.remember(HashMap::from([("server".to_owned(), vec![f64::NAN, 1.0, 2.0]), ("worker".to_owned(), vec![1.0])]));
    let text = screen(&mut top, 80, 24);
    assert!(text.contains("last minute ") && text.contains("last hour  ▅█"), "{text}");
    press(&mut top, "↓");
    assert!(!screen(&mut top, 80, 24).contains("last hour"), "nothing is remembered of this name");
    press(&mut top, "↑⏎");
    assert!(!screen(&mut top, 80, 24).contains("last hour"), "functions are not remembered");
}

#[test]
fn without_frees_allocations_are_what_counts() {
    let mut profile = small();
    profile.header.live = false;
    let mut top = top(false);
    top.take(Arc::new(profile));
    let text = screen(&mut top, 120, 24);
    assert!(
        text.contains("ALLOCATED") && text.contains("frees are not tracked") && !text.contains("not known"),
        "{text}"
    );
}

#[test]
fn many_stacks_come_and_go() {
    let mut top = top(false);
    for second in 1..3 {
        let mut profile = large(1_000, 20);
        profile.header.duration = Duration::from_secs(second);
        top.take(Arc::new(profile));
    }
    press(&mut top, "⏎");
    assert!(screen(&mut top, 120, 40).contains("company::subsystem"));
    press(&mut top, "⇥");
    assert_eq!(top.key(Key::End), None);
    let text = screen(&mut top, 120, 40);
    assert!(text.contains(" of 500"), "{text}");
    for key in [Key::PageUp, Key::PageDown, Key::Up, Key::Home] {
        assert_eq!(top.key(key), None);
        screen(&mut top, 120, 40);
    }
    let text = screen(&mut top, 120, 40);
    assert!(text.lines().filter(|line| line.contains('[')).count() > 10, "error bars: {text}");
}
