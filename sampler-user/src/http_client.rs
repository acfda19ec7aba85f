//! What heapbpf's requests to HTTP servers have in common.

use std::sync::Arc;

use ureq::config::ConfigBuilder;
use ureq::tls::{RootCerts, TlsConfig};
use ureq::typestate::AgentScope;

/// The settings of an agent: servers are verified as the system does it, a status is no error, and heapbpf says who it is. Time
/// limits and redirects are the caller's.
pub fn settings() -> ConfigBuilder<AgentScope> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(provider)
        .build();
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .user_agent(concat!("heapbpf/", env!("CARGO_PKG_VERSION")))
        .tls_config(tls)
}
