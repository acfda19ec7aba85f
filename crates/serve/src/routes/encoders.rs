//! Encodes profiles and differences, in threads where that does not delay other answers.

use std::io::ErrorKind;
use std::sync::Arc;

use bytes::Bytes;
use heapbpf_access::parameters::ProfileFormat;
use heapbpf_profile::GroupBy;
use heapbpf_profile::formats::{WriteOptions, by_name, encode_pprof};
use heapbpf_profile::model::Profile;
use heapbpf_record::requests::FinishedProfile;
use hyper::StatusCode;
use prost::Message as _;
use tokio::task::JoinError;

use super::super::delta::{Inuse, difference};
use super::super::page;
use super::super::places::Slot;
use super::super::source::EncodingKey;
use super::Refusal;

/// Runs a function where it does not delay other answers. `held` is dropped when it has ended: if the client hangs up, it
/// cannot be stopped, and must not run beside more than it is counted with.
pub(super) async fn in_thread<T: Send + 'static>(
    held: impl Send + 'static,
    run: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    tokio::task::spawn_blocking(move || {
        let _held = held;
        run()
    })
    .await
}

/// Runs an encoder for the request that holds a slot.
pub(super) async fn encoding(
    slot: &Slot,
    encode: impl FnOnce() -> std::io::Result<Bytes> + Send + 'static,
) -> Result<Bytes, Refusal> {
    let failed = |reason: String| Refusal(StatusCode::INTERNAL_SERVER_ERROR, reason);
    match in_thread(Arc::clone(slot), encode).await {
        Ok(Err(error)) if error.kind() == ErrorKind::NotFound => Err(Refusal(StatusCode::NOT_FOUND, error.to_string())),
        Ok(encoded) => encoded.map_err(|error| failed(format!("the profile could not be encoded: {error}"))),
        Err(_) => Err(failed("the profile could not be encoded".into())),
    }
}

/// Encodes the difference between two profiles, compressed.
pub(super) fn encode_difference(
    earlier: &FinishedProfile,
    later: &FinishedProfile,
    wanted: &EncodingKey,
) -> std::io::Result<Bytes> {
    encode(&difference(Some(earlier), later, Inuse::Change), wanted)
}

/// Encodes what a client sees of a profile, compressed.
pub(super) fn encode(profile: &Profile, wanted: &EncodingKey) -> std::io::Result<Bytes> {
    let profile = wanted.seen.of(profile);
    if wanted.format != ProfileFormat::Pprof {
        // Each process has its own stacks.
        let options = WriteOptions { group_by: Some(GroupBy::Process), ..WriteOptions::default() };
        let format = by_name("json").map_err(std::io::Error::other)?;
        return page::compressed_while_written(|gzip| {
            format.write(&profile, &options, gzip).map_err(std::io::Error::other)
        });
    }
    let mut message = encode_pprof(&profile);
    if let Some(id) = message.string_table.iter().position(|text| text == wanted.first) {
        message.default_sample_type = id as i64;
    }
    page::compressed(&message.encode_to_vec())
}
