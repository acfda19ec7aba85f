//! `multipart/form-data` (RFC 7578), as far as Pyroscope's `/ingest` needs it.

/// Separates the parts. It never occurs in what we send: our gzip and JSON contain no such line.
const BOUNDARY: &str = "heapbpf-3f1d0c9b7a65e8427f";

/// The content type to send with the output of [`encode`].
pub fn content_type() -> String {
    format!("multipart/form-data; boundary={BOUNDARY}")
}

/// Encodes parts (name, file name, content) as a body.
pub fn encode(parts: &[(&str, &str, &[u8])]) -> Vec<u8> {
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
