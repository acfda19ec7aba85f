//! A profile as a request: path, content type and body. It is made once and kept until it is delivered.

use std::io::Write;
use std::time::UNIX_EPOCH;

use base64::Engine as _;
use flate2::Compression;
use flate2::write::GzEncoder;
use heapbpf_profile::formats::{encode_otlp, encode_pprof};
use heapbpf_profile::model::Profile;
use heapbpf_profile::value::Value;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use prost::Message as _;

use super::destination::{Destination, Protocol};

/// Separates the parts of a form. It never occurs in what we send: our gzip and JSON contain no such line.
const BOUNDARY: &str = "heapbpf-3f1d0c9b7a65e8427f";

/// A request to send.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Path and query.
    pub path: String,
    /// Content type.
    pub content_type: String,
    /// Body.
    pub body: Vec<u8>,
}

impl Batch {
    /// Serializes the batch as the content of a file: two lines, then the body.
    pub fn to_bytes(&self) -> Vec<u8> {
        [self.path.as_bytes(), b"\n", self.content_type.as_bytes(), b"\n", &self.body].concat()
    }

    /// Parses the content of a file.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts = bytes.splitn(3, |byte| *byte == b'\n');
        let mut text = || String::from_utf8(parts.next()?.to_vec()).ok();
        let (path, content_type) = (text()?, text()?);
        (path.starts_with('/')).then_some(())?;
        Some(Self { path, content_type, body: parts.next()?.to_vec() })
    }
}

/// Returns the request that delivers a profile to a destination.
///
/// # Errors
/// Only if writing to memory fails, which does not happen.
pub fn batches(destination: &Destination, profile: &Profile) -> std::io::Result<Batch> {
    let path = destination.path.clone();
    Ok(match destination.protocol {
        Protocol::OtlpHttp | Protocol::OtlpGrpc => Batch {
            path,
            content_type: "application/x-protobuf".into(),
            // `ProfilesData` and `ExportProfilesServiceRequest` have the same encoding.
            body: encode_otlp(profile, Value::default_of(profile)).encode_to_vec(),
        },
        Protocol::Post => Batch { path, content_type: "application/octet-stream".into(), body: pprof(profile)? },
        Protocol::PyroscopeIngest => {
            let config = sample_types(profile);
            let parts =
                [("profile", "profile.pb.gz", &*pprof(profile)?), ("sample_type_config", "types.json", &*config)];
            let (from, until) = span(profile);
            // Pyroscope reads label values without quotes, up to a comma or a brace.
            let name = format!("heapbpf{{host={}}}", label(&profile.header.host));
            let name = utf8_percent_encode(&name, NON_ALPHANUMERIC);
            let separator = if path.contains('?') { '&' } else { '?' };
            Batch {
                // Without the `format` parameter: with `format=pprof`, the body would have to be the bare profile.
                path: format!("{path}{separator}name={name}&from={from}&until={until}&spyName=heapbpf"),
                content_type: format!("multipart/form-data; boundary={BOUNDARY}"),
                body: form(&parts),
            }
        }
        Protocol::PyroscopePush => {
            let raw = base64::engine::general_purpose::STANDARD.encode(pprof(profile)?);
            let pair = |name: &str, value: &str| serde_json::json!({ "name": name, "value": value });
            let labels =
                [pair("__name__", "memory"), pair("service_name", "heapbpf"), pair("host", &profile.header.host)];
            let body = serde_json::json!({ "series": [{ "labels": labels, "samples": [{ "rawProfile": raw }] }] });
            Batch { path, content_type: "application/json".into(), body: body.to_string().into_bytes() }
        }
    })
}

/// Encodes parts (name, file name, content) as `multipart/form-data` (RFC 7578), as far as Pyroscope's `/ingest` needs
/// it.
fn form(parts: &[(&str, &str, &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, file, content) in parts {
        let head =
            format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"{file}\"\r\n\r\n");
        body.extend_from_slice(head.as_bytes());
        body.extend_from_slice(content);
        body.extend_from_slice(b"\r\n");
    }
    body.extend_from_slice(format!("--{BOUNDARY}--\r\n").as_bytes());
    body
}

fn pprof(profile: &Profile) -> std::io::Result<Vec<u8>> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::new(5));
    gzip.write_all(&encode_pprof(profile).encode_to_vec())?;
    gzip.finish()
}

/// How Pyroscope aggregates each value: allocations add up over time, levels do not.
fn sample_types(profile: &Profile) -> Vec<u8> {
    let values = Value::shown_of(profile).iter().filter(|value| !value.is_at_exit());
    let types = values.map(|value| {
        let units = if value.is_bytes() { "bytes" } else { "objects" };
        let aggregation = if value.is_inuse() { "average" } else { "sum" };
        let about = serde_json::json!({ "units": units, "aggregation": aggregation, "display-name": value.name(), "sampled": false });
        (value.name().to_owned(), about)
    });
    serde_json::Value::Object(types.collect()).to_string().into_bytes()
}

/// Start and end of the profile, in seconds since 1970.
fn span(profile: &Profile) -> (u64, u64) {
    let from = profile.header.started.duration_since(UNIX_EPOCH).unwrap_or_default();
    (from.as_secs(), (from + profile.header.duration).as_secs())
}

/// A host name as a label value.
fn label(text: &str) -> String {
    text.chars().filter(|c| !matches!(c, '"' | '\\' | '{' | '}' | ',') && !c.is_control()).collect()
}

#[cfg(test)]
mod tests {
    use heapbpf_profile::testing;

    use super::*;

    #[test]
    fn files_bring_batches_back() {
        let batch = Batch { path: "/x?y=z".into(), content_type: "a/b".into(), body: b"\n\nany\0thing\n".to_vec() };
        assert_eq!(Batch::from_bytes(&batch.to_bytes()), Some(batch));
        for bad in [&b""[..], b"/x", b"/x\na/b", b"x\na/b\nbody", b"/\xff\na/b\nbody"] {
            assert_eq!(Batch::from_bytes(bad), None);
        }
    }

    #[test]
    fn ingest_says_name_time_and_types() {
        let destination = Destination::parse("pyroscope://p:4040").unwrap();
        let mut profile = testing::small();
        profile.header.host = "a\"b".into();
        let batch = batches(&destination, &profile).unwrap();
        assert!(batch.path.starts_with("/ingest?name=heapbpf%7Bhost%3Dab%7D&from="), "{}", batch.path);
        let text = String::from_utf8_lossy(&batch.body);
        assert!(text.contains("name=\"profile\"") && text.contains("\"inuse_space\":{\"aggregation\":\"average\""));
        assert!(text.ends_with("--\r\n"));
    }
}
