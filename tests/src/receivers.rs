//! Test doubles of the stores that heapbpf pushes to: one over HTTP, and OpenTelemetry's collector over gRPC. They can
//! be unavailable: not listening yet, or answering that they are busy.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_profile::proto::otlp::ProfilesData;
use heapbpf_testing::grpc;
use prost::Message as _;

/// The method of OpenTelemetry's collector that takes profiles.
const EXPORT: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";

/// A reserved loopback port on which nothing listens, so that connections are refused.
pub struct Reserved {
    socket: OwnedFd,
    address: SocketAddr,
}

impl Reserved {
    /// Reserves any free port.
    ///
    /// # Panics
    /// If there is none.
    pub fn new() -> Self {
        // SAFETY: `socket` takes plain integers; the result is checked before it is owned.
        let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
        assert!(socket >= 0, "{}", io::Error::last_os_error());
        // SAFETY: `socket` just returned this descriptor, so nothing else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        // SAFETY: `sockaddr_in` is plain integers, for which zero is a valid value.
        let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        name.sin_family = libc::AF_INET as libc::sa_family_t;
        name.sin_addr.s_addr = u32::from(Ipv4Addr::LOCALHOST).to_be();
        let mut length = size_of_val(&name) as libc::socklen_t;
        let pointer = (&raw mut name).cast::<libc::sockaddr>();
        // SAFETY: `pointer` is to `name`, which is initialised, has `length` bytes, and outlives both calls.
        let bound = unsafe {
            libc::bind(socket.as_raw_fd(), pointer, length) == 0
                && libc::getsockname(socket.as_raw_fd(), pointer, &raw mut length) == 0
        };
        assert!(bound, "{}", io::Error::last_os_error());
        Self { socket, address: (Ipv4Addr::LOCALHOST, u16::from_be(name.sin_port)).into() }
    }

    /// The address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn listen(self) -> TcpListener {
        // SAFETY: `listen` takes plain integers, and `self` keeps the descriptor open.
        let listening = unsafe { libc::listen(self.socket.as_raw_fd(), 64) };
        assert_eq!(listening, 0, "{}", io::Error::last_os_error());
        TcpListener::from(self.socket)
    }
}

impl Default for Reserved {
    fn default() -> Self {
        Self::new()
    }
}

/// An accepted request.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// `POST /path?query HTTP/1.1`.
    pub line: String,
    /// Value of `Content-Type`.
    pub content_type: String,
    /// Body.
    pub body: Vec<u8>,
}

/// The requests that a store accepted, and whether it is unavailable.
#[derive(Clone, Debug)]
pub struct Store<T> {
    taken: Arc<Mutex<Vec<T>>>,
    away: Arc<AtomicBool>,
}

impl<T> Default for Store<T> {
    fn default() -> Self {
        Self { taken: Arc::default(), away: Arc::default() }
    }
}

impl<T: Clone> Store<T> {
    /// All requests accepted so far, in order.
    pub fn taken(&self) -> Vec<T> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes the store answer that it is busy, or available again.
    pub fn set_away(&self, away: bool) {
        self.away.store(away, Ordering::Release);
    }

    /// Accepts a request, unless the store is unavailable.
    fn take(&self, what: T) -> bool {
        let here = !self.away.load(Ordering::Acquire);
        if here {
            self.taken.lock().unwrap_or_else(PoisonError::into_inner).push(what);
        }
        here
    }
}

/// Starts a store that accepts requests over HTTP/1.1. While unavailable, it answers 503.
pub fn http_store(reserved: Reserved) -> Store<Request> {
    let store = Store::default();
    let own = store.clone();
    let listener = reserved.listen();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let store = own.clone();
            std::thread::spawn(move || converse(stream, &store));
        }
    });
    store
}

fn converse(stream: TcpStream, store: &Store<Request>) -> Option<()> {
    let mut answers = stream.try_clone().ok()?;
    let mut stream = BufReader::new(stream);
    loop {
        let request = read_request(&mut stream)?;
        let status = if store.take(request) { "200 OK" } else { "503 Service Unavailable" };
        answers.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()).ok()?;
    }
}

fn read_request(stream: &mut impl BufRead) -> Option<Request> {
    let mut request = Request::default();
    stream.read_line(&mut request.line).ok().filter(|length| *length > 0)?;
    request.line.truncate(request.line.trim_end().len());
    let mut length = 0;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "content-type" => value.clone_into(&mut request.content_type),
            _ => {}
        }
    }
    request.body = vec![0; length];
    stream.read_exact(&mut request.body).ok()?;
    Some(request)
}

/// Starts OpenTelemetry's collector service for profiles over gRPC. While unavailable, it answers `UNAVAILABLE`.
///
/// # Panics
/// If it cannot be started.
pub fn collector(reserved: Reserved) -> Store<ProfilesData> {
    let store = Store::default();
    let own = store.clone();
    grpc::serve(reserved.listen(), EXPORT, move |message| {
        let is_taken = own.take(ProfilesData::decode(message).expect("a request"));
        if is_taken { Ok(Vec::new()) } else { Err((14, "busy")) }
    });
    store
}
