//! Formats checked with the programs that read them. A test is reported as skipped if its program is not installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::model::Profile;
use crate::testing;
use crate::value::Value;
use heapbpf_testing::skipped;

/// A temporary directory with the profile in the given format, and the path of the file.
fn written(profile: &Profile, file: &str, format: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let path = dir.path().join(file);
    write_file(profile, &path, format);
    (dir, path)
}

fn write_file(profile: &Profile, path: &Path, format: &str) {
    std::fs::write(path, testing::written(profile, format)).expect("written");
}

/// Whether the program is installed; otherwise reports the test as skipped.
fn installed(program: &str, argument: &str, package: &str) -> bool {
    let found = Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success());
    if !found {
        skipped(format_args!("{program} is not installed (Debian package {package})"));
    }
    found
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("started");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {error}");
    out.into_owned()
}

fn go_pprof(arguments: &[&str], file: &Path) -> String {
    // Do not look up binaries: the paths in the profile are not from this host.
    let mut command = Command::new("go");
    run(command.args(["tool", "pprof", "-symbolize=none"]).args(arguments).arg(file).env("PPROF_BINARY_PATH", "/"))
}

#[test]
fn go_tool_pprof_reads_pprof() {
    if !installed("go", "version", "golang-go") {
        return;
    }
    let profile = testing::small();
    let (_dir, file) = written(&profile, "x.pb.gz", "pprof");
    let top = go_pprof(&["-top", "-unit=B", "-nodecount=50"], &file);
    print!("{top}");
    assert!(top.contains("Type: inuse_space"), "{top}");
    let total = profile.rows.iter().map(|row| row.inuse.bytes).sum::<f64>().round();
    assert!(top.contains(&format!("100% of {total}B total")) || top.contains(&format!("{total}B")), "{top}");
    for function in ["grow", "parse_value", "handle", "main"] {
        assert!(top.lines().any(|line| line.contains(function)), "{function} in {top}");
    }
    let raw = go_pprof(&["-raw"], &file);
    print!("{raw}");
    for expected in [
        "PeriodType: space bytes",
        "Period: 524288",
        "alloc_objects/count alloc_space/bytes inuse_objects/count inuse_space/bytes[dflt]",
        "/srv/lib/libjson.so 0102030405060708",
        "interval=524288",
        "pid:[4242",
        "thread:[worker]",
    ] {
        assert!(raw.contains(expected), "{expected} in {raw}");
    }
    let tags = go_pprof(&["-tags", "-unit=B"], &file);
    print!("{tags}");
    assert!(tags.contains("4242") && tags.contains("server"), "{tags}");
    let focused = go_pprof(&["-top", "-tagfocus=pid=4300:4300", "-unit=B", "-sample_index=alloc_space"], &file);
    print!("{focused}");
}

/// pprof reads back what it wrote after reading our file: the same stacks, values, labels and mappings.
#[test]
fn go_tool_pprof_round_trip_changes_nothing() {
    if !installed("go", "version", "golang-go") {
        return;
    }
    let (dir, file) = written(&testing::small(), "x.pb.gz", "pprof");
    let again = dir.path().join("again.pb.gz");
    go_pprof(&["-proto", &format!("-output={}", again.display())], &file);
    assert_eq!(go_pprof(&["-raw"], &file), go_pprof(&["-raw"], &again));
}

#[test]
fn jeprof_prints_our_totals() {
    if !installed("jeprof", "--version", "libjemalloc-dev") {
        return;
    }
    let profile = testing::small().only_process(0);
    let (_dir, file) = written(&profile, "x.heap", "heap_v2");
    for (value, flag) in
        Value::COLUMNS.into_iter().zip(["alloc_objects", "alloc_space", "inuse_objects", "inuse_space"])
    {
        let mut jeprof = Command::new("jeprof");
        let arguments = ["--text", "--show_bytes", &format!("--{flag}"), "/bin/true"];
        let text = run(jeprof.args(arguments).arg(&file).stderr(std::process::Stdio::null()));
        let total = text.split_whitespace().skip_while(|word| *word != "Total:").nth(1).expect("a total");
        let total: f64 = total.parse().expect("a number");
        let ours: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
        assert!((total - ours).abs() <= 2.0, "{flag}: {total}, ours {ours}: {text}");
    }
}

/// Viewers drop stacks without frames, so such stacks get a frame, and the totals agree.
#[test]
fn a_stack_without_frames_is_in_every_total() {
    let mut profile = testing::small().only_process(0);
    profile.rows[1].key.stack = Default::default();
    let total = profile.rows.iter().map(|row| row.inuse.bytes).sum::<f64>();
    let without = total - profile.rows[1].inuse.bytes;
    assert!(without < 0.99 * total, "the row matters");
    if installed("go", "version", "golang-go") {
        let (_dir, file) = written(&profile, "x.pb.gz", "pprof");
        let top = go_pprof(&["-top", "-unit=B", "-nodecount=50"], &file);
        let flat = |line: &str| line.split_whitespace().next()?.strip_suffix('B')?.parse::<f64>().ok();
        let sum: f64 = top.lines().skip_while(|line| !line.contains("flat%")).skip(1).filter_map(flat).sum();
        assert!((sum - total).abs() <= 2.0 && top.contains("[no stack]"), "{sum}, ours {total}: {top}");
    }
    if installed("jeprof", "--version", "libjemalloc-dev") {
        let (_dir, file) = written(&profile, "x.heap", "heap_v2");
        let mut jeprof = Command::new("jeprof");
        jeprof.args(["--text", "--show_bytes", "--inuse_space", "/bin/true"]);
        let text = run(jeprof.arg(&file).stderr(std::process::Stdio::null()));
        let words = text.split_whitespace().skip_while(|word| *word != "Total:");
        let said: f64 = words.clone().nth(1).and_then(|word| word.parse().ok()).expect("a total");
        assert!((said - total).abs() <= 2.0, "{said}, ours {total}: {text}");
    }
    let (_dir, file) = written(&profile, "x.folded", "folded");
    let folded = std::fs::read_to_string(file).expect("text");
    let sum: f64 = folded.lines().filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert!((sum - total).abs() <= 1.0 && folded.contains("[no stack]"), "{sum}, ours {total}: {folded}");
    let (_dir, file) = written(&profile, "x.perfetto-trace", "perfetto");
    assert!(std::fs::read(file).expect("bytes").windows(10).any(|bytes| bytes == b"[no stack]"));
}

/// Runs a Python script with the path of the file as its argument, if the module is installed.
fn python(module: &str, script: &str, file: &Path) -> Option<String> {
    // A virtual environment's interpreter can be given, because Debian packages none of these modules.
    let python = std::env::var("HEAPBPF_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python).args(["-c", &format!("import {module}")]).output();
    if !found.is_ok_and(|output| output.status.success()) {
        skipped(format_args!(
            "{python} has no module {module} (pip install {module}; HEAPBPF_TEST_PYTHON names another)"
        ));
        return None;
    }
    Some(run(Command::new(&python).args(["-c", script]).arg(file)))
}

#[test]
fn perfettos_own_schema_decodes_the_trace() {
    let profile = testing::small();
    let (_dir, file) = written(&profile, "x.perfetto-trace", "perfetto");
    let script = r#"
import sys
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as p
trace = p.Trace()
trace.ParseFromString(open(sys.argv[1], "rb").read())
def unknown(message):
    from google.protobuf import unknown_fields
    assert len(unknown_fields.UnknownFieldSet(message)) == 0, message
    for field, value in message.ListFields():
        if field.message_type:
            for item in (value if field.is_repeated else [value]):
                unknown(item)
unknown(trace)
assert {packet.trusted_packet_sequence_id for packet in trace.packet} == {1}
names, frames, stacks, mappings = {}, {}, {}, {}
for packet in trace.packet:
    names.update({s.iid: s.str.decode() for s in packet.interned_data.function_names})
    frames.update({f.iid: f for f in packet.interned_data.frames})
    stacks.update({c.iid: c.frame_ids for c in packet.interned_data.callstacks})
    mappings.update({m.iid: m for m in packet.interned_data.mappings})
clocks = {c.clock_id for packet in trace.packet for c in packet.clock_snapshot.clocks}
assert {p.BUILTIN_CLOCK_REALTIME, p.BUILTIN_CLOCK_BOOTTIME, p.BUILTIN_CLOCK_MONOTONIC_COARSE} <= clocks
for packet in trace.packet:
    for dump in packet.profile_packet.process_dumps:
        for sample in dump.samples:
            assert 0 <= sample.self_freed <= sample.self_allocated
            chain = [names[frames[f].function_name_id] for f in stacks[sample.callstack_id]]
            assert all(frames[f].mapping_id in mappings for f in stacks[sample.callstack_id])
            print(dump.pid, ";".join(chain), sample.self_allocated - sample.self_freed)
"#;
    let Some(text) = python("perfetto", script, &file) else { return };
    let expected = profile.rows[..3].iter().map(|row| row.inuse.bytes).sum::<f64>();
    let line = text.lines().find(|line| line.starts_with("4242 main;handle(Request const&);parse_value;"));
    let value: f64 = line.and_then(|line| line.rsplit(' ').next()).expect("the stack").parse().expect("a number");
    assert!((value - expected).abs() <= 1.0, "{text}");
}

#[test]
fn duckdb_adds_up_parquet_files_of_several_hosts() {
    let mut profile = testing::small();
    let (dir, file) = written(&profile, "host1.parquet", "parquet");
    profile.header.host = "host2".into();
    write_file(&profile, &dir.path().join("host2.parquet"), "parquet");
    let script = r#"
import sys, os, duckdb
directory = os.path.dirname(sys.argv[1])
query = f"""SELECT count(DISTINCT host), sum(alloc_bytes), sum(alloc_bytes_var), sum(inuse_objects), min(frames[1]), sum(samples)::BIGINT
            FROM '{directory}/*.parquet'"""
print("|".join(map(str, duckdb.sql(query).fetchall()[0])))
print(duckdb.sql(f"SELECT typeof(time), typeof(frames), typeof(pid) FROM '{sys.argv[1]}' LIMIT 1").fetchall()[0])
"#;
    let Some(text) = python("duckdb", script, &file) else { return };
    let row: Vec<&str> = text.lines().next().expect("a row").split('|').collect();
    let sum = |of: fn(&crate::model::Row) -> f64| 2.0 * profile.rows.iter().map(of).sum::<f64>();
    let expected = [2.0, sum(|row| row.alloc.bytes), sum(|row| row.alloc.bytes_variance), sum(|row| row.inuse.objects)];
    for (found, expected) in row.iter().zip(expected) {
        let found: f64 = found.parse().expect("a number");
        assert!((found / expected - 1.0).abs() < 1e-12, "{found}, expected {expected}");
    }
    assert_eq!(row[4..], ["[libjson.so+0x4000]", "120"]);
    assert!(text.contains("('TIMESTAMP WITH TIME ZONE', 'VARCHAR[]', 'BIGINT')"), "{text}");
}

#[test]
fn a_browser_without_a_network_shows_the_page() {
    if !installed("chromium", "--version", "chromium") {
        return;
    }
    let profile = testing::small();
    let (dir, file) = written(&profile, "x.html", "html");
    // The browser does not wait for its own threads, which decompress the data.
    let dom = || {
        run(Command::new("chromium")
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--dump-dom",
            ])
            .arg("--virtual-time-budget=5000")
            .arg(format!("--user-data-dir={}", dir.path().join("browser").display()))
            .arg(format!("file://{}", file.display()))
            .env("HOME", dir.path()))
    };
    let total: f64 = profile.rows.iter().map(|row| row.inuse.bytes).sum();
    let shown = format!("<b>{}</b> in use</p>", crate::units::bytes(total));
    let dom = (0..10).map(|_| dom()).find(|dom| dom.contains(&shown)).expect("the page has the total");
    assert!(dom.contains("<option value=\"inuse_space\">bytes in use</option>"));
}

/// Does what `speedscope FILE` does, but in a headless browser.
#[test]
fn speedscope_opens_the_file() {
    let Some(release) = std::env::var_os("HEAPBPF_TEST_SPEEDSCOPE").map(PathBuf::from) else {
        skipped("HEAPBPF_TEST_SPEEDSCOPE does not name the directory dist/release of npm's package speedscope");
        return;
    };
    if !installed("chromium", "--version", "chromium") {
        return;
    }
    let (dir, file) = written(&testing::small(), "x.speedscope.json", "speedscope");
    let text = std::fs::read_to_string(&file).expect("written");
    let argument = serde_json::to_string(&base64(text.as_bytes())).expect("text");
    let script = dir.path().join("load.js");
    std::fs::write(&script, format!("speedscope.loadFileFromBase64('x.speedscope.json', {argument})"))
        .expect("written");
    let dom = run(Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--allow-file-access-from-files", "--enable-unsafe-swiftshader"])
        .args(["--virtual-time-budget=5000", "--dump-dom"])
        .arg(format!("--user-data-dir={}", dir.path().join("browser").display()))
        .arg(format!("file://{}/index.html#localProfilePath={}", release.display(), script.display()))
        .env("HOME", dir.path()));
    // The title bar shows the active profile, one of four.
    assert!(dom.contains("<span>bytes in use <span") && dom.contains("(4/4)"), "{dom}");
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, &byte| bits << 8 | u32::from(byte)) << (8 * (3 - group.len()));
        for digit in 0..4 {
            let index = (bits >> (18 - 6 * digit)) as usize % 64;
            text.push(if digit <= group.len() { DIGITS[index] as char } else { '=' });
        }
    }
    text
}
