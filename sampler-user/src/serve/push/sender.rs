//! The thread that delivers one destination's batches, in order, until the destination accepts them.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::collector::profiles::v1development::profiles_service_client::ProfilesServiceClient;
use prost::Message as _;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};

use super::backoff::Backoff;
use super::batch::Batch;
use super::destination::{Destination, Protocol};
use super::queue::Queue;

/// Timeout of a request. A destination that takes longer counts as unavailable.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The outcome of an attempt.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Delivered,
    /// The destination will never accept this batch.
    Rejected(String),
    /// The destination may accept it later.
    Failed(String),
}

/// Delivers batches until the queue is closed. After that, each remaining batch gets one more attempt.
pub fn run(destination: &Destination, queue: &Queue) {
    let shown = destination.shown();
    let mut wire = match Wire::open(destination) {
        Ok(wire) => wire,
        Err(error) => {
            log::error!("{shown}: {error}");
            return;
        }
    };
    let mut backoff = Backoff::default();
    let mut is_away = false;
    while let Some((number, batch)) = queue.next() {
        match wire.send(destination, &batch) {
            Outcome::Delivered => {
                queue.done(number, true);
                backoff = Backoff::default();
                if std::mem::take(&mut is_away) {
                    log::warn!("{shown} takes profiles again");
                }
            }
            Outcome::Rejected(why) => {
                log::warn!("{shown} refuses a profile: {why}");
                queue.done(number, false);
            }
            Outcome::Failed(why) => {
                let wait = backoff.next(fastrand::f64());
                if std::mem::replace(&mut is_away, true) {
                    log::info!("{shown} did not take a profile: {why}; again in {wait:.1?}");
                } else {
                    log::warn!("{shown} did not take a profile: {why}; it gets this and later ones when it does");
                }
                if !queue.failed(wait) {
                    // Batches on disk wait for the next run.
                    return;
                }
            }
        }
    }
}

/// The connection to a destination.
enum Wire {
    Http(ureq::Agent),
    Grpc { runtime: tokio::runtime::Runtime, channel: Channel },
}

impl Wire {
    fn open(destination: &Destination) -> anyhow::Result<Self> {
        if destination.protocol == Protocol::OtlpGrpc {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let endpoint = Endpoint::from_shared(destination.origin.clone())?;
            let endpoint = endpoint.connect_timeout(CONNECT_TIMEOUT).timeout(TIMEOUT);
            let channel = runtime.block_on(async { endpoint.connect_lazy() });
            return Ok(Self::Grpc { runtime, channel });
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("heapbpf/", env!("CARGO_PKG_VERSION")))
            .build();
        Ok(Self::Http(config.new_agent()))
    }

    fn send(&mut self, destination: &Destination, batch: &Batch) -> Outcome {
        match self {
            Self::Http(agent) => post(agent, destination, batch),
            Self::Grpc { runtime, channel } => runtime.block_on(export(channel.clone(), destination, batch)),
        }
    }
}

fn post(agent: &ureq::Agent, destination: &Destination, batch: &Batch) -> Outcome {
    let url = format!("{}{}", destination.origin, batch.path);
    let mut request = agent.post(&url).header("Content-Type", &batch.content_type);
    if let Some(authorization) = &destination.authorization {
        request = request.header("Authorization", authorization);
    }
    match request.send(&batch.body[..]) {
        Ok(response) => of_status(response.status().as_u16()),
        Err(error) => Outcome::Failed(error.to_string()),
    }
}

/// The outcome for an HTTP status. A status about this request is permanent; any other reflects the destination's
/// state.
fn of_status(status: u16) -> Outcome {
    match status {
        200..=299 => Outcome::Delivered,
        401 | 403 | 404 | 408 | 425 | 429 => Outcome::Failed(format!("status {status}")),
        400..=499 => Outcome::Rejected(format!("status {status}")),
        _ => Outcome::Failed(format!("status {status}")),
    }
}

async fn export(channel: Channel, destination: &Destination, batch: &Batch) -> Outcome {
    let message = match ExportProfilesServiceRequest::decode(&batch.body[..]) {
        Ok(message) => message,
        Err(error) => return Outcome::Rejected(error.to_string()),
    };
    let mut request = tonic::Request::new(message);
    if let Some(value) = destination.authorization.as_ref().and_then(|text| MetadataValue::try_from(text).ok()) {
        request.metadata_mut().insert("authorization", value);
    }
    match ProfilesServiceClient::new(channel).export(request).await {
        Ok(_) => Outcome::Delivered,
        Err(status) => match status.code() {
            tonic::Code::InvalidArgument | tonic::Code::OutOfRange | tonic::Code::DataLoss => {
                Outcome::Rejected(said(&status))
            }
            _ => Outcome::Failed(said(&status)),
        },
    }
}

fn said(status: &tonic::Status) -> String {
    format!("{} ({})", status.message(), status.code())
}

#[cfg(test)]
mod tests;
