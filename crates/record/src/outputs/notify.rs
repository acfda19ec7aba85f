//! Messages to the service manager.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends `READY=1` to the service manager, if there is one (sd_notify(3)).
pub fn ready() {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || {
        let address = match path.to_string_lossy().strip_prefix('@') {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(&path)?,
        };
        UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address)
    };
    if let Err(error) = send() {
        log::warn!("cannot report to the service manager that heapbpf is ready: {error}");
    }
}
