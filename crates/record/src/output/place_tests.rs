//! Tests of outputs that are devices, FIFOs, sockets and symbolic links.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, lchown, symlink};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use heapbpf_profile::formats::{WriteOptions, by_name};
use heapbpf_profile::testing;
use heapbpf_testing::skipped;
use tempfile::TempDir;

use super::place::{Destination, LinkRule, Naming, Place, find, link_rule};
use super::{Output, OutputError, check_new_file, same_file, write_whole};

const TEXT: &[u8] = b"what is written";
/// Id of a user that no test runs as.
const SOMEBODY: u32 = 54321;

fn dir() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}

fn is_root() -> bool {
    // SAFETY: `geteuid` takes no arguments and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn fifo(path: &Path) -> PathBuf {
    let name = c_path(path);
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0, "{}", io::Error::last_os_error());
    path.into()
}

/// Creates a node like `/dev/null` (3) or `/dev/full` (7). Returns `None`, with a message, where that is not possible.
fn device(path: &Path, minor: u32) -> Option<PathBuf> {
    let name = c_path(path);
    // SAFETY: the path is a NUL-terminated string that outlives the call.
    let status = unsafe { libc::mknod(name.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, minor)) };
    let made = if status == 0 { OpenOptions::new().write(true).open(path) } else { Err(io::Error::last_os_error()) };
    made.map_err(|error| skipped(format_args!("no device nodes: {error}"))).ok()?;
    Some(path.into())
}

fn write(path: &Path, force: bool) -> Result<(), OutputError> {
    write_whole(path, force, |out| out.write_all(TEXT).map_err(|source| OutputError::Io { path: path.into(), source }))
}

fn place(path: &Path) -> Place {
    super::place::look(path).unwrap().0
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Reads a FIFO from when it is opened to its end.
fn reader(path: &Path) -> JoinHandle<Vec<u8>> {
    let path = path.to_path_buf();
    thread::spawn(move || fs::read(path).unwrap())
}

/// Takes one connection and reads it to its end.
fn listener(path: &Path) -> JoinHandle<Vec<u8>> {
    let listener = UnixListener::bind(path).unwrap();
    thread::spawn(move || {
        let mut read = Vec::new();
        listener.accept().unwrap().0.read_to_end(&mut read).unwrap();
        read
    })
}

#[test]
fn whose_link_it_is_decides() {
    use LinkRule::{Follow, NeedsForce, OfAnother};
    let (root, user, other) = (0, 1000, 1001);
    let mut seen = 0;
    for owner in [root, user, other] {
        for effective in [root, user, other] {
            for sudo in [None, Some(root), Some(user), Some(other)] {
                // SUDO_UID is trusted only if heapbpf runs as root.
                let own = owner == effective || effective == root && sudo == Some(owner);
                assert_eq!(link_rule(owner, effective, sudo, true), if own { Follow } else { OfAnother });
                assert_eq!(link_rule(owner, effective, sudo, false), if own { NeedsForce } else { OfAnother });
                seen += usize::from(own);
            }
        }
    }
    // Twelve links of the user's own; as root, those of the invoking user and of the other user.
    assert_eq!(seen, 14);
    assert_eq!(link_rule(user, root, Some(user), true), Follow);
    assert_eq!(link_rule(other, root, Some(user), true), OfAnother);
    assert_eq!(link_rule(other, user, Some(other), true), OfAnother);
    assert_eq!(link_rule(root, user, None, true), OfAnother);
}

#[test]
fn a_fifo_is_written_to_and_stays() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    for force in [false, true] {
        check_new_file(&path, force).unwrap();
        let reader = reader(&path);
        write(&path, force).unwrap();
        assert_eq!(reader.join().unwrap(), TEXT);
        assert_eq!(place(&path), Place::Fifo);
    }
    assert_eq!(names(dir.path()), ["x.json"]);
}

/// More than a pipe's capacity: writing blocks until the reader has read.
#[test]
fn a_fifo_takes_more_than_it_holds() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    let reader = reader(&path);
    let large = vec![7; 9 << 20];
    write_whole(&path, false, |out| {
        out.write_all(&large).map_err(|source| OutputError::Io { path: path.clone(), source })
    })
    .unwrap();
    assert_eq!(reader.join().unwrap(), large);
}

#[test]
fn a_fifo_without_a_reader_is_reported_and_a_check_never_waits_for_one() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    check_new_file(&path, false).unwrap();
    let destination = find(&path, false, Naming::ByUser).unwrap();
    assert_eq!(destination, Destination { path: path.clone(), place: Place::Fifo });
    let error = destination.open(Duration::ZERO).unwrap_err();
    assert!(matches!(error, OutputError::NoReader { .. }), "{error}");
    assert!(error.to_string().contains("nobody has read") && error.to_string().contains("a FIFO"), "{error}");
}

#[test]
fn a_reader_that_goes_away_is_an_error() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    // A non-blocking open for reading needs no writer.
    let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let error = write_whole(&path, false, |out| {
        drop(reader);
        out.write_all(TEXT).map_err(|source| OutputError::Io { path: path.clone(), source })
    });
    assert!(error.unwrap_err().to_string().contains("its reader went away"));
    assert_eq!(place(&path), Place::Fifo);
}

#[test]
fn a_socket_is_connected_to_and_stays() {
    let dir = dir();
    // Longer than a socket address may be.
    let deep = dir.path().join("a".repeat(120));
    fs::create_dir(&deep).unwrap();
    for force in [false, true] {
        let short = dir.path().join(format!("{force}"));
        let listener = listener(&short);
        let path = deep.join(format!("{force}"));
        fs::rename(&short, &path).unwrap();
        check_new_file(&path, force).unwrap();
        write(&path, force).unwrap();
        assert_eq!(listener.join().unwrap(), TEXT);
        assert_eq!(place(&path), Place::Socket);
        // The listener is gone, but its socket file remains.
        let error = write(&path, force).unwrap_err();
        assert!(matches!(error, OutputError::NoListener(_)), "{error}");
        assert!(error.to_string().contains("start its listener"), "{error}");
    }
}

#[test]
fn a_socket_that_nobody_can_connect_to_is_an_error() {
    let dir = dir();
    let path = dir.path().join("x.json");
    let _datagrams = UnixDatagram::bind(&path).unwrap();
    assert!(matches!(write(&path, true), Err(OutputError::Io { .. })));

    // No one accepts, and the backlog is full.
    let path = dir.path().join("y.json");
    let _listener = UnixListener::bind(&path).unwrap();
    let destination = find(&path, false, Naming::ByUser).unwrap();
    let mut waiting = Vec::new();
    let error = loop {
        match destination.open(Duration::ZERO) {
            Ok(stream) => waiting.push(stream),
            Err(error) => break error,
        }
        assert!(waiting.len() < 1 << 16, "there is a limit");
    };
    assert!(matches!(error, OutputError::NoReader { place: Place::Socket, .. }), "{error}");
}

#[test]
fn a_device_is_written_to_and_stays() {
    let dir = dir();
    let Some(null) = device(&dir.path().join("null.json"), 3) else { return };
    let Some(full) = device(&dir.path().join("full.json"), 7) else { return };
    for force in [false, true] {
        check_new_file(&null, force).unwrap();
        write(&null, force).unwrap();
        let error = write(&full, force).unwrap_err().to_string();
        assert!(error.contains("No space left"), "{error}");
        assert_eq!([place(&null), place(&full)], [Place::CharacterDevice; 2]);
    }
    assert_eq!(names(dir.path()), ["full.json", "null.json"]);
}

#[test]
fn what_replaced_the_output_meanwhile_is_not_written() {
    let dir = dir();
    let path = dir.path().join("x.json");
    fs::write(&path, "kept").unwrap();
    for was in [Place::Fifo, Place::Socket, Place::CharacterDevice] {
        let error = Destination { path: path.clone(), place: was }.open(Duration::ZERO).unwrap_err();
        assert!(matches!(error, OutputError::Changed { now: Place::File, .. }), "{error}");
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    // A link is not followed, wherever it leads.
    fs::remove_file(&path).unwrap();
    symlink("/dev/null", &path).unwrap();
    for was in [Place::Fifo, Place::Socket, Place::CharacterDevice] {
        assert!(Destination { path: path.clone(), place: was }.open(Duration::ZERO).is_err());
    }
    // A file that is being written does not replace what appears in its place.
    for force in [false, true] {
        let path = dir.path().join(format!("{force}.json"));
        let result = write_whole(&path, force, |out| {
            fifo(&path);
            out.write_all(TEXT).map_err(|source| OutputError::Io { path: path.clone(), source })
        });
        let error = result.unwrap_err();
        assert!(matches!(error, OutputError::Exists(_) | OutputError::Changed { .. }), "{error}");
        assert_eq!(place(&path), Place::Fifo);
    }
}

#[test]
fn a_link_is_refused_unless_forced() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("there.json"), "kept").unwrap();
    fifo(&at("fifo"));
    let _listener = UnixListener::bind(at("socket")).unwrap();
    for target in ["there.json", "missing.json", "fifo", "socket", "/dev/null"] {
        let link = at("link.json");
        symlink(target, &link).unwrap();
        for error in [check_new_file(&link, false).unwrap_err(), write(&link, false).unwrap_err()] {
            let text = error.to_string();
            assert!(matches!(error, OutputError::Link { .. }), "{text}");
            assert!(text.contains("symbolic link to") && text.contains(target) && text.contains("--force"), "{text}");
        }
        assert_eq!(fs::read_link(&link).unwrap(), Path::new(target));
        fs::remove_file(&link).unwrap();
    }
    assert_eq!(fs::read_to_string(at("there.json")).unwrap(), "kept");
    assert_eq!(names(dir.path()), ["fifo", "socket", "there.json"]);
}

#[test]
fn a_forced_link_of_the_users_own_is_followed() {
    let dir = dir();
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("there.json"), "earlier").unwrap();
    // Relative to the link's directory, and through another link.
    for target in ["there.json", "missing.json"] {
        symlink(Path::new("elsewhere").join(target), dir.path().join("second")).unwrap();
        let link = dir.path().join("link.json");
        symlink("second", &link).unwrap();
        check_new_file(&link, true).unwrap();
        write(&link, true).unwrap();
        assert_eq!(fs::read(elsewhere.join(target)).unwrap(), TEXT);
        for name in ["second", "link.json"] {
            assert_eq!(place(&dir.path().join(name)), Place::Link);
            fs::remove_file(dir.path().join(name)).unwrap();
        }
    }
    assert_eq!(names(&elsewhere), ["missing.json", "there.json"]);
    assert_eq!(names(dir.path()), ["elsewhere"]);

    let link = dir.path().join("link.json");
    let path = fifo(&elsewhere.join("fifo"));
    symlink(&path, &link).unwrap();
    let reader = reader(&path);
    write(&link, true).unwrap();
    assert_eq!(reader.join().unwrap(), TEXT);
    fs::remove_file(&link).unwrap();

    let path = elsewhere.join("socket");
    let listener = listener(&path);
    symlink(&path, &link).unwrap();
    write(&link, true).unwrap();
    assert_eq!(listener.join().unwrap(), TEXT);
    fs::remove_file(&link).unwrap();

    symlink("/dev/null", &link).unwrap();
    check_new_file(&link, true).unwrap();
    write(&link, true).unwrap();
    assert_eq!(place(&link), Place::Link);
    assert_eq!(place(Path::new("/dev/null")), Place::CharacterDevice);
}

#[test]
fn links_that_lead_to_no_file_are_reported() {
    let dir = dir();
    let link = dir.path().join("link.json");
    let refusal = |target: &Path, force| {
        symlink(target, &link).unwrap();
        let error = check_new_file(&link, force).unwrap_err();
        assert_eq!(write(&link, force).unwrap_err().to_string(), error.to_string());
        fs::remove_file(&link).unwrap();
        error
    };
    for force in [false, true] {
        assert!(matches!(refusal(dir.path(), force), OutputError::IsDir(path) if path == link));
    }
    assert!(refusal(&link, true).to_string().contains("symbolic links"), "in a circle");
    assert!(matches!(check_new_file(&dir.path().join("no/x.json"), true), Err(OutputError::NoDir { .. })));
    symlink("no/x.json", &link).unwrap();
    assert!(matches!(check_new_file(&link, true), Err(OutputError::NoDir { .. })));
    fs::remove_file(&link).unwrap();
    // Like /dev/stdout in a pipeline.
    let (_reading, writing) = io::pipe().unwrap();
    let descriptor = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&writing));
    let error = refusal(Path::new(&descriptor), true);
    assert!(matches!(error, OutputError::LinkToOpenFile { .. }), "{error}");
    assert!(error.to_string().contains("pipe:[") && error.to_string().contains("use -"), "{error}");
}

#[test]
fn a_link_of_another_user_is_never_followed() {
    if !is_root() {
        return skipped("only root can give a link to another user");
    }
    if std::env::var_os("SUDO_UID").is_some_and(|uid| uid.to_str() == Some(&SOMEBODY.to_string())) {
        return skipped("that user runs this test");
    }
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("there.json"), "kept").unwrap();
    for target in ["there.json", "missing.json", "/dev/null"] {
        symlink(target, at("link.json")).unwrap();
        lchown(at("link.json"), Some(SOMEBODY), None).unwrap();
        // Nor if a link of the user's own leads to it.
        symlink("link.json", at("own.json")).unwrap();
        for (name, force) in [("link.json", false), ("link.json", true), ("own.json", true)] {
            for error in [check_new_file(&at(name), force).unwrap_err(), write(&at(name), force).unwrap_err()] {
                assert!(matches!(error, OutputError::LinkOfAnother { owner: SOMEBODY, .. }), "{error}");
                assert!(error.to_string().contains("another user") && error.to_string().contains(target), "{error}");
            }
        }
        fs::remove_file(at("link.json")).unwrap();
        fs::remove_file(at("own.json")).unwrap();
    }
    assert_eq!(fs::read_to_string(at("there.json")).unwrap(), "kept");
    assert_eq!(names(dir.path()), ["there.json"]);
}

#[test]
fn missing_permission_is_noticed_without_opening_the_output() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
    let check = move || check_new_file(&path, false);
    let error = if is_root() {
        let everybody = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.path(), everybody).unwrap();
        let other = thread::spawn(move || {
            // SAFETY: a raw system call with plain integers. It changes the user ids of this thread only, which then
            // has none of root's capabilities, and which ends right after.
            assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, SOMEBODY, -1) }, 0);
            check()
        });
        other.join().unwrap()
    } else {
        check()
    };
    let error = error.unwrap_err().to_string();
    assert!(error.contains("x.json") && error.contains("Permission denied"), "{error}");
}

/// Paths that heapbpf derives must name regular files: anything else there is not written to, replaced or followed.
#[test]
fn derived_paths_are_regular_files_only() {
    let dir = dir();
    let at = |name: &str| dir.path().join(name);
    let options = WriteOptions::default();
    let profile = testing::small();
    let snapshot = Output::new(at("x.json"), by_name("json").unwrap(), false).numbered(1);
    assert_eq!(snapshot.path(), at("x.0001.json"));
    snapshot.write(&profile, &options).unwrap();
    snapshot.write(&profile, &options).expect("a file is replaced");
    fs::remove_file(at("x.0001.json")).unwrap();

    let per_process = Output::new(at("y.heap"), by_name("heap_v2").unwrap(), true);
    for (output, name) in [(&snapshot, "x.0001.json"), (&per_process, "y.4242.heap")] {
        fifo(&at(name));
        let refused = output.write(&profile, &options).unwrap_err();
        assert!(matches!(refused, OutputError::NotAFile { place: Place::Fifo, .. }), "{refused}");
        assert!(refused.to_string().contains("a FIFO") && refused.to_string().contains("remove it"), "{refused}");
        fs::remove_file(at(name)).unwrap();
        symlink("target.json", at(name)).unwrap();
        let refused = output.write(&profile, &options).unwrap_err();
        assert!(matches!(refused, OutputError::NotAFile { place: Place::Link, .. }), "{refused}");
        assert_eq!(place(&at(name)), Place::Link);
    }
    assert_eq!(names(dir.path()), ["x.0001.json", "y.4242.heap"]);
}

#[test]
fn files_per_process_are_written_to_a_fifo_one_after_the_other() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.heap"));
    let output = Output::new(&path, by_name("heap_v2").unwrap(), false);
    assert_eq!(output.special(), Some(Place::Fifo));
    assert!(!output.takes_snapshots());
    let profile = testing::small();
    let reader = reader(&path);
    let written = output.write(&profile, &WriteOptions::default()).unwrap();
    assert!(written.is_empty(), "no file: {written:?}");
    let both = String::from_utf8(reader.join().unwrap()).unwrap();
    let mut expected = Vec::new();
    for index in 0..profile.processes.len() {
        output.format.write(&profile.only_process(index), &WriteOptions::default(), &mut expected).unwrap();
    }
    assert_eq!(both.as_bytes(), expected);
    assert_eq!(both.matches("heap_v2/").count(), 2);
    assert_eq!(names(dir.path()), ["x.heap"]);
}

#[test]
fn if_the_encoder_fails_a_fifo_stays_and_its_reader_gets_nothing() {
    let dir = dir();
    let path = fifo(&dir.path().join("x.json"));
    let reader = reader(&path);
    let result = write_whole(&path, false, |out| {
        out.write_all(TEXT).unwrap();
        Err(OutputError::IsDir("stop".into()))
    });
    assert!(result.is_err());
    assert!(reader.join().unwrap().is_empty());
}

#[test]
fn paths_that_lead_to_the_same_file_are_found() {
    let (dir, other) = (dir(), dir());
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("sub")).unwrap();
    symlink(dir.path(), other.path().join("again")).unwrap();
    symlink(at("a.json"), other.path().join("link.json")).unwrap();
    fs::write(at("b.json"), "").unwrap();
    let [a, b, c] = ["a.json", "b.json", "c.json"].map(at);
    let (around, linked) = (at("sub/../a.json"), other.path().join("again/a.json"));
    let link = other.path().join("link.json");
    let same = |paths: &[&Path], force| same_file(paths.iter().copied(), force).is_some();
    assert!(!same(&[&a, &b, &c], true));
    for other in [&a, &around, &linked] {
        assert!(same(&[&b, &a, other], true) && same(&[&b, &a, other], false), "{}", other.display());
    }
    assert!(same(&[&b, &b], false), "it exists");
    assert!(same(&[&a, &link], true), "a link is followed with --force");
    assert!(!same(&[Path::new("/dev/null"), Path::new("/dev/null")], true), "a device takes both");
    assert!(same(&[&at("missing/x"), &at("missing/x")], false));
}
