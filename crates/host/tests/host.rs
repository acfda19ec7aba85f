//! Tests the whole host with real processes: replaced files, and one file under two roots. Skipped without root.

use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use heapbpf_host::Host;
use heapbpf_host::modules::{Module, ModuleKind, ModuleSource};
use heapbpf_host::open::Unreadable;
use heapbpf_host::processes::Generation;
use heapbpf_testing::skipped;

fn start() -> Option<Host> {
    // SAFETY: `geteuid` takes no arguments and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        skipped("not root");
        return None;
    }
    match Host::start(4096) {
        Ok(host) => Some(host),
        Err(error) => {
            skipped(error);
            None
        }
    }
}

/// Polls the host until `wanted` returns something, for at most 20 s.
fn wait_for<T>(host: &mut Host, mut wanted: impl FnMut(&Host) -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        host.poll().expect("polls");
        if let Some(found) = wanted(host) {
            return found;
        }
        assert!(Instant::now() < deadline, "it did not happen within 20 s");
        let mut poll = libc::pollfd { fd: host.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one initialised entry, as the count says, and outlives the call.
        unsafe { libc::poll(&raw mut poll, 1, 100) };
    }
}

/// The last generation of `pid` and the module that it has mapped whose path contains `name`, once there is one.
fn program<'a>(host: &'a Host, pid: u32, name: &str) -> Option<(&'a Generation, &'a Module)> {
    let generation = host
        .processes()
        .iter()
        .filter(|generation| generation.id.pid == pid)
        .max_by_key(|generation| generation.since_ns)?;
    let module = generation.space.current().iter().find_map(|mapping| {
        host.modules()
            .get(mapping.module)
            .filter(|module| module.kind == ModuleKind::File && module.path.contains(name))
    })?;
    Some((generation, module))
}

fn id_of(host: &Host, wanted: &Module) -> heapbpf_host::mappings::ModuleId {
    host.modules().iter().find(|(_, module)| std::ptr::eq(*module, wanted)).expect("it is in the table").0
}

/// Reads the first bytes of a program as it can be read now.
fn magic(host: &mut Host, pid: u32, name: &str) -> Result<[u8; 4], Unreadable> {
    let id = id_of(host, program(host, pid, name).expect("known").1);
    match host.modules_mut().source(id)? {
        ModuleSource::File(file) => {
            let mut bytes = [0; 4];
            file.read_exact_at(&mut bytes, 0).map_err(|error| Unreadable::Other(error.to_string()))?;
            Ok(bytes)
        }
        ModuleSource::Memory(bytes) => Ok(bytes[..4].try_into().expect("four")),
    }
}

/// A copy of `sleep` under a name of its own.
fn copy_of_sleep(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    copy("/bin/sleep", &path);
    path
}

/// Copies a file in a separate process. A child that another test forks during a copy in this process would inherit the
/// descriptor, and the kernel refuses to start a program that is open for writing ("Text file busy").
fn copy(from: &str, to: &Path) {
    let status = Command::new("cp").arg(from).arg(to).status().expect("starts");
    assert!(status.success(), "cp {from} {to:?}: {status}");
}

fn end(mut child: Child) {
    child.kill().expect("kills");
    child.wait().expect("waits");
}

#[test]
fn a_process_that_was_there_and_ourselves() {
    let Some(host) = start() else { return };
    let pid = std::process::id();
    let generation = host.processes().current(pid).expect("we are found");
    assert_eq!(generation.since_ns, 0);
    let here = a_process_that_was_there_and_ourselves as fn() as usize as u64;
    let now = heapbpf_host::clock::monotonic_ns();
    let mapping = generation.space.resolve(here, now).expect("our code is mapped");
    let module = host.modules().get(mapping.module).expect("known");
    assert_eq!(*module.path, *generation.info.exe);
    assert!(module.build_id.is_some() || module.unreadable().is_none());
    let vdso = host.modules().iter().find(|(_, module)| module.kind == ModuleKind::Vdso);
    assert!(vdso.is_none_or(|(_, module)| module.build_id.is_some()));
}

#[test]
fn a_file_closed_to_free_its_descriptor_is_only_opened_again_if_it_is_the_same() {
    let Some(mut host) = start() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let path = copy_of_sleep(dir.path(), "upgraded");
    let child = Command::new(&path).arg("60").spawn().expect("starts");
    let pid = child.id();
    let id = wait_for(&mut host, |host| program(host, pid, "upgraded").map(|(_, module)| id_of(host, module)));
    host.modules_mut().close(id);
    assert_eq!(magic(&mut host, pid, "upgraded"), Ok(*b"\x7fELF"), "the process still has it");
    host.modules_mut().close(id);
    let new = copy_of_sleep(dir.path(), "new");
    fs::rename(new, &path).expect("replaces");
    assert_eq!(magic(&mut host, pid, "upgraded"), Ok(*b"\x7fELF"), "through the mapping: the old one");
    host.modules_mut().close(id);
    end(child);
    assert_eq!(magic(&mut host, pid, "upgraded"), Err(Unreadable::Replaced));
    fs::remove_file(&path).expect("removes");
    assert_eq!(magic(&mut host, pid, "upgraded"), Err(Unreadable::Gone));
}

/// An overlay mount; unmounted when dropped.
struct Overlay(CString);

impl Overlay {
    fn mount(dir: &Path, lower: &Path, name: &str) -> Option<Self> {
        let part = |kind: &str| {
            let path = dir.join(format!("{name}-{kind}"));
            fs::create_dir_all(&path).expect("creates");
            path
        };
        let (upper, work, merged) = (part("upper"), part("work"), part("merged"));
        let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        let merged = CString::new(merged.to_str()?).ok()?;
        let options = CString::new(options).ok()?;
        // SAFETY: all arguments are NUL-terminated strings that outlive the call.
        let result = unsafe {
            libc::mount(c"overlay".as_ptr(), merged.as_ptr(), c"overlay".as_ptr(), 0, options.as_ptr().cast())
        };
        (result == 0).then_some(Self(merged))
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(self.0.to_str().expect("was text"))
    }
}

impl Drop for Overlay {
    fn drop(&mut self) {
        // SAFETY: the path is a NUL-terminated string owned by `self`.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Two containers with the same image share one module, because one probe in it serves both.
#[test]
fn one_file_under_two_overlays_is_one_module() {
    let Some(mut host) = start() else { return };
    let dir = tempfile::tempdir().expect("a directory");
    let lower = dir.path().join("lower");
    fs::create_dir(&lower).expect("creates");
    copy_of_sleep(&lower, "layered");
    let mounts = ["one", "two"].map(|name| Overlay::mount(dir.path(), &lower, name));
    let [Some(one), Some(two)] = &mounts else {
        skipped(format_args!("no overlay mounts: {}", std::io::Error::last_os_error()));
        return;
    };
    let start = |root: &Overlay| Command::new(root.path().join("layered")).arg("60").spawn().expect("starts");
    let children = [start(one), start(two)];
    let modules = children.each_ref().map(|child| {
        wait_for(&mut host, |host| program(host, child.id(), "layered").map(|(_, module)| id_of(host, module)))
    });
    let scanned = Host::snapshot().expect("reads /proc");
    let again = children
        .each_ref()
        .map(|child| id_of(&scanned, program(&scanned, child.id(), "layered").expect("in its maps").1));
    // A file that was written to has been copied up, so it is a different file.
    let changed = two.path().join("layered");
    let [first, second] = children;
    end(second);
    // As in `copy`, in a separate process.
    let status = Command::new("sh").args(["-c", "echo >> \"$0\""]).arg(&changed).status().expect("starts");
    assert!(status.success(), "{status}");
    let third = start(two);
    let own = wait_for(&mut host, |host| program(host, third.id(), "layered").map(|(_, module)| id_of(host, module)));
    end(first);
    end(third);
    assert_eq!((modules[0], again[0]), (modules[1], again[1]));
    assert_ne!(own, modules[0]);
}
