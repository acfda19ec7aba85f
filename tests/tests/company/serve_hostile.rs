//! `--listen` against malicious clients: what each token gives access to, oversized requests, slow and many clients,
//! and TLS.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use heapbpf_tests::certificates::self_signed;
use heapbpf_tests::environment::{skipped, tool_or_install, turn};
use heapbpf_tests::pprof::unpacked;
use heapbpf_tests::program::{copy_of, program};
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::scrape::{Answer, get, get_with, send, token_file};
use heapbpf_tests::target::{Target, until};

/// Which of two processes a client gets to see, if it gets an answer at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sees {
    /// The answer is 401.
    Nothing,
    One,
    Two,
    Both,
    Neither,
}

/// Every endpoint, with a query if it needs one, and whether its answer is about processes.
const ENDPOINTS: &[(&str, &str, bool)] = &[
    ("/", "", false),
    ("/healthz", "", false),
    ("/debug/pprof/heap", "", true),
    ("/debug/pprof/allocs", "", true),
    ("/debug/pprof/delta_heap", "seconds=1", true),
    ("/history", "", true),
    ("/metrics", "", true),
    ("/page/data", "", true),
    ("/page/growth", MOMENTS, true),
    ("/page/kept", MOMENTS, true),
    ("/page/export", "format=pprof", true),
];

/// Placeholder for two saved moments.
const MOMENTS: &str = "from=…&to=…";

/// Names of the two processes. No function has such a name.
const NAMES: [&str; 2] = ["first_of_two", "other_of_two"];

fn seen(answer: &Answer) -> Sees {
    if answer.status == 401 {
        return Sees::Nothing;
    }
    assert_eq!(answer.status, 200, "{}", answer.text());
    let is_profile = answer.headers["content-type"] == "application/octet-stream";
    let body = if is_profile { unpacked(&answer.body) } else { answer.body.clone() };
    let [one, two] = NAMES.map(|name| body.windows(name.len()).any(|window| window == name.as_bytes()));
    match (one, two) {
        (true, true) => Sees::Both,
        (true, false) => Sees::One,
        (false, true) => Sees::Two,
        (false, false) => Sees::Neither,
    }
}

/// The query that compares the first and the last moment which the page has listed.
fn two_moments(refresh: impl Fn() -> Answer) -> String {
    let mut moments = Vec::new();
    until("there are two moments", || {
        let answer: serde_json::Value = serde_json::from_slice(&refresh().body).expect("JSON");
        moments = answer["moments"].as_array().expect("a list").clone();
        moments.len() > 1
    });
    format!("from={}&to={}", moments[0], moments[moments.len() - 1])
}

/// Starts a copy of a program under another name.
fn named(dir: &Path, name: &str) -> Target {
    Target::start(&copy_of(&program("growing"), dir, name), ["100000000", "2000"])
}

#[test]
fn no_endpoint_shows_more_than_a_token_may_see() {
    let Some(_turn) = turn("no_endpoint_shows_more_than_a_token_may_see") else { return };
    let routes = include_str!("../../../crates/serve/src/routes.rs");
    let routes = routes.lines().filter_map(|line| Some(line.trim().strip_prefix('"')?.split_once("\" => ")?.0));
    let mut listed: Vec<&str> = ENDPOINTS.iter().map(|(path, ..)| *path).collect();
    let mut served: Vec<&str> = routes.collect();
    listed.sort_unstable();
    served.sort_unstable();
    assert_eq!(served, listed, "every endpoint is in the table");

    let dir = tempfile::tempdir().expect("a temporary directory");
    let (mut one, mut two) = (named(dir.path(), NAMES[0]), named(dir.path(), NAMES[1]));
    let scopes = format!(
        "all-aaaaaaaaaaaaaaaa\npid-bbbbbbbbbbbbbbbb pid={}\ncomm-ccccccccccccccc comm=other*\nnone-ddddddddddddddd comm=x pid=1\n",
        one.pid()
    );
    let tokens = token_file(dir.path(), 0o600, &scopes);
    let recorder = Recorder::of(one.pid(), 1000).pid(two.pid()).without_outputs();
    let (recording, address) = recorder.option("--token-file", &tokens).serve();
    one.go();
    two.go();
    let ask = |path: &str, token: Option<&str>| match token {
        Some(token) => get_with(address, path, &format!("Authorization: Bearer {token}\r\n")),
        None => get(address, path),
    };
    let all = Some("all-aaaaaaaaaaaaaaaa");
    until("both are seen", || seen(&ask("/debug/pprof/heap", all)) == Sees::Both);
    let mut moments = String::new();
    until("both have kept something between two moments", || {
        moments = two_moments(|| ask("/page/data", all));
        seen(&ask(&format!("/page/kept?{moments}"), all)) == Sees::Both
    });
    until("both are remembered", || seen(&ask("/history", all)) == Sees::Both);
    let clients = [
        (None, Sees::Nothing),
        (Some("all-aaaaaaaaaaaaaaab"), Sees::Nothing),
        (Some("all-aaaaaaaaaaaaaaaa"), Sees::Both),
        (Some("pid-bbbbbbbbbbbbbbbb"), Sees::One),
        (Some("comm-ccccccccccccccc"), Sees::Two),
        (Some("none-ddddddddddddddd"), Sees::Neither),
    ];
    for (token, expected) in clients {
        for (path, query, about_processes) in ENDPOINTS {
            let expected = match (expected, *about_processes, *path) {
                (_, _, "/healthz" | "/") => Sees::Neither,
                (Sees::Nothing, ..) => Sees::Nothing,
                (_, false, _) => Sees::Neither,
                (sees, true, _) => sees,
            };
            let query = if *query == MOMENTS { &*moments } else { query };
            let answer = ask(&format!("{path}?{query}"), token);
            assert_eq!(seen(&answer), expected, "{path} with {token:?}");
        }
        // The totals are of all processes.
        let has_totals = ask("/metrics", token).text().contains("heapbpf_hits_total");
        assert_eq!(has_totals, expected == Sees::Both, "{token:?}");
        let between = format!("/debug/pprof/delta_heap?{moments}");
        assert_eq!(seen(&ask(&between, token)), expected, "{between} with {token:?}");
        // A query can narrow what a token gives access to, but never widen it.
        let wide = format!("/debug/pprof/heap?comm=*&pid={}", two.pid());
        let narrowed = match expected {
            Sees::Nothing => &[Sees::Nothing][..],
            Sees::Two => &[Sees::Two],
            // Only clients that see everything get remarks about the recording.
            Sees::Both => &[Sees::Two, Sees::Both],
            _ => &[Sees::Neither],
        };
        assert!(narrowed.contains(&seen(&ask(&wide, token))), "{wide} with {token:?}");
        // Other spellings of a path are not accepted.
        for path in ["//metrics", "/metrics/", "/./metrics", "/healthz/../metrics", "/%6detrics", "/METRICS"] {
            let status = ask(path, token).status;
            assert!(status == 404 || expected == Sees::Nothing && status == 401, "{path} with {token:?}: {status}");
        }
    }
    recording.stop();
}

/// A malicious web page can point its own DNS name at this server, and has no other way to read the answers. Such names
/// are refused.
#[test]
fn without_tokens_other_names_are_refused() {
    let Some(_turn) = turn("without_tokens_other_names_are_refused") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    let ask = |path: &str, host: &str| {
        send(address, &format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"))
    };
    for path in ["/", "/metrics", "/page/data", "/debug/pprof/heap"] {
        for host in ["evil.example", "evil.example:6060", "localhost.evil.example"] {
            let answer = ask(path, host);
            assert_eq!(answer.status, 421, "{path} {host}: {}", answer.text());
            assert!(answer.text().contains("--token-file"), "{}", answer.text());
        }
        for host in ["localhost", "localhost:6060", "127.0.0.1", "[::1]:6060"] {
            assert_eq!(ask(path, host).status, 200, "{path} {host}");
        }
    }
    recording.stop();
}

/// gzip is for clients that accept it (RFC 9110, 12.5.3), and a request of HTTP/1.1 has a host (RFC 9112, 3.2).
#[test]
fn encodings_and_hosts_are_those_of_the_standard() {
    let Some(_turn) = turn("encodings_and_hosts_are_those_of_the_standard") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    let ask = |version: &str, headers: &str| {
        send(address, &format!("GET /page/data HTTP/{version}\r\n{headers}Connection: close\r\n\r\n"))
    };
    for (accepted, is_packed) in [("gzip", true), ("gzip;q=0", false), ("*;q=0", false), ("br, gzip;q=0.5", true)] {
        let answer = ask("1.1", &format!("Host: localhost\r\nAccept-Encoding: {accepted}\r\n"));
        assert_eq!((answer.status, answer.body.starts_with(b"\x1f\x8b")), (200, is_packed), "{accepted}");
        assert_eq!(answer.headers.contains_key("content-encoding"), is_packed, "{accepted}");
    }
    assert_eq!(["1.1", "1.0"].map(|version| ask(version, "").status), [400, 200]);
    recording.stop();
}

#[test]
fn requests_beyond_measure_are_refused() {
    let Some(_turn) = turn("requests_beyond_measure_are_refused") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let (recording, address) = Recorder::of(target.pid(), 4096).without_outputs().serve();
    let head = |line: String, headers: String| {
        format!("{line} HTTP/1.1\r\nHost: localhost\r\n{headers}Connection: close\r\n\r\n")
    };
    let plain = |headers: String| head("GET /metrics".into(), headers);
    let cases = [
        ("a path", head(format!("GET /{}", "x".repeat(64 << 10)), String::new())),
        ("a query", head(format!("GET /metrics?comm={}", "x".repeat(64 << 10)), String::new())),
        ("many parameters", head(format!("GET /metrics?{}", "pid=1&".repeat(10 << 10)), String::new())),
        ("a header", plain(format!("X: {}\r\n", "x".repeat(64 << 10)))),
        ("a header's name", plain(format!("{}: 1\r\n", "x".repeat(64 << 10)))),
        ("many headers", plain("X: 1\r\n".repeat(10_000))),
        ("a token", plain(format!("Authorization: Bearer {}\r\n", "x".repeat(64 << 10)))),
        ("a method", head(format!("{} /metrics", "G".repeat(64 << 10)), String::new())),
        ("a body", plain("Content-Length: 18446744073709551615\r\n".into())),
        ("a body in pieces", plain("Transfer-Encoding: chunked\r\n".into())),
    ];
    for (what, request) in cases {
        let answer = send(address, &request);
        assert!((400..500).contains(&answer.status), "{what}: {} {}", answer.status, answer.text());
        assert!(answer.body.len() < 4096, "{what}: {} bytes", answer.body.len());
    }
    // Requests just within the limits are answered.
    let within = send(address, &plain(format!("X: {}\r\n", "x".repeat(8 << 10))));
    assert_eq!(within.status, 200, "{}", within.text());
    recording.stop();
}

#[test]
fn slow_and_many_clients_are_shed_and_losses_counted() {
    let Some(_turn) = turn("slow_and_many_clients_are_shed_and_losses_counted") else { return };
    let mut target = Target::start(&program("growing"), ["100000000", "20000"]);
    let (recording, address) = Recorder::of(target.pid(), 64 << 10).serve();
    target.go();
    until("samples", || get(address, "/metrics").metric("heapbpf_samples_total").is_some_and(|n| n > 50.0));
    // Open more connections than the server admits: some send nothing, some send half a request, and some do not read
    // the answer.
    let connect = |number: usize| {
        let mut stream = TcpStream::connect(address).ok()?;
        let said: &[u8] = match number % 3 {
            0 => b"",
            1 => b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-",
            _ => b"GET /debug/pprof/heap HTTP/1.1\r\nHost: localhost\r\n\r\n",
        };
        stream.write_all(said).ok()?;
        Some(stream)
    };
    let mut slow: Vec<TcpStream> = (0..700).filter_map(connect).collect();
    assert!(slow.len() >= 512, "{}", slow.len());
    // They continue a byte at a time while another client asks, which gets its answer once they have timed out.
    let answer = get(address, "/healthz");
    assert_eq!(answer.status, 200, "{}", answer.text());
    slow.iter_mut().for_each(|stream| drop(stream.write_all(b"x")));
    let closed = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
        let mut rest = Vec::new();
        // Connections whose last byte arrives too late are reset.
        !stream
            .read_to_end(&mut rest)
            .is_err_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
    };
    let shed = slow.iter_mut().map(closed).filter(|closed| *closed).count();
    println!("{shed} of {} slow clients were sent away", slow.len());
    let metrics = get(address, "/metrics");
    let lost = |reason: &str| metrics.metric(&format!("heapbpf_lost_total{{reason=\"{reason}\"}}")).expect("is there");
    let reported = lost("ring_full") + lost("no_thread_state") + lost("abandoned");
    println!("{reported} samples lost meanwhile, of {:?}", metrics.metric("heapbpf_samples_total"));
    assert_eq!(shed, slow.len());
    // Everything that a busy machine lost is counted: the identities hold, and estimates cover everything.
    let (profile, stats) = recording.stop().results();
    let (exact, estimated) = (stats.exact_alloc_bytes as f64, profile.totals.alloc_bytes.value());
    // At least 500 samples of the same size: 6 σ are below 30 %.
    assert!((estimated / exact - 1.0).abs() < 0.3, "{estimated} of {exact}");
}

#[test]
fn tls_answers_who_trusts_its_certificate() {
    let case = "tls_answers_who_trusts_its_certificate";
    let Some(_turn) = turn(case) else { return };
    let (Some(openssl), Some(curl)) = (tool_or_install("openssl", "openssl"), tool_or_install("curl", "curl")) else {
        return skipped(case, "there is no openssl or no curl");
    };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let [one, two] = ["one", "two"].map(|name| self_signed(&openssl, dir.path(), name));
    let [certificate_file, key, other] =
        [one.certificate, one.key, two.certificate].map(|path| path.display().to_string());
    let target = Target::start(&program("pairs"), ["1000"]);
    let refused = |certificate: &str, key: &str| {
        let recorder = Recorder::of(target.pid(), 4096).without_outputs().option("--listen", "127.0.0.1:0");
        recorder.option("--tls-cert", certificate).option("--tls-key", key).refused()
    };
    refused(&other, &key).check(1, &["another certificate"]);
    refused(&key, &key).check(1, &["has no certificate"]);
    refused(&certificate_file, "/no/such/file").check(1, &["cannot read the key file"]);
    let alone = Recorder::of(target.pid(), 4096).without_outputs().option("--listen", "127.0.0.1:0");
    alone.option("--tls-cert", &certificate_file).refused().check(2, &["--tls-key"]);

    let recorder = Recorder::of(target.pid(), 4096).without_outputs().option("--listen", "127.0.0.1:0");
    let recording = recorder.option("--tls-cert", &certificate_file).option("--tls-key", &key).start();
    let address: SocketAddr = loop {
        if let Some(address) = recording.next_line().strip_prefix("heapbpf: listening on https://") {
            break address.split(' ').next().and_then(|address| address.parse().ok()).expect("an address");
        }
    };
    let ask = |authority: &str, more: &[&str]| {
        let mut command = Command::new(&curl);
        command.args(["-sS", "--max-time", "60", "--cacert", authority]).args(more);
        let output = command.arg(format!("https://{address}/metrics")).output().expect("curl runs");
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    for more in [&[][..], &["--tls-max", "1.2"]] {
        let (is_trusted, text) = ask(&certificate_file, more);
        assert!(is_trusted && text.contains("heapbpf_hits_total"), "{text}");
    }
    assert!(!ask(&other, &[]).0, "a certificate of somebody else");
    assert!(!ask(&certificate_file, &["--tls-max", "1.1"]).0, "an old protocol");
    // A client that does not speak TLS gets no answer, and one that sends nothing is disconnected.
    let mut plain = TcpStream::connect(address).expect("it listens");
    plain.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    plain.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it listens");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.windows(7).any(|window| window == b"heapbpf"), "{answer:?}");
    let mut silent = TcpStream::connect(address).expect("it listens");
    silent.set_read_timeout(Some(Duration::from_secs(60))).expect("a time");
    assert_eq!(silent.read(&mut [0]).expect("it is closed in time"), 0);
    recording.stop();
}
