//! The thread that delivers one destination's batches, in order. It retries until the destination accepts them.

use std::time::Duration;

use heapbpf_profile::proto::otlp::ProfilesData;
use prost::Message as _;

use super::batch::Batch;
use super::destination::{Destination, Protocol};
use super::grpc;
use super::queue::Queue;

/// Timeout of a request. A slower destination counts as unavailable.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);
/// Timeout of a connection.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The user agent.
pub(super) const NAME: &str = concat!("heapbpf/", env!("CARGO_PKG_VERSION"));

/// The outcome of an attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Delivered,
    /// The destination will never accept this batch.
    Rejected(String),
    /// The destination may accept it later.
    Failed(String),
}

/// Waits between attempts. They double each time and have jitter, so that a thousand hosts do not retry at once.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

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
    let (mut step, mut is_away) = (FIRST_WAIT, false);
    while let Some((number, batch)) = queue.next() {
        match wire.send(destination, &batch) {
            Outcome::Delivered => {
                queue.done(number, true);
                step = FIRST_WAIT;
                if std::mem::take(&mut is_away) {
                    log::warn!("{shown} accepts profiles again");
                }
            }
            Outcome::Rejected(why) => {
                log::warn!("{shown} rejected a profile: {why}");
                queue.done(number, false);
            }
            Outcome::Failed(why) => {
                let wait = next_wait(&mut step, fastrand::f64());
                if std::mem::replace(&mut is_away, true) {
                    log::info!("{shown} did not accept a profile: {why}; retrying in {wait:.1?}");
                } else {
                    log::warn!("{shown} did not accept a profile: {why}; retrying until it does");
                }
                if !queue.failed(wait) {
                    // Batches on disk wait for the next run.
                    return;
                }
            }
        }
    }
}

/// The next wait, between half of the current step and the whole step. `chance`, from 0 to 1, selects the point.
fn next_wait(step: &mut Duration, chance: f64) -> Duration {
    let wait = step.mul_f64(0.5 + 0.5 * chance);
    *step = (*step * 2).min(LONGEST_WAIT);
    wait
}

/// The connection to a destination.
enum Wire {
    Http(ureq::Agent),
    Grpc(tokio::runtime::Runtime),
}

impl Wire {
    fn open(destination: &Destination) -> std::io::Result<Self> {
        if destination.protocol == Protocol::OtlpGrpc {
            return Ok(Self::Grpc(tokio::runtime::Builder::new_current_thread().enable_all().build()?));
        }
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(NAME)
            .build();
        Ok(Self::Http(config.new_agent()))
    }

    fn send(&mut self, destination: &Destination, batch: &Batch) -> Outcome {
        match self {
            Self::Http(agent) => post(agent, destination, batch),
            // A spool file may contain anything.
            Self::Grpc(runtime) => match ProfilesData::decode(&batch.body[..]) {
                Ok(_) => runtime.block_on(grpc::export(destination, &batch.body)),
                Err(error) => Outcome::Rejected(error.to_string()),
            },
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

/// Returns the outcome for an HTTP status. A status about this request is permanent; any other reflects the
/// destination's state.
fn of_status(status: u16) -> Outcome {
    match status {
        200..=299 => Outcome::Delivered,
        401 | 403 | 404 | 408 | 425 | 429 => Outcome::Failed(format!("status {status}")),
        400..=499 => Outcome::Rejected(format!("status {status}")),
        _ => Outcome::Failed(format!("status {status}")),
    }
}

#[cfg(test)]
mod tests;
