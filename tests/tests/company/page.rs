//! The web page in headless Chromium, opened from a profile's file and from a running `serve`, driven by clicks and
//! keys.
//!
//! HEAPBPF_PICTURES=DIR writes the screenshots of the README and the documents to DIR.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use heapbpf_tests::browser::Browser;
use heapbpf_tests::environment::{heapbpf, skipped, turn};
use heapbpf_tests::hostile::{self, MARKUP};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::{get, get_with, token_file};
use heapbpf_tests::target::{Target, cpu_time, until};

/// What the page says before it has data.
const WAITING: &str = "waiting for the first profile";

/// Opens a served page whose request for data waits until `Fetch.disable`.
fn open_before_its_data(browser: &mut Browser, address: SocketAddr) {
    browser.call("Fetch.enable", serde_json::json!({ "patterns": [{ "urlPattern": "*/page/data*" }] }));
    browser.open(&format!("http://{address}/"), "performance.getEntriesByName('heapbpf-begin').length");
    browser.until(&format!("document.body.innerText.includes('{WAITING}')"));
    assert_eq!(browser.value("document.getElementById('app').hidden"), true);
}

/// Milliseconds from the request of the page that is open to its first paint with text.
fn first_paint_ms(browser: &mut Browser) -> f64 {
    const PAINTED: &str = "performance.getEntriesByName('first-contentful-paint')";
    browser.until(&format!("{PAINTED}.length"));
    browser.value(&format!("{PAINTED}[0].startTime")).as_f64().expect("a number")
}

/// Starts a browser, or reports that the test is skipped.
fn browser(case: &str, width: u32, height: u32) -> Option<Browser> {
    let started = Browser::start(width, height);
    if started.is_none() {
        skipped(case, "there is no chromium");
    }
    started
}

/// The page over a recording of a program with known lifetimes, whose functions were given hostile names. Made once.
fn hostile_page() -> PathBuf {
    static MADE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let page = make_hostile_page(dir.path());
        (dir, page)
    });
    made.1.clone()
}

fn make_hostile_page(dir: &Path) -> PathBuf {
    let profile = hostile::profile();
    let (json, html) = (dir.join("hostile.json"), dir.join("hostile.html"));
    std::fs::write(&json, profile.to_string()).expect("there is space");
    let output = Command::new(heapbpf()).arg("report").arg(&json).arg("-o").arg(&html).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    html
}

/// Sets the size of the window, and waits until the page has it.
fn resize(browser: &mut Browser, width: u32, height: u32) {
    browser.resize(width, height);
    browser.until(&format!("innerWidth === {width}"));
}

/// Waits until nothing overflows sideways: plots adapt to the window within the next frames.
fn fits(browser: &mut Browser, what: &str) {
    let begun = Instant::now();
    while !browser.fits() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{what}: {}", browser.cut_off());
        std::thread::sleep(Duration::from_millis(30));
    }
}

/// Checks that nothing overflows sideways in the narrowest and the widest window.
fn fits_at_every_width(browser: &mut Browser, what: &str) {
    for width in [400, 2000] {
        resize(browser, width, 900);
        fits(browser, &format!("{what} at {width} px"));
    }
    // On a phone, the style makes paragraphs of rows, and then a browser may forget what they are.
    let without_role =
        "document.querySelectorAll('.table-scroll :is(table, thead, tbody, tr, th, td):not([role])').length";
    assert_eq!(browser.value(without_role), 0, "{what}");
    resize(browser, 1300, 1000);
}

/// Checks that what the page shows at first has no words of the code, which tell a user nothing.
fn is_in_plain_words(browser: &mut Browser) {
    let text = browser.text("document.body.innerText").to_lowercase();
    for word in ["session link", "criterion", "hooked", "given up", "σ", "q <", "q ="] {
        assert!(!text.contains(word), "{word}: {text}");
    }
}

/// Writes a screenshot for the documents, if HEAPBPF_PICTURES is set.
fn picture(browser: &mut Browser, name: &str) {
    let Some(dir) = std::env::var_os("HEAPBPF_PICTURES") else { return };
    let bytes = browser.picture();
    assert!(bytes.len() < 200 << 10, "{name} has {} bytes", bytes.len());
    std::fs::write(Path::new(&dir).join(name), bytes).expect("there is space");
}

/// The page first shows what the second profile has in addition to the first. The second profile's own values can be
/// chosen.
#[test]
fn a_file_compares_two_profiles() {
    let case = "a_file_compares_two_profiles";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [before, after, html] = ["before.json", "after.json", "compared.html"].map(|name| dir.path().join(name));
    let mut profile = hostile::profile();
    std::fs::write(&after, profile.to_string()).expect("there is space");
    let is_of_site = |stack: &serde_json::Value| {
        stack["frames"].as_array().is_some_and(|all| all.iter().any(|it| it["function"] == "site_06"))
    };
    profile["stacks"].as_array_mut().expect("stacks").retain(|stack| !is_of_site(stack));
    std::fs::write(&before, profile.to_string()).expect("there is space");
    let compared = Command::new(heapbpf()).arg("diff").args([&before, &after]).arg("-o").arg(&html).output();
    let compared = compared.expect("it runs");
    assert!(compared.status.success() && compared.stdout.is_empty(), "{compared:?}");
    browser.open_file(&html, "document.querySelector('.flame canvas')?.width > 500");
    assert_eq!(browser.text("document.getElementById('value').value"), "growth");
    assert!(browser.text("document.getElementById('path').innerText").contains(" net; 1 stack grew significantly"));
    is_in_plain_words(&mut browser);
    assert!(browser.text("document.getElementById('report').textContent").contains("new, sure"));
    browser.click("#libraries");
    browser.until("!document.getElementById('startup').hidden && location.hash.includes('frames=libraries')");
    browser.click("#startup");
    browser.until("location.hash.includes('frames=all')");
    browser.click("#tab-table");
    browser.until("document.getElementById('main').innerText.includes('site_06')");
    browser.value("(() => { const it = document.getElementById('value'); it.value = 'inuse_space'; it.dispatchEvent(new Event('change')) })()");
    browser.until("!document.getElementById('path').innerText.includes('grew')");
}

/// A page in a file makes no pprof: it knows too little of processes and losses.
#[test]
fn a_file_saves_what_can_be_made_from_it() {
    let case = "a_file_saves_what_can_be_made_from_it";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    browser.open_file(&hostile_page(), "document.querySelector('.flame canvas')?.width > 500");
    let buttons = "[...document.querySelectorAll('#export button')].map(it => it.innerText).join(' ')";
    assert_eq!(browser.text(buttons), "json csv folded");
    browser.value("URL.createObjectURL = blob => { globalThis.saved = blob; return 'data:,' }");
    browser.value("void [...document.querySelectorAll('#export button')].find(it => it.innerText === 'json').click()");
    let saved = browser.text("saved.text().then(it => JSON.parse(it).profile.processes.length)");
    assert_eq!(saved, "1");
}

#[test]
fn a_file_is_the_page_and_hostile_names_are_only_shown() {
    let case = "a_file_is_the_page_and_hostile_names_are_only_shown";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    let html = hostile_page();
    browser.open_file(&html, "document.querySelector('.flame canvas')?.width > 500");
    assert!(browser.text("document.getElementById('summary').innerText").contains("in use"));
    is_in_plain_words(&mut browser);
    assert!(browser.text("document.getElementById('report').textContent").contains("site_06"));

    // The stack table has all stacks, with error bars, and hostile names as text.
    browser.click("#tab-table");
    browser.until("document.querySelectorAll('#main tbody tr').length > 3");
    assert_eq!(browser.value("document.querySelectorAll('#main img').length"), 0);
    let table = browser.text("document.getElementById('main').innerText");
    assert!(table.contains("evil_\\u{202e}txt.exe") && table.contains("\\u{1b}[31m\\u{a}red"), "{table}");
    assert!(browser.value("document.querySelectorAll('#main .bar b').length").as_u64() > Some(3), "error bars");

    browser.value("(() => { const it = document.getElementById('value'); it.value = 'alloc_space'; it.dispatchEvent(new Event('change')) })()");
    browser.click("#tab-functions");
    browser.until("document.getElementById('main').innerText.includes('xxxxx…')");
    let functions = browser.text("document.getElementById('main').innerText");
    assert!(functions.contains(MARKUP), "{functions}");
    assert_eq!(browser.value("document.querySelectorAll('#main img').length"), 0);
    fits(&mut browser, "functions with hostile names");
    fits_at_every_width(&mut browser, "functions with hostile names");
    browser.click("#tab-table");
    browser.until("document.querySelectorAll('#main .bar b').length > 3");

    // Open every stack with a hostile name: a panel with its calls, and with the callers of one of them.
    let hostile = browser.value("[...document.querySelectorAll('#main tbody tr')].map((it, index) => /evil|red|xxxxx|<img/.test(it.innerText) ? index + 1 : 0).filter(it => it)");
    let hostile: Vec<u64> = hostile.as_array().expect("a list").iter().filter_map(|it| it.as_u64()).collect();
    assert!(hostile.len() > 1, "{hostile:?}");
    for row in hostile {
        browser.click(&format!("#main tbody tr:nth-child({row}) button"));
        browser.until("!document.getElementById('details').hidden");
        fits_at_every_width(&mut browser, &format!("the panel of row {row}"));
    }
    browser.value("document.querySelectorAll('details').forEach(it => it.open = true)");
    fits_at_every_width(&mut browser, "everything that opens");

    // Sort by a heading, search with a regular expression, and open one stack.
    browser.click("#main thead th:last-child button");
    browser.until("document.querySelector('#main th:last-child').getAttribute('aria-sort') === 'descending'");
    browser.key("/");
    browser.type_text("^site_0[67]$");
    browser.until("document.querySelectorAll('#main tbody tr').length === 2");
    browser.click("#main tbody tr:first-child button");
    browser.until("!document.getElementById('details').hidden");
    let details = browser.text("document.getElementById('details').innerText");
    assert!(
        details.contains("lifetimes.c:") && details.contains("Lifetimes") && details.contains("Sizes"),
        "{details}"
    );
    assert!(details.contains("bytes allocated") && details.contains("samples"), "{details}");

    // Open the same view from its link, which names no network address.
    let link = browser.text("location.href");
    assert!(link.contains("tab=table") && link.contains("search=") && link.contains("stack="), "{link}");
    browser.open("about:blank", "true");
    browser.open(&link, "document.querySelectorAll('#main tbody tr').length === 2");
    browser.until("!document.getElementById('details').hidden");
    // Hostile names are no example.
    browser.value("document.querySelector('.card.growing')?.remove()");
    picture(&mut browser, "page-stacks.png");

    // Show callers and callees of a function, from its line in the details.
    browser.click("#details .frames li:nth-child(2) button");
    browser.until("document.querySelectorAll('#main canvas').length === 2");
    assert!(browser.text("document.getElementById('path').innerText").contains("callers and callees of"));
    fits_at_every_width(&mut browser, "callers and callees");
    assert_eq!(browser.value("window.broken ?? null"), serde_json::Value::Null, "no name was run");
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn the_graph_obeys_keys_and_clicks_at_every_width() {
    let case = "the_graph_obeys_keys_and_clicks_at_every_width";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    let html = hostile_page();
    browser.open_file(&html, "document.querySelector('.flame canvas')?.width > 500");

    // `?` lists the keys, but is a letter where text is typed.
    browser.key("?");
    browser.until("document.getElementById('keys').open");
    let keys = browser.text("document.getElementById('keys').innerText");
    assert!(["search", "arrow keys", "Escape", "Home"].iter().all(|key| keys.contains(key)), "{keys}");
    resize(&mut browser, 400, 900);
    fits(&mut browser, "the list of keys at 400 px");
    resize(&mut browser, 1300, 900);
    browser.click("#keys button");
    browser.until("!document.getElementById('keys').open");
    browser.key("/");
    browser.key("?");
    browser.until("document.getElementById('search').value === '?'");
    assert_eq!(browser.value("document.getElementById('keys').open"), false);
    browser.value("(() => { const it = document.getElementById('search'); it.value = ''; it.dispatchEvent(new Event('input')) })()");
    browser.until("!location.hash.includes('search=')");

    // The tooltip of the outermost function has the interval and lifetimes of several stacks.
    browser.value("(() => { const it = document.querySelector('.flame canvas'), at = it.getBoundingClientRect(); it.dispatchEvent(new MouseEvent('mousemove', { clientX: at.x + 40, clientY: at.y + 19 + 9 })) })()");
    let tip = browser.text("document.querySelector('.tip').innerText");
    let has_interval = tip.contains("exact") || tip.contains("95 % interval: ");
    assert!(has_interval && tip.contains("Lifetimes: ") && tip.contains("lifetimes.c:"), "{tip}");

    // Keys: enter the graph, go down, zoom, zoom out. A screen reader hears the position.
    browser.value("document.querySelector('.flame canvas').focus()");
    browser.key("ArrowDown");
    browser.key("ArrowDown");
    browser.until("document.querySelector('.flame [aria-live]').textContent.includes(' %)')");
    browser.key("Enter");
    browser.until("location.hash.includes('zoom=')");
    let path = browser.text("document.getElementById('path').innerText");
    assert!(path.contains("of all"), "{path}");
    browser.key("Escape");
    browser.key("Escape");
    browser.until("!location.hash.includes('zoom=')");
    // Click a box in the third row.
    let place = browser.value("(() => { const box = document.querySelector('.flame canvas').getBoundingClientRect(); return [box.x + 40, box.y + 19 * 2 + 9] })()");
    browser.click_at(place[0].as_f64().expect("x"), place[1].as_f64().expect("y"));
    browser.until("location.hash.includes('zoom=')");
    browser.click("#path button");
    browser.until("!location.hash.includes('zoom=')");
    browser.click("#turn");
    browser.until("document.getElementById('turn').getAttribute('aria-pressed') === 'true'");
    // Change tabs with arrow keys.
    browser.value("document.getElementById('tab-flame').focus()");
    browser.key("ArrowRight");
    browser.key("ArrowRight");
    browser.until("document.getElementById('tab-functions').getAttribute('aria-selected') === 'true'");
    assert!(browser.text("document.getElementById('main').innerText").contains("main"));
    // Every control has a name, and nothing that is only visually hidden is hidden from screen readers.
    let nameless = "[...document.querySelectorAll('button, select, input, canvas')].filter(it => !(it.innerText || it.ariaLabel || it.labels?.length || it.getAttribute('aria-label'))).length";
    assert_eq!(browser.value(nameless), 0);
    for (width, scheme) in [(400, "dark"), (2000, "light")] {
        resize(&mut browser, width, 900);
        browser.prefer(scheme);
        for tab in ["table", "functions", "flame"] {
            browser.click(&format!("#tab-{tab}"));
            browser.until(&format!("document.getElementById('tab-{tab}').getAttribute('aria-selected') === 'true'"));
            fits(&mut browser, &format!("{tab} at {width} px"));
        }
        browser.until(&format!("document.documentElement.dataset.theme === '{scheme}'"));
    }
    assert_eq!(browser.errors, [""; 0]);
}

/// The page says what it waits for before it has data. Its tables are painted before stacks are read.
#[test]
fn the_page_is_there_before_its_data() {
    const FRAMES: &str = "globalThis.order = []; (function look() {
        const seen = ['#programs tbody tr', '.flame canvas'].map(it => document.querySelector(it) !== null).join();
        if (order.at(-1) !== seen) order.push(seen);
        requestAnimationFrame(look);
    })()";
    const PARSED: &str = "globalThis.painted = 0; { const parse = JSON.parse; JSON.parse = text => {
        globalThis.parsed ??= [painted, document.getElementById('connection').textContent];
        return parse(text);
    } } (function count() {
        painted += performance.getEntriesByName('heapbpf-begin').length;
        requestAnimationFrame(count);
    })()";
    let case = "the_page_is_there_before_its_data";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    for source in [FRAMES, PARSED] {
        browser.call("Page.addScriptToEvaluateOnNewDocument", serde_json::json!({ "source": source }));
    }
    let mut target = Target::start(&program("growing"), ["100000000", "2000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    target.go();
    until("something was sampled", || {
        let data: serde_json::Value = serde_json::from_slice(&get(address, "/page/data").body).expect("JSON");
        data["profile"]["groups"].as_array().is_some_and(|groups| !groups.is_empty())
    });
    open_before_its_data(&mut browser, address);
    browser.call("Fetch.disable", serde_json::json!({}));
    browser.until("order.at(-1) === 'true,true'");
    assert_eq!(browser.value("order"), serde_json::json!(["false,false", "true,false", "true,true"]));
    recording.stop();
    // A file has its data in it, but reads them only after a frame.
    browser.open_file(&hostile_page(), "document.querySelector('.flame canvas')?.width > 500");
    let parsed = browser.value("parsed");
    assert!(parsed[0].as_u64() > Some(0) && parsed[1] == WAITING, "{parsed}");
    assert_eq!(browser.value("document.getElementById('connection').textContent"), "");
}

/// A recorder of a growing program, which serves at this address.
fn serving(pid: u32, address: &str) -> Recorder {
    Recorder::of(pid, 4096).without_outputs().option("--listen", address)
}

#[test]
fn a_served_page_shows_growth_and_outlives_its_server() {
    let case = "a_served_page_shows_growth_and_outlives_its_server";
    let Some(_turn) = turn(case) else { return };
    // Slow enough that a busy machine loses no sample: after unbounded losses, growth cannot be judged.
    let mut target = Target::start(&program("growing"), ["100000000", "2000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    target.go();
    // The service remembers while the browser starts.
    let Some(mut browser) = browser(case, 1300, 1000) else { return };
    browser.open(&format!("http://{address}/"), "document.querySelector('.flame canvas')?.width > 500");
    assert!(browser.text("document.getElementById('programs').innerText").contains("growing"));
    assert!(browser.text("document.getElementById('summary').innerText").contains("of a CPU"), "what probes cost");
    browser.until("document.querySelectorAll('#programs .spark').length === 1");
    is_in_plain_words(&mut browser);
    // Memory outside the heap, in one line that adds up.
    assert!(browser.text("document.querySelector('#programs thead').innerText").contains("Resident"));
    browser.click("#memory summary");
    let memory = browser.text("document.getElementById('memory-lines').innerText");
    assert!(memory.contains(" = heap ") && memory.contains("free inside glibc"), "{memory}");
    fits_at_every_width(&mut browser, "a running service with its memory");
    // A refresh keeps the focus and what is open.
    browser.value("document.querySelector('#programs tbody button').focus()");
    let shown = browser.text("document.getElementById('connection').textContent");
    browser.until(&format!("document.getElementById('connection').textContent !== {shown:?}"));
    browser.until("document.querySelectorAll('#programs .spark').length === 1");
    assert_eq!(browser.value("document.activeElement.matches('#programs tbody button')"), true);
    assert_eq!(browser.value("document.getElementById('memory').open"), true);
    browser.click("#memory summary");
    let moments = || {
        let data: serde_json::Value = serde_json::from_slice(&get(address, "/page/data").body).expect("JSON");
        data["moments"].as_array().map_or(0, Vec::len)
    };
    until("there are some moments", || moments() > 4);

    // The timeline has what the service remembers, for as long as is chosen.
    browser.until("document.getElementById('timeline-text').textContent.includes(' points from ')");
    browser.value("(() => { const it = document.getElementById('span'); it.value = '1440'; it.dispatchEvent(new Event('change')) })()");
    browser.until("location.hash.includes('span=1440')");

    // Drag a range of the timeline: it shows what was allocated in it and kept.
    browser.until("document.querySelector('#marks input').max >= 3");
    let place = browser.value("(() => { const box = document.querySelector('.u-over').getBoundingClientRect(); return [box.x, box.y + 60, box.width] })()");
    let [x, y, width] = [0, 1, 2].map(|index| place[index].as_f64().expect("a place"));
    browser.drag((x + 2.0, y), (x + width - 2.0, y));
    browser.until("document.getElementById('path').innerText.includes('in use at the end')");
    let path = browser.text("document.getElementById('path').innerText");
    assert!(path.contains(" allocated, ") && path.contains('['), "of how much, with its interval: {path}");
    browser.click("#tab-table");
    browser.until("document.querySelectorAll('#main tbody tr').length > 0");
    let table = browser.text("document.querySelector('#main tbody').innerText");
    assert!(table.contains("site_00"), "every tenth block is kept: {table}");
    browser.click("#tab-flame");
    picture(&mut browser, "page-kept.png");
    let link = browser.text("location.href");
    browser.open("about:blank", "true");
    browser.open(&link, "document.getElementById('path').innerText.includes('in use at the end')");

    // What grew in the range, coloured where that is significant.
    browser.value("(() => { const it = document.getElementById('value'); it.value = 'growth'; it.dispatchEvent(new Event('change')) })()");
    browser.until("document.getElementById('path').innerText.includes('grew significantly')");
    assert!(browser.text("location.hash").contains("value=growth"));
    browser.click("#tab-table");
    browser.until("document.querySelector('#main .significant')?.innerText.includes('yes')");
    fits_at_every_width(&mut browser, "growth");
    let grown = browser.text("document.querySelector('#main tbody tr').innerText");
    assert!(grown.contains("site_00"), "{grown}");
    picture(&mut browser, "page-growth.png");

    // When the server goes away, the page says so and keeps its data. It reconnects by itself.
    recording.stop();
    browser.until("!document.getElementById('banner').hidden");
    let said = browser.text("document.getElementById('banner').innerText");
    assert!(said.contains("heapbpf") && said.contains("comes back by itself"), "{said}");
    browser.until("document.getElementById('banner').innerText.includes('does not answer')");
    assert!(browser.value("document.querySelectorAll('#main tbody tr').length").as_u64() > Some(0));
    let again = serving(target.pid(), &address.to_string()).start();
    browser.until("document.getElementById('banner').hidden");
    browser.until("document.getElementById('connection').textContent.startsWith('live')");
    again.stop();
}

/// Bytes of each site in an answer of `/page/kept`.
fn bytes_of_sites(data: &serde_json::Value) -> BTreeMap<String, i64> {
    let list = |value: &serde_json::Value| -> Vec<usize> {
        let numbers = value.as_array().expect("a list").iter();
        numbers.map(|number| number.as_u64().expect("a number") as usize).collect()
    };
    let (shared, own, calls) = ["shared", "own", "calls"].map(|key| list(&data["stacks"][key])).into();
    let (functions, names) = (list(&data["frames"]["function"]), list(&data["functions"]["name"]));
    let (mut sites, mut path, mut calls) = (BTreeMap::new(), Vec::new(), calls.into_iter());
    for (stack, (shared, own)) in shared.into_iter().zip(own).enumerate() {
        path.truncate(shared);
        path.extend(calls.by_ref().take(own));
        let name = |frame: &usize| data["strings"][names[functions[*frame]]].as_str().expect("text").to_owned();
        let site = path.iter().map(name).find(|name| name.starts_with("site_")).expect("a site");
        *sites.entry(site).or_default() += data["column"]["estimate"][stack].as_i64().expect("bytes");
    }
    sites
}

/// Every allocation is sampled, so the page must show exactly the truth.
#[test]
fn what_was_allocated_in_a_range_and_kept_is_what_the_program_kept() {
    let case = "what_was_allocated_in_a_range_and_kept_is_what_the_program_kept";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start::<&str>(&program("phases"), []);
    let (recording, address) = Recorder::of(target.pid(), 1).without_outputs().serve();
    let json = |path: &str| -> serde_json::Value {
        let answer = get(address, path);
        serde_json::from_slice(&answer.body)
            .unwrap_or_else(|_| panic!("{path}: {:?}", String::from_utf8_lossy(&answer.body)))
    };
    let mut moments = vec![json("/page/data")["profile"]["time_ms"].clone()];
    for phase in 0..4 {
        target.go();
        if phase < 3 {
            target.step()
        } else {
            drop(target.truth())
        }
        moments.push(json("/page/data")["profile"]["time_ms"].clone());
    }
    let kept = |from: usize, to: usize| {
        let data = json(&format!("/page/kept?from={}&to={}", moments[from], moments[to]));
        assert_eq!(data["notes"], serde_json::json!([]), "{data}");
        let sites = bytes_of_sites(&data);
        let total = &data["total"];
        assert_eq!(total["estimate"].as_i64(), Some(sites.values().sum()), "{total}");
        assert_eq!(
            (&total["low"], &total["high"]),
            (&total["estimate"], &total["estimate"]),
            "nothing is left to chance"
        );
        sites
            .into_iter()
            .map(|(site, bytes)| (site[5..].parse().expect("a number"), bytes))
            .collect::<Vec<(u32, i64)>>()
    };
    assert_eq!(kept(0, 1), [(0, 1_000_000)]);
    // Unlike in growth, older blocks that were freed in the range are not subtracted.
    assert_eq!(kept(1, 2), [(1, 250_000)]);
    assert_eq!(kept(0, 2), [(0, 500_000), (1, 250_000)]);
    // A block that was enlarged counts as allocated then.
    assert_eq!(kept(2, 3), [(3, 300_000), (4, 2_000)]);
    assert_eq!(kept(1, 3), [(1, 200_000), (3, 300_000), (4, 2_000)]);
    assert_eq!(kept(0, 4), [(1, 200_000), (3, 300_000), (4, 2_000)]);
    assert_eq!(kept(3, 4), []);
    let growth = json(&format!("/page/growth?from={}&to={}", moments[1], moments[2]));
    assert_eq!(growth["total"]["change"][0], -250_000.0);
    assert_eq!(get(address, &format!("/page/kept?from=1&to={}", moments[2])).status, 404);
    assert_eq!(get(address, &format!("/page/kept?from={}&to={}", moments[2], moments[1])).status, 400);
    recording.stop();
}

#[test]
fn a_page_asks_for_its_token_and_offers_every_format() {
    let case = "a_page_asks_for_its_token_and_offers_every_format";
    let Some(_turn) = turn(case) else { return };
    let Some(mut browser) = browser(case, 1300, 900) else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let tokens = token_file(dir.path(), 0o600, "all-aaaaaaaaaaaaaaaa\n");
    let mut target = Target::start(&program("growing"), ["100000000", "5000"]);
    let recorder = Recorder::of(target.pid(), 1000).option("--token-file", &tokens);
    let (recording, address): (_, SocketAddr) = recorder.serve();
    target.go();
    browser.open(&format!("http://{address}/"), "!document.getElementById('token-form').hidden");
    browser.click("#token");
    browser.type_text("all-aaaaaaaaaaaaaaaa");
    browser.key("Enter");
    browser.until("document.querySelector('.flame canvas')?.width > 500");
    assert_eq!(browser.value("document.getElementById('banner').hidden"), true);
    assert!(!browser.text("location.href").contains("all-"), "a link has no token");
    let first = "[...document.querySelectorAll('#export button')].filter(it => it.offsetWidth > 0).map(it => it.innerText).sort().join(' ')";
    assert_eq!(browser.text(first), "html json more pprof");
    browser.click("#export [aria-expanded]");
    let formats = "[...document.querySelectorAll('#export button')].filter(it => it.offsetWidth > 0).map(it => it.innerText).join(' ')";
    let formats = browser.text(formats);
    for format in [
        "pprof",
        "json",
        "folded",
        "svg",
        "html",
        "parquet",
        "otlp",
        "perfetto",
        "speedscope",
        "heap_v2",
        "dhat",
        "firefox",
        "csv",
    ] {
        assert!(formats.split(' ').any(|offered| offered == format), "{format} in {formats}");
        let path = format!("page/export?format={format}");
        let asked = format!(
            "fetch('{path}', {{headers: {{Authorization: 'Bearer all-aaaaaaaaaaaaaaaa'}}}}).then(it => it.arrayBuffer().then(body => [it.status, body.byteLength]))"
        );
        let answer = browser.value(&asked);
        assert!(answer[0] == 200 && answer[1].as_u64() > Some(50), "{format}: {answer}");
    }
    recording.stop();
}

/// Measures what a refresh of the page costs the daemon, in turn with a scrape of the same 5,000 stacks, and then the
/// cost of a profile with lifetimes. Prints the figures. First every allocation is sampled, then one per 2,000 bytes,
/// so that confidence intervals are computed.
#[test]
#[ignore = "a benchmark: cargo xtask bench page"]
fn cost_of_a_refresh() {
    const TURNS: usize = 6;
    const SCRAPE: &str = "/debug/pprof/heap";
    const REFRESH: &str = "/page/data";
    const LIFETIMES: &str = "/debug/pprof/heap?format=json";
    let _turn = turn("cost_of_a_refresh").expect("root and BPF");
    for (interval, least) in [(1, 5_000), (2_000, 100)] {
        let mut target = Target::start(&program("branches"), ["5000", "1000"]);
        let (recording, address) = Recorder::of(target.pid(), interval).without_outputs().serve();
        target.go();
        let stacks = || {
            let data: serde_json::Value = serde_json::from_slice(&get(address, REFRESH).body).expect("JSON");
            data["profile"]["stacks"]["id"].as_array().map_or(0, Vec::len)
        };
        until("all stacks are there", || stacks() >= least);
        // Returns milliseconds of CPU time.
        let cost = |path: &str, times: u32| {
            let before = cpu_time(recording.pid());
            let bytes =
                (0..times).map(|_| get_with(address, path, "Accept-Encoding: gzip\r\n").body.len()).sum::<usize>();
            let each = (cpu_time(recording.pid()) - before).as_secs_f64() * 1e3 / f64::from(times);
            println!("-i {interval} {path}: {each:.1} ms of CPU time, {} bytes", bytes / times as usize);
            each
        };
        // The first answer of each is not counted, because later ones reuse what it builds.
        for path in [SCRAPE, REFRESH] {
            cost(path, 1);
        }
        let turns: Vec<[f64; 2]> = (0..TURNS).map(|_| [SCRAPE, REFRESH].map(|path| cost(path, 10))).collect();
        let [scrape, refresh] = [0, 1].map(|of| turns.iter().map(|turn| turn[of]).sum::<f64>() / TURNS as f64);
        println!(
            "-i {interval}: a refresh takes {refresh:.1} ms, a scrape {scrape:.1} ms: {:.2} of it",
            refresh / scrape
        );
        cost(LIFETIMES, 5);
        recording.stop();
    }
}

/// Measures when the browser paints a served page that still waits for its data. Prints the figures.
#[test]
#[ignore = "a benchmark: cargo xtask bench page"]
fn first_paint_of_a_served_page() {
    let _turn = turn("first_paint_of_a_served_page").expect("root and BPF");
    let mut browser = Browser::start(1400, 900).expect("chromium");
    let mut target = Target::start(&program("growing"), ["100000000", "2000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    target.go();
    let mut times = [0.0; 9];
    for time in &mut times {
        browser.open("about:blank", "location.href === 'about:blank'");
        open_before_its_data(&mut browser, address);
        *time = first_paint_ms(&mut browser);
    }
    let first = times[0];
    times.sort_by(f64::total_cmp);
    println!(
        "a served page paints \"{WAITING}\" after {:.0} ms (median of 9; wanted: at most 200), at first {first:.0} ms, \
         at most {:.0} ms",
        times[4], times[8]
    );
    recording.stop();
}

/// Measures what the browser needs for a page of 50,000 stacks, whose file `HEAPBPF_LARGE_PAGE` names. Prints the
/// figures.
#[test]
#[ignore = "a benchmark: cargo xtask bench page"]
fn speed_of_a_large_page() {
    let file = PathBuf::from(std::env::var_os("HEAPBPF_LARGE_PAGE").expect("the page"));
    let mut browser = Browser::start(1400, 1000).expect("chromium");
    let long_tasks = "globalThis.tasks = []; new PerformanceObserver(list => tasks.push(...list.getEntries().map(it => it.duration))).observe({type: 'longtask', buffered: true})";
    let script = serde_json::json!({ "source": long_tasks });
    browser.call("Page.addScriptToEvaluateOnNewDocument", script);
    // From here on, durations are CPU time of the page's thread, so other load on the machine does not count.
    browser.call("Performance.enable", serde_json::json!({ "timeDomain": "threadTicks" }));
    println!("page: {} bytes", std::fs::metadata(&file).expect("is there").len());
    for _ in 0..3 {
        browser.open_file(&file, "performance.getEntriesByName('heapbpf-shown').length && document.querySelector('.flame canvas').width > 500");
        let shown = "performance.getEntriesByName('heapbpf-shown')[0].startTime";
        let begun = "performance.getEntriesByName('heapbpf-begin')[0].startTime";
        let (shown, begun, painted) = (browser.value(shown), browser.value(begun), first_paint_ms(&mut browser));
        println!(
            "painted after {painted:.0} ms, shown after {shown} ms (wanted: at most 1000), of which until the script \
             began {begun} ms; long tasks: {}",
            browser.value("tasks.map(Math.round)")
        );
        for row in [2, 6, 10, 3, 1, 0] {
            browser.value("new Promise(requestAnimationFrame).then(() => 0)");
            let before = script_seconds(&mut browser);
            let zoom = format!(
                "(() => {{ const box = document.querySelector('.flame canvas'), at = box.getBoundingClientRect(), begun = performance.now(); box.dispatchEvent(new MouseEvent('click', {{clientX: at.x + 300, clientY: at.y + {row} * 19 + 9, bubbles: true}})); return performance.now() - begun }})()"
            );
            let took = browser.value(&zoom).as_f64().expect("a number");
            let cpu = 1e3 * (script_seconds(&mut browser) - before);
            println!("zoom at row {row}: {took:.0} ms, of which {cpu:.1} ms of CPU time");
        }
    }
}

/// Time that the page's scripts have run, in seconds, by the selected clock.
fn script_seconds(browser: &mut Browser) -> f64 {
    let metrics = browser.call("Performance.getMetrics", serde_json::json!({}));
    let metrics = metrics["metrics"].as_array().expect("a list");
    let metric = metrics.iter().find(|metric| metric["name"] == "ScriptDuration").expect("one of Chromium's");
    metric["value"].as_f64().expect("a number")
}
