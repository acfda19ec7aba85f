//! Tests of the client with well-behaved servers and with hostile ones.

use std::ffi::OsString;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use heapbpf_profile::units::hex;
use tempfile::TempDir;

use super::client::Client;
use super::settings::{self, Limits, Settings, parse_url};
use crate::tests::compile;

/// A file, its build ID, and a cache.
struct Setting {
    dir: TempDir,
    file: Vec<u8>,
    id: Vec<u8>,
}

impl Setting {
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().expect("temporary directory");
        let file = fs::read(compile(dir.path())?).expect("readable");
        let id = heapbpf_elf::build_id::of(&file).expect("asked for");
        Some(Self { dir, file, id })
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// A client that waits longer than any server here takes on a busy machine.
    fn client(&self, servers: &[&Server]) -> Client {
        self.client_within(servers, [Duration::from_secs(60); 2])
    }

    /// A client that waits so long for a byte, and for a file.
    fn client_within(&self, servers: &[&Server], [silence, file_time]: [Duration; 2]) -> Client {
        let servers = servers.iter().map(|server| server.url.clone()).collect();
        let limits = Limits { file_bytes: 1 << 20, silence, file_time, ..Limits::default() };
        Client::new(Settings { servers, cache: Some(self.cache()), limits })
    }

    /// Sizes of the files in the cache.
    fn kept(&self) -> Vec<u64> {
        let dirs = fs::read_dir(self.cache()).into_iter().flatten().flatten().filter(|it| it.path().is_dir());
        let files = dirs.flat_map(|dir| fs::read_dir(dir.path()).expect("readable").flatten());
        files.map(|file| file.metadata().expect("there").len()).collect()
    }

    fn place(&self) -> PathBuf {
        self.cache().join(hex(&self.id)).join("debuginfo")
    }
}

/// A server that answers every request in the same way. Its thread ends with the test program.
struct Server {
    url: String,
    requests: Arc<AtomicUsize>,
}

impl Server {
    fn start(answer: impl Fn(&mut TcpStream) -> std::io::Result<()> + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let requests = Arc::<AtomicUsize>::default();
        let counted = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut stream = stream;
                let mut asked = Vec::new();
                let mut byte = [0];
                while !asked.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|length| length == 1) {
                    asked.push(byte[0]);
                }
                counted.fetch_add(1, Ordering::SeqCst);
                let _ = answer(&mut stream);
            }
        });
        Self { url, requests }
    }

    fn saying(head: &str, body: Vec<u8>) -> Self {
        let head = format!("HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len());
        Self::start(move |stream| {
            stream.write_all(head.as_bytes())?;
            stream.write_all(&body)
        })
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn read(mut file: &fs::File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).expect("readable");
    bytes
}

#[test]
fn a_file_is_downloaded_once_and_kept_where_elfutils_looks_for_it() {
    let Some(setting) = Setting::new() else { return };
    let none = Server::saying("404 Not Found", vec![]);
    let good = Server::saying("200 OK", setting.file.clone());
    let mut client = setting.client(&[&none, &good]);
    assert!(read(&client.find(&setting.id).expect("the second has it")) == setting.file);
    assert!(fs::read(setting.place()).expect("kept") == setting.file);
    // Another client finds it without asking again.
    assert!(read(&setting.client(&[&none, &good]).find(&setting.id).expect("it is kept")) == setting.file);
    assert_eq!((none.requests(), good.requests()), (1, 1));
    // Cached files are verified: a file of another build is replaced.
    fs::remove_file(setting.place()).expect("ours");
    fs::write(setting.place(), b"\x7fELF of another build").expect("writes");
    assert!(read(&client.find(&setting.id).expect("asked again")) == setting.file);
    assert_eq!((good.requests(), setting.kept()), (2, vec![setting.file.len() as u64]));
    for id in [&[][..], &[1; 65]] {
        assert!(client.find(id).is_err());
    }
}

#[test]
fn negative_answers_are_kept_for_a_while() {
    let Some(setting) = Setting::new() else { return };
    let none = Server::saying("404 Not Found", vec![]);
    let why = setting.client(&[&none]).find(&setting.id).expect_err("it has none");
    assert_eq!(why, format!("{} has no debug file for it", none.url));
    assert_eq!((setting.kept(), none.requests()), (vec![0], 1));
    assert!(setting.client(&[&none]).find(&setting.id).is_err());
    assert_eq!(none.requests(), 1);
    // After `cache_miss_s`, the servers are asked again.
    let file = fs::File::options().read(true).open(setting.place()).expect("kept");
    file.set_modified(SystemTime::now() - Duration::from_secs(601)).expect("our own file");
    let good = Server::saying("200 OK", setting.file.clone());
    assert!(setting.client(&[&good]).find(&setting.id).is_ok());
    assert_eq!(setting.kept(), [setting.file.len() as u64]);
}

/// Whatever a server does, it costs a bounded time and no disk space, and is not asked again soon.
#[test]
fn hostile_servers_are_left_alone() {
    let Some(setting) = Setting::new() else { return };
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let own = fs::read("/proc/self/exe").expect("this program");
    let mut lie = setting.file.clone();
    let at = lie.windows(setting.id.len()).position(|window| window == setting.id).expect("its build ID");
    lie[at] ^= 1;
    let servers = [
        (Server::saying("500 Oops", vec![]), "status 500"),
        (Server::saying("200 OK", lie), "a different file"),
        (Server::saying("200 OK", vec![]), "a different file"),
        (Server::saying("200 OK", setting.file[..setting.file.len() / 2].to_vec()), "a different file"),
        (Server::saying("200 OK", b"<html>".to_vec()), "not an ELF file"),
        (Server::saying("200 OK", own), "above the limit of 1 MiB"),
        (Server::saying("302 Found\r\nLocation: /again", vec![]), "redirect"),
        (Server::start(|stream| stream.write_all(b"garbage\r\n\r\n")), ""),
        // Closes at once, or in the middle of the file.
        (Server::start(|_| Ok(())), ""),
        (Server::start(|stream| stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n\x7fELF")), ""),
        // Sends nothing.
        (
            Server::start(|_| {
                std::thread::sleep(Duration::from_secs(3600));
                Ok(())
            }),
            "timeout",
        ),
        // Never ends: fast and slow.
        (
            Server::start(move |stream| {
                write!(stream, "{chunked}4\r\n\x7fELF\r\n")?;
                loop {
                    write!(stream, "{:x}\r\n{}\r\n", 1 << 16, "x".repeat(1 << 16))?;
                }
            }),
            "above the limit of 1 MiB",
        ),
        (
            Server::start(move |stream| {
                write!(stream, "{chunked}4\r\n\x7fELF\r\n")?;
                loop {
                    write!(stream, "1\r\nx\r\n")?;
                    std::thread::sleep(Duration::from_millis(50));
                }
            }),
            "timeout",
        ),
        (
            Server::start(|stream| {
                write!(stream, "HTTP/1.1 200 OK\r\n")?;
                loop {
                    write!(stream, "X-Header: {}\r\n", "x".repeat(1000))?;
                }
            }),
            "",
        ),
    ];
    let limits = [1, 3].map(Duration::from_secs);
    for (server, part) in &servers {
        let mut client = setting.client_within(&[server], limits);
        let why = client.find(&setting.id).expect_err(part);
        assert!(why.starts_with(&server.url) && why.contains(part), "{part}: {why}");
        assert_eq!(setting.kept(), [] as [u64; 0], "{why}");
        let asked = server.requests();
        assert_eq!(client.find(&setting.id).expect_err(part), why, "the reason stays");
        assert_eq!(server.requests(), asked, "{why}");
        // It is not asked for another file either, unless only this one was too large.
        if !part.contains("limit") {
            assert_eq!(client.find(&[1; 20]).expect_err(part), why);
            assert_eq!(server.requests(), asked, "{why}");
        }
        // Another server's file is used.
        let good = Server::saying("200 OK", setting.file.clone());
        assert!(setting.client_within(&[server, &good], limits).find(&setting.id).is_ok(), "{why}");
        fs::remove_dir_all(setting.cache()).expect("ours");
    }
    let refused = Server { url: "http://127.0.0.1:1".into(), requests: Arc::default() };
    assert!(setting.client(&[&refused]).find(&setting.id).is_err());
}

#[test]
fn a_cache_that_cannot_be_used_is_told() {
    let Some(setting) = Setting::new() else { return };
    let good = Server::saying("200 OK", setting.file.clone());
    fs::write(setting.cache(), "a file").expect("writes");
    let mut client = setting.client(&[&good]);
    let why = client.find(&setting.id).expect_err("no directory");
    assert!(why.starts_with("debuginfod's cache: "), "{why}");
    let settings = Settings { cache: None, servers: vec![good.url.clone()], limits: Limits::default() };
    assert!(Client::new(settings).find(&setting.id).expect_err("no home").contains("HOME"));
    assert_eq!(good.requests(), 0);
}

#[test]
fn all_downloads_together_have_limits() {
    let Some(setting) = Setting::new() else { return };
    let good = Server::saying("200 OK", setting.file.clone());
    let client = |limits: Limits| {
        let settings = Settings { cache: Some(setting.cache()), servers: vec![good.url.clone()], limits };
        Client::new(settings).find(&setting.id)
    };
    let bytes = client(Limits { all_bytes: 100, ..Limits::default() }).expect_err("too large");
    assert!(bytes.contains("above the limit"), "{bytes}");
    let time = client(Limits { batch_time: Duration::ZERO, ..Limits::default() }).expect_err("too late");
    assert!(time.contains("all files together took 0 s"), "{time}");
    assert!(client(Limits::default()).is_ok());
}

#[test]
fn files_that_were_not_used_for_long_are_removed() {
    let Some(setting) = Setting::new() else { return };
    let (old, new) = (setting.cache().join("0123"), setting.cache().join("4567"));
    let long_ago = SystemTime::now() - Duration::from_secs(700_000);
    for dir in [&old, &new] {
        fs::create_dir_all(dir).expect("ours");
        fs::write(dir.join("debuginfo"), "x").expect("writes");
    }
    let times = fs::FileTimes::new().set_accessed(long_ago).set_modified(long_ago);
    let open = |path: &Path| fs::File::options().write(true).open(path).expect("ours");
    open(&old.join("debuginfo")).set_times(times).expect("ours");
    let none = Server::saying("404 Not Found", vec![]);
    // The first client makes the mark; a later one cleans.
    let mark = setting.cache().join("cache_clean_interval_s");
    assert!(setting.client(&[&none]).find(&[9; 20]).is_err());
    assert!(mark.is_file() && old.exists());
    open(&mark).set_times(times).expect("ours");
    assert!(setting.client(&[&none]).find(&[8; 20]).is_err());
    assert!(!old.exists() && new.join("debuginfo").exists());
}

#[test]
fn settings_are_those_of_elfutils() {
    let read = |option: &[&str], variables: &[(&str, &str)]| {
        let option: Vec<String> = option.iter().map(|url| (*url).to_owned()).collect();
        let variables: Vec<(String, OsString)> =
            variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        settings::read(&option, |name| variables.iter().find(|(it, _)| it == name).map(|(_, value)| value.clone()))
    };
    assert_eq!(read(&[], &[]), None);
    assert_eq!(read(&[], &[("DEBUGINFOD_URLS", "  ")]), None);
    let urls = ("DEBUGINFOD_URLS", "http://b/ ima:enforcing ftp://x https://a/path/ http://b");
    let home = tempfile::tempdir().expect("temporary directory");
    let home_variable = ("HOME", home.path().to_str().expect("UTF-8"));
    let found = read(&["http://c"], &[urls, home_variable]).expect("servers");
    assert_eq!(found.servers, ["http://c", "http://b", "https://a/path"]);
    assert_eq!((found.cache, found.limits), (Some(home.path().join(".cache/debuginfod_client")), Limits::default()));
    let limits = [("DEBUGINFOD_MAXSIZE", "5"), ("DEBUGINFOD_TIMEOUT", "6"), ("DEBUGINFOD_MAXTIME", "0")];
    let found = read(&[], &[&[urls, home_variable, ("XDG_CACHE_HOME", "/x")], &limits[..]].concat()).expect("servers");
    assert_eq!(found.cache.as_deref(), Some(Path::new("/x/debuginfod_client")));
    let expected = Limits { file_bytes: 5, silence: Duration::from_secs(6), ..Limits::default() };
    assert_eq!(found.limits, expected);
    fs::create_dir(home.path().join(".debuginfod_client_cache")).expect("ours");
    let cache = |more: &[_]| read(&[], &[&[urls, home_variable, ("XDG_CACHE_HOME", "/x")], more].concat())?.cache;
    assert_eq!(cache(&[]), Some(home.path().join(".debuginfod_client_cache")));
    assert_eq!(cache(&[("DEBUGINFOD_CACHE_PATH", "/y")]).as_deref(), Some(Path::new("/y")));
    for bad in ["", "host", "ftp://host", "http://", "http://host/?x=1", "file:///etc"] {
        assert!(parse_url(bad).is_err(), "{bad}");
    }
}
