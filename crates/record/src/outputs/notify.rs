//! Messages to the service manager.

/// Sends `READY=1` to the service manager, if there is one (sd_notify(3)).
pub fn ready() {
    use std::os::unix::net::UnixDatagram;
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || -> std::io::Result<()> {
        let socket = UnixDatagram::unbound()?;
        match path.to_string_lossy().strip_prefix('@') {
            Some(name) => {
                use std::os::linux::net::SocketAddrExt;
                let address = std::os::unix::net::SocketAddr::from_abstract_name(name.as_bytes())?;
                socket.send_to_addr(b"READY=1", &address)?;
            }
            None => {
                socket.send_to(b"READY=1", &path)?;
            }
        }
        Ok(())
    };
    if let Err(error) = send() {
        log::warn!("cannot tell the service manager that we are ready: {error}");
    }
}
