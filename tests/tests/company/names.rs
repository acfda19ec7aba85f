//! Function names: what a stripped program's functions are called, and names from other sources.

use std::ffi::OsStr;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use heapbpf_tests::certificates::{Authority, Certified};
use heapbpf_tests::environment::{heapbpf, skipped, tool, tool_or_install, turn};
use heapbpf_tests::others::Beside;
use heapbpf_tests::output::{self, Profile, Stack};
use heapbpf_tests::program::{copy_of, program, program_with};
use heapbpf_tests::recorder::{Outcome, Recorder};
use heapbpf_tests::scrape;
use heapbpf_tests::target::{self, Lines, Target, until};
use tempfile::TempDir;

/// Records every allocation of a program.
fn record(program: &Path) -> Outcome {
    let mut target = Target::start(program, ["40"]);
    let recording = Recorder::of(target.pid(), 1).start();
    target.run();
    recording.stop()
}

/// Id of a user without privileges.
const NOBODY: u32 = 65534;

/// A running debuginfod (Debian's) for the debug files in a directory.
struct Server {
    _child: Beside,
    address: SocketAddr,
}

impl Server {
    /// Starts the server and waits until it has the file with this build ID.
    fn start(program: &Path, dir: &Path, build_id: &str) -> Self {
        // Another process could take the port first. Then the server ends at once, and the wait below reports it.
        let address = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a free port");
        let mut command = Command::new(program);
        command.args(["-d", ":memory:", "-p", &address.port().to_string(), "-F"]).arg(dir);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("debuginfod runs");
        let server = Self { _child: Beside(child), address };
        let listens = || std::net::TcpStream::connect(address).is_ok();
        target::until("debuginfod listens", listens);
        let request = format!("GET /buildid/{build_id}/debuginfo HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        target::until("debuginfod has read the directory", || scrape::send(address, &request).status == 200);
        server
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// An HTTPS server for the files below a directory.
struct SecureServer {
    _child: Beside,
    address: String,
}

impl SecureServer {
    fn start(openssl: &Path, dir: &Path, certified: &Certified) -> Self {
        let mut command = Command::new(openssl);
        command.args(["s_server", "-WWW", "-accept", "127.0.0.1:0"]).current_dir(dir);
        command.arg("-cert").arg(&certified.certificate).arg("-key").arg(&certified.key);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("openssl runs");
        let lines = Lines::of(child.stdout.take().expect("piped"));
        let address = loop {
            let line = lines.next().expect("openssl serves");
            if let Some(address) = line.strip_prefix("ACCEPT ") {
                break address.to_owned();
            }
        };
        Self { _child: Beside(child), address }
    }

    fn url(&self) -> String {
        format!("https://{}", self.address)
    }
}

/// Runs `--symbolize` with a server as an ordinary user. Returns its messages and the profile.
fn symbolize(profile: &Path, dir: &Path, url: &str) -> (String, Profile) {
    symbolize_trusting(profile, dir, url, None)
}

/// Like [`symbolize`], with a file of authorities to trust instead of the system's.
fn symbolize_trusting(profile: &Path, dir: &Path, url: &str, authorities: Option<&Path>) -> (String, Profile) {
    let named = dir.join("named.json");
    let mut command = Command::new(heapbpf());
    for variable in ["DEBUGINFOD_CACHE_PATH", "http_proxy", "https_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR"] {
        command.env_remove(variable);
    }
    let said = command
        .arg("report")
        .arg("--symbolize")
        .arg(profile)
        .args(["--force", "-o"])
        .arg(&named)
        .env("DEBUGINFOD_URLS", url)
        .env("XDG_CACHE_HOME", dir)
        .envs(authorities.map(|file| ("SSL_CERT_FILE", file)))
        .uid(NOBODY)
        .gid(NOBODY)
        .output()
        .expect("an ordinary user may run it");
    let text = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.status.success(), "{text}");
    (text, output::read(&named))
}

/// A program, the same program stripped, and its symbols and debug information in a separate file.
struct Split {
    dir: TempDir,
    /// Directory of the debug file.
    served: PathBuf,
    /// Directory of an ordinary user.
    users: PathBuf,
    whole: PathBuf,
    stripped: PathBuf,
}

impl Split {
    fn new(objcopy: &Path) -> Self {
        let flags = ["-fomit-frame-pointer", "-g", "-Wl,--build-id"];
        let whole = program_with("inlines", "inlines-whole", &flags);
        let dir = TempDir::with_prefix("heapbpf-test-").expect("a temporary directory");
        let (served, users) = (dir.path().join("served"), dir.path().join("users"));
        for made in [&served, &users] {
            fs::create_dir(made).expect("our own directory");
        }
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("our own directory");
        std::os::unix::fs::chown(&users, Some(NOBODY), Some(NOBODY)).expect("we are root");
        let stripped = dir.path().join("inlines-whole");
        for (option, to) in [("--only-keep-debug", served.join("x.debug")), ("--strip-all", stripped.clone())] {
            let status = Command::new(objcopy).arg(option).arg(&whole).arg(to).status().expect("objcopy runs");
            assert!(status.success());
        }
        Self { dir, served, users, whole, stripped }
    }
}

fn is_inlined(profile: &Profile) -> bool {
    profile.stacks.iter().flat_map(|it| &it.frames).any(|frame| frame.inlined)
}

fn build_id_of_program(profile: &Profile) -> String {
    let frames = profile.stacks.iter().flat_map(|it| &it.frames);
    let of_program = frames.filter(|it| it.module.as_ref().is_some_and(|path| path.ends_with("/inlines-whole")));
    of_program.filter_map(|it| it.build_id.clone()).next().expect("the program has one")
}

/// Copies a profile to where an ordinary user may read it.
fn given_to_users(outcome: &Outcome, file: &str, users: &Path) -> PathBuf {
    let given = users.join(file);
    fs::copy(outcome.file(file), &given).expect("our own directory");
    fs::set_permissions(&given, PermissionsExt::from_mode(0o644)).expect("our own file");
    given
}

/// Only a server has the debug file of a stripped program. With the server, a recording has names, files, lines and
/// inlined calls as if the program had not been stripped. So has a profile that an ordinary user symbolizes later.
#[test]
fn a_server_has_the_debug_file() {
    let case = "a_server_has_the_debug_file";
    let Some(_turn) = turn(case) else { return };
    let (Some(debuginfod), Some(objcopy)) = (tool("debuginfod"), tool("objcopy")) else {
        return skipped(case, "no debuginfod or no objcopy (Debian: debuginfod, binutils)");
    };
    let Split { dir, served, users, whole, stripped } = Split::new(&objcopy);
    let (expected, _) = record(&whole).results();
    assert!(is_inlined(&expected));
    let outcome = record(&stripped);
    let build_id = build_id_of_program(&outcome.results().0);
    let server = Server::start(&debuginfod, &served, &build_id);

    let cache = dir.path().join("cache");
    let mut target = Target::start(&stripped, ["40"]);
    let recorder = Recorder::of(target.pid(), 1).option("--debuginfod", &server.url());
    let (online, ..) = recorder.variable("DEBUGINFOD_CACHE_PATH", cache.as_os_str()).results_of(&mut target);
    assert_eq!(online.shown(), expected.shown());
    assert!(cache.join(&build_id).join("debuginfo").is_file());

    for file in ["profile.json", "profile.pb.gz"] {
        let recorded = given_to_users(&outcome, file, &users);
        let (said, later) = symbolize(&recorded, &users, &server.url());
        assert!(later.shown().keys().eq(expected.shown().keys()), "{file}: {said}");
    }
    assert!(users.join("debuginfod_client").join(&build_id).join("debuginfo").is_file());
    let url = server.url();
    drop(server);
    // Without a cached file and a server, the reason says so.
    fs::remove_dir_all(users.join("debuginfod_client")).expect("our own directory");
    let (said, later) = symbolize(&users.join("profile.json"), &users, &url);
    assert!(said.contains(&format!("inlines-whole is stripped: install its debug symbols ({url}: ")), "{said}");
    assert!(!is_inlined(&later));
}

/// A server's certificate must be for the server's own address, and from an authority that the user's system or
/// `SSL_CERT_FILE` knows. Otherwise nothing is fetched, and the profile says why.
#[test]
fn certificates_of_servers_are_verified() {
    let case = "certificates_of_servers_are_verified";
    let Some(_turn) = turn(case) else { return };
    let (Some(openssl), Some(objcopy)) = (tool_or_install("openssl", "openssl"), tool("objcopy")) else {
        return skipped(case, "no openssl or no objcopy (Debian: openssl, binutils)");
    };
    let Split { dir, served, users, whole, stripped } = Split::new(&objcopy);
    let (expected, _) = record(&whole).results();
    let outcome = record(&stripped);
    let recorded = given_to_users(&outcome, "profile.json", &users);
    let build_id = build_id_of_program(&outcome.results().0);
    let place = served.join("buildid").join(&build_id);
    fs::create_dir_all(&place).expect("our own directory");
    fs::rename(served.join("x.debug"), place.join("debuginfo")).expect("our own directory");
    let ours = Authority::new(&openssl, dir.path(), "ours");
    let theirs = Authority::new(&openssl, dir.path(), "theirs");
    for authority in [&ours, &theirs] {
        fs::set_permissions(&authority.own.certificate, PermissionsExt::from_mode(0o644)).expect("our own file");
    }
    let known = Some(ours.own.certificate.as_path());

    let elsewhere = SecureServer::start(&openssl, &served, &ours.certify("elsewhere", "IP:127.0.0.2"));
    let server = SecureServer::start(&openssl, &served, &ours.certify("here", "IP:127.0.0.1"));
    let refused = [
        (&server, None, "no authority"),
        (&server, Some(theirs.own.certificate.as_path()), "no authority"),
        (&elsewhere, known, "not valid for"),
    ];
    for (server, authorities, part) in refused {
        let (said, later) = symbolize_trusting(&recorded, &users, &server.url(), authorities);
        println!("{said}");
        assert!(said.contains(&format!("({}: its certificate cannot be trusted: ", server.url())), "{said}");
        assert!(said.contains(part), "{part}: {said}");
        assert!(!is_inlined(&later));
        assert!(!users.join("debuginfod_client").join(&build_id).join("debuginfo").exists());
    }
    let (said, later) = symbolize_trusting(&recorded, &users, &server.url(), known);
    assert_eq!(later.shown(), expected.shown(), "{said}");

    // Now while recording, with fewer privileges.
    let record_trusting = |authorities: &Authority, cache: &str| {
        let mut target = Target::start(&stripped, ["40"]);
        let recorder = Recorder::of(target.pid(), 1).option("--debuginfod", &server.url());
        let recorder = recorder.variable("DEBUGINFOD_CACHE_PATH", dir.path().join(cache).as_os_str());
        let recording = recorder.variable("SSL_CERT_FILE", authorities.own.certificate.as_os_str()).start();
        target.run();
        recording.stop().results().0
    };
    assert_eq!(record_trusting(&ours, "trusting").shown(), expected.shown());
    assert!(!is_inlined(&record_trusting(&theirs, "distrusting")));
}

/// A debug file server that accepts a request and never answers delays everything that has names. Totals have none, so
/// they do not wait. Profiles do not pile up for clients that have left.
#[test]
fn metrics_do_not_wait_for_names_nor_do_profiles_pile_up() {
    let case = "metrics_do_not_wait_for_names_nor_do_profiles_pile_up";
    let Some(_turn) = turn(case) else { return };
    let Some(objcopy) = tool("objcopy") else { return skipped(case, "no objcopy (Debian: binutils)") };
    let Split { dir, stripped, .. } = Split::new(&objcopy);
    let silent = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let url = format!("http://{}", silent.local_addr().expect("it has one"));
    let mut target = Target::start(&stripped, ["40"]);
    let recorder = Recorder::of(target.pid(), 1).option("--debuginfod", &url);
    // Its silence is borne until this test is over.
    let recorder = recorder.variable("DEBUGINFOD_TIMEOUT", OsStr::new("600"));
    let (recording, address) = recorder.variable("DEBUGINFOD_CACHE_PATH", dir.path().join("cache").as_os_str()).serve();
    target.run();
    // The client leaves if it gets no answer soon.
    let status = || {
        let mut client = TcpStream::connect(address).ok()?;
        client.set_read_timeout(Some(Duration::from_millis(200))).ok()?;
        client.write_all(format!("GET /debug/pprof/heap HTTP/1.1\r\nHost: {address}\r\n\r\n").as_bytes()).ok()?;
        let mut answer = [0; 4096];
        let bytes = client.read(&mut answer).ok()?;
        Some(String::from_utf8_lossy(&answer[..bytes]).into_owned())
    };
    assert_eq!(status(), None, "names are there already");
    silent.set_nonblocking(true).expect("a flag");
    let mut asked = None;
    target::until("a debug file is asked for", || {
        asked = asked.take().or_else(|| silent.accept().ok());
        asked.is_some()
    });
    let total = scrape::get(address, "/metrics").metric("heapbpf_alloc_bytes_total").expect("is there");
    assert!(total > 0.0, "{total}");
    let (mut asked, _) = asked.expect("it was");
    asked.set_nonblocking(true).expect("a flag");
    let mut request = Vec::new();
    let waits = asked.read_to_end(&mut request).is_err_and(|why| why.kind() == std::io::ErrorKind::WouldBlock);
    assert!(waits, "names were given up before the totals came: {}", String::from_utf8_lossy(&request));
    target::until("profiles are refused", || {
        status().is_some_and(|answer| answer.starts_with("HTTP/1.1 503") && answer.contains("retry-after: "))
    });
    assert_eq!(scrape::get(address, "/metrics").status, 200);
    drop((asked, silent));
    recording.stop().results();
}

/// The program has ended when its file is overwritten in place by another program. Its allocations get no names from
/// the new file, and the next program gets its own names.
#[test]
fn a_file_that_is_overwritten_names_nothing_of_the_old_program() {
    let Some(_turn) = turn("a_file_that_is_overwritten_names_nothing_of_the_old_program") else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = copy_of(&program("mix"), dir.path(), "heapbpf-over");
    let mut first = Target::start(&file, ["100"]);
    let recording = Recorder::new().option("--comm", "heapbpf-over").interval(1).start();
    let old = first.pid();
    first.run();
    first.end();
    std::fs::copy(program("lifetimes"), &file).expect("nobody runs it");
    let snapshot = recording.dir().join("profile.0001.json");
    recording.signal(libc::SIGUSR1);
    until("a snapshot", || snapshot.exists());
    let (profile, _) = recording.stop().results();
    let own = |stack: &&Stack| stack.pid == old;
    let frames = profile.stacks.iter().filter(own).flat_map(|stack| &stack.frames);
    let frames: Vec<_> =
        frames.filter(|frame| frame.module.as_deref().is_some_and(|it| it.ends_with("heapbpf-over"))).collect();
    assert!(!frames.is_empty(), "{profile:?}");
    for frame in frames {
        assert_eq!(frame.function, None, "{frame:?}");
        assert!(frame.reason.as_deref().is_some_and(|why| why.contains("overwritten")), "{frame:?}");
    }
}
