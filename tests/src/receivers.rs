//! Test doubles of the stores that heapbpf pushes to: one over HTTP, and OpenTelemetry's collector over gRPC. They can
//! be unavailable: not listening yet, or answering that they are busy.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use heapbpf_profile::proto::otlp::ProfilesData;
use heapbpf_testing::grpc;
use prost::Message as _;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType};

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
        let flags = SocketFlags::CLOEXEC;
        let socket = net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).expect("a socket");
        net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = net::getsockname(&socket).and_then(SocketAddr::try_from).expect("it is bound");
        Self { socket, address }
    }

    /// The address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn listen(self) -> TcpListener {
        net::listen(&self.socket, 64).expect("it is bound");
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
