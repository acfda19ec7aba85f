//! Tests with hostile profiles, and of what is kept from a saved profile.

use std::path::Path;
use std::sync::Arc;

use heapbpf_profile::model::{Frame, Module, Profile, Stack};
use heapbpf_profile::testing;

use super::{MOST_FRAMES, symbolize};
use crate::options::Options;

fn with_stacks(modules: Vec<Module>, stacks: Vec<Stack>) -> Profile {
    let mut profile = testing::small();
    let row = profile.rows[0].clone();
    profile.modules = modules;
    profile.rows = stacks
        .into_iter()
        .map(|stack| {
            let mut row = row.clone();
            row.key.stack = Arc::new(stack);
            row
        })
        .collect();
    profile
}

fn at(module: usize, offset: u64) -> Arc<Frame> {
    let reason = Some("not symbolized".into());
    Arc::new(Frame { module: Some(module), file_offset: Some(offset), reason, ..Frame::default() })
}

fn options(directory: &Path) -> Options {
    Options { debug_directories: vec![directory.into()], ..Options::default() }
}

#[test]
fn hostile_profiles_get_reasons() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let own = std::fs::read("/proc/self/exe").expect("readable");
    let build_id = heapbpf_elf::build_id::of(&own);
    let module = |path: &str, build_id: Option<Vec<u8>>| Module { path: path.into(), build_id, ..Module::default() };
    let modules = vec![
        module("../../../etc/passwd", Some(vec![1, 2, 3])),
        module("/dev/zero", Some(vec![1; 20])),
        module("", None),
        module("/proc/self/exe", Some(vec![])),
        module("[vdso]", Some(vec![9; 64])),
        // This program's own file, with an impossible mapping.
        Module { start: u64::MAX, end: 0, file_offset: u64::MAX, ..module("/proc/self/exe", build_id) },
        module(&"/x".repeat(40_000), Some(vec![7; 20])),
    ];
    let inlined = Arc::new(Frame { inlined: true, ..Frame::clone(&at(1, 5)) });
    let stacks: Vec<Stack> = (0..9)
        .flat_map(|module| [0, 1, u64::MAX].map(|offset| at(module, offset)))
        .map(|frame| Stack { frames: vec![inlined.clone(), frame, inlined.clone()], ..Stack::default() })
        .chain([Stack::default(), Stack { frames: vec![inlined.clone(); 3], ..Stack::default() }])
        .collect();
    let mut profile = with_stacks(modules, stacks);
    let rows = profile.rows.len();
    let summary = symbolize(&mut profile, options(dir.path()), Arc::default());
    assert_eq!(profile.rows.len(), rows);
    assert_eq!(summary.asked, summary.named + summary.unnamed.values().sum::<usize>());
    for frame in profile.rows.iter().flat_map(|row| &row.key.stack.frames) {
        assert!(frame.function.is_some() != frame.reason.is_some(), "{frame:?}");
    }
}

/// A small profile can name many modules. Each costs several attempts to open a file, so their number is bounded.
#[test]
fn many_modules_are_bounded() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let count = (1 << 16) + 1000;
    let modules = (0..count).map(|at| Module { path: format!("/none/{at}").into(), ..Module::default() }).collect();
    let frames = (0..count).map(|module| at(module, 1)).collect();
    let mut profile = with_stacks(modules, vec![Stack { frames, ..Stack::default() }]);
    let summary = symbolize(&mut profile, options(dir.path()), Arc::default());
    assert_eq!((summary.asked, summary.named), (count, 0));
    let too_many = summary.unnamed.iter().filter(|(why, _)| why.contains("too many modules"));
    assert_eq!(too_many.map(|(_, count)| count).sum::<usize>(), 1000);
    assert!(count < MOST_FRAMES);
}

/// Names from the recording are kept, and JIT code keeps its reason.
#[test]
fn what_is_known_stays() {
    let dir = tempfile::tempdir().expect("temporary directory");
    let modules = vec![Module { path: "//anon".into(), ..Module::default() }];
    let named = Arc::new(Frame { function: Some("kept".into()), ..Frame::clone(&at(0, 1)) });
    let made = Arc::new(Frame { reason: Some("code made at run time".into()), ..Frame::clone(&at(0, 2)) });
    let stack = Stack { frames: vec![named, made], unwinder: "dwarf", cut: Some("why".into()) };
    let mut profile = with_stacks(modules, vec![stack.clone()]);
    let summary = symbolize(&mut profile, options(dir.path()), Arc::default());
    assert_eq!(*profile.rows[0].key.stack, stack);
    assert_eq!(summary.asked, 0);
}
