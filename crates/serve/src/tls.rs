//! TLS of the server, from a certificate file and a key file.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// Maximum size of either file, in bytes.
const LARGEST_FILE: u64 = 1 << 20;

/// Where the certificate and its key are.
#[derive(Clone, Copy, Debug)]
pub struct TlsFiles<'a> {
    /// The certificate, followed by those that lead to a known authority (PEM).
    pub certificates: &'a Path,
    /// The certificate's private key (PEM).
    pub key: &'a Path,
}

/// Why a certificate or its key cannot be used. The message contains no part of a key.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    /// The content or the permissions of a file are wrong.
    fn unfit(what: &str, path: &Path, reason: &str) -> Self {
        Self(format!("the {what} file {} {reason}", path.display()))
    }
}

/// Reads both files.
///
/// # Errors
/// See [`TlsError`].
pub(super) fn acceptor(files: TlsFiles<'_>) -> Result<TlsAcceptor, TlsError> {
    let text = read("certificate", files.certificates, 0)?;
    let certificates: Vec<CertificateDer<'static>> =
        CertificateDer::pem_slice_iter(&text).collect::<Result<_, _>>().map_err(|error| {
            TlsError::unfit("certificate", files.certificates, &format!("is not PEM: {}", said(&error)))
        })?;
    if certificates.is_empty() {
        let reason = "has no certificate (-----BEGIN CERTIFICATE-----)";
        return Err(TlsError::unfit("certificate", files.certificates, reason));
    }
    let text = read("key", files.key, 0o027)?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| TlsError::unfit("key", files.key, &said(&error)))?;
    let pair = |error: rustls::Error| {
        let reason = match error {
            rustls::Error::InconsistentKeys(_) => "the key belongs to another certificate".into(),
            other => other.to_string(),
        };
        let (key, certificates) = (files.key.display(), files.certificates.display());
        TlsError(format!("the key in {key} and the certificate in {certificates} cannot be used together: {reason}"))
    };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, key))
        .map_err(pair)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn said(error: &pem::Error) -> String {
    match error {
        pem::Error::NoItemsFound => "has no private key (-----BEGIN PRIVATE KEY-----, without a passphrase)".into(),
        other => other.to_string(),
    }
}

/// Reads a regular file that has none of the `forbidden` permissions.
fn read(what: &str, path: &Path, forbidden: u32) -> Result<Vec<u8>, TlsError> {
    let failed = |error: io::Error| TlsError(format!("cannot read the {what} file {}: {error}", path.display()));
    let unfit = |reason: &str| Err(TlsError::unfit(what, path, reason));
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return unfit("is not a file");
    }
    if metadata.mode() & forbidden != 0 {
        let (mode, path) = (metadata.mode() & 0o777, path.display());
        return unfit(&format!("can be read or written by others (mode {mode:03o}): chmod 600 {path}"));
    }
    let mut bytes = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return unfit("is larger than 1 MiB");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn wrong_files_get_one_sentence_without_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, mode: u32, text: &[u8]| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            path
        };
        let secret = "c2VjcmV0c2VjcmV0c2VjcmV0";
        let certificate = file("a.crt", 0o644, b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        let key_text = format!("-----BEGIN PRIVATE KEY-----\n{secret}\n-----END PRIVATE KEY-----\n");
        let key = file("a.key", 0o600, key_text.as_bytes());
        let empty = file("empty", 0o600, b"");
        let text = file("text", 0o600, b"not PEM\n");
        let broken = file("broken", 0o600, b"-----BEGIN CERTIFICATE-----\n????\n-----END CERTIFICATE-----\n");
        let public = file("public.key", 0o644, key_text.as_bytes());
        let large = file("large", 0o600, &vec![b'x'; (1 << 20) + 1]);
        let missing = dir.path().join("missing");
        for (certificates, key, parts) in [
            (&missing, &key, ["cannot read the certificate file", "missing"]),
            (&empty, &key, ["certificate file", "has no certificate"]),
            (&text, &key, ["certificate file", "has no certificate"]),
            (&key, &key, ["certificate file", "has no certificate"]),
            (&broken, &key, ["certificate file", "is not PEM"]),
            (&large, &key, ["certificate file", "1 MiB"]),
            (&dir.path().to_path_buf(), &key, ["certificate file", "not a file"]),
            (&certificate, &missing, ["cannot read the key file", "missing"]),
            (&certificate, &certificate, ["key file", "can be read or written by others"]),
            (&certificate, &empty, ["key file", "has no private key"]),
            (&certificate, &public, ["key file", "chmod 600"]),
            (&certificate, &key, ["a.key", "cannot be used together"]),
        ] {
            let error = acceptor(TlsFiles { certificates, key }).err().expect("it is wrong").to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
            assert!(!error.contains(secret) && !error.contains('\n'), "{error}");
        }
    }
}
