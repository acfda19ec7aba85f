//! Accepts connections, limits their number, and times out slow clients.

use std::convert::Infallible;
use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;

use super::routes::Routes;

/// Maximum number of connections. Further clients wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 512;
/// How long a client may take to send a request, and how long it may keep an idle connection.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection is closed if its client accepts no data for this long.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a request's head, in bytes. Requests have no bodies.
const LONGEST_HEAD: usize = 16 << 10;
/// How long answers in progress may continue after the recording ends.
const GRACE_PERIOD: Duration = Duration::from_secs(1);

/// Answers requests until something is sent to `stopped` or its sender is dropped. With `tls`, connections are
/// encrypted.
pub async fn serve(socket: TcpListener, tls: Option<TlsAcceptor>, routes: Routes, stopped: oneshot::Receiver<()>) {
    let listener = match tokio::net::TcpListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("cannot listen: {error}");
            return;
        }
    };
    let permits = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let under_way = GracefulShutdown::new();
    let mut stopped = pin!(stopped);
    loop {
        // The semaphore is never closed.
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // The process may be out of file descriptors, for example. Other connections may end soon.
                log::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (routes, tls, watcher) = (routes.clone(), tls.clone(), under_way.watcher());
        tokio::spawn(async move {
            if let Err(error) = converse(stream, tls, routes, watcher).await {
                log::debug!("a connection ended: {error}");
            }
            drop(permit);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(GRACE_PERIOD, under_way.shutdown()).await;
}

/// Answers one client.
async fn converse(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    routes: Routes,
    watcher: Watcher,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _ = stream.set_nodelay(true);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(WRITE_TIMEOUT));
    let stream = Box::pin(stream);
    match tls {
        None => answer(stream, routes, watcher).await,
        Some(tls) => answer(tokio::time::timeout(READ_TIMEOUT, tls.accept(stream)).await??, routes, watcher).await,
    }
}

async fn answer(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    routes: Routes,
    watcher: Watcher,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let service = service_fn(move |request: Request<Incoming>| {
        let routes = routes.clone();
        async move { Ok::<_, Infallible>(routes.answer(request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(READ_TIMEOUT)
        .max_buf_size(LONGEST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    Ok(watcher.watch(connection).await?)
}
