//! `--push` to OpenTelemetry's collector, to Pyroscope and to any endpoint. If a receiver is unavailable for a while,
//! nothing is lost. If it stays unavailable, disk use is bounded.

use std::fs;
use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use heapbpf_profile::proto::otlp::ProfilesData;
use heapbpf_tests::environment::turn;
use heapbpf_tests::pprof;
use heapbpf_tests::program::program;
use heapbpf_tests::receivers::{Request, Reserved, collector, http_store};
use heapbpf_tests::recorder::{Recorder, Recording};
use heapbpf_tests::scrape::{Answer, get};
use heapbpf_tests::target::{Target, until};
use prost::Message;

/// The parts of a pushed profile that show whether something is missing: its period, and what was allocated during it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Part {
    begin_ns: u64,
    end_ns: u64,
    alloc_bytes: i64,
}

const ALLOC_SPACE: usize = 1;

fn of_pprof(gzip: &[u8]) -> Part {
    let profile = pprof::profile(gzip);
    let begin_ns = u64::try_from(profile.time_nanos).expect("after 1970");
    Part {
        begin_ns,
        end_ns: begin_ns + u64::try_from(profile.duration_nanos).expect("time goes on"),
        alloc_bytes: profile.sample.iter().map(|sample| sample.value[ALLOC_SPACE]).sum(),
    }
}

fn of_otlp(message: &ProfilesData) -> Part {
    let strings = &message.dictionary.as_ref().expect("a dictionary").string_table;
    let profiles = message.resource_profiles.iter().flat_map(|resource| &resource.scope_profiles);
    let profiles: Vec<_> = profiles.flat_map(|scope| &scope.profiles).collect();
    let of_type = profiles.iter().filter(|profile| {
        let kind = profile.sample_type.as_ref().expect("a type");
        strings[kind.type_strindex as usize] == "alloc_space"
    });
    let first = profiles.first().expect("a process");
    Part {
        begin_ns: first.time_unix_nano,
        end_ns: first.time_unix_nano + first.duration_nano,
        alloc_bytes: of_type.flat_map(|profile| &profile.samples).flat_map(|sample| &sample.values).sum(),
    }
}

/// The part of a multipart body with this name (RFC 7578).
fn form_field<'a>(request: &'a Request, name: &str) -> &'a [u8] {
    let boundary = request.content_type.strip_prefix("multipart/form-data; boundary=").expect("a form");
    let (boundary, wanted) = (format!("--{boundary}"), format!("name=\"{name}\""));
    let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|window| window == what);
    let mut rest = &request.body[..];
    while let Some(at) = find(rest, boundary.as_bytes()) {
        rest = &rest[at + boundary.len()..];
        let Some(head) = find(rest, b"\r\n\r\n") else { break };
        let end = head + 4 + find(&rest[head + 4..], format!("\r\n{boundary}").as_bytes()).expect("a closed part");
        if String::from_utf8_lossy(&rest[..head]).contains(&wanted) {
            return &rest[head + 4..end];
        }
    }
    panic!("no {name} in the form");
}

fn of_push_api(request: &Request) -> Part {
    use serde_json::Value;
    assert_eq!(request.content_type, "application/json");
    let message: Value = serde_json::from_slice(&request.body).expect("JSON");
    let labels = message["series"][0]["labels"].as_array().expect("labels");
    for name in ["__name__", "service_name", "host"] {
        assert!(labels.iter().any(|label| label["name"] == name && label["value"] != ""), "{name}: {labels:?}");
    }
    let raw = message["series"][0]["samples"][0]["rawProfile"].as_str().expect("a profile");
    of_pprof(&BASE64_STANDARD.decode(raw).expect("Base64"))
}

/// Checks that the profiles follow each other without a gap, and that their sum is complete.
fn whole(what: &str, parts: &[Part], alloc_bytes: f64) {
    for pair in parts.windows(2) {
        assert_eq!(pair[0].end_ns, pair[1].begin_ns, "{what}: {parts:?}");
    }
    let sum: i64 = parts.iter().map(|part| part.alloc_bytes).sum();
    assert_eq!(sum as f64, alloc_bytes, "{what}: {parts:?}");
}

/// Starts a recording at R = 1 that also serves scrapers.
fn recording(
    target: &Target,
    urls: &[String],
    every: &str,
    options: &[(&str, &str)],
) -> (Recording, impl Fn() -> Answer + use<>) {
    let recorder = Recorder::of(target.pid(), 1).option("--push-every", every);
    let recorder = urls.iter().fold(recorder, |recorder, url| recorder.option("--push", url));
    let recorder = options.iter().fold(recorder, |recorder, (option, value)| recorder.option(option, value));
    let (recording, address) = recorder.serve();
    (recording, move || get(address, "/metrics"))
}

/// Values of a metric, one per destination.
fn pushed(answer: &Answer, name: &str) -> Vec<f64> {
    let name = format!("heapbpf_push_{name}{{");
    let lines = answer.text();
    let values = lines.lines().filter(|line| line.starts_with(&name));
    values.map(|line| line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")).collect()
}

#[test]
fn receivers_that_were_away_get_everything_in_order() {
    let Some(_turn) = turn("receivers_that_were_away_get_everything_in_order") else { return };
    let places: Vec<Reserved> = (0..5).map(|_| Reserved::new()).collect();
    let schemes = ["otlp+grpc", "otlp+http", "pyroscope", "pyroscope-push", "http"];
    let urls: Vec<String> =
        schemes.iter().zip(&places).map(|(scheme, place)| format!("{scheme}://{}", place.address())).collect();
    let mut target = Target::start(&program("growing"), ["100000000", "2000"]);
    let (recording, metrics) = recording(&target, &urls, "500ms", &[]);
    target.go();
    // No receiver is listening.
    until("profiles wait everywhere", || pushed(&metrics(), "waiting").iter().all(|waiting| *waiting >= 5.0));
    assert!(pushed(&metrics(), "failures_total").iter().all(|failures| *failures >= 1.0));
    assert_eq!(pushed(&metrics(), "delivered_total"), [0.0; 5]);

    let mut places = places.into_iter();
    let grpc = collector(places.next().expect("five"));
    let stores: Vec<_> = places.map(http_store).collect();
    until("all have taken what waited", || pushed(&metrics(), "delivered_total").iter().all(|taken| *taken >= 10.0));
    let away = |away: bool| {
        grpc.set_away(away);
        stores.iter().for_each(|store| store.set_away(away));
    };
    // The receivers listen, but accept nothing.
    away(true);
    until("some wait again", || pushed(&metrics(), "waiting").iter().all(|waiting| *waiting >= 2.0));
    away(false);
    until("none waits for long", || pushed(&metrics(), "waiting").iter().all(|waiting| *waiting <= 1.0));
    let last = metrics();
    assert_eq!(pushed(&last, "dropped_total"), [0.0; 5]);
    assert_eq!(pushed(&last, "rejected_total"), [0.0; 5]);
    let (profile, _) = recording.stop().results();
    let all = profile.totals.alloc_bytes.value();
    // R is 1. A running target is counted slightly after the profile's moment; the profile says by how much.
    let later = profile.slack().sampled_bytes;
    let counted_later = profile.totals.alloc_bytes.exact.expect("counted") - all;
    assert!((0.0..=later as f64).contains(&counted_later), "{counted_later} of {all}, {later} told");

    let parts: Vec<Part> = grpc.taken().iter().map(of_otlp).collect();
    whole("gRPC", &parts, all);
    let taken: Vec<Vec<Request>> = stores.iter().map(|store| store.taken()).collect();
    let [http, ingest, push, post] = &taken[..] else { panic!("four") };
    let line = "POST /v1development/profiles HTTP/1.1";
    assert!(http.iter().all(|request| request.line == line && request.content_type == "application/x-protobuf"));
    let parts: Vec<Part> =
        http.iter().map(|request| of_otlp(&Message::decode(&request.body[..]).expect("the request"))).collect();
    whole("OTLP over HTTP", &parts, all);

    let parts: Vec<Part> = ingest.iter().map(|request| of_pprof(form_field(request, "profile"))).collect();
    whole("/ingest", &parts, all);
    for (request, part) in ingest.iter().zip(&parts) {
        // The server reads the form only if the query names no format; label values have no quotes.
        let (from, until) = (part.begin_ns / 1_000_000_000, part.end_ns / 1_000_000_000);
        let times = format!("&from={from}&until={until}&spyName=heapbpf ");
        assert!(request.line.starts_with("POST /ingest?name=heapbpf%7Bhost%3D"), "{}", request.line);
        assert!(request.line.contains(&times) && !request.line.contains("%22"), "{}: {times}", request.line);
        let types: serde_json::Value =
            serde_json::from_slice(form_field(request, "sample_type_config")).expect("what the values are");
        assert_eq!(types["alloc_space"]["aggregation"], "sum");
        assert_eq!(types["inuse_space"]["units"], "bytes");
    }

    assert!(push.iter().all(|request| request.line == "POST /push.v1.PusherService/Push HTTP/1.1"));
    let parts: Vec<Part> = push.iter().map(of_push_api).collect();
    whole("push API", &parts, all);

    assert!(post.iter().all(|request| request.content_type == "application/octet-stream"));
    let parts: Vec<Part> = post.iter().map(|request| of_pprof(&request.body)).collect();
    whole("POST", &parts, all);
}

/// Total size of all files below a directory, without the history, in bytes.
fn size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten().filter(|entry| entry.file_name() != "history");
    // A file may be deleted after it is listed.
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => size(&entry.path()),
        Ok(about) => about.len(),
        Err(_) => 0,
    };
    entries.map(of).sum()
}

#[test]
fn one_that_is_away_for_ever_costs_bounded_disk() {
    let Some(_turn) = turn("one_that_is_away_for_ever_costs_bounded_disk") else { return };
    const MOST: u64 = 16 << 10;
    let place = Reserved::new();
    let url = [format!("http://{}/profiles?from=test", place.address())];
    let dir = tempfile::tempdir().expect("a temporary directory");
    let spool = dir.path().join("spool").display().to_string();
    let options = [("--spool", spool.as_str()), ("--spool-bytes", "16KiB")];
    let mut target = Target::start(&program("growing"), ["100000000", "2000"]);
    let (first, metrics) = recording(&target, &url, "100ms", &options);
    target.go();
    until("the oldest are dropped", || {
        let size = size(dir.path());
        assert!(size <= MOST, "{size}");
        pushed(&metrics(), "dropped_total")[0] >= 10.0
    });
    let outcome = first.stop();
    assert!(outcome.stderr.contains("they wait in the spool"), "{}", outcome.stderr);
    let kept = size(dir.path());
    assert!(kept <= MOST && kept > MOST / 2, "{kept}");

    // The next recording delivers the waiting profiles before its own. Its own must not take their place before that.
    let store = http_store(place);
    let (second, metrics) = recording(&target, &url, "100ms", &options);
    until("they are taken", || pushed(&metrics(), "delivered_total")[0] >= 10.0);
    second.stop().results();
    let taken = store.taken();
    assert!(taken.iter().all(|request| request.line == "POST /profiles?from=test HTTP/1.1"));
    let parts: Vec<Part> = taken.iter().map(|request| of_pprof(&request.body)).collect();
    assert!(parts.windows(2).all(|pair| pair[0].end_ns <= pair[1].begin_ns), "{parts:?}");
    // A profile that was being sent while others were dropped to make space still arrives, without the ones after it.
    let gaps = parts.windows(2).skip(1).filter(|pair| pair[0].end_ns != pair[1].begin_ns).count();
    assert_eq!(gaps, 1, "between the two recordings: {parts:?}");
    assert_eq!(size(dir.path()), 0);
}

#[test]
fn destinations_are_judged_before_anything_is_attached() {
    let Some(_turn) = turn("destinations_are_judged_before_anything_is_attached") else { return };
    let target = Target::start(&program("pairs"), ["1000"]);
    let refused = |options: &[(&str, &str)]| {
        let recorder = Recorder::of(target.pid(), 4096).without_outputs();
        options.iter().fold(recorder, |recorder, (option, value)| recorder.option(option, value)).refused()
    };
    refused(&[("--push", "nonsense")]).check(2, &["supported are otlp+http://HOST:4318"]);
    let url = "http://127.0.0.1:9/x";
    refused(&[("--push", url), ("--push", url)]).check(2, &["given twice"]);
    refused(&[("--push", url), ("--spool", "/proc/nowhere")]).check(1, &["/proc/nowhere"]);
    refused(&[("--push", url), ("--push-every", "0s")]).check(2, &["--push-every"]);
    refused(&[("--spool", "anywhere")]).check(2, &["--push URL", "--listen ADDR"]);
}
