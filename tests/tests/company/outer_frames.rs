//! Stack copies contain long-lived frames only in part, and stacks are still complete.

use heapbpf_tests::checks::{self, Compare};
use heapbpf_tests::environment::turn;
use heapbpf_tests::output::{Profile, Stack};
use heapbpf_tests::program::program_with;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

/// Number of allocations of each site, two milliseconds apart: in each phase the daemon must get to run, before copies of
/// 100 KB fill the ring.
const ROUNDS: u64 = 400;

/// Records every allocation of outer.c in this mode. Also returns what the daemon logged about outer frames.
fn record(mode: &str, hook: &str) -> (Profile, Vec<String>) {
    let program = program_with("outer", "outer", &["-fomit-frame-pointer"]);
    let mut target = Target::start(&program, [mode, &ROUNDS.to_string()]);
    let (outcome, truth) = Recorder::of(target.pid(), 1).option("--hook", hook).flag("-vvv").record(&mut target);
    let (profile, stats) = outcome.results();
    checks::sites(&profile, &truth, 1, Compare::All);
    assert_eq!((stats.lost(), stats.other["stacks_lost"]), (0, 0), "{stats:?}");
    let said = outcome.stderr.lines().filter(|line| line.contains("of the outer frames of process"));
    (profile, said.map(str::to_owned).collect())
}

fn of_site<'a>(profile: &'a Profile, site: &'a str) -> impl Iterator<Item = &'a Stack> {
    profile.stacks.iter().filter(move |stack| stack.site() == Some(site))
}

fn samples<'a>(of: impl Iterator<Item = &'a Stack>) -> u64 {
    of.map(|stack| stack.samples).sum()
}

/// A frame of 100 KB, and one of 60 KB around it, are left out of copies, and every stack is complete.
#[test]
fn large_frames_that_stay_are_left_out_and_stacks_are_whole() {
    let Some(_turn) = turn("large_frames_that_stay_are_left_out_and_stacks_are_whole") else { return };
    for hook in ["probe", "inline"] {
        let (profile, said) = record("stay", hook);
        assert!(said.iter().filter(|line| line.contains("Some(")).count() >= 2, "both threads': {said:?}");
        for (site, outermost) in [("site_00", "main"), ("site_01", "thread_main")] {
            assert_eq!(samples(of_site(&profile, site)), ROUNDS, "{hook}");
            for stack in of_site(&profile, site) {
                let names = stack.names();
                let calls = names.iter().filter(|name| **name == "descend").count();
                assert!(stack.complete && (1..=7).contains(&calls), "{hook}: {:?} {names:?}", stack.cut);
                assert_eq!(names[0], site);
                assert!(names[1..=calls].iter().all(|name| *name == "descend"), "{names:?}");
                assert_eq!(names[calls + 1..calls + 3], ["in_large_frame", outermost], "{hook}");
            }
        }
    }
}

/// Where the expected return addresses are in place only by chance, a few stacks end early and say why. They are still
/// counted, and the others are complete.
#[test]
fn other_frames_are_noticed() {
    let Some(_turn) = turn("other_frames_are_noticed") else { return };
    for hook in ["probe", "inline"] {
        let (profile, said) = record("change", hook);
        assert!(said.iter().any(|line| line.contains("Some(")), "{hook}: {said:?}");
        let wholes = |site, wanted: &[&str]| {
            let whole = of_site(&profile, site).filter(|stack| stack.complete);
            samples(whole.inspect(|stack| assert_eq!(stack.names()[..wanted.len()], *wanted, "{hook}")))
        };
        // Each of the two sites gets half of the 3 × ROUNDS calls.
        let calls = ROUNDS * 3 / 2;
        assert_eq!(wholes("site_02", &["site_02", "leaves", "act", "main"]), calls, "{hook}");
        let whole = wholes("site_03", &["site_03", "covers", "through", "act", "main"]);
        let cut: Vec<&Stack> = of_site(&profile, "site_03").filter(|stack| !stack.complete).collect();
        println!("{hook}: {whole} of {calls} are whole");
        // Stacks are cut until the daemon notices. It reads samples every few milliseconds, on a busy machine every few
        // hundred.
        assert!(whole > calls / 2, "{hook}: {whole} of {calls} are whole");
        assert!(whole < calls, "{hook}: the return addresses were not there by chance, so this has tested nothing");
        for stack in &cut {
            assert_eq!(stack.cut.as_deref(), Some("outer frames were left out of the stack's copy"), "{hook}");
            assert_eq!(stack.names()[..2], ["site_03", "covers"], "{hook}: what there is of it is right");
        }
        assert_eq!(whole + samples(cut.into_iter()), calls, "{hook}");
    }
}
