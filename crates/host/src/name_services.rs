//! How a statically linked heapbpf looks up names of hosts and users.

/// Databases of the C library, and the sources for them that are built in.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
const SERVICES: [(&std::ffi::CStr, &std::ffi::CStr); 4] =
    [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files"), (c"initgroups", c"files")];

/// Makes a statically linked C library look up names only in files and by DNS. For each other source that
/// /etc/nsswitch.conf names it would load a library. Those libraries are built for the distribution's C library, and a
/// process with both C libraries may crash. Must be called at the start, before there are threads.
pub fn use_built_in() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    for (database, services) in SERVICES {
        // SAFETY: this is glibc's function from <nss.h> with this signature. Both texts are static and end with a zero
        // byte, and no other thread is looking up names.
        unsafe {
            __nss_configure_lookup(database.as_ptr(), services.as_ptr());
        }
    }
}

#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
// SAFETY: this is the declaration from <nss.h>. Every glibc version that Rust supports has the function.
unsafe extern "C" {
    fn __nss_configure_lookup(database: *const libc::c_char, services: *const libc::c_char) -> libc::c_int;
}
