//! Push destinations: a URL and its protocol.

use ureq::http::Uri;

/// Protocol of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// OTLP profiles in HTTP requests.
    OtlpHttp,
    /// OTLP profiles over gRPC.
    OtlpGrpc,
    /// Pyroscope's `/ingest`.
    PyroscopeIngest,
    /// Pyroscope's push API (Connect, JSON).
    PyroscopePush,
    /// A POST whose body is the gzip-compressed pprof.
    Post,
}

/// A destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Scheme of its URL.
    scheme: &'static str,
    /// Protocol.
    pub protocol: Protocol,
    /// `http://host:port`.
    pub origin: String,
    /// Path and query.
    pub path: String,
    /// Value of the `Authorization` header, from the URL's user information.
    pub authorization: Option<String>,
}

/// Schemes, with the protocol and the path that is meant if the URL has none.
const SCHEMES: [(&str, Protocol, &str); 5] = [
    ("otlp+http", Protocol::OtlpHttp, "/v1development/profiles"),
    ("otlp+grpc", Protocol::OtlpGrpc, "/"),
    ("pyroscope", Protocol::PyroscopeIngest, "/ingest"),
    ("pyroscope-push", Protocol::PyroscopePush, "/push.v1.PusherService/Push"),
    ("http", Protocol::Post, "/"),
];

/// Why a URL cannot be a destination.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("--push {url}: {reason}; {KNOWN}")]
pub struct DestinationError {
    url: String,
    reason: String,
}

impl DestinationError {
    /// The same destination is given twice.
    pub fn twice(destination: &Destination) -> Self {
        Self { url: destination.shown(), reason: "it is given twice and would get every profile twice".into() }
    }
}

const KNOWN: &str = "supported are otlp+http://HOST:4318, otlp+grpc://HOST:4317, pyroscope://HOST:4040 (/ingest), \
    pyroscope-push://HOST:4040 (push API) and http://HOST/PATH (a POST of the pprof)";

impl Destination {
    /// Parses a URL.
    ///
    /// # Errors
    /// The URL does not parse, or its protocol is not supported.
    pub fn parse(url: &str) -> Result<Self, DestinationError> {
        // The part before the @ is a secret.
        let shown = url.rsplit_once('@').map_or(url, |(_, host)| host).to_owned();
        let failed = |reason: &str| DestinationError { url: shown.clone(), reason: reason.into() };
        let (scheme, rest) = url.split_once("://").ok_or_else(|| failed("not a URL"))?;
        let (scheme, protocol, default_path) = match SCHEMES.iter().find(|(known, ..)| *known == scheme) {
            Some(known) => *known,
            None if scheme == "https" => {
                return Err(failed("TLS is not built in: push to a collector or proxy on this host"));
            }
            None => return Err(failed("unknown kind of URL")),
        };
        let (authority, _) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (user, host) = authority.rsplit_once('@').map_or((None, authority), |(user, host)| (Some(user), host));
        if host.is_empty() {
            return Err(failed("it has no host"));
        }
        let uri: Uri = format!("http://{host}{}", &rest[authority.len()..])
            .parse()
            .map_err(|error: ureq::http::uri::InvalidUri| failed(&error.to_string()))?;
        if uri.host().is_none_or(str::is_empty) {
            return Err(failed("it has no host"));
        }
        if uri.authority().is_some_and(|authority| authority.as_str() != authority.host() && uri.port_u16().is_none()) {
            return Err(failed("its port must be a number up to 65535"));
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let path = if path == "/" { default_path } else { path }.to_owned();
        let authorization = user.map(|user| match user.split_once(':') {
            Some(_) => {
                use base64::Engine as _;
                format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(user))
            }
            None => format!("Bearer {user}"),
        });
        Ok(Self { scheme, protocol, origin: format!("http://{host}"), path, authorization })
    }

    /// Returns the destination without secrets. Messages show it, and it identifies the spool.
    pub fn shown(&self) -> String {
        let path = self.path.split('?').next().unwrap_or_default();
        format!("{}{}{path}", self.scheme, &self.origin["http".len()..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_say_what_is_spoken() {
        for (url, protocol, full) in [
            ("otlp+http://c:4318", Protocol::OtlpHttp, "http://c:4318/v1development/profiles"),
            ("otlp+grpc://c:4317", Protocol::OtlpGrpc, "http://c:4317/"),
            ("pyroscope://p:4040", Protocol::PyroscopeIngest, "http://p:4040/ingest"),
            ("pyroscope-push://p:4040/", Protocol::PyroscopePush, "http://p:4040/push.v1.PusherService/Push"),
            ("http://x/a?b=c", Protocol::Post, "http://x/a?b=c"),
            ("http://[::1]:80/", Protocol::Post, "http://[::1]:80/"),
        ] {
            let destination = Destination::parse(url).unwrap();
            assert_eq!(destination.protocol, protocol);
            assert_eq!(format!("{}{}", destination.origin, destination.path), full);
        }
    }

    #[test]
    fn secrets_are_used_but_not_shown() {
        let basic = Destination::parse("pyroscope://me:secret@p:4040").unwrap();
        assert_eq!(basic.authorization.as_deref(), Some("Basic bWU6c2VjcmV0"));
        assert_eq!(basic.shown(), "pyroscope://p:4040/ingest");
        let bearer = Destination::parse("http://secret@p/x?key=k").unwrap();
        assert_eq!(bearer.authorization.as_deref(), Some("Bearer secret"));
        assert_eq!(bearer.shown(), "http://p/x");
        let error = Destination::parse("https://me:secret@p").unwrap_err().to_string();
        assert!(error.contains("TLS") && !error.contains("secret"), "{error}");
    }

    #[test]
    fn what_is_no_url_is_refused_with_what_would_be() {
        for url in ["", "localhost:4040", "http://", "ftp://x", "http://a b/", "http://x:port/", "otlp+http:///x"] {
            let error = Destination::parse(url).expect_err(url).to_string();
            assert!(error.contains("otlp+grpc://"), "{error}");
        }
    }
}
