//! Requirements on every request, whatever it asks for.

use std::net::IpAddr;

use hyper::http::uri::Authority;
use hyper::{Request, StatusCode, Version, header};

/// Whether a client accepts gzip (RFC 9110, 12.5.3): it lists `gzip`, or else `*`, with a weight above 0.
pub fn accepts_gzip(accepted: &str) -> bool {
    let weight_of = |wanted: &str| {
        accepted.split(',').find_map(|coding| {
            let mut parts = coding.split(';').map(str::trim);
            parts.next().filter(|name| name.eq_ignore_ascii_case(wanted))?;
            let weight = parts.find_map(|part| part.strip_prefix("q=").or_else(|| part.strip_prefix("Q=")));
            Some(weight.map_or(1.0, |weight| weight.parse().unwrap_or(0.0)))
        })
    };
    weight_of("gzip").or_else(|| weight_of("*")).is_some_and(|weight: f64| weight > 0.0)
}

/// Checks that a request has no body, names a host if it must, and has parameters that can be decoded.
///
/// # Errors
/// Returns the status and a sentence for the client.
pub fn check_form(request: &Request<()>) -> Result<(), (StatusCode, String)> {
    let headers = request.headers();
    let has_body = headers.contains_key(header::TRANSFER_ENCODING)
        || headers.get(header::CONTENT_LENGTH).is_some_and(|length| length != "0");
    if has_body {
        return Err((StatusCode::PAYLOAD_TOO_LARGE, "requests must not have a body".into()));
    }
    // RFC 9112, 3.2.
    if request.version() == Version::HTTP_11 && !headers.contains_key(header::HOST) {
        return Err((StatusCode::BAD_REQUEST, "an HTTP/1.1 request needs the header Host".into()));
    }
    let query = request.uri().query().unwrap_or("");
    match bad_escape(query) {
        Some(escape) => Err((
            StatusCode::BAD_REQUEST,
            format!(
                "{escape:?} in the parameters is not a valid escape: % needs two hexadecimal digits, and % itself is %25"
            ),
        )),
        None => Ok(()),
    }
}

/// Returns the first percent sign of a query that is not followed by two hexadecimal digits, with up to two characters
/// after it.
fn bad_escape(query: &str) -> Option<String> {
    let is_escape = |at: usize| {
        let digits = query.as_bytes().get(at + 1..at + 3);
        digits.is_some_and(|digits| digits.iter().all(u8::is_ascii_hexdigit))
    };
    let bad = query.match_indices('%').map(|(at, _)| at).find(|&at| !is_escape(at))?;
    Some(query[bad..].chars().take(3).collect())
}

/// Checks that a request names this host in a way that nobody else can claim: by IP address or as `localhost`.
/// Otherwise a page in a browser on this host could point a name of its own at 127.0.0.1 (DNS rebinding) and read the
/// answers.
///
/// # Errors
/// Returns the status and a sentence for the client.
pub fn check_host(request: &Request<()>) -> Result<(), (StatusCode, String)> {
    let named = |bytes: &[u8]| Authority::try_from(bytes).map(|authority| authority.host().to_owned());
    let headers = request.headers().get_all(header::HOST).iter().map(|value| named(value.as_bytes()));
    let hosts = headers.chain(request.uri().host().map(|host| Ok(host.to_owned())));
    for host in hosts {
        if !host.as_deref().is_ok_and(is_this_host) {
            return Err((
                StatusCode::MISDIRECTED_REQUEST,
                "without tokens, heapbpf answers only requests to an IP address or to localhost: use one of these, or start it with \
                 --token-file"
                    .into(),
            ));
        }
    }
    Ok(())
}

fn is_this_host(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    address.parse::<IpAddr>().is_ok() || host.trim_end_matches('.').eq_ignore_ascii_case("localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uri: &str, headers: &[(&str, &str)]) -> Request<()> {
        let has_host = headers.iter().any(|(name, _)| *name == "host");
        let version = if has_host { Version::HTTP_11 } else { Version::HTTP_10 };
        let mut request = Request::builder().uri(uri).version(version);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).expect("a request")
    }

    #[test]
    fn names_that_others_can_have_are_refused() {
        for host in
            ["127.0.0.1", "127.0.0.1:6060", "[::1]:6060", "localhost", "LocalHost:6060", "localhost.", "10.1.2.3"]
        {
            assert_eq!(check_host(&request("/metrics", &[("host", host)])), Ok(()), "{host}");
        }
        for host in
            ["evil.example", "evil.example:6060", "127.0.0.1.evil.example", "localhost.evil.example", "", "a b", "::1"]
        {
            let (status, reason) = check_host(&request("/metrics", &[("host", host)])).unwrap_err();
            assert_eq!(status, StatusCode::MISDIRECTED_REQUEST, "{host}");
            assert!(reason.contains("localhost") && reason.contains("--token-file"), "{reason}");
        }
        assert_eq!(check_host(&request("/metrics", &[])), Ok(()), "HTTP/1.0, which browsers do not speak");
        assert!(check_host(&request("http://evil.example/metrics", &[])).is_err(), "HTTP/2 has it in the URI");
        let two = [("host", "localhost"), ("host", "evil.example")];
        assert!(check_host(&request("/metrics", &two)).is_err());
    }

    #[test]
    fn a_request_of_http_1_1_names_its_host() {
        let without = Request::builder().uri("/metrics").body(()).expect("a request");
        assert_eq!(check_form(&without).unwrap_err().0, StatusCode::BAD_REQUEST);
        assert_eq!(check_form(&request("/metrics", &[("host", "localhost")])), Ok(()));
        assert_eq!(check_form(&request("/metrics", &[])), Ok(()), "HTTP/1.0");
    }

    #[test]
    fn gzip_is_accepted_if_it_has_a_weight() {
        for accepted in ["gzip", "br, gzip", "GZIP;q=0.5", "*", "br;q=1, *;q=0.1", "gzip ; q=1"] {
            assert!(accepts_gzip(accepted), "{accepted}");
        }
        for accepted in ["", "br", "gzip;q=0", "gzip;q=0.000, *", "*;q=0", "gzip;q=x", "xgzip"] {
            assert!(!accepts_gzip(accepted), "{accepted}");
        }
    }

    #[test]
    fn escapes_that_are_none_are_refused() {
        for good in ["/", "/x?comm=a%20b&pid=%37", "/x?comm=%25zz", "/x?comm=*"] {
            assert_eq!(check_form(&request(good, &[("content-length", "0")])), Ok(()), "{good}");
        }
        for (bad, escape) in [("/x?comm=%zz", "%zz"), ("/x?comm=a%", "%"), ("/x?comm=%4", "%4"), ("/x?%g1=1", "%g1")] {
            let (status, reason) = check_form(&request(bad, &[])).unwrap_err();
            assert_eq!(status, StatusCode::BAD_REQUEST, "{bad}");
            assert!(reason.starts_with(&format!("{escape:?} in the parameters")), "{reason}");
        }
        let (status, _) = check_form(&request("/", &[("content-length", "3")])).unwrap_err();
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
