//! The HTTP endpoints.

use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Bytes;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message as _;
use tokio::sync::SemaphorePermit;

use super::delta::{Inuse, difference};
use super::filter::{Filter, shown};
use super::metrics::{Metrics, Serving};
use super::parameters::{Parameters, ProfileFormat};
use super::places::Places;
use super::push::PushStatuses;
use super::source::{Source, SourceError, Wanted};
use super::tokens::Tokens;
use crate::record::requests::{Detail, RecordingHandle};
use heapbpf_profile::GroupBy;
use heapbpf_profile::formats::{WriteOptions, by_name, encode_pprof};
use heapbpf_profile::model::Profile;

/// Maximum number of scrapes in progress, shared equally by the tokens. Further clients are told to come back later.
const MOST_SCRAPES: usize = 256;
/// Maximum number of differences in progress, shared in the same way. While a difference waits for its time to pass, it
/// does not count as a scrape.
const MOST_DIFFERENCES: usize = 128;
/// Fast compression, because speed matters here: level 1 output is within a tenth of level 5 on profiles.
const COMPRESSION: Compression = Compression::fast();

const ALLOC_SPACE: &str = "alloc_space";
const INUSE_SPACE: &str = "inuse_space";

/// State that all requests share.
struct ServerState {
    source: Source,
    tokens: Option<Tokens>,
    room: Places,
    differences: Places,
    metrics: Mutex<Metrics>,
    push: PushStatuses,
    answered: AtomicU64,
    refused: AtomicU64,
}

/// Who asks, and what this client may see.
#[derive(Clone, Default)]
struct Client {
    /// Number of its token; 0 without tokens.
    token: usize,
    scope: Filter,
}

/// An answer without a profile: a status and a sentence.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, mut text) = self;
        text.push('\n');
        let mut response = (status, text).into_response();
        let headers = response.headers_mut();
        if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::UNAUTHORIZED) {
            // Its connection is for others.
            headers.insert(header::CONNECTION, header::HeaderValue::from_static("close"));
        }
        if status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, header::HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<SourceError> for Refusal {
    fn from(error: SourceError) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

fn bad_request(reason: impl Into<String>) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, reason.into())
}

type Pairs = Query<Vec<(String, String)>>;

/// The router for all endpoints.
pub fn router(recording: RecordingHandle, tokens: Option<Tokens>, push: PushStatuses) -> Router {
    let sharers = tokens.as_ref().map_or(1, Tokens::count);
    let server = Arc::new(ServerState {
        source: Source::new(recording, sharers),
        tokens,
        room: Places::new(MOST_SCRAPES, sharers),
        differences: Places::new(MOST_DIFFERENCES, sharers),
        metrics: Mutex::default(),
        push,
        answered: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    });
    Router::new()
        .route("/", get(index))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/debug/pprof/heap", get(heap))
        .route("/debug/pprof/allocs", get(allocs))
        .route("/debug/pprof/delta_heap", get(delta_heap))
        .route("/metrics", get(metrics))
        .fallback(|| async { Refusal(StatusCode::NOT_FOUND, "there is no such page; / lists those there are".into()) })
        .layer(middleware::from_fn_with_state(Arc::clone(&server), admit))
        .with_state(server)
}

/// Checks whether a client may come in, and what it may see.
async fn admit(State(server): State<Arc<ServerState>>, mut request: Request, next: Next) -> Result<Response, Refusal> {
    let headers = request.headers();
    let has_body = headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
    if has_body {
        return Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, "requests have no body here".into()));
    }
    let client = match &server.tokens {
        None => Client::default(),
        // Health is not secret.
        Some(_) if request.uri().path() == "/healthz" => Client::default(),
        Some(tokens) => {
            let (token, scope) = bearer(headers).and_then(|token| tokens.scope(token)).ok_or_else(|| {
                let hint = "a token is needed: send the header `Authorization: Bearer TOKEN`";
                Refusal(StatusCode::UNAUTHORIZED, hint.into())
            })?;
            Client { token, scope: scope.clone() }
        }
    };
    request.extensions_mut().insert(client);
    Ok(next.run(request).await)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

async fn index() -> Html<&'static str> {
    Html(include_str!("index.html"))
}

async fn heap(
    State(server): State<Arc<ServerState>>,
    Extension(client): Extension<Client>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    server.profile(client, &pairs(query)?, INUSE_SPACE, false).await
}

async fn allocs(
    State(server): State<Arc<ServerState>>,
    Extension(client): Extension<Client>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    server.profile(client, &pairs(query)?, ALLOC_SPACE, false).await
}

async fn delta_heap(
    State(server): State<Arc<ServerState>>,
    Extension(client): Extension<Client>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    server.profile(client, &pairs(query)?, INUSE_SPACE, true).await
}

fn pairs(query: Result<Pairs, axum::extract::rejection::QueryRejection>) -> Result<Vec<(String, String)>, Refusal> {
    query.map(|Query(pairs)| pairs).map_err(|_| bad_request("the parameters are not name=value pairs"))
}

async fn metrics(
    State(server): State<Arc<ServerState>>,
    Extension(Client { token, scope }): Extension<Client>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    let parameters = Parameters::parse(&pairs(query)?).map_err(bad_request)?;
    if parameters.seconds.is_some() {
        return Err(bad_request("seconds: metrics are counted from the start, and Prometheus makes rates of them"));
    }
    let _permit = server.permit(token)?;
    let shared = server.source.profile(token, Detail::Totals).await?;
    let serving = Serving {
        answered: server.answered.load(Ordering::Relaxed),
        refused: server.refused.load(Ordering::Relaxed),
        push: server.push.read(),
    };
    let mut metrics = server.metrics.lock().unwrap_or_else(PoisonError::into_inner);
    let text = metrics.write(&shared.made, &[&scope, &parameters.filter], serving);
    drop(metrics);
    server.answered.fetch_add(1, Ordering::Relaxed);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

impl ServerState {
    fn permit(&self, token: usize) -> Result<SemaphorePermit<'_>, Refusal> {
        self.room.try_take(token).ok_or_else(|| self.full(self.room.of_each))
    }

    fn full(&self, most: usize) -> Refusal {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let whose = if self.tokens.is_some() { " with this token" } else { "" };
        let reason = format!("{most} scrapes{whose} are under way already; try again later");
        Refusal(StatusCode::SERVICE_UNAVAILABLE, reason)
    }

    async fn profile(
        &self,
        Client { token, scope }: Client,
        pairs: &[(String, String)],
        first: &'static str,
        needs_seconds: bool,
    ) -> Result<Response, Refusal> {
        let Parameters { filter, seconds, format } = Parameters::parse(pairs).map_err(bad_request)?;
        if needs_seconds && seconds.is_none() {
            return Err(bad_request("seconds is needed here: ?seconds=10, for example"));
        }
        let detail = if format == ProfileFormat::Json { Detail::Lifetimes } else { Detail::Stacks };
        let wanted = Wanted { scope, filter, first, format };
        let permit = self.permit(token)?;
        let (earlier, _permit) = match seconds {
            Some(seconds) => {
                let places = &self.differences;
                let _difference = places.try_take(token).ok_or_else(|| self.full(places.of_each))?;
                let earlier = self.source.profile(token, Detail::Stacks).await?;
                drop(permit);
                tokio::time::sleep(seconds).await;
                // A client that has waited this long is not turned away.
                (Some(earlier), self.room.take(token).await)
            }
            None => (None, Some(permit)),
        };
        let shared = match earlier {
            Some(_) => self.source.second_profile(token, Detail::Stacks).await?,
            None => self.source.profile(token, detail).await?,
        };
        let bytes = match earlier {
            Some(earlier) => {
                encoding(move || {
                    let difference = difference(Some(&earlier.made), &shared.made, Inuse::Change);
                    encode(&shown(&difference, &wanted.scope, &wanted.filter), &wanted)
                })
                .await?
            }
            None => {
                let cell = shared.encoding(&wanted);
                let made = shared.clone();
                let encoded = cell.get_or_try_init(|| {
                    encoding(move || encode(&shown(&made.made.profile, &wanted.scope, &wanted.filter), &wanted))
                });
                encoded.await?.clone()
            }
        };
        self.answered.fetch_add(1, Ordering::Relaxed);
        let name = match format {
            ProfileFormat::Pprof => "attachment; filename=\"heap.pb.gz\"",
            ProfileFormat::Json => "attachment; filename=\"heap.json.gz\"",
        };
        Ok(([(header::CONTENT_TYPE, "application/octet-stream"), (header::CONTENT_DISPOSITION, name)], bytes)
            .into_response())
    }
}

/// Runs an encoder where it does not hold up other answers.
async fn encoding(encode: impl FnOnce() -> std::io::Result<Bytes> + Send + 'static) -> Result<Bytes, Refusal> {
    let failed = |reason: String| Refusal(StatusCode::INTERNAL_SERVER_ERROR, reason);
    match tokio::task::spawn_blocking(encode).await {
        Ok(encoded) => encoded.map_err(|error| failed(format!("the profile could not be encoded: {error}"))),
        Err(_) => Err(failed("the profile could not be encoded".into())),
    }
}

/// Encodes a profile, compressed.
fn encode(profile: &Profile, wanted: &Wanted) -> std::io::Result<Bytes> {
    if wanted.format == ProfileFormat::Json {
        let mut gzip = GzEncoder::new(Vec::new(), COMPRESSION);
        // Each process has its stacks.
        let options = WriteOptions { group_by: Some(GroupBy::Process), ..WriteOptions::default() };
        let format = by_name("json").map_err(std::io::Error::other)?;
        format.write(profile, &options, &mut gzip).map_err(std::io::Error::other)?;
        return Ok(gzip.finish()?.into());
    }
    let mut message = encode_pprof(profile);
    if let Some(id) = message.string_table.iter().position(|text| text == wanted.first) {
        message.default_sample_type = id as i64;
    }
    let mut gzip = GzEncoder::new(Vec::new(), COMPRESSION);
    gzip.write_all(&message.encode_to_vec())?;
    Ok(gzip.finish()?.into())
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
