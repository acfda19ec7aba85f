//! Shared parts of heapbpf's requests to HTTP servers.

use std::sync::Arc;

use rustls::CertificateError;
use ureq::config::ConfigBuilder;
use ureq::tls::{Certificate, RootCerts, TlsConfig};
use ureq::typestate::AgentScope;

/// Returns the settings of an HTTP client. Servers are verified by the system's authorities (`SSL_CERT_FILE` and
/// `SSL_CERT_DIR` replace them), a status is not an error, and heapbpf identifies itself. Time limits and redirects are
/// up to the caller.
pub fn settings() -> ConfigBuilder<AgentScope> {
    let found = rustls_native_certs::load_native_certs();
    for error in found.errors {
        log::warn!("an authority's certificate cannot be used: {error}");
    }
    let authorities: Vec<_> = found.certs.iter().map(|one| Certificate::from_der(one).to_owned()).collect();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(authorities)))
        .unversioned_rustls_crypto_provider(provider)
        .build();
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("heapbpf/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls)
}

/// Returns why a request failed, as a text for the user.
pub fn reason(error: &ureq::Error) -> String {
    let of_tls = match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref().and_then(|error| error.downcast_ref()),
        _ => None,
    };
    match of_tls {
        Some(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)) => {
            "its certificate cannot be trusted: no authority known to this system has signed it (SSL_CERT_FILE can name others)".into()
        }
        Some(rustls::Error::InvalidCertificate(why)) => format!("its certificate cannot be trusted: {why}"),
        _ => error.to_string(),
    }
}
