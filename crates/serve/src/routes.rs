//! The HTTP endpoints.

mod encoders;
mod remembering;

use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use bytes::Bytes;
use flate2::read::GzDecoder;
use heapbpf_access::filter::Filter;
use heapbpf_access::parameters::{Parameters, ProfileFormat, taken};
use heapbpf_access::tokens::Tokens;
use heapbpf_profile::formats::by_name;
use heapbpf_profile::model::Process;
use heapbpf_profile::page::{served_page, served_policy};
use heapbpf_profile::report::{FrameView, Growing};
use heapbpf_record::requests::{Detail, RecordingHandle};
use heapbpf_statistics::estimate::Estimate;
use http_body_util::Full;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};

use self::encoders::{encode, encode_difference, encoding, in_thread};
use super::admission::{accepts_gzip, check_form, check_host};
use super::history::History;
use super::metrics::{self, Metrics, Serving};
use super::moments::Moments;
use super::page::{self, ClientView};
use super::places::{Places, Slot};
use super::push::PushStatuses;
use super::source::{EncodingKey, Held, Shared, Source, SourceError};

/// Maximum number of scrapes in progress, shared equally by the tokens. Further clients are asked to come back later.
const MOST_SCRAPES: usize = 256;
/// Maximum number of differences in progress, shared in the same way. A difference that is waiting for its time to pass
/// does not count as a scrape.
const MOST_DIFFERENCES: usize = 128;
/// Name of the page's encoding among those of a profile.
const PAGE: &str = "page";
const PLAIN: &str = "text/plain; charset=utf-8";
const ALLOC_SPACE: &str = "alloc_space";
const INUSE_SPACE: &str = "inuse_space";

/// State that all requests share.
struct ServerState {
    source: Source,
    tokens: Option<Tokens>,
    scrapes: Places,
    differences: Places,
    metrics: Mutex<Metrics>,
    push: PushStatuses,
    history: Mutex<History>,
    moments: Moments,
    /// The last profile that was kept unasked, with what grows or grew in it.
    growing: Mutex<Option<(Arc<Shared>, Vec<Growing>)>>,
    layouts: page::Layouts,
    /// How the page and leak suspects show frames.
    frames: FrameView,
    /// Held while a file is made for a page, because files are made in memory.
    exporting: Arc<tokio::sync::Mutex<()>>,
    answered: AtomicU64,
    refused: AtomicU64,
}

/// The client that sent a request, and what it may see.
#[derive(Clone, Default)]
struct Client {
    /// Number of its token; 0 without tokens.
    token: usize,
    scope: Filter,
}

/// An answer to a client.
pub type Answer = Response<Full<Bytes>>;

/// An answer without a profile: a status and a sentence.
struct Refusal(StatusCode, String);

impl From<Refusal> for Answer {
    fn from(Refusal(status, mut text): Refusal) -> Self {
        text.push('\n');
        let mut response = answer([(header::CONTENT_TYPE, PLAIN)], text);
        *response.status_mut() = status;
        let extra: &[(HeaderName, &str)] = match status {
            // Frees its connection for other clients.
            StatusCode::SERVICE_UNAVAILABLE => &[(header::CONNECTION, "close"), (header::RETRY_AFTER, "1")],
            StatusCode::UNAUTHORIZED => &[(header::CONNECTION, "close"), (header::WWW_AUTHENTICATE, "Bearer")],
            StatusCode::METHOD_NOT_ALLOWED => &[(header::ALLOW, "GET,HEAD")],
            _ => &[],
        };
        for (name, value) in extra {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        response
    }
}

/// An answer with these headers.
fn answer<const N: usize>(headers: [(HeaderName, &str); N], body: impl Into<Bytes>) -> Answer {
    let mut response = Response::new(Full::new(body.into()));
    for (name, value) in headers {
        if let Ok(value) = HeaderValue::from_str(value) {
            response.headers_mut().insert(name, value);
        }
    }
    response
}

impl From<SourceError> for Refusal {
    fn from(error: SourceError) -> Self {
        Self(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

fn bad_request(reason: impl Into<String>) -> Refusal {
    Refusal(StatusCode::BAD_REQUEST, reason.into())
}

/// All endpoints.
#[derive(Clone)]
pub struct Routes(Arc<ServerState>);

impl Routes {
    /// The endpoints of a recording. `history`: what is known from earlier runs; `frames`: how frames are shown.
    pub fn new(
        recording: RecordingHandle,
        tokens: Option<Tokens>,
        push: PushStatuses,
        history: History,
        frames: FrameView,
    ) -> Self {
        let sharers = tokens.as_ref().map_or(1, Tokens::count);
        Self(Arc::new(ServerState {
            source: Source::new(recording, sharers),
            tokens,
            scrapes: Places::new(MOST_SCRAPES, sharers),
            differences: Places::new(MOST_DIFFERENCES, sharers),
            metrics: Mutex::default(),
            push,
            history: Mutex::new(history),
            moments: Moments::default(),
            growing: Mutex::default(),
            layouts: page::Layouts::default(),
            frames,
            exporting: Arc::default(),
            answered: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }))
    }

    /// Answers a request.
    pub async fn answer<B>(self, request: Request<B>) -> Answer {
        // Requests have no bodies.
        self.0.answer(&request.map(drop)).await.unwrap_or_else(Answer::from)
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}

fn index() -> Answer {
    static SERVED: LazyLock<Bytes> = LazyLock::new(|| served_page().into());
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, page_policy()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    answer(headers, SERVED.clone())
}

/// The page's own policy, and a ban on framing by other pages.
fn page_policy() -> &'static str {
    static POLICY: LazyLock<String> = LazyLock::new(|| format!("{}; frame-ancestors 'none'", served_policy()));
    &POLICY
}

/// An answer that is a file.
fn file(name: &str, body: impl Into<Bytes>) -> Answer {
    let name = format!("attachment; filename=\"{name}\"");
    answer([(header::CONTENT_TYPE, "application/octet-stream"), (header::CONTENT_DISPOSITION, &name)], body)
}

/// Parses a time in a query, if there is one.
fn time(pairs: &mut Vec<(String, String)>, key: &str) -> Result<Option<u64>, Refusal> {
    let Some(value) = taken(pairs, key) else { return Ok(None) };
    let bad = |_| bad_request(format!("{key} must be Unix time in whole milliseconds, not {value:?}"));
    value.parse().map(Some).map_err(bad)
}

/// Parses the two moments of a query.
fn two_times(pairs: &mut Vec<(String, String)>) -> Result<[u64; 2], Refusal> {
    let missing = |key: &str| bad_request(format!("{key} is required: a moment that profiles_ms in /history lists"));
    let from = time(pairs, "from")?.ok_or_else(|| missing("from"))?;
    let to = time(pairs, "to")?.ok_or_else(|| missing("to"))?;
    if from >= to {
        return Err(bad_request("from must be before to"));
    }
    Ok([from, to])
}

impl ServerState {
    async fn answer(self: &Arc<Self>, request: &Request<()>) -> Result<Answer, Refusal> {
        let client = self.admit(request)?;
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return Err(Refusal(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD requests are allowed".into()));
        }
        let query = request.uri().query().unwrap_or("").as_bytes();
        let pairs: Vec<(String, String)> = form_urlencoded::parse(query).into_owned().collect();
        let answered = match request.uri().path() {
            "/" => return Ok(index()),
            "/healthz" => return Ok(answer([(header::CONTENT_TYPE, PLAIN)], "ok\n")),
            "/debug/pprof/heap" => self.profile(client, &pairs, INUSE_SPACE, false).await,
            "/debug/pprof/allocs" => self.profile(client, &pairs, ALLOC_SPACE, false).await,
            "/debug/pprof/delta_heap" => self.delta(client, pairs).await,
            "/history" => self.history(client, pairs, request.headers()).await,
            "/metrics" => self.metrics(client, &pairs).await,
            "/page/data" => self.page_data(client, &pairs, request.headers()).await,
            "/page/growth" => self.compare(client, pairs, request.headers(), page::growth).await,
            "/page/kept" => self.compare(client, pairs, request.headers(), page::kept).await,
            "/page/export" => self.page_export(client, pairs).await,
            _ => Err(Refusal(StatusCode::NOT_FOUND, "there is no such page; docs/fleet.md lists all of them".into())),
        };
        self.answered.fetch_add(u64::from(answered.is_ok()), Ordering::Relaxed);
        answered
    }

    /// Checks whether a client is admitted. Returns what it may see.
    fn admit(&self, request: &Request<()>) -> Result<Client, Refusal> {
        let refused = |(status, reason)| Refusal(status, reason);
        check_form(request).map_err(refused)?;
        match &self.tokens {
            None => check_host(request).map(|()| Client::default()).map_err(refused),
            // The health check is public, and so is the page without its data.
            Some(_) if matches!(request.uri().path(), "/healthz" | "/") => Ok(Client::default()),
            Some(tokens) => {
                let token = bearer(request.headers()).and_then(|token| tokens.scope(token));
                let (token, scope) = token.ok_or_else(|| {
                    let hint = "a token is needed: send the header `Authorization: Bearer TOKEN`";
                    Refusal(StatusCode::UNAUTHORIZED, hint.into())
                })?;
                Ok(Client { token, scope: scope.clone() })
            }
        }
    }

    async fn page_data(
        self: &Arc<Self>,
        client: Client,
        pairs: &[(String, String)],
        headers: &HeaderMap,
    ) -> Result<Answer, Refusal> {
        let Parameters { filter, seconds, .. } = Parameters::parse(pairs).map_err(bad_request)?;
        if seconds.is_some() {
            return Err(bad_request("seconds is not supported here: /page/growth compares moments"));
        }
        let slot = self.permit(client.token)?;
        let shared = self.source.profile(client.token, Detail::Stacks).await?;
        self.keep(&shared);
        let seen = ClientView { scope: client.scope, filter };
        let wanted = EncodingKey { seen: seen.clone(), first: PAGE, format: ProfileFormat::default() };
        let cell = shared.encoding(&wanted);
        let (now, moments, state) = (shared.clone(), self.moments.times(), Arc::clone(self));
        let data = move || page::compressed(&page::data(&now, moments, &seen, &state.layouts, state.frames)?);
        let encoded = cell.get_or_try_init(|| encoding(&slot, data));
        json(&slot, encoded.await?.clone(), headers).await
    }

    async fn page_export(&self, client: Client, mut pairs: Vec<(String, String)>) -> Result<Answer, Refusal> {
        let name =
            taken(&mut pairs, "format").ok_or_else(|| bad_request("format is required: ?format=pprof, for example"))?;
        let format = by_name(&name).map_err(|error| bad_request(error.to_string()))?;
        let Parameters { filter, .. } = Parameters::parse(&pairs).map_err(bad_request)?;
        let slot = self.permit(client.token)?;
        let turn = Arc::clone(&self.exporting).lock_owned().await;
        let shared = self.source.profile(client.token, Detail::Stacks).await?;
        let seen = ClientView { scope: client.scope, filter };
        let frames = self.frames;
        let made = in_thread((slot, turn), move || page::file(&shared.made.profile, format, &seen, frames)).await;
        let made =
            made.map_err(|_| Refusal(StatusCode::INTERNAL_SERVER_ERROR, "the file could not be created".into()))?;
        Ok(file(&format!("heapbpf{}", format.extensions[0]), made.map_err(bad_request)?))
    }

    /// Keeps a profile, so that it can be compared with others.
    fn keep(&self, profile: &Held) {
        self.moments.keep(profile.kept());
        self.source.set_marks(self.moments.marks());
    }

    /// One figure of each function that grows or grew, if the client may see all of its processes.
    fn growing(&self, filters: &[&Filter], figure: impl Fn(&Growing) -> Option<Estimate>) -> Vec<(String, Estimate)> {
        let growing = self.growing.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((shared, growing)) = &*growing else { return Vec::new() };
        let visible = |process: &Process| filters.iter().all(|filter| filter.matches(process));
        metrics::growing_series(&shared.made.profile, growing, visible, figure)
    }

    /// Answers with the totals of some time.
    async fn history(
        self: &Arc<Self>,
        client: Client,
        mut pairs: Vec<(String, String)>,
        headers: &HeaderMap,
    ) -> Result<Answer, Refusal> {
        let (from, to) = (time(&mut pairs, "from")?.unwrap_or(0), time(&mut pairs, "to")?.unwrap_or(u64::MAX));
        let Parameters { filter, .. } = Parameters::parse(&pairs).map_err(bad_request)?;
        let slot = self.permit(client.token)?;
        let (state, seen) = (Arc::clone(self), ClientView { scope: client.scope, filter });
        let encoded = encoding(&slot, move || {
            let mut past = state.history.lock().unwrap_or_else(PoisonError::into_inner).answer(from, to, &seen);
            past.profiles_ms = state.moments.times();
            page::compressed(&page::json(&past)?)
        });
        json(&slot, encoded.await?, headers).await
    }

    async fn metrics(&self, Client { token, scope }: Client, pairs: &[(String, String)]) -> Result<Answer, Refusal> {
        let parameters = Parameters::parse(pairs).map_err(bad_request)?;
        if parameters.seconds.is_some() {
            return Err(bad_request(
                "seconds is not supported here: metrics count from the start, and Prometheus computes rates",
            ));
        }
        let _permit = self.permit(token)?;
        let shared = self.source.profile(token, Detail::Totals).await?;
        let filters = [&scope, &parameters.filter];
        let serving = Serving {
            answered: self.answered.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed),
            push: self.push.read(),
            suspects: self.growing(&filters, |it| it.per_second),
            full: self.growing(&filters, |it| it.full),
        };
        let mut metrics = self.metrics.lock().unwrap_or_else(PoisonError::into_inner);
        let text = metrics.write(&shared.made, &filters, serving);
        drop(metrics);
        Ok(answer([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
    }

    /// Answers with what `of` computes from the two moments that the query names.
    async fn compare(
        &self,
        client: Client,
        mut pairs: Vec<(String, String)>,
        headers: &HeaderMap,
        of: impl FnOnce(&Shared, &Shared, &ClientView, FrameView) -> std::io::Result<Bytes> + Send + 'static,
    ) -> Result<Answer, Refusal> {
        let times = two_times(&mut pairs)?;
        let Parameters { filter, .. } = Parameters::parse(&pairs).map_err(bad_request)?;
        let slot = self.permit(client.token)?;
        let ([before, after], seen) = (self.moments_at(times)?, ClientView { scope: client.scope, filter });
        let frames = self.frames;
        let encoded = encoding(&slot, move || page::compressed(&of(&before, &after, &seen, frames)?)).await?;
        json(&slot, encoded, headers).await
    }

    /// The profiles of two moments.
    fn moments_at(&self, times: [u64; 2]) -> Result<[Arc<Shared>; 2], Refusal> {
        let [before, after] = times.map(|time| {
            let reason = format!("the moment {time} is not kept; profiles_ms in /history lists those that are");
            self.moments.at(time).ok_or(Refusal(StatusCode::NOT_FOUND, reason))
        });
        Ok([before?, after?])
    }

    /// Answers with the difference over some seconds, or between two moments that are kept.
    async fn delta(&self, client: Client, mut pairs: Vec<(String, String)>) -> Result<Answer, Refusal> {
        if !pairs.iter().any(|(key, _)| ["from", "to"].contains(&&**key)) {
            return self.profile(client, &pairs, INUSE_SPACE, true).await;
        }
        let times = two_times(&mut pairs)?;
        let Parameters { filter, seconds, format } = Parameters::parse(&pairs).map_err(bad_request)?;
        if seconds.is_some() || format != ProfileFormat::Pprof {
            return Err(bad_request("from and to cannot be combined with seconds, or with a format other than pprof"));
        }
        let slot = self.permit(client.token)?;
        let [before, after] = self.moments_at(times)?;
        let seen = ClientView { scope: client.scope, filter };
        let wanted = EncodingKey { seen, first: INUSE_SPACE, format };
        let bytes = encoding(&slot, move || encode_difference(&before.made, &after.made, &wanted)).await?;
        Ok(file("heap.pb.gz", bytes))
    }

    fn permit(&self, token: usize) -> Result<Slot, Refusal> {
        self.scrapes.try_take(token).ok_or_else(|| self.full(self.scrapes.of_each))
    }

    fn full(&self, most: usize) -> Refusal {
        self.refused.fetch_add(1, Ordering::Relaxed);
        let whose = if self.tokens.is_some() { " with this token" } else { "" };
        let reason = format!("{most} scrapes{whose} are already in progress; try again later");
        Refusal(StatusCode::SERVICE_UNAVAILABLE, reason)
    }

    async fn profile(
        &self,
        Client { token, scope }: Client,
        pairs: &[(String, String)],
        first: &'static str,
        needs_seconds: bool,
    ) -> Result<Answer, Refusal> {
        let Parameters { filter, seconds, format } = Parameters::parse(pairs).map_err(bad_request)?;
        if needs_seconds && seconds.is_none() {
            return Err(bad_request("seconds is required: ?seconds=10, for example"));
        }
        let detail = match format {
            ProfileFormat::Pprof => Detail::Stacks,
            ProfileFormat::Json => Detail::Lifetimes,
            ProfileFormat::Totals => Detail::Totals,
        };
        let wanted = EncodingKey { seen: ClientView { scope, filter }, first, format };
        let permit = self.permit(token)?;
        let (earlier, slot) = match seconds {
            Some(seconds) => {
                let places = &self.differences;
                let _difference = places.try_take(token).ok_or_else(|| self.full(places.of_each))?;
                let earlier = self.source.profile(token, Detail::Stacks).await?;
                drop(permit);
                tokio::time::sleep(seconds).await;
                // A client that has waited this long is not refused.
                (Some(earlier), self.scrapes.take(token).await.ok_or_else(|| self.full(self.scrapes.of_each))?)
            }
            None => (None, permit),
        };
        let shared = match earlier {
            Some(_) => self.source.second_profile(token, Detail::Stacks).await?,
            None => self.source.profile(token, detail).await?,
        };
        let bytes = match earlier {
            Some(earlier) => encoding(&slot, move || encode_difference(&earlier.made, &shared.made, &wanted)).await?,
            None => {
                let cell = shared.encoding(&wanted);
                let made = shared.clone();
                let encoded = cell.get_or_try_init(|| encoding(&slot, move || encode(&made.made.profile, &wanted)));
                encoded.await?.clone()
            }
        };
        let name = match format {
            ProfileFormat::Pprof => "heap.pb.gz",
            ProfileFormat::Json | ProfileFormat::Totals => "heap.json.gz",
        };
        Ok(file(name, bytes))
    }
}

/// An answer from compressed JSON, decompressed for clients that do not accept gzip.
async fn json(slot: &Slot, compressed: Bytes, headers: &HeaderMap) -> Result<Answer, Refusal> {
    let accepted = headers.get(header::ACCEPT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or("");
    let [kind, store] = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
    if accepts_gzip(accepted) {
        return Ok(answer([kind, store, (header::CONTENT_ENCODING, "gzip")], compressed));
    }
    let plain = encoding(slot, move || {
        let mut plain = Vec::new();
        GzDecoder::new(&compressed[..]).read_to_end(&mut plain)?;
        Ok(plain.into())
    });
    Ok(answer([kind, store], plain.await?))
}

#[cfg(test)]
#[path = "routes_tests.rs"]
mod tests;
