//! A server of unary gRPC calls over HTTP/2, like OpenTelemetry's collector.

use std::net::TcpListener;
use std::sync::Arc;

use h2::server::SendResponse;
use h2::{Error, RecvStream};
use http::{HeaderMap, Request, Response};

/// The reply to a message, or gRPC's status and a sentence.
pub type Answer = Result<Vec<u8>, (u16, &'static str)>;

/// Answers calls of the method at `path`, in a thread that ends with the test program.
///
/// # Panics
/// If the server cannot be started.
pub fn serve(listener: TcpListener, path: &'static str, answer: impl Fn(&[u8]) -> Answer + Send + Sync + 'static) {
    listener.set_nonblocking(true).expect("a socket of our own");
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).expect("it listens");
            while let Ok((stream, _)) = listener.accept().await {
                let answer = Arc::clone(&answer);
                tokio::spawn(async move {
                    let mut connection = h2::server::handshake(stream).await?;
                    while let Some(call) = connection.accept().await {
                        let (request, respond) = call?;
                        assert_eq!((request.method().as_str(), request.uri().path()), ("POST", path));
                        tokio::spawn(reply(request, respond, Arc::clone(&answer)));
                    }
                    Ok::<_, Error>(())
                });
            }
        });
    });
}

async fn reply(
    request: Request<RecvStream>,
    mut respond: SendResponse<bytes::Bytes>,
    answer: Arc<impl Fn(&[u8]) -> Answer>,
) -> Result<(), Error> {
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers")] {
        assert_eq!(request.headers()[name], value);
    }
    let mut body = request.into_body();
    let mut message = Vec::new();
    while let Some(piece) = body.data().await.transpose()? {
        body.flow_control().release_capacity(piece.len())?;
        message.extend_from_slice(&piece);
    }
    let (head, message) = message.split_at(5);
    assert_eq!(head, prefix(message));
    let response = Response::builder().header("content-type", "application/grpc");
    match answer(message) {
        Ok(message) => {
            let mut sending = respond.send_response(response.body(()).expect("valid"), false)?;
            sending.send_data([&prefix(&message)[..], &message].concat().into(), false)?;
            sending.send_trailers(HeaderMap::from_iter([("grpc-status".parse().expect("a name"), 0_u16.into())]))
        }
        Err((status, why)) => {
            let response = response.header("grpc-status", status).header("grpc-message", why);
            respond.send_response(response.body(()).expect("valid"), true).map(drop)
        }
    }
}

/// Returns what precedes a message that is not compressed.
fn prefix(message: &[u8]) -> [u8; 5] {
    let [a, b, c, d] = u32::try_from(message.len()).expect("below 4 GiB").to_be_bytes();
    [0, a, b, c, d]
}
