//! Tests of the slots for requests, over real connections.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use heapbpf_profile::testing;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::super::connections;
use super::*;
use crate::source::tests::finished;

const EVERYTHING: &str = "0123456789abcdef";
const OWN_PART: &str = "fedcba9876543210";

/// Serves a small profile to the bearers of two tokens until the sender is dropped.
fn serve() -> (SocketAddr, oneshot::Sender<()>) {
    let (recording, mut requests) = RecordingHandle::new();
    tokio::spawn(async move {
        while let Some(request) = requests.recv().await {
            let _ = request.reply.send(Ok(finished(testing::small(), Vec::new())));
        }
    });
    let tokens = Tokens::parse(&format!("{EVERYTHING}\n{OWN_PART} comm=server\n")).unwrap();
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    socket.set_nonblocking(true).unwrap();
    let address = socket.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let routes =
        Routes::new(recording, Some(tokens), PushStatuses::default(), History::default(), FrameView::default());
    tokio::spawn(connections::serve(socket, None, routes, stopped));
    (address, stop)
}

/// Returns the answer's head. This side keeps the connection open.
async fn ask(address: SocketAddr, token: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    if head.contains("connection: close") {
        let mut body = Vec::new();
        stream.read_to_end(&mut body).await.unwrap();
    }
    head
}

#[tokio::test(flavor = "current_thread")]
async fn a_token_that_takes_all_its_places_leaves_the_others_theirs() {
    let (address, _stop) = serve();
    let refused = Arc::new(AtomicU64::new(0));
    let waiting: Vec<_> = (0..200)
        .map(|_| {
            let refused = Arc::clone(&refused);
            tokio::spawn(async move {
                let head = ask(address, OWN_PART, "/debug/pprof/heap?seconds=3600").await;
                assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("retry-after"), "{head}");
                refused.fetch_add(1, Ordering::Relaxed);
            })
        })
        .collect();
    // All are refused except those that have the token's slots.
    let most = MOST_DIFFERENCES as u64 / 2;
    let begun = Instant::now();
    while refused.load(Ordering::Relaxed) < 200 - most {
        assert!(begun.elapsed() < Duration::from_secs(60), "{refused:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for path in [
        "/debug/pprof/heap",
        "/debug/pprof/heap?seconds=1",
        "/debug/pprof/heap?format=totals",
        "/debug/pprof/delta_heap?seconds=1",
        "/metrics",
    ] {
        let head = ask(address, EVERYTHING, path).await;
        assert!(head.starts_with("HTTP/1.1 200 "), "{path}: {head}");
    }
    let own = ask(address, OWN_PART, "/debug/pprof/heap?seconds=1").await;
    assert!(own.starts_with("HTTP/1.1 503 "), "{own}");
    assert!(ask(address, OWN_PART, "/metrics").await.starts_with("HTTP/1.1 200 "));
    assert_eq!(refused.load(Ordering::Relaxed), 200 - most);
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "current_thread")]
async fn a_client_that_hangs_up_leaves_its_slot_to_its_work() {
    let places = Places::new(1, 1);
    let slot = places.try_take(0).expect("nobody has it");
    let (go, waits) = std::sync::mpsc::channel::<()>();
    let encode = move || Ok(waits.recv().map_or_else(|_| Bytes::new(), |()| Bytes::new()));
    let client = tokio::spawn(async move { encoding(&slot, encode).await.is_ok() });
    tokio::task::yield_now().await;
    client.abort();
    assert!(client.await.is_err());
    assert!(places.try_take(0).is_none());
    drop(go);
    while places.try_take(0).is_none() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "current_thread")]
async fn who_is_turned_away_keeps_no_connection() {
    let (address, _stop) = serve();
    let head = ask(address, "not-a-token-of-this-host", "/metrics").await;
    assert!(head.starts_with("HTTP/1.1 401 ") && head.contains("connection: close"), "{head}");
}

#[tokio::test(flavor = "current_thread")]
async fn who_asks_for_what_is_not_there_is_told() {
    let (address, _stop) = serve();
    for (method, path, status) in
        [("HEAD", "/healthz", 200), ("POST", "/healthz", 405), ("GET", "/health", 404), ("GET", "/metrics?pid=x", 400)]
    {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {EVERYTHING}\r\n");
        stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{path}: {answer}");
        assert_eq!(answer.contains("allow: GET,HEAD"), status == 405, "{answer}");
        assert!(answer.contains("content-type: text/plain; charset=utf-8") && answer.contains("content-length: "));
        assert_eq!(answer.ends_with("\r\n\r\n"), method == "HEAD", "{answer}");
    }
}
