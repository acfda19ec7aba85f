//! The address that answers scrapers. It is bound or refused before anything is attached.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::{fmt, io};

use heapbpf_access::tokens::{TokenError, Tokens};
use tokio_rustls::TlsAcceptor;

use super::tls::{TlsError, TlsFiles, acceptor};

/// A bound address, and who may send requests to it.
pub struct Listen {
    /// The address, with the port that the kernel chose if port 0 was requested.
    pub address: SocketAddr,
    pub(super) socket: TcpListener,
    pub(super) tokens: Option<Tokens>,
    /// Encrypts connections, if TLS is configured.
    pub(super) tls: Option<TlsAcceptor>,
}

impl fmt::Debug for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listen").field("address", &self.address).field("is_tls", &self.tls.is_some()).finish()
    }
}

/// Why the server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Others could read the profiles.
    #[error(
        "--listen {0}: other hosts can reach this address, so --token-file is needed; or listen on loopback (127.0.0.1)"
    )]
    NeedsTokens(SocketAddr),
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}{}", hint(source))]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The token file cannot be used.
    #[error(transparent)]
    Tokens(#[from] TokenError),
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; choose another port, or stop what uses this one",
        io::ErrorKind::AddrNotAvailable => "; no interface of this host has that address",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need CAP_NET_BIND_SERVICE",
        _ => "",
    }
}

impl Listen {
    /// Reads the tokens, the certificate and its key, and binds the address. Connections wait until a server accepts them.
    ///
    /// # Errors
    /// See [`ListenError`].
    pub fn open(
        address: SocketAddr,
        token_file: Option<&Path>,
        tls: Option<TlsFiles<'_>>,
    ) -> Result<Self, ListenError> {
        let tokens = token_file.map(Tokens::read).transpose()?;
        let tls = tls.map(acceptor).transpose()?;
        if tokens.is_none() && !address.ip().is_loopback() {
            return Err(ListenError::NeedsTokens(address));
        }
        let failed = |source| ListenError::Bind { address, source };
        let socket = TcpListener::bind(address).map_err(failed)?;
        socket.set_nonblocking(true).map_err(failed)?;
        let address = socket.local_addr().map_err(failed)?;
        Ok(Self { address, socket, tokens, tls })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_addresses_need_tokens_and_a_port_in_use_is_said() {
        let open = |text: &str| Listen::open(text.parse().unwrap(), None, None);
        assert!(open("0.0.0.0:0").unwrap_err().to_string().contains("--token-file"));
        assert!(open("[::]:0").unwrap_err().to_string().contains("--token-file"));
        let first = open("127.0.0.1:0").unwrap();
        assert_ne!(first.address.port(), 0);
        let error = open(&first.address.to_string()).unwrap_err().to_string();
        assert!(error.contains("choose another port"), "{error}");
    }
}
