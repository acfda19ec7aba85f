//! Tests of the page's data.

use heapbpf_statistics::growth::Growth;

use super::*;
use crate::origin::FrameRules;
use crate::report::FrameView;
use crate::testing;

fn data(profile: &Profile) -> serde_json::Value {
    serde_json::to_value(page_data(profile, Value::default_of(profile), &WriteOptions::default())).expect("plain data")
}

fn numbers(value: &serde_json::Value) -> Vec<i64> {
    value.as_array().expect("a list").iter().map(|number| number.as_i64().expect("whole")).collect()
}

/// The stacks, outermost first, as the page reads them.
fn stacks(data: &serde_json::Value) -> Vec<String> {
    let stacks = &data["stacks"];
    let (shared, own, calls) = (numbers(&stacks["shared"]), numbers(&stacks["own"]), numbers(&stacks["calls"]));
    let (functions, names) = (numbers(&data["frames"]["function"]), numbers(&data["functions"]["name"]));
    let mut rest = calls.into_iter();
    let mut path: Vec<i64> = Vec::new();
    let mut all = Vec::new();
    for (shared, own) in shared.into_iter().zip(own) {
        path.truncate(shared as usize);
        path.extend(rest.by_ref().take(own as usize));
        let name = |frame: &i64| {
            let text = names[functions[*frame as usize] as usize];
            data["strings"][text as usize].as_str().expect("text").to_owned()
        };
        all.push(path.iter().map(name).collect::<Vec<_>>().join(";"));
    }
    assert_eq!(rest.next(), None);
    all
}

#[test]
fn every_stack_can_be_read_back_and_columns_add_up() {
    for profile in [testing::small(), testing::large(400, 12)] {
        let data = data(&profile);
        let found = stacks(&data);
        for row in &profile.rows {
            let names = row.key.stack.frames.iter().rev().map(|frame| crate::naming::frame_name(&profile, frame));
            let chain = names.collect::<Vec<_>>().join(";");
            assert!(found.contains(&chain), "{chain} is not in {found:#?}");
        }
        for (value, column) in Value::COLUMNS.into_iter().zip(data["columns"].as_array().expect("columns")) {
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            assert_eq!(numbers(&column["estimate"]).iter().sum::<i64>(), total.round() as i64, "{value:?}");
            assert_eq!(column["low"].as_array().expect("a list").len(), found.len());
        }
        let mut ids = numbers(&data["stacks"]["id"]);
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), found.len(), "ids tell stacks apart");
    }
}

/// Functions of one name in two modules are two, clones of one are one, here and in other recordings.
#[test]
fn functions_are_told_apart_by_name_and_module() {
    let of = |names, module| {
        let mut profile = testing::with_overload(testing::small().only_process(0), "grow", names);
        if let Some(row) = profile.rows.last_mut() {
            let moved = |frame: &mut crate::model::Frame| {
                if frame.function.as_deref() == Some("grow()") {
                    frame.module = Some(module);
                }
            };
            row.key.stack = Arc::new(row.key.stack.with_frames(&mut Default::default(), moved));
        }
        let data = data(&profile);
        let text = |index: i64| data["strings"][index as usize].as_str().expect("text").to_owned();
        let [names, homes] = ["name", "home"].map(|list| numbers(&data["functions"][list]));
        let named = names.into_iter().zip(homes).map(|(name, home)| (text(name), text(home)));
        let mut ids = numbers(&data["stacks"]["id"]);
        ids.sort_unstable();
        (named.filter(|(name, _)| name.starts_with("grow(")).collect::<Vec<_>>(), ids)
    };
    let named = |name: &str, home: &str| (name.to_owned(), home.to_owned());
    let (two, _) = of(["grow()", "grow()"], 0);
    assert_eq!(two, [named("grow()", "libjson.so"), named("grow()", "server")]);
    let (one, ids) = of(["grow()", "grow()"], 1);
    assert_eq!(one, [named("grow()", "")]);
    let clone = "grow() [clone .part.0]";
    assert_eq!(of(["grow()", clone], 1), (vec![named("grow()", "")], ids.clone()));
    assert_eq!(of([clone, clone], 1), (vec![named(clone, "")], ids));
}

#[test]
fn idle_processes_are_in_groups_and_have_their_memory() {
    let data = data(&testing::whole_host());
    let bytes = |list: &str, name: &str, value: &str| {
        let of = data[list].as_array().expect("a list").iter().find(|it| it[name] == value).expect("it is listed");
        (of["totals"].as_array().map(Vec::len), of["resident"]["bytes"].as_u64().map(|bytes| bytes >> 20))
    };
    assert_eq!(bytes("groups", "name", "ledgerd (900)"), (Some(0), Some(622)));
    assert!(data["groups"][2]["resident"].get("growth_per_minute").is_some_and(serde_json::Value::is_null));
    assert_eq!(bytes("groups", "name", "sh (2 processes)"), (Some(0), Some(8)));
    assert_eq!(bytes("processes", "comm", "sh"), (Some(0), Some(4)));
    assert_eq!(data["processes"].as_array().map(Vec::len), Some(5));
}

#[test]
fn groups_count_processes_without_samples_as_their_names_do() {
    let mut profile = testing::small();
    profile.processes[1].exact_alloc_bytes = Some(5_000);
    let worker = profile.processes[1].clone();
    profile.processes.push(Process { pid: 4301, exact_alloc_bytes: Some(7), ..worker.clone() });
    profile.idle.push(Process { pid: 4302, exact_alloc_bytes: None, ended: false, ..worker });
    let data = data(&profile);
    let group = &data["groups"][1];
    assert_eq!(group["name"], "worker \"x\" (3 processes)");
    assert_eq!(group["processes"], 3);
    let allocated = Value::shown_of(&profile).iter().position(|&it| it == Value::AllocSpace).expect("it is shown");
    assert_eq!(group["totals"][allocated]["exact"], 5_007);
    profile.idle[0].ended = true;
    let ended = self::data(&profile);
    assert_eq!(
        (&ended["groups"][1]["name"], &ended["groups"][1]["processes"]),
        (&"worker \"x\" (2 processes)".into(), &2.into())
    );
    let all: u64 = ended["processes"].as_array().expect("a list").iter().filter_map(|it| it["count"].as_u64()).sum();
    assert_eq!(all, 3, "the one that has ended is listed, and not counted");
    assert_eq!([&data["targets"], &ended["targets"]], [4, 3]);
    (profile.processes, profile.rows) = Default::default();
    assert_eq!(self::data(&profile)["targets"], 1, "if all were idle and have ended, these are counted");
    assert_eq!(data["groups"].as_array().map(Vec::len), Some(2), "the idle one has no group of its own");
}

#[test]
fn what_was_lost_and_how_processes_are_hooked_is_there() {
    let data = data(&testing::small());
    assert!(data["remarks"].to_string().contains("counted for 50 %"), "{}", data["remarks"]);
    assert_eq!(data["processes"][0]["hook"], "inline");
    assert_eq!(data["processes"][1]["not_inline"], "it runs with shadow stacks");
    assert_eq!(data["groups"].as_array().expect("groups").len(), 2);
    assert_eq!(data["counters"]["lost_ring_full"], 3);
    let with_curve = data["lifetimes"].as_array().expect("a list").iter().find(|it| !it.is_null()).expect("one");
    assert_eq!(with_curve["median"], 1.5);
    assert!(with_curve["curve"].as_array().is_some_and(|curve| curve.len() > 1));
}

/// Boxes by the sum of their stacks' numbers: the lower end of the interval of each value.
fn boxes(data: &serde_json::Value) -> HashMap<i64, Vec<Option<i64>>> {
    let low = data["boxes"]["low"].as_array().expect("a list per value");
    let of = numbers(&data["boxes"]["of"]);
    let ends = |at: usize| low.iter().map(|of_value| of_value[at].as_i64()).collect();
    of.iter().enumerate().map(|(at, sum)| (*sum, ends(at))).collect()
}

fn sum_of<'a>(ids: impl Iterator<Item = &'a i64>) -> i64 {
    ids.map(|id| id & ((1_i64 << 36) - 1)).sum()
}

#[test]
fn large_boxes_have_the_interval_of_all_samples_below_them() {
    let profile = testing::large(400, 12);
    let data = data(&profile);
    let (ids, groups) = (numbers(&data["stacks"]["id"]), numbers(&data["stacks"]["group"]));
    let boxes = boxes(&data);
    assert!(boxes.len() > 10 && boxes.len() <= 1_000, "{}", boxes.len());
    let intervals = intervals_used(&profile);
    for process in [0, 1] {
        let mut pool = Pool::of(profile.rows.iter().filter(|row| row.key.process == process));
        pool.allow_for(&intervals);
        // The groups are numbered in the order in which they appear: that of the processes.
        let of_group = ids.iter().zip(&groups).filter(|(_, group)| **group == process as i64).map(|(id, _)| id);
        let found = &boxes[&sum_of(of_group)];
        for (value, low) in Value::shown_of(&profile).iter().zip(found) {
            let expected = pool.estimate(&profile, *value, 0.95).low.map(|low| low.round() as i64);
            assert_eq!(*low, expected, "{value:?}");
        }
    }
}

#[test]
fn a_box_of_few_stacks_has_their_pooled_lifetimes() {
    let mut profile = testing::small();
    profile.rows[3].lifetimes = profile.rows[0].lifetimes.clone();
    let data = data(&profile);
    let lifetimes = data["boxes"]["lifetimes"].as_array().expect("a list");
    let temporary = |it: &serde_json::Value| it[1].as_f64().is_some_and(|share| (share - 0.25).abs() < 1e-9);
    assert!(lifetimes.iter().any(temporary), "{lifetimes:?}");
    let (ids, groups) = (numbers(&data["stacks"]["id"]), numbers(&data["stacks"]["group"]));
    // The server's two stacks: both are below `handle`.
    let server = sum_of(ids.iter().zip(&groups).filter(|(_, group)| **group == 0).map(|(id, _)| id));
    assert!(boxes(&data).contains_key(&server));
}

#[test]
fn growth_is_judged_as_diff_judges_it() {
    let (before, mut after) = (testing::small(), testing::small());
    after.rows[0].inuse = testing::sums(300, 70_000, 524_288);
    let growth = serde_json::to_value(growth_data(&before, &after, 0.95, FrameView::default())).expect("plain data");
    let rows = growth["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().filter(|row| row["significant"] == true).count(), 1);
    assert_eq!(growth["total"]["significant"], true);
    // A stack has the same id wherever it is shown.
    let ids = numbers(&data(&after)["stacks"]["id"]);
    let of_growth = numbers(&growth["stacks"]["id"]);
    assert!(of_growth.iter().filter(|id| ids.contains(id)).count() >= 3, "{of_growth:?} {ids:?}");
}

#[test]
fn the_page_needs_nothing_and_cannot_be_broken_out_of() {
    let mut profile = testing::small();
    profile.processes[0].comm = "</script><script>alert(1)</script>\u{202e}".into();
    let text = testing::text(&profile, "html");
    assert!(!text.contains("</script><script>alert") && !text.contains('\u{202e}') && !text.contains(PLACE));
    let (_, rest) = text.split_once("id=\"data\">").expect("the data");
    let (data, _) = rest.split_once("</script>").expect("its end");
    let data: serde_json::Value = serde_json::from_str(data).expect("JSON");
    assert_eq!(data["profile"]["active"], 3);
    assert_eq!(stacks(&data["profile"]).len(), 4);
    assert!(data["report"].as_str().is_some_and(|report| report.contains("parse_value")));
    let code = [PAGE.split_once(PLACE).expect("a place").0, PAGE.split_once(PLACE).expect("a place").1].concat();
    assert!(!code.contains("src=\"http") && !code.contains("@import") && code.contains("default-src 'none'"));
    assert!(!code.contains("unsafe-inline") && !code.contains("unsafe-eval"));
}

/// A refresh that reuses the previous layout gives the same page as one built from scratch; a layout that does not fit
/// is not reused.
#[test]
fn the_layout_of_the_page_before_is_used_if_it_fits() {
    let mut profile = testing::large(400, 12);
    let json = |profile: &Profile, last| {
        let data = next_page_data(profile, Value::default_of(profile), &WriteOptions::default(), last);
        (serde_json::to_string(&data).expect("plain data"), Arc::clone(data.layout()))
    };
    let (first, layout) = json(&profile, None);
    assert_eq!(first, json(&profile, Some(Arc::clone(&layout))).0);
    profile.rows[7].inuse = testing::sums(300, 70_000, 524_288);
    let (changed, same) = json(&profile, Some(Arc::clone(&layout)));
    assert!(Arc::ptr_eq(&layout, &same) && changed != first && changed == json(&profile, None).0);
    let others: [fn(&mut Profile); 5] = [
        |it| it.rows.swap(0, 1),
        |it| it.rows.truncate(10),
        |it| it.rows[3].key.stack = Arc::new(it.rows[3].key.stack.as_ref().clone()),
        |it| it.processes[0].comm.push('!'),
        |it| it.modules.push(crate::model::Module::default()),
    ];
    for change in others {
        let mut other = profile.clone();
        change(&mut other);
        let (text, own) = json(&other, Some(Arc::clone(&layout)));
        assert!(!Arc::ptr_eq(&layout, &own) && text == json(&other, None).0);
    }
}

#[test]
fn a_page_of_nothing_is_a_page() {
    let mut profile = testing::small();
    profile.rows.clear();
    assert!(testing::text(&profile, "html").contains("\"calls\":[]"));
}

#[test]
fn a_page_of_very_many_stacks_has_the_largest() {
    let profile = testing::large(60, 5);
    let layout = Layout::new(&profile, GroupBy::Program, Value::InuseSpace, FrameRules::standard());
    assert!(layout::largest(&layout.pooled(&profile), Value::InuseSpace).iter().all(|kept| *kept));
}

/// Writes the page of 50,000 stacks for `cargo xtask bench page`.
#[test]
#[ignore = "part of a benchmark"]
fn a_large_page_is_written() {
    let file = std::env::var_os("HEAPBPF_LARGE_PAGE").expect("where to write it");
    std::fs::write(file, testing::written(&testing::large(50_000, 40), "html")).expect("there is space");
}

#[test]
fn what_grows_is_on_the_page_in_the_words_of_the_report() {
    let growing = |profile: &Profile| {
        let data = page_data(profile, Value::InuseSpace, &WriteOptions::default());
        serde_json::to_value(data).expect("plain data")["growing"].clone()
    };
    let mut profile = testing::small();
    let kept = testing::sums(12, 70_000, 512 << 10);
    profile.rows[0].growth = Some(Growth { kept, ..Growth::default() });
    let found = growing(&profile);
    let [first] = found.as_array().expect("it is known").as_slice() else { panic!("{found}") };
    assert_eq!(first["program"], "server (4242)");
    assert_eq!(first["name"], "grow");
    assert!(first["how_much"].as_str().is_some_and(|text| text.starts_with('+') && text.contains("/s [")), "{first}");
    let mut of_two = profile.clone();
    of_two.processes[1] = of_two.processes[0].clone();
    of_two.processes[1].pid = 4243;
    of_two.rows[4].growth = Some(Growth { kept: testing::sums(4, 70_000, 512 << 10), ..Growth::default() });
    let why = growing(&of_two)[0]["why"].clone();
    assert!(why.as_str().is_some_and(|why| why.ends_with("in 2 of 2 processes: pid 4242 has 75 %")), "{why}");
    profile.header.growth_over = None;
    profile.rows.iter_mut().for_each(|row| (row.lifetimes, row.growth) = (None, None));
    assert!(growing(&profile).is_null(), "nobody can tell");
}

/// The page gives them a colour of their own.
#[test]
fn frames_of_runtimes_are_told_from_those_of_libraries() {
    let mut profile = testing::small();
    profile.modules[1].path = "/usr/lib/libpython3.13.so.1.0".into();
    let frames = &data(&profile)["frames"];
    let [rank, module, runtime] = ["rank", "module", "runtime"].map(|column| numbers(&frames[column]));
    let strings = data(&profile)["strings"].clone();
    let is_python = |module: &i64| strings[*module as usize] == "libpython3.13.so.1.0";
    let expected: Vec<i64> = module.iter().map(|module| i64::from(is_python(module))).collect();
    assert!(runtime == expected && expected.contains(&1) && expected.contains(&0), "{frames}");
    assert!(rank.iter().zip(&runtime).all(|(rank, runtime)| *runtime == 0 || *rank == 1), "{frames}");
}

/// A user's rules for frames hold on pages, too: for their graphs, for what grows, and for the report in a file.
#[test]
fn pages_follow_the_rules_of_the_command() {
    const OURS: &str = "library function grow\nlibrary function parse_value";
    let rules: &'static FrameRules = Box::leak(Box::new(FrameRules::with(OURS).expect("valid")));
    let ours = WriteOptions { frames: FrameView { rules, ..FrameView::default() }, ..WriteOptions::default() };
    let mut profile = testing::small().only_process(0);
    profile.rows.truncate(1);
    let kept = testing::sums(12, 70_000, 512 << 10);
    profile.rows[0].growth = Some(Growth { kept, ..Growth::default() });
    let ranks = |data: &serde_json::Value| {
        let mut ranks = numbers(&data["frames"]["rank"]);
        ranks.sort_unstable();
        ranks
    };
    let of = |options: &WriteOptions| {
        let data = serde_json::to_value(page_data(&profile, Value::InuseSpace, options)).expect("plain data");
        (ranks(&data), data["growing"][0]["name"].as_str().expect("it grows").to_owned())
    };
    let standard = of(&WriteOptions::default());
    assert_eq!(standard.1, "grow");
    let (with_ours, grows) = of(&ours);
    assert_eq!(grows, "handle");
    assert_ne!(with_ours, standard.0);
    let growth = |frames| serde_json::to_value(growth_data(&profile, &profile, 0.95, frames)).expect("plain data");
    let since =
        |frames| serde_json::to_value(kept_data(&profile, 0, None, Vec::new(), 0.95, frames)).expect("plain data");
    assert_eq!(ranks(&growth(ours.frames)), with_ours);
    assert_eq!(ranks(&since(ours.frames)), with_ours);
    assert_eq!(ranks(&since(FrameView::default())), standard.0);
    let mut file = Vec::new();
    crate::formats::by_name("html").expect("built in").write(&profile, &ours, &mut file).expect("memory");
    let text = String::from_utf8(file).expect("text");
    assert!(text.contains("handle server.cc:20 (via "), "its report is titled so");
}
