//! Connections: accepted, bounded, timed out when their other end is slow.

use std::net::TcpListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, oneshot};
use tokio_io_timeout::TimeoutStream;

/// Connections at a time; more wait in the kernel's queue.
const MOST_CONNECTIONS: usize = 512;
/// A client has this long to send a request; also how long it may keep a connection without one.
const READ_TIMEOUT: Duration = Duration::from_secs(10);
/// A client that takes nothing for this long is gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest head of a request, bytes. There are no bodies.
const LONGEST_HEAD: usize = 16 << 10;
/// Answers under way when the recording ends get this long.
const PARTING: Duration = Duration::from_secs(1);

/// Answers until `stopped` is dropped or said.
pub async fn serve(socket: TcpListener, router: Router, stopped: oneshot::Receiver<()>) {
    let listener = match tokio::net::TcpListener::from_std(socket) {
        Ok(listener) => listener,
        Err(error) => {
            log::error!("cannot listen: {error}");
            return;
        }
    };
    let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let under_way = GracefulShutdown::new();
    let mut stopped = pin!(stopped);
    loop {
        // Never closed.
        let Ok(place) = Arc::clone(&room).acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = &mut stopped => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, for example: others may end soon.
                log::warn!("cannot accept a connection: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(WRITE_TIMEOUT));
        let service = TowerToHyperService::new(router.clone());
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(READ_TIMEOUT)
            .max_buf_size(LONGEST_HEAD)
            .serve_connection(TokioIo::new(Box::pin(stream)), service);
        let connection = under_way.watch(connection);
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                log::debug!("a connection ended: {error}");
            }
            drop(place);
        });
    }
    drop(listener);
    let _ = tokio::time::timeout(PARTING, under_way.shutdown()).await;
}
