//! Profiles of many hosts in SQL: the statements of docs/fleet.md give the same in DuckDB and Spark, and what
//! `heapbpf merge` and `heapbpf diff` give.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use heapbpf_tests::environment::{heapbpf, programs_dir, skipped, tool, turn};
use heapbpf_tests::program::program;
use heapbpf_tests::recorder::Recorder;
use heapbpf_tests::target::Target;

const HOSTS: usize = 25;
/// Twice as much is in use in the second profile of each host whose number is a multiple of this.
const GROWS: usize = 5;
/// Hosts that are made up from one profile, and their rows on each of two days. `HEAPBPF_FLEET_HOSTS` asks for more.
const MADE_UP: &str = "50";
const ROWS: &str = "10000";

/// `compare DOCS PROFILES HEAPBPF`, or `make PROFILES BEFORE AFTER HOSTS ROWS` and then `compare DOCS PROFILES`. Prints
/// the hosts on which `site_00` has grown by more than 1 MB, and what each engine took. It starts itself once for each.
/// HEAPBPF is the program whose merge and diff give what the statements must.
const SCRIPT: &str = r#"
import glob, json, math, os, re, subprocess, sys, tempfile, time
SITE = "site_00"

def statements(docs, profiles):
    section = open(docs).read().split("\n## In SQL\n")[1].split("\n## ")[0]
    blocks = [block.strip().rstrip(";") for block in re.findall(r"```sql\n(.*?)```", section, re.S)]
    views = [view.replace("'profiles/", f"'{profiles}/").replace("`profiles`", f"`{profiles}`") for view in blocks[:2]]
    return views, [text.replace("load_session", SITE) for text in blocks[2:]]

def peak_mib(pid):
    return int(re.search(r"VmHWM:\s+(\d+)", open(f"/proc/{pid}/status").read())[1]) >> 10

def duckdb_engine():
    import duckdb
    base = duckdb.connect()
    return (lambda text: base.execute(text).fetchall()), "self"

def spark_engine():
    from pyspark.sql import SparkSession
    scratch = tempfile.mkdtemp()
    options = {"spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.local.dir": scratch,
               "spark.sql.warehouse.dir": scratch, "spark.sql.shuffle.partitions": "8", "spark.driver.memory": "2g"}
    builder = SparkSession.builder.master("local[2]")
    for key, value in options.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    return (lambda text: session.sql(text).collect()), session.sparkContext._gateway.proc.pid

def answer(engine, docs, profiles):
    views, texts = statements(docs, profiles)
    ask, pid = (duckdb_engine, spark_engine)[engine]()
    ask(views[engine])
    rows, seconds = [], []
    for text in texts:
        begun = time.monotonic()
        rows.append([list(row) for row in ask(text)])
        seconds.append(round(time.monotonic() - begun, 2))
    print(json.dumps({"rows": rows, "seconds": seconds, "peak_mib": peak_mib(pid)}))

def equal(a, b):
    return a == b or isinstance(a, float) and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)

def check(what, one, other):
    one, other = [sorted(rows, key=lambda row: str(row[0])) for rows in (one, other)]
    assert len(one) == len(other) > 0, (what, one, other)
    for a, b in zip(one, other):
        assert len(a) == len(b) and all(map(equal, a, b)), (what, a, b)

def sums(ask, file):
    return ask(f"""SELECT frames[1], sum(inuse_bytes), sum(inuse_bytes_var), sum(inuse_samples)
        FROM '{file}' GROUP BY 1 ORDER BY 2 DESC""")

def with_heapbpf(heapbpf, profiles):
    ask, _ = duckdb_engine()
    merged = tempfile.mkdtemp() + "/merged.parquet"
    merge = lambda files: subprocess.run([heapbpf, "merge", *files, "-o", merged, "--force"], check=True)
    moment = lambda file: ask(f"SELECT epoch_us(max(time)) / 1e6 FROM '{file}'")[0][0]
    hosts = [[f"{profiles}/day={day}/{file}" for day in ("2026-11-24", "2026-11-30")]
             for file in sorted(map(os.path.basename, glob.glob(f"{profiles}/day=2026-11-24/*")))]
    grown, fastest = [], {}
    for first, last in hosts:
        diff = [heapbpf, "diff", "--json", "--value", "inuse_space", first, last]
        said = subprocess.run(diff, stdout=subprocess.PIPE, check=True)
        growths = {}
        for stack in json.loads(said.stdout)["stacks"]:
            site = stack["frames"][0]["function"]
            growths[site] = growths.get(site, 0) + stack["change"]["estimate"]
        merge((first, last))
        seconds = moment(last) - moment(first)
        for site, _, variance, _ in sums(ask, merged):
            growth = growths.get(site, 0)
            if site == SITE and growth > 3 * math.sqrt(variance):
                grown.append([os.path.basename(first).split(".")[0], growth, 1.96 * math.sqrt(variance)])
            of = fastest.setdefault(site, [site, 0, 0, 0])
            of[1:] = of[1] + growth / seconds, of[2] + variance / seconds ** 2, of[3] + 1
    merge([last for _, last in hosts])
    fastest = sorted(fastest.values(), key=lambda of: -of[1])
    with_bars = lambda rows: [[site, value, 1.96 * math.sqrt(variance), n] for site, value, variance, n in rows[:20]]
    return with_bars(sums(ask, merged)), grown, with_bars(fastest)

def compare(docs, profiles, heapbpf=None):
    answers = []
    for engine, name in enumerate(("DuckDB", "Spark")):
        command = [sys.executable, __file__, "answer", str(engine), docs, profiles]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        answers.append(json.loads(said.splitlines()[-1]))
        print(f"{name}: {answers[-1]['seconds']} s, {answers[-1]['peak_mib']} MiB")
    rows = answers[0]["rows"]
    assert len(rows) == 3
    for number in range(3):
        check(number, rows[number], answers[1]["rows"][number])
    for number, expected in enumerate(with_heapbpf(heapbpf, profiles) if heapbpf else ()):
        check(f"with heapbpf, {number}", rows[number], expected)
    print(json.dumps(sorted(host for host, growth, _ in rows[1] if growth > 1e6)))

def make(profiles, before, after, hosts, rows):
    ask, _ = duckdb_engine()
    for day, seed, factor in (("2026-11-24", before, 1), ("2026-11-30", after, 2)):
        os.makedirs(f"{profiles}/day={day}")
        for host in range(int(hosts)):
            ask(f"""COPY (SELECT * EXCLUDE (k) REPLACE ('host-{host:03}' AS host,
                list_prepend(CASE WHEN k % 997 = 0 THEN '{SITE}' ELSE format('f{{}}', k % 997) END, frames) AS frames,
                inuse_bytes * {factor} * (1 + k / 1e4 + {host} / 1e6) AS inuse_bytes)
                FROM (SELECT * FROM '{seed}' WHERE frames[1] = '{SITE}' LIMIT 1), range({rows}) AS numbers(k))
                TO '{profiles}/day={day}/host-{host:03}.parquet' (FORMAT parquet)""")

mode, *words = sys.argv[1:]
if mode == "answer":
    answer(int(words[0]), *words[1:])
else:
    {"compare": compare, "make": make}[mode](*words)
"#;

/// Runs the script with these arguments. Returns what it printed.
fn run(python: &OsStr, script: &Path, arguments: &[&OsStr]) -> String {
    let output = Command::new(python).arg(script).args(arguments).output().expect("it ran before");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{text}");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Records a program that keeps a tenth of so many blocks, on a host of this name.
fn record(host: &str, blocks: usize, file: &Path) {
    let mut target = Target::start(&program("growing"), [blocks.to_string()]);
    let named = ["unshare", "--uts", "sh", "-c", r#"hostname "$0" && exec "$@""#, host].map(OsStr::new);
    let recorder = Recorder::of(target.pid(), 1 << 10).through(&named).without_outputs();
    let recording = recorder.option("-o", "host.parquet").start();
    target.run();
    std::fs::copy(recording.stop().file("host.parquet"), file).expect("it was written");
}

#[test]
fn the_statements_for_fleets_give_what_merging_gives() {
    let case = "the_statements_for_fleets_give_what_merging_gives";
    let Some(_turn) = turn(case) else { return };
    let python = std::env::var_os("HEAPBPF_TEST_PYTHON").unwrap_or_else(|| "python3".into());
    let modules = Command::new(&python).args(["-c", "import duckdb, pyspark"]).output();
    if tool("java").is_none() || !modules.is_ok_and(|output| output.status.success()) {
        let why = format!("there is no java, or {} has no duckdb or no pyspark", python.to_string_lossy());
        return skipped(case, &why);
    }
    let dir = tempfile::tempdir().expect("a directory");
    let (script, docs) = (dir.path().join("fleet.py"), programs_dir().join("../../docs/fleet.md"));
    std::fs::write(&script, SCRIPT).expect("written");
    let profiles = dir.path().join("profiles");
    let days = ["2026-11-24", "2026-11-30"].map(|day| profiles.join(format!("day={day}")));
    days.iter().for_each(|day| std::fs::create_dir_all(day).expect("a directory"));
    let hosts: Vec<String> = (0..HOSTS).map(|host| format!("host-{host:03}")).collect();
    let file = |day: &Path, host: &str| day.join(format!("{host}.parquet"));
    for (number, host) in hosts.iter().enumerate() {
        record(host, 20_000, &file(&days[0], host));
        record(host, if number % GROWS == 0 { 40_000 } else { 20_000 }, &file(&days[1], host));
    }
    let said = run(&python, &script, &["compare".as_ref(), docs.as_ref(), profiles.as_ref(), heapbpf().as_ref()]);
    let grown: Vec<&String> = hosts.iter().step_by(GROWS).collect();
    assert!(said.ends_with(&format!("{grown:?}\n")), "{grown:?}");

    let count = std::env::var("HEAPBPF_FLEET_HOSTS").unwrap_or_else(|_| MADE_UP.to_owned());
    let [before, after] = [0, 1].map(|day| file(&days[day], &hosts[1]));
    let made = dir.path().join("made");
    let [make, hosts, rows] = ["make", &count, ROWS].map(OsStr::new);
    run(&python, &script, &[make, made.as_ref(), before.as_ref(), after.as_ref(), hosts, rows]);
    let said = run(&python, &script, &["compare".as_ref(), docs.as_ref(), made.as_ref()]);
    let hosts = said.matches("host-").count();
    assert_eq!(hosts.to_string(), count, "all grow");
}
