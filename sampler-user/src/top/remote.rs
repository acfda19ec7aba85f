//! Profiles of a running service (`heapbpf serve`), over HTTP.

use std::collections::HashMap;
use std::io::Read;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use heapbpf_host::clock::thread_cpu_time;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::model::Profile;
use heapbpf_profile::read;
use heapbpf_profile::units::unix_ms;
use heapbpf_record::requests::Detail;
use heapbpf_symbols::http_client;
use serde::Deserialize;
use ureq::Body;
use ureq::http::{Response, Uri};

use super::Look;
use super::feed::{Feed, Got, NoProfile};
use super::screen::show;
use super::standard_streams::Redirected;
use super::terminal::{Leaves, Terminal};

/// Timeout of a connection, and until an answer begins.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// Timeout of an answer.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// Maximum size of an answer, in bytes.
const LARGEST_ANSWER: u64 = 256 << 20;
/// Maximum size of an answer that is not a profile, in bytes: a sentence.
const LARGEST_SENTENCE: u64 = 4 << 10;

/// The profile with everything that is known. Older services refuse this parameter, and return less without it.
const WHOLE: &str = "/debug/pprof/heap?format=json";
/// Totals, which do not wait for names. Older services refuse this, too.
const TOTALS: &str = "/debug/pprof/heap?format=totals";
const PPROF: &str = "/debug/pprof/heap";
/// What the service remembers. Older services do not.
const HISTORY: &str = "/history";
/// Time between two requests for it.
const HISTORY_EVERY: Duration = Duration::from_secs(60);
/// Steps of the last hour, and the length of one in milliseconds.
const STEPS: usize = 12;
const STEP_MS: u64 = 300_000;

/// The address of a service, and the authorization to use it.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    origin: String,
    authorization: Option<String>,
}

impl Address {
    /// Parses an address as the user writes it: `http://HOST:PORT`, optionally with a token before an `@`.
    ///
    /// # Errors
    /// It is not an address. The sentence does not contain the token.
    pub fn parse(url: &str, token: Option<&str>) -> Result<Self, String> {
        let shown = url.rsplit_once('@').map_or(url, |(_, host)| host);
        let wanted = "an address is http://HOST:PORT or https://HOST:PORT; to look at a process, use --pid PID";
        let failed = |why: &str| format!("{shown}: {why}; {wanted}");
        let (scheme, rest) = url.split_once("://").ok_or_else(|| failed("not an address"))?;
        if !["http", "https"].contains(&scheme) {
            return Err(failed("unknown kind of address"));
        }
        let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, host) = authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        if !matches!(path, "" | "/") {
            return Err(failed("it must not have a path"));
        }
        let origin = format!("{scheme}://{host}");
        let uri: Uri = format!("{origin}/").parse().map_err(|_| failed("not a URL"))?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(failed("it has no host"));
        }
        let authorization = token.or(user).map(|token| format!("Bearer {token}"));
        Ok(Self { origin, authorization })
    }

    /// Returns the address without its token.
    pub fn shown(&self) -> &str {
        &self.origin
    }
}

/// Shows a running service until the user quits. Returns the exit status.
///
/// # Errors
/// The terminal cannot be used.
pub fn watched(address: Address, look: Look) -> anyhow::Result<u8> {
    let terminal = Terminal::open().context("the terminal cannot be used")?;
    let said = Redirected::said_to_memory().context("cannot keep messages")?;
    let leaves = Leaves(Arc::clone(&terminal));
    terminal.enter().context("the terminal cannot be used")?;
    let waiting = Arc::clone(&terminal);
    let feed = Arc::new(Feed::notifying(move || waiting.wake()));
    let filled = Arc::clone(&feed);
    let source = address.shown().to_owned();
    let mut client = Client::new(address);
    let fill = move || {
        filled.fill(look.refresh, |detail| {
            if detail == Detail::Totals {
                return client.asked(TOTALS).map_err(|Refused(_, why)| NoProfile::Later(why));
            }
            let got = client.profile().map_err(NoProfile::Later)?;
            client.past(unix_ms(got.profile.header.time)).into_iter().for_each(|past| filled.remember(past));
            Ok(got)
        });
    };
    std::thread::Builder::new().name("profiles-shown".into()).spawn(fill).context("cannot start a thread")?;
    let shown = until_signal(Arc::clone(&terminal), Arc::clone(&feed), source, look);
    feed.close();
    drop(leaves);
    drop(said);
    shown.map(|()| 0)
}

/// Shows the screen in a separate thread until it ends or a signal arrives.
fn until_signal(terminal: Arc<Terminal>, feed: Arc<Feed>, source: String, look: Look) -> anyhow::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    runtime.block_on(async {
        let kinds = [SignalKind::hangup(), SignalKind::terminate(), SignalKind::interrupt()];
        let [mut hangup, mut terminate, mut interrupt] = kinds.map(signal);
        let (leave, left) = tokio::sync::oneshot::channel();
        let screen = move || drop(leave.send(show(&terminal, &feed, source, look)));
        std::thread::Builder::new().name("screen".into()).spawn(screen).context("cannot start a thread")?;
        tokio::select! {
            shown = left => shown.context("an internal error ended the screen")?.context("the terminal can no longer be used"),
            _ = hangup.as_mut().map_err(|error| anyhow::anyhow!("{error}"))?.recv() => Ok(()),
            _ = terminate.as_mut().map_err(|error| anyhow::anyhow!("{error}"))?.recv() => Ok(()),
            _ = interrupt.as_mut().map_err(|error| anyhow::anyhow!("{error}"))?.recv() => Ok(()),
        }
    })
}

/// Requests profiles from a service.
struct Client {
    address: Address,
    agent: ureq::Agent,
    path: &'static str,
    /// When its history is requested; `None` if it has none.
    next_past: Option<Instant>,
}

/// Why there is no profile: the status of the answer (0: none), and a sentence.
struct Refused(u16, String);

/// The part of a history that is shown.
#[derive(Deserialize)]
struct Past {
    time_ms: Vec<u64>,
    programs: Vec<PastProgram>,
}

#[derive(Deserialize)]
struct PastProgram {
    comm: String,
    inuse: Vec<Option<f64>>,
}

impl Past {
    /// Bytes in use in equal steps up to now, by command name: those at the end of each step.
    fn steps(self, now_ms: u64) -> HashMap<String, Vec<f64>> {
        let step = |time_ms: &u64| (now_ms.saturating_sub(*time_ms) / STEP_MS) as usize;
        let steps: Vec<usize> = self.time_ms.iter().map(step).collect();
        let series = |PastProgram { comm, inuse }: PastProgram| {
            let mut series = vec![f64::NAN; STEPS];
            for (step, inuse) in steps.iter().zip(inuse).filter(|(step, _)| **step < STEPS) {
                series[STEPS - 1 - step] = inuse.unwrap_or(f64::NAN);
            }
            (comm, series)
        };
        self.programs.into_iter().map(series).collect()
    }
}

impl Client {
    fn new(address: Address) -> Self {
        let config = http_client::settings()
            .timeout_connect(Some(CONNECT_TIME))
            .timeout_global(Some(ANSWER_TIME))
            .max_redirects(0)
            .build();
        Self { address, agent: config.new_agent(), path: WHOLE, next_past: Some(Instant::now()) }
    }

    fn get(&self, path: &str) -> Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(format!("{}{path}", self.address.origin));
        if let Some(authorization) = &self.address.authorization {
            request = request.header("Authorization", authorization);
        }
        request.call()
    }

    /// What the service remembers of the last hour, if it is time to ask again and it answers.
    fn past(&mut self, now_ms: u64) -> Option<HashMap<String, Vec<f64>>> {
        self.next_past.filter(|at| *at <= Instant::now())?;
        self.next_past = Some(Instant::now() + HISTORY_EVERY);
        let from_ms = now_ms.saturating_sub(STEPS as u64 * STEP_MS);
        let mut response = self.get(&format!("{HISTORY}?from={from_ms}&to={now_ms}")).ok()?;
        if response.status().as_u16() == 404 {
            self.next_past = None;
        }
        let mut body = Vec::new();
        response.body_mut().as_reader().take(LARGEST_ANSWER).read_to_end(&mut body).ok()?;
        Some(serde_json::from_slice::<Past>(&body).ok()?.steps(now_ms))
    }

    fn profile(&mut self) -> Result<Got, String> {
        match self.asked(self.path) {
            Err(Refused(400, _)) if self.path == WHOLE => {
                self.path = PPROF;
                self.profile()
            }
            answer => answer.map_err(|Refused(_, why)| why),
        }
    }

    /// Gets the profile at this path.
    fn asked(&self, path: &str) -> Result<Got, Refused> {
        let failed = |why: &str| Refused(0, self.failure(why));
        let mut response = self.get(path).map_err(|error| failed(&http_client::reason(&error)))?;
        let status = response.status().as_u16();
        let most = if status == 200 { LARGEST_ANSWER + 1 } else { LARGEST_SENTENCE };
        let mut body = Vec::new();
        let read = response.body_mut().as_reader().take(most).read_to_end(&mut body);
        if status != 200 {
            return Err(Refused(status, self.failure(&format!("status {status} {}", text(&body)))));
        }
        read.map_err(|error| failed(&error.to_string()))?;
        let before = thread_cpu_time();
        let profile = parse(&body).map_err(|why| failed(&why))?;
        Ok(Got { profile: Arc::new(profile), cost: thread_cpu_time().saturating_sub(before) })
    }

    fn failure(&self, why: &str) -> String {
        format!("{} does not answer with a profile: {}", self.address.shown(), escaped(why.trim()))
    }
}

/// Returns the first line of what a server said.
fn text(sentence: &[u8]) -> String {
    String::from_utf8_lossy(sentence).lines().next().unwrap_or_default().to_owned()
}

fn parse(body: &[u8]) -> Result<Profile, String> {
    if body.len() as u64 > LARGEST_ANSWER {
        return Err(format!("it is larger than {} MiB", LARGEST_ANSWER >> 20));
    }
    read::parse(body).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_tokens_stay_secret() {
        let plain = Address::parse("http://127.0.0.1:6060", None).unwrap();
        assert_eq!((plain.shown(), &plain.authorization), ("http://127.0.0.1:6060", &None));
        let user = Address::parse("https://secret@host:1/", None).unwrap();
        assert_eq!((user.shown(), user.authorization.as_deref()), ("https://host:1", Some("Bearer secret")));
        let file = Address::parse("http://[::1]:6060", Some("token")).unwrap();
        assert_eq!(file.authorization.as_deref(), Some("Bearer token"));
        for bad in ["1234", "localhost:6060", "ftp://secret@x", "http://", "http://secret@x/path", "http://a b"] {
            let error = Address::parse(bad, None).err().unwrap();
            assert!(error.contains("--pid") && !error.contains("secret"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_history_becomes_equal_steps_and_gaps_stay() {
        const NOW: u64 = 100 * STEP_MS;
        let text = format!(
            r#"{{"confidence":0.95,"time_ms":[{},{},{},{}],"programs":[{{"comm":"web","inuse":[9,4,5,null]}}]}}"#,
            NOW - STEP_MS * STEPS as u64,
            NOW - 2 * STEP_MS - 2,
            NOW - 2 * STEP_MS - 1,
            NOW - 1,
        );
        let steps = serde_json::from_str::<Past>(&text).unwrap().steps(NOW);
        let web = &steps["web"];
        assert_eq!((web.len(), web[STEPS - 3]), (STEPS, 5.0), "the last of its step");
        assert_eq!(web.iter().filter(|bytes| bytes.is_nan()).count(), STEPS - 1, "one is too old, one is not known");
        assert!(serde_json::from_str::<Past>("{}").is_err());
    }

    #[test]
    fn what_is_no_profile_is_an_error() {
        assert!(parse(b"<html>").is_err() && parse(b"").is_err());
    }
}
