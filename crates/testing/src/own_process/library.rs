//! C code that the tests compile and load, and in which they capture stacks.

use std::ffi::{CStr, CString, c_void};
use std::path::PathBuf;
use std::process::Command;

use crate::own_process::capture::{OwnCapture, capture_here, take_capture};
use crate::skipped;

/// A loaded shared library.
pub struct Library {
    handle: *mut c_void,
    /// Its file.
    pub path: PathBuf,
    _directory: tempfile::TempDir,
}

impl Library {
    /// Compiles `source` with `flags` and loads it. Returns `None`, after reporting that the test is skipped, if there
    /// is no C compiler or it fails.
    ///
    /// # Panics
    /// If the library cannot be written or loaded.
    pub fn compile(source: &str, flags: &[&str]) -> Option<Self> {
        let directory = tempfile::tempdir().expect("temporary directory");
        let (code, path) = (directory.path().join("code.c"), directory.path().join("libtruth.so"));
        std::fs::write(&code, source).expect("write");
        // Set for cross builds, where `cc` compiles for another machine.
        let cc = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let status = Command::new(&cc).args(["-shared", "-fPIC", "-o"]).args([&path, &code]).args(flags).status();
        match status {
            Ok(status) if status.success() => {}
            other => {
                skipped(format_args!("{cc} {flags:?} cannot build the program: {other:?}"));
                return None;
            }
        }
        let name = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
        // SAFETY: our own library, whose constructors do nothing.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) };
        assert!(!handle.is_null(), "dlopen {}", path.display());
        Some(Self { handle, path, _directory: directory })
    }

    /// Calls the library's function `name` with a capturing callback and `argument`. Returns the capture that it made.
    ///
    /// # Panics
    /// If there is no such function, or it does not call back.
    pub fn capture(&self, name: &str, argument: i32) -> OwnCapture {
        let symbol = CString::new(name).expect("no NUL");
        // SAFETY: the handle is open.
        let address = unsafe { libc::dlsym(self.handle, symbol.as_ptr()) };
        assert!(!address.is_null(), "{name}");
        // SAFETY: every test program's function that is called from here has this type.
        let function: unsafe extern "C" fn(extern "C" fn(), i32) -> i32 = unsafe { std::mem::transmute(address) };
        let target: extern "C" fn() = {
            // The assembler stub itself: a wrapper would add a frame.
            // SAFETY: a function without arguments and result.
            unsafe { std::mem::transmute::<*const (), extern "C" fn()>(capture_here as *const ()) }
        };
        // SAFETY: the function has this type, as above, and the library stays loaded.
        unsafe { function(target, argument) };
        take_capture().expect("the program captures")
    }
}

/// Returns the name of the exported function that contains `address`, in any loaded library. `?` if there is none.
pub fn exported_name(address: u64) -> String {
    // SAFETY: all-zero is a valid value of plain pointers.
    let mut found: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: the call accepts any address, and writes only to `found`.
    let ok = unsafe { libc::dladdr(address as *const c_void, &mut found) };
    if ok == 0 || found.dli_sname.is_null() {
        return "?".into();
    }
    // SAFETY: a NUL-terminated string of a library that stays loaded (none is ever closed).
    unsafe { CStr::from_ptr(found.dli_sname) }.to_string_lossy().into_owned()
}
