//! A minimal HTTP/1.1 client for a serving heapbpf, which gives tests control over every byte.

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use crate::target::PATIENCE;

/// A response.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Headers, with names in lower case.
    pub headers: BTreeMap<String, String>,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// In a body of `/metrics`, the value of the series written exactly like this.
    pub fn metric(&self, series: &str) -> Option<f64> {
        self.text().lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    /// In a body of `/metrics`, the value of one process's metric.
    pub fn metric_of(&self, name: &str, pid: u32) -> Option<f64> {
        let series = format!("{name}{{pid=\"{pid}\",");
        self.text().lines().find_map(|line| line.strip_prefix(&series)?.rsplit_once(' ')?.1.parse().ok())
    }
}

/// Writes a file of tokens with these permissions, and returns its path.
///
/// # Panics
/// If it cannot be written.
pub fn token_file(dir: &Path, mode: u32, text: &str) -> String {
    let path = dir.join("tokens");
    fs::write(&path, text).expect("our own directory");
    fs::set_permissions(&path, Permissions::from_mode(mode)).expect("our own file");
    path.display().to_string()
}

/// Requests `path`.
///
/// # Panics
/// If there is no complete response.
pub fn get(address: SocketAddr, path: &str) -> Answer {
    get_with(address, path, "")
}

/// Requests `path` with extra headers, each ending in `\r\n`.
///
/// # Panics
/// If there is no complete response.
pub fn get_with(address: SocketAddr, path: &str, headers: &str) -> Answer {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n"))
}

/// Sends a request unchanged and reads the response to its end.
///
/// # Panics
/// If there is no complete response.
pub fn send(address: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(address).expect("heapbpf listens");
    stream.set_read_timeout(Some(*PATIENCE)).expect("a time");
    stream.set_write_timeout(Some(*PATIENCE)).expect("a time");
    // A server may respond and close before it has read the whole request.
    let _ = stream.write_all(request.as_bytes());
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    parse(&bytes)
}

/// Opens a connection, sends only `beginning` (possibly nothing), and returns what arrives until the server closes it.
///
/// # Panics
/// If the server keeps it open for longer than `patience`.
pub fn idle(address: SocketAddr, beginning: &str, patience: Duration) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).expect("heapbpf listens");
    stream.set_read_timeout(Some(patience)).expect("a time");
    stream.write_all(beginning.as_bytes()).expect("it is listening");
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("the server closes a connection that says nothing");
    bytes
}

fn parse(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no head in {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a status line");
    let pairs = lines.filter_map(|line| line.split_once(": "));
    let headers: BTreeMap<_, _> = pairs.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    let body = bytes[end + 4..].to_vec();
    let length = headers.get("content-length").and_then(|length| length.parse::<usize>().ok());
    assert!(length.is_none_or(|length| length == body.len()), "the answer is not whole: {head}, {} bytes", body.len());
    Answer { status, headers, body }
}
