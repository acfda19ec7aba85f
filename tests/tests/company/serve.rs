//! `--listen`: scrapes by `go tool pprof`, by Prometheus, and by a hundred clients at once; access control; bad input.

use std::fs;
use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use heapbpf_tests::environment::{skipped, tool, tool_or_install, turn};
use heapbpf_tests::others::Beside;
use heapbpf_tests::pprof;
use heapbpf_tests::program::{copy_of, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::{Answer, get, idle, send, token_file};
use heapbpf_tests::target::{Target, until};

const ALLOC_OBJECTS: usize = 0;
const ALLOC_SPACE: usize = 1;
const INUSE_SPACE: usize = 3;

/// Sums of a profile by value type, as `go tool pprof` reads them.
fn read(answer: &Answer) -> Option<pprof::Raw> {
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.headers["content-type"], "application/octet-stream");
    let mut file = tempfile::Builder::new().suffix(".pb.gz").tempfile().expect("a temporary file");
    file.write_all(&answer.body).expect("there is space");
    pprof::raw(file.path())
}

/// Whether any sample is from this process.
fn has_pid(raw: &pprof::Raw, pid: u32) -> bool {
    raw.text.contains(&format!("pid:[{pid} count]"))
}

#[test]
fn a_scrape_is_the_truth_so_far() {
    let Some(_turn) = turn("a_scrape_is_the_truth_so_far") else { return };
    let mut target = Target::start(&program("growing"), ["20000"]);
    let (recording, address) = Recorder::of(target.pid(), 1).serve();
    let truth = target.run();
    let (bytes, calls): (u64, u64) = (20_000 * 1000, 20_000);
    assert!(!truth.sites.is_empty());
    let answer = get(address, "/debug/pprof/heap");
    let Some(raw) = read(&answer) else { return skipped("a_scrape_is_the_truth_so_far", "there is no go") };
    // At R = 1 nothing is estimated. `report()` itself may allocate.
    let (space, objects) = (raw.sum(ALLOC_SPACE) as u64, raw.sum(ALLOC_OBJECTS) as u64);
    assert!((bytes..bytes + 100_000).contains(&space), "{space}");
    assert!((calls..calls + 100).contains(&objects), "{objects}");
    assert!((2_000_000..2_100_000).contains(&raw.sum(INUSE_SPACE)), "{}", raw.sum(INUSE_SPACE));
    assert!(raw.sample_types[INUSE_SPACE].ends_with("[dflt]"), "{:?}", raw.sample_types);
    let allocs = read(&get(address, "/debug/pprof/allocs")).expect("as before");
    assert!(allocs.sample_types[ALLOC_SPACE].ends_with("[dflt]"), "{:?}", allocs.sample_types);

    let metrics = get(address, "/metrics");
    let total = metrics.metric("heapbpf_alloc_bytes_total").expect("is there");
    assert!(total >= bytes as f64 && total < bytes as f64 + 100_000.0, "{total}");
    let labels = format!("{{pid=\"{}\",comm=\"growing\",", target.pid());
    for name in ["alloc_bytes_total", "allocs_total", "inuse_bytes", "inuse_low_bytes", "inuse_high_bytes"] {
        let series = format!("heapbpf_process_{name}{labels}");
        assert!(metrics.text().contains(&series), "{series} is not in\n{}", metrics.text());
    }
    assert!(metrics.metric("heapbpf_daemon_cpu_seconds_total").expect("is there") > 0.0);

    let nobody = read(&get(address, "/debug/pprof/heap?comm=nobody*")).expect("as before");
    assert_eq!(nobody.samples.len(), 0);
    let own = format!("/debug/pprof/heap?pid={}&comm=grow*", target.pid());
    assert_eq!(read(&get(address, &own)).expect("as before").sum(ALLOC_SPACE), raw.sum(ALLOC_SPACE));
    assert_eq!(get(address, "/healthz").status, 200);
    let page = get(address, "/");
    assert!(
        page.text().contains("<title>heapbpf</title>") && !page.text().contains(&format!("growing ({}", target.pid()))
    );
    assert!(page.headers["content-security-policy"].contains("default-src 'none'; script-src 'sha256-"));
    let data: serde_json::Value = serde_json::from_slice(&get(address, "/page/data").body).expect("JSON");
    let inuse = data["profile"]["totals"][INUSE_SPACE]["estimate"].as_i64();
    assert!(inuse.is_some_and(|bytes| (2_000_000..2_100_000).contains(&bytes)), "{inuse:?}");
    recording.stop().results();
}

/// Nobody opens a page. Every allocation is sampled, so the history must have the truth.
#[test]
fn a_service_remembers_from_its_start() {
    let case = "a_service_remembers_from_its_start";
    let Some(_turn) = turn(case) else { return };
    let mut target = Target::start(&program("growing"), ["20000"]);
    let (recording, address) = Recorder::of(target.pid(), 1).without_outputs().serve();
    let history = || -> serde_json::Value { serde_json::from_slice(&get(address, "/history").body).expect("JSON") };
    let numbers = |past: &serde_json::Value, key: &str| -> Vec<f64> {
        past[key].as_array().expect("a list").iter().map(|number| number.as_f64().unwrap_or(0.0)).collect()
    };
    until("it remembers", || {
        let past = history();
        !numbers(&past, "time_ms").is_empty() && !numbers(&past, "profiles_ms").is_empty()
    });
    assert!(!target.run().sites.is_empty());
    let (bytes, kept) = (20_000_000.0, 2_000_000.0);
    until("what is kept is in the history", || numbers(&history(), "inuse").last().is_some_and(|last| *last >= kept));
    let past = history();
    let last = |key: &str| numbers(&past, key).last().copied().expect("a sample");
    assert!(last("inuse") < kept + 100_000.0, "{past}");
    assert_eq!((last("low"), last("high")), (last("inuse"), last("inuse")), "nothing is left to chance");
    let (program, times) = (&past["programs"][0], numbers(&past, "time_ms"));
    assert_eq!(program["comm"], "growing");
    assert_eq!(numbers(program, "inuse").len(), times.len());
    let rates = numbers(&past, "alloc_per_second");
    let allocated: f64 = times.windows(2).zip(&rates[1..]).map(|(pair, rate)| rate * (pair[1] - pair[0]) / 1e3).sum();
    let gaps: f64 = numbers(&past, "after_gap").iter().sum();
    // Rates are whole numbers. The first sample follows a gap; on a busy machine, others may.
    assert!(allocated < bytes + 101_000.0 && (allocated > bytes - 1_000.0 || gaps > 1.0), "{allocated}: {past}");

    assert_eq!(get(address, "/page/data").status, 200);
    let profiles = numbers(&history(), "profiles_ms");
    let [from, to] = [profiles[0], profiles[profiles.len() - 1]];
    let between = get(address, &format!("/debug/pprof/delta_heap?from={from}&to={to}"));
    let Some(raw) = read(&between) else { return skipped(case, "there is no go") };
    for (index, truth) in [(ALLOC_SPACE, bytes), (INUSE_SPACE, kept)] {
        let change = raw.sum(index) as f64;
        assert!((truth..truth + 100_000.0).contains(&change), "{change} of {truth}");
    }
    recording.stop();
}

/// A restart: the second service shows what the first one kept, after which there is a gap.
#[test]
fn totals_outlive_a_service_with_a_spool() {
    let Some(_turn) = turn("totals_outlive_a_service_with_a_spool") else { return };
    let mut target = Target::start(&program("growing"), ["20000"]);
    let (pid, dir) = (target.pid(), tempfile::tempdir().expect("a temporary directory"));
    let start = || {
        let spool = dir.path().join("spool").display().to_string();
        Recorder::of(pid, 1).without_outputs().option("--spool", &spool).serve()
    };
    let numbers = |address: SocketAddr, key: &str| -> Vec<Option<u64>> {
        let past: serde_json::Value = serde_json::from_slice(&get(address, "/history").body).expect("JSON");
        past[key].as_array().expect("a list").iter().map(serde_json::Value::as_u64).collect()
    };
    let (first, _) = start();
    assert!(!target.run().sites.is_empty());
    first.stop();
    let restarted = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_millis() as u64;

    let (second, address) = start();
    let is_own = |time: Option<u64>| time >= Some(restarted);
    until("the second one has totals of its own", || numbers(address, "time_ms").last().copied().is_some_and(is_own));
    let earlier = numbers(address, "time_ms").iter().take_while(|time| !is_own(**time)).count();
    let inuse = numbers(address, "inuse");
    assert!(earlier > 0 && inuse[..earlier].iter().all(Option::is_some), "only what was measured is kept: {inuse:?}");
    let last = inuse[earlier - 1];
    assert!(last.is_some_and(|bytes| (2_000_000..2_100_000).contains(&bytes)), "a run ends with its figures: {last:?}");
    assert_eq!(numbers(address, "after_gap")[earlier], Some(1), "a restart is a gap");
    assert_eq!(numbers(address, "alloc_per_second")[earlier], None, "nothing is computed across it");
    let profiles = numbers(address, "profiles_ms");
    assert!(profiles.iter().all(|time| *time >= Some(restarted)), "profiles are not kept: {profiles:?}");
    second.stop();
}

#[test]
fn go_tool_pprof_scrapes_a_difference() {
    let Some(_turn) = turn("go_tool_pprof_scrapes_a_difference") else { return };
    let Some(go) = tool_or_install("go", "golang-go") else {
        return skipped("go_tool_pprof_scrapes_a_difference", "there is no go");
    };
    let mut target = Target::start(&program("growing"), ["100000000", "5000"]);
    let (recording, address) = Recorder::of(target.pid(), 1000).serve();
    target.go();
    until("samples", || get(address, "/metrics").metric("heapbpf_samples_total").is_some_and(|n| n > 1000.0));
    let home = tempfile::tempdir().expect("a temporary directory");
    let pprof = |arguments: &[&str], query: &str| {
        let url = format!("http://{address}/debug/pprof/heap{query}");
        let mut command = Command::new(&go);
        command.args(["tool", "pprof", "-symbolize=none"]).args(arguments).arg(url);
        let output = command.env("HOME", home.path()).env("PPROF_TMPDIR", home.path()).output().expect("go runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let before = get(address, "/metrics").metric("heapbpf_alloc_bytes_total").expect("is there");
    let top = pprof(&["-top", "-sample_index=alloc_space", "-unit=bytes"], "?seconds=5");
    let after = get(address, "/metrics").metric("heapbpf_alloc_bytes_total").expect("is there");
    assert!(top.contains("site_00") && top.contains("site_01"), "{top}");
    // "Showing nodes accounting for 25000000B, 100% of 25000000B total"
    let total = top.lines().find_map(|line| line.split("% of ").nth(1)?.strip_suffix("B total")?.parse::<f64>().ok());
    let total = total.unwrap_or_else(|| panic!("{top}"));
    // The two metrics bracket the measured seconds. The standard error of the estimate is below 1 % (about 25,000
    // samples: 6 σ of 0.6 % are 4 %).
    assert!(total > 0.0 && total < (after - before) * 1.04, "{total} of {}", after - before);
    let whole = pprof(&["-top"], "");
    assert!(whole.contains("Type: inuse_space") && whole.contains("site_00"), "{whole}");
    recording.stop();
}

#[test]
fn a_hundred_scrapes_lose_nothing() {
    let Some(_turn) = turn("a_hundred_scrapes_lose_nothing") else { return };
    const SCRAPERS: usize = 100;
    let mut target = Target::start(&program("pairs"), ["100000000", "2", "100"]);
    let (recording, address) = Recorder::of(target.pid(), 64 << 10).serve();
    target.go();
    until("samples", || get(address, "/metrics").metric("heapbpf_samples_total").is_some_and(|n| n > 50.0));
    let begun = Instant::now();
    let hits = get(address, "/metrics").metric("heapbpf_hits_total").expect("is there");
    let gate = Arc::new(AtomicBool::new(false));
    let scrapers: Vec<_> = (0..SCRAPERS)
        .map(|number| {
            let gate = Arc::clone(&gate);
            std::thread::spawn(move || {
                while !gate.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                let path = match number % 4 {
                    0 => "/metrics",
                    1 => "/debug/pprof/allocs",
                    2 => "/debug/pprof/heap?seconds=1",
                    _ => "/debug/pprof/heap",
                };
                (0..3).map(|_| get(address, path)).collect::<Vec<_>>()
            })
        })
        .collect();
    gate.store(true, Ordering::Release);
    let answers: Vec<Answer> = scrapers.into_iter().flat_map(|scraper| scraper.join().expect("an answer")).collect();
    let seconds = begun.elapsed().as_secs_f64();
    let metrics = get(address, "/metrics");
    let rate = (metrics.metric("heapbpf_hits_total").expect("is there") - hits) / seconds;
    println!(
        "{} answers in {seconds:.2} s under {rate:.0} allocations/s; last standstill {:?} s",
        answers.len(),
        metrics.metric("heapbpf_snapshot_seconds")
    );
    assert_eq!(answers.len(), 3 * SCRAPERS);
    let mut profiles = 0;
    for answer in &answers {
        assert_eq!(answer.status, 200, "{}", answer.text());
        if answer.headers["content-type"] == "application/octet-stream" {
            profiles += 1;
            // It has gzip's trailer: checksum and length.
            pprof::unpacked(&answer.body);
        } else {
            assert!(answer.metric("heapbpf_hits_total").is_some());
        }
    }
    assert_eq!(profiles, 9 * SCRAPERS / 4);
    for (reason, count) in ["ring_full", "no_thread_state", "abandoned"]
        .map(|reason| (reason, metrics.metric(&format!("heapbpf_lost_total{{reason=\"{reason}\"}}"))))
    {
        assert_eq!(count, Some(0.0), "{reason}");
    }
    let (_, stats) = recording.stop().results();
    // The target keeps running, with some twenty million calls a second. Each of its two threads may be in a call when
    // the recording ends, and may have made others between the reads of the kernel's counters and of its own. Five were
    // seen.
    let under_way = stats.lost["in_flight"] + stats.lost["undecided"];
    assert!(under_way <= 100 && stats.lost() == under_way, "{stats:?}");
}

#[test]
fn prometheus_scrapes_the_metrics() {
    let Some(_turn) = turn("prometheus_scrapes_the_metrics") else { return };
    let Some(prometheus) = tool_or_install("prometheus", "prometheus") else {
        return skipped("prometheus_scrapes_the_metrics", "there is no prometheus");
    };
    let mut target = Target::start(&program("growing"), ["20000"]);
    let (recording, address) = Recorder::of(target.pid(), 1).serve();
    target.run();
    let dir = tempfile::tempdir().expect("a temporary directory");
    if let Some(promtool) = tool("promtool") {
        let text = dir.path().join("metrics.txt");
        fs::write(&text, get(address, "/metrics").body).expect("there is space");
        let input = fs::File::open(&text).expect("just written");
        let checked = Command::new(&promtool).args(["check", "metrics"]).stdin(input).output().expect("it runs");
        assert!(checked.status.success() && checked.stderr.is_empty(), "{checked:?}");
        let rules = packaging("prometheus");
        let tested = Command::new(&promtool).args(["test", "rules", "alerts_test.yml"]).current_dir(rules).output();
        assert!(tested.as_ref().is_ok_and(|tested| tested.status.success()), "{tested:?}");
    }
    let config = dir.path().join("prometheus.yml");
    let text = format!(
        "global: {{scrape_interval: 1s}}\nscrape_configs:\n- job_name: heapbpf\n  static_configs:\n  - targets: ['{address}']\n"
    );
    fs::write(&config, text).expect("there is space");
    // A port that was free a moment ago.
    let own = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).expect("a port");
    let mut command = Command::new(prometheus);
    command
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
        .arg(format!("--web.listen-address={own}"));
    let prometheus = Beside::start(&mut command);
    let query = |expression: &str| -> Option<f64> {
        std::net::TcpStream::connect(own).ok()?;
        let answer = get(own, &format!("/api/v1/query?query={expression}"));
        let json: serde_json::Value = serde_json::from_slice(&answer.body).ok()?;
        json["data"]["result"].get(0)?["value"].get(1)?.as_str()?.parse().ok()
    };
    let series = format!("heapbpf_process_alloc_bytes_total%7Bpid=%22{}%22%7D", target.pid());
    until("prometheus has scraped", || query(&series).is_some());
    let scraped = query(&series).expect("it was there");
    assert!((20_000_000.0..20_100_000.0).contains(&scraped), "{scraped}");
    assert_eq!(query("up%7Bjob=%22heapbpf%22%7D"), Some(1.0));
    let inuse = query("heapbpf_process_inuse_bytes").expect("scraped with the rest");
    assert!((2_000_000.0..2_100_000.0).contains(&inuse), "{inuse}");
    // Everything that the dashboard shows exists, except what this target does not have.
    let dashboard = fs::read(packaging("grafana/heapbpf.json")).expect("a dashboard");
    let dashboard: serde_json::Value = serde_json::from_slice(&dashboard).expect("JSON");
    let targets = dashboard["panels"].as_array().expect("panels").iter().flat_map(|panel| panel["targets"].as_array());
    let mut asked = 0;
    for target in targets.flatten() {
        let expression = target["expr"].as_str().expect("an expression");
        let all = ["$instance", "$comm"].iter().fold(expression.to_owned(), |it, variable| it.replace(variable, ".*"));
        let encoded = all.replace("$__rate_interval", "1m");
        let encoded: String = encoded.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let absent = ["heapbpf_lost_total", "heapbpf_at_exit", "> 0"].iter().any(|it| expression.contains(it));
        if absent {
            let answer = get(own, &format!("/api/v1/query?query={encoded}"));
            assert_eq!(answer.status, 200, "{expression}: {}", answer.text());
        } else {
            until(expression, || query(&encoded).is_some());
        }
        asked += 1;
    }
    assert!(asked >= 8, "{asked}");
    drop(prometheus);
    recording.stop().results();
}

/// Path of a file that is shipped for other programs.
fn packaging(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging").join(name)
}

#[test]
fn bad_requests_get_a_sentence() {
    let Some(_turn) = turn("bad_requests_get_a_sentence") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).serve();
    for (path, status, part) in [
        ("/debug/pprof/heap?pid=first", 400, "process id"),
        ("/page/data?seconds=5", 400, "/page/growth"),
        ("/page/data?what=1", 400, "known are"),
        ("/page/growth", 400, "from is required"),
        ("/page/growth?from=1&to=x", 400, "whole milliseconds"),
        ("/page/growth?from=2&to=1", 400, "before"),
        ("/page/growth?from=1&to=2", 404, "is not kept"),
        ("/page/growth?from=1&from=1&to=2", 400, "known are"),
        ("/history?from=x", 400, "whole milliseconds"),
        ("/history?what=1", 400, "known are"),
        ("/history?from=9&to=1", 200, ""),
        ("/debug/pprof/delta_heap?from=1", 400, "to is required"),
        ("/debug/pprof/delta_heap?from=1&to=2", 404, "is not kept"),
        ("/debug/pprof/delta_heap?from=1&to=2&seconds=5", 400, "cannot be combined"),
        ("/page/export", 400, "format is required"),
        ("/page/export?format=bmp", 400, "known ones are"),
        ("/debug/pprof/heap?cgroup=x", 400, "beginning with /"),
        ("/debug/pprof/heap?comm=%5B", 400, "comm"),
        ("/debug/pprof/heap?comm=%FF%FE", 200, ""),
        ("/debug/pprof/heap?comm=%zz", 400, "not a valid escape"),
        ("/debug/pprof/heap?seconds=0", 200, ""),
        ("/debug/pprof/delta_heap", 400, "seconds is required"),
        ("/metrics?seconds=5", 400, "from the start"),
        ("/debug/pprof/profile", 404, "docs/fleet.md lists"),
    ] {
        let answer = get(address, path);
        assert_eq!(answer.status, status, "{path}: {}", answer.text());
        assert!(status == 200 || answer.text().contains(part), "{path}: {}", answer.text());
    }
    let post = "POST /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100000000\r\n\r\n";
    assert_eq!(send(address, post).status, 413);
    assert_eq!(send(address, "POST /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").status, 405);
    let long = format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n\r\n", "x".repeat(100_000));
    assert!(matches!(send(address, &long).status, 400 | 414 | 431));
    // The server does not wait for a client that never completes its request.
    idle(address, "GET / HTTP/1.1\r\nHost:", Duration::from_secs(60));
    assert_eq!(get(address, "/healthz").status, 200);
    recording.stop();
}

#[test]
fn addresses_and_tokens_are_judged_before_anything_is_attached() {
    let Some(_turn) = turn("addresses_and_tokens_are_judged_before_anything_is_attached") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken_address = taken.local_addr().expect("bound").to_string();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let refused = |options: &[(&str, &str)]| {
        let recorder = Recorder::of(target.pid(), 4096).without_outputs();
        options.iter().fold(recorder, |recorder, (option, value)| recorder.option(option, value)).refused()
    };
    refused(&[("--listen", &taken_address)]).check(1, &["choose another port"]);
    refused(&[("--listen", "0.0.0.0:0")]).check(1, &["--token-file"]);
    refused(&[("--listen", "nonsense")]).check(2, &["127.0.0.1:6060"]);
    refused(&[("--token-file", "/nowhere")]).check(2, &["--listen"]);
    let public = token_file(dir.path(), 0o644, "aaaaaaaaaaaaaaaaaaaa\n");
    refused(&[("--listen", "0.0.0.0:0"), ("--token-file", &public)]).check(1, &["chmod 600"]);
    refused(&[("--listen", "127.0.0.1:0"), ("--token-file", "/no/such/file")]).check(1, &["cannot read"]);
}

#[test]
fn allocations_never_fall_as_processes_end() {
    const CALLS: u64 = 2000;
    let Some(_turn) = turn("allocations_never_fall_as_processes_end") else { return };
    // A name that no other test's program has.
    let dir = tempfile::tempdir().expect("a temporary directory");
    let program = copy_of(&program("pairs"), dir.path(), "pairs-served");
    let (recording, address) = Recorder::new().without_outputs().option("--comm", "pairs-served").interval(1).serve();
    let counted = || pprof::sums(&get(address, "/debug/pprof/heap?comm=pairs-served").body)[ALLOC_OBJECTS];
    let mut last = (0, 0.0);
    until("exited processes are merged", || {
        let status = Command::new(&program)
            .args([CALLS.to_string().as_str(), "1", "100"])
            .env("FREE_RUNNING", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .expect("runs");
        assert!(status.success());
        let (in_profile, metrics) = (counted(), get(address, "/metrics"));
        let metric = |name: &str| metrics.metric(name).expect("is there");
        let now = (in_profile, metric("heapbpf_allocs_total"));
        assert!(now.0 >= last.0 && now.1 >= last.1, "{now:?} after {last:?}");
        last = now;
        // Each process is held at its entry point, but on a busy machine heapbpf reaches some too late. Processes that
        // exited some seconds ago no longer have a series with a pid.
        now.1 >= (5 * CALLS) as f64 && metric("heapbpf_other_allocs_total") > 0.0
    });
    until("all of them have ended", || {
        let metrics = get(address, "/metrics");
        !metrics.text().contains("heapbpf_process_allocs_total{")
    });
    let metrics = get(address, "/metrics");
    let other = metrics.metric("heapbpf_other_allocs_total").expect("is there");
    assert_eq!(Some(other), metrics.metric("heapbpf_allocs_total"));
    assert_eq!((counted(), other), last, "each scrape had all calls of the programs that had ended by then");
    let profile = || read(&get(address, "/debug/pprof/heap"));
    until("a profile without their lines", || profile().is_none_or(|raw| has_pid(&raw, 0)));
    let Some(raw) = profile() else { return };
    assert_eq!(raw.sum(ALLOC_OBJECTS) as f64, other, "at R = 1 everything is counted");
    assert_eq!(raw.sum(INUSE_SPACE), 0, "what ended processes had in use is gone with them");
    assert!(raw.text.contains("site_00"), "{}", raw.text);
    recording.stop();
}
