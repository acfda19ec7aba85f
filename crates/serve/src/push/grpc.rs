//! The call by which OpenTelemetry's collector receives profiles over gRPC: one request over HTTP/2, without TLS.

use std::io;

use bytes::Bytes;
use h2::client::{Builder, SendRequest};
use heapbpf_profile::proto::otlp::ExportProfilesServiceResponse;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, TE, USER_AGENT};
use hyper::{HeaderMap, Request, StatusCode, Uri};
use percent_encoding::percent_decode;
use prost::Message as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::destination::Destination;
use super::sender::{CONNECT_TIMEOUT, NAME, Outcome, TIMEOUT};

/// The method. A destination has no other, so the path of its URL is not used.
pub const METHOD: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";
/// Maximum size of an answer's head and of its body, in bytes.
const LARGEST_ANSWER: u32 = 16 << 10;
/// Size of what precedes a message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// Calls the method over a new connection. A connection kept open until the next profile would have to answer pings.
pub async fn export(destination: &Destination, message: &[u8]) -> Outcome {
    match timeout(TIMEOUT, answer(destination, message)).await {
        Ok(Ok(answer)) => answer.outcome(),
        Ok(Err(error)) => Outcome::Failed(error.to_string()),
        Err(_) => Outcome::Failed("no answer in time".into()),
    }
}

/// An answer with its trailers, or with its headers if there are no trailers.
struct Answer {
    status: StatusCode,
    trailers: HeaderMap,
    body: Vec<u8>,
}

async fn answer(destination: &Destination, message: &[u8]) -> Result<Answer, Error> {
    let uri: Uri = format!("{}{METHOD}", destination.origin).parse()?;
    let stream = connect(&uri).await?;
    let mut request = Request::post(uri)
        .header(CONTENT_TYPE, "application/grpc")
        .header(TE, "trailers")
        .header(USER_AGENT, NAME)
        .body(())?;
    if let Some(value) = destination.authorization.as_ref().and_then(|text| HeaderValue::from_str(text).ok()) {
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    let length = u32::try_from(message.len())?.to_be_bytes();
    let framed = [&[0][..], &length, message].concat().into();
    let mut builder = Builder::new();
    let (client, connection) =
        builder.enable_push(false).max_header_list_size(LARGEST_ANSWER).handshake(stream).await?;
    // When the exchange drops the client, the connection closes cleanly and ends.
    tokio::join!(exchange(client, request, framed), connection).0
}

/// Tries each address for an equal part of the time.
async fn connect(uri: &Uri) -> io::Result<TcpStream> {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let addresses: Vec<_> = tokio::net::lookup_host((host, uri.port_u16().unwrap_or(80))).await?.collect();
    let mut failed = io::Error::other("it has no address");
    for address in &addresses {
        let connected = timeout(CONNECT_TIMEOUT / addresses.len() as u32, TcpStream::connect(address)).await;
        match connected.map_err(io::Error::from).flatten() {
            Ok(stream) => return Ok(stream),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

async fn exchange(client: SendRequest<Bytes>, request: Request<()>, message: Bytes) -> Result<Answer, Error> {
    let (response, mut sending) = client.ready().await?.send_request(request, false)?;
    sending.send_data(message, true)?;
    let (head, mut receiving) = response.await?.into_parts();
    let mut body = Vec::new();
    while let Some(piece) = receiving.data().await.transpose()? {
        receiving.flow_control().release_capacity(piece.len())?;
        body.extend_from_slice(&piece);
        if body.len() > LARGEST_ANSWER as usize {
            return Err("its answer is too long".into());
        }
    }
    let trailers = receiving.trailers().await?.unwrap_or(head.headers);
    Ok(Answer { status: head.status, trailers, body })
}

impl Answer {
    /// Returns the outcome for a gRPC status. A status about this message is permanent; any other reflects the
    /// destination's state.
    fn outcome(&self) -> Outcome {
        let text = |name| self.trailers.get(name).map(|value| percent_decode(value.as_bytes()).decode_utf8_lossy());
        let Some(code) = text("grpc-status") else {
            return Outcome::Failed(format!("it does not speak gRPC: status {}", self.status));
        };
        let why = format!("{} (gRPC status {code})", text("grpc-message").unwrap_or_default());
        match &*code {
            "0" => {
                let message = self.body.get(PREFIX_BYTES..).map(ExportProfilesServiceResponse::decode);
                match message.and_then(Result::ok).and_then(|message| message.partial_success) {
                    Some(part) if part.rejected_profiles > 0 => {
                        Outcome::Rejected(format!("{} of its parts: {}", part.rejected_profiles, part.error_message))
                    }
                    _ => Outcome::Delivered,
                }
            }
            // Invalid argument, out of range, data loss.
            "3" | "11" | "15" => Outcome::Rejected(why),
            _ => Outcome::Failed(why),
        }
    }
}
