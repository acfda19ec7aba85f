//! The endpoints.

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
use tokio::sync::{Semaphore, SemaphorePermit};

use super::delta::{Inuse, difference};
use super::filter::{Filter, shown};
use super::metrics::{Metrics, Serving};
use super::parameters::Parameters;
use super::push::PushStatuses;
use super::source::{Source, SourceError, Wanted};
use super::tokens::Tokens;
use crate::profile::formats::encode_pprof;
use crate::profile::model::Profile;
use crate::record::requests::Recording;
use crate::record::snapshot::Detail;

/// Scrapes under way at a time; more are told to come back later.
const MOST_SCRAPES: usize = 256;
/// Differences under way at a time; while one waits for its time to pass, it keeps no other scrape away.
const MOST_DIFFERENCES: usize = 128;
/// Speed counts here: level 1 is within a tenth of level 5 on profiles.
const COMPRESSION: Compression = Compression::fast();

const ALLOC_SPACE: &str = "alloc_space";
const INUSE_SPACE: &str = "inuse_space";

/// What all requests share.
struct Shop {
    source: Source,
    tokens: Option<Tokens>,
    room: Semaphore,
    differences: Semaphore,
    metrics: Mutex<Metrics>,
    push: PushStatuses,
    answered: AtomicU64,
    refused: AtomicU64,
}

/// What the asker may see.
#[derive(Clone)]
struct Scope(Filter);

/// An answer that is no profile: a status and a sentence.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, mut text) = self;
        text.push('\n');
        let mut response = (status, text).into_response();
        let headers = response.headers_mut();
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

/// All endpoints.
pub fn router(recording: Recording, tokens: Option<Tokens>, push: PushStatuses) -> Router {
    let shop = Arc::new(Shop {
        source: Source::new(recording),
        tokens,
        room: Semaphore::new(MOST_SCRAPES),
        differences: Semaphore::new(MOST_DIFFERENCES),
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
        .layer(middleware::from_fn_with_state(Arc::clone(&shop), admit))
        .with_state(shop)
}

/// Who may come in, and with what.
async fn admit(State(shop): State<Arc<Shop>>, mut request: Request, next: Next) -> Result<Response, Refusal> {
    let headers = request.headers();
    let has_body = headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
    if has_body {
        return Err(Refusal(StatusCode::PAYLOAD_TOO_LARGE, "requests have no body here".into()));
    }
    let scope = match &shop.tokens {
        None => Filter::default(),
        // Whether we are alive is no secret.
        Some(_) if request.uri().path() == "/healthz" => Filter::default(),
        Some(tokens) => bearer(headers).and_then(|token| tokens.scope(token)).cloned().ok_or_else(|| {
            let hint = "a token is needed: send the header `Authorization: Bearer TOKEN`";
            Refusal(StatusCode::UNAUTHORIZED, hint.into())
        })?,
    };
    request.extensions_mut().insert(Scope(scope));
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
    State(shop): State<Arc<Shop>>,
    Extension(scope): Extension<Scope>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    shop.profile(scope, &pairs(query)?, INUSE_SPACE, false).await
}

async fn allocs(
    State(shop): State<Arc<Shop>>,
    Extension(scope): Extension<Scope>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    shop.profile(scope, &pairs(query)?, ALLOC_SPACE, false).await
}

async fn delta_heap(
    State(shop): State<Arc<Shop>>,
    Extension(scope): Extension<Scope>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    shop.profile(scope, &pairs(query)?, INUSE_SPACE, true).await
}

fn pairs(query: Result<Pairs, axum::extract::rejection::QueryRejection>) -> Result<Vec<(String, String)>, Refusal> {
    query.map(|Query(pairs)| pairs).map_err(|_| bad_request("the parameters are not name=value pairs"))
}

async fn metrics(
    State(shop): State<Arc<Shop>>,
    Extension(Scope(scope)): Extension<Scope>,
    query: Result<Pairs, axum::extract::rejection::QueryRejection>,
) -> Result<Response, Refusal> {
    let parameters = Parameters::parse(&pairs(query)?).map_err(bad_request)?;
    if parameters.seconds.is_some() {
        return Err(bad_request("seconds: metrics are counted from the start, and Prometheus makes rates of them"));
    }
    let _place = shop.place()?;
    let shared = shop.source.profile(Detail::Totals).await?;
    let serving = Serving {
        answered: shop.answered.load(Ordering::Relaxed),
        refused: shop.refused.load(Ordering::Relaxed),
        push: shop.push.read(),
    };
    let mut metrics = shop.metrics.lock().unwrap_or_else(PoisonError::into_inner);
    let text = metrics.write(&shared.made, &[&scope, &parameters.filter], serving);
    drop(metrics);
    shop.answered.fetch_add(1, Ordering::Relaxed);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}

impl Shop {
    fn place(&self) -> Result<SemaphorePermit<'_>, Refusal> {
        self.room.try_acquire().map_err(|_| self.full(MOST_SCRAPES))
    }

    fn full(&self, most: usize) -> Refusal {
        self.refused.fetch_add(1, Ordering::Relaxed);
        Refusal(StatusCode::SERVICE_UNAVAILABLE, format!("{most} scrapes are under way already; try again later"))
    }

    async fn profile(
        &self,
        Scope(scope): Scope,
        pairs: &[(String, String)],
        first: &'static str,
        needs_seconds: bool,
    ) -> Result<Response, Refusal> {
        let Parameters { filter, seconds } = Parameters::parse(pairs).map_err(bad_request)?;
        if needs_seconds && seconds.is_none() {
            return Err(bad_request("seconds is needed here: ?seconds=10, for example"));
        }
        let wanted = Wanted { scope, filter, first };
        let place = self.place()?;
        let (earlier, _place) = match seconds {
            Some(seconds) => {
                let _difference = self.differences.try_acquire().map_err(|_| self.full(MOST_DIFFERENCES))?;
                let earlier = self.source.profile(Detail::Stacks).await?;
                drop(place);
                tokio::time::sleep(seconds).await;
                // Who has waited so long is not sent away. Never closed.
                (Some(earlier), self.room.acquire().await.ok())
            }
            None => (None, Some(place)),
        };
        let shared = self.source.profile(Detail::Stacks).await?;
        let bytes = match earlier {
            Some(earlier) => {
                encoding(move || {
                    let difference = difference(Some(&earlier.made), &shared.made, Inuse::Change);
                    encode(&shown(&difference, &wanted.scope, &wanted.filter), wanted.first)
                })
                .await?
            }
            None => {
                let cell = shared.encoding(&wanted);
                let made = Arc::clone(&shared);
                let encoded = cell.get_or_try_init(|| {
                    encoding(move || encode(&shown(&made.made.profile, &wanted.scope, &wanted.filter), wanted.first))
                });
                encoded.await?.clone()
            }
        };
        self.answered.fetch_add(1, Ordering::Relaxed);
        let name = "attachment; filename=\"heap.pb.gz\"";
        Ok(([(header::CONTENT_TYPE, "application/octet-stream"), (header::CONTENT_DISPOSITION, name)], bytes)
            .into_response())
    }
}

/// Runs an encoder where it keeps no other answer waiting.
async fn encoding(encode: impl FnOnce() -> std::io::Result<Bytes> + Send + 'static) -> Result<Bytes, Refusal> {
    let failed = |reason: String| Refusal(StatusCode::INTERNAL_SERVER_ERROR, reason);
    match tokio::task::spawn_blocking(encode).await {
        Ok(encoded) => encoded.map_err(|error| failed(format!("the profile could not be encoded: {error}"))),
        Err(_) => Err(failed("the profile could not be encoded".into())),
    }
}

/// As gzip-compressed pprof, showing `first` first.
fn encode(profile: &Profile, first: &str) -> std::io::Result<Bytes> {
    let mut message = encode_pprof(profile);
    if let Some(id) = message.string_table.iter().position(|text| text == first) {
        message.default_sample_type = id as i64;
    }
    let mut gzip = GzEncoder::new(Vec::new(), COMPRESSION);
    gzip.write_all(&message.encode_to_vec())?;
    Ok(gzip.finish()?.into())
}
