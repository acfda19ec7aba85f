//! Opens files below the roots of other processes. Such a process may have mounted a file system whose server does not
//! answer (FUSE), so this is done in a separate thread.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::in_root::{self, Links};
use super::open::is_served;
use super::reader_thread::{NoAnswer, ReaderThread};

/// How long a file may take to be opened.
const OPENED_WITHIN: Duration = Duration::from_secs(2);

/// The handle to the thread that opens files. Clones share it.
#[derive(Clone, Default)]
pub struct Roots(Arc<Mutex<Shared>>);

#[derive(Default)]
struct Shared {
    reader: ReaderThread,
    /// Roots below which a file could not be opened in time. Nothing more is opened there.
    silent: HashSet<PathBuf>,
}

impl Roots {
    /// Opens the regular file `path` for reading, as a process with the root directory `root` would. Symbolic links
    /// cannot leave the root, and a leading `/` means `root`. Devices, FIFOs and files that a process serves (FUSE) are
    /// not opened.
    ///
    /// # Errors
    /// Errors of open(2), openat2(2) and statfs(2); [`io::ErrorKind::InvalidInput`] if it is not a regular file;
    /// [`io::ErrorKind::TimedOut`] if that took too long, or did so for another file below `root`.
    pub fn open(&self, root: &Path, path: &Path) -> io::Result<File> {
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.silent.contains(root) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let (below, path) = (root.to_owned(), path.to_owned());
        let open = move || {
            let handle = in_root::find(&below, &path, Links::Inside)?;
            if is_served(&handle)? {
                return Err(io::ErrorKind::Unsupported.into());
            }
            in_root::open_regular(&handle)
        };
        shared.reader.ask("open", OPENED_WITHIN, open).unwrap_or_else(|why| {
            if why == NoAnswer::Late {
                shared.silent.insert(root.to_owned());
            }
            Err(io::ErrorKind::TimedOut.into())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;
    use std::ptr::null;

    use heapbpf_testing::silent::mount_silent;
    use heapbpf_testing::skipped;

    use super::*;

    /// Shows a directory at another path.
    fn bind(from: &Path, to: &Path) {
        let [from, to] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()).expect("no NUL"));
        // SAFETY: the paths are C strings that outlive the call; the kernel ignores the null pointers here.
        let result = unsafe { libc::mount(from.as_ptr(), to.as_ptr(), null(), libc::MS_BIND, null()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }

    #[test]
    fn other_mounts_below_a_root_are_searched_and_one_that_does_not_answer_is_waited_for_once() {
        if heapbpf_testing::is_emulated("no openat2(2)") {
            return;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let [root, debug, usr, from] = ["root", "root/debug", "root/usr", "from"].map(|name| dir.path().join(name));
        for path in [&root, &debug, &usr, &from] {
            std::fs::create_dir(path).expect("our own directory");
        }
        std::fs::write(from.join("x"), "symbols").expect("our own directory");
        let _server = match mount_silent(&usr) {
            Ok(server) => server,
            Err(error) => return skipped(format_args!("no FUSE file system can be mounted: {error}")),
        };
        bind(&from, &debug);
        let roots = Roots::default();
        let read = |path: &str| {
            let opened = roots.open(&root, Path::new(path));
            opened.and_then(io::read_to_string).map_err(|error| error.kind())
        };
        assert_eq!(read("/debug/x").as_deref(), Ok("symbols"));
        assert_eq!(read("/debug/y"), Err(io::ErrorKind::NotFound));
        assert_eq!(read("/usr/lib/debug/x"), Err(io::ErrorKind::TimedOut));
        assert_eq!(read("/debug/x"), Err(io::ErrorKind::TimedOut), "nothing more is opened there");
        assert!(roots.open(&from, Path::new("/x")).is_ok(), "that is another root");
    }
}
