//! Where a statically linked heapbpf looks up names of hosts and users.

/// Databases of the C library, and their sources that are inside it.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
const SERVICES: [(&std::ffi::CStr, &std::ffi::CStr); 4] =
    [(c"hosts", c"files dns"), (c"passwd", c"files"), (c"group", c"files"), (c"initgroups", c"files")];

/// Makes the C library look up names in files and by DNS only, if it is linked statically. It would load a library for each
/// other source that /etc/nsswitch.conf names. Those libraries are made for the C library of the distribution, which is
/// another one: a process with both may crash. To be called at the start, before there are threads.
pub fn use_built_in() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    for (database, services) in SERVICES {
        // SAFETY: glibc's function of <nss.h> with this signature. Both texts are static and end with a zero byte, and no other
        // thread looks up names meanwhile.
        unsafe {
            __nss_configure_lookup(database.as_ptr(), services.as_ptr());
        }
    }
}

#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
// SAFETY: the declaration of <nss.h>, which glibc has in every version that Rust supports.
unsafe extern "C" {
    fn __nss_configure_lookup(database: *const libc::c_char, services: *const libc::c_char) -> libc::c_int;
}
