//! speedscope: one profile for each value.

use std::io;

use serde::Serialize;

use super::{FormatError, WriteOptions};
use crate::chains::Chains;
use crate::escape::JsonText;
use crate::model::Profile;
use crate::report::subject;
use crate::value::Value;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let shown = options.value_of(profile)?;
    let values = Value::shown_of(profile);
    let chains = Chains::new(profile, values, options.group_of(profile), true);
    let frames = chains.names.iter().map(|name| Frame { name: &name.name, file: name.file }).collect();
    let profiles = values
        .iter()
        .zip(&chains.columns)
        .map(|(value, column)| {
            let samples = chains.chains.iter().zip(column).filter(|(_, weight)| **weight != 0);
            let (samples, weights): (Vec<&[u32]>, Vec<i64>) =
                samples.map(|(chain, weight)| (&**chain, *weight)).unzip();
            Sampled {
                r#type: "sampled",
                name: value.title(),
                unit: if value.is_bytes() { "bytes" } else { "none" },
                start_value: 0,
                end_value: weights.iter().fold(0, |sum, weight| sum.saturating_add(*weight)),
                samples,
                weights,
            }
        })
        .collect();
    let file = File {
        schema: "https://www.speedscope.app/file-format-schema.json",
        exporter: format!("heapbpf@{}", profile.header.version),
        name: subject(profile),
        active_profile_index: values.iter().position(|&value| value == shown).unwrap_or(0),
        shared: Shared { frames },
        profiles,
    };
    serde_json::to_writer(JsonText(out), &file)?;
    Ok(())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct File<'a> {
    #[serde(rename = "$schema")]
    schema: &'static str,
    exporter: String,
    name: String,
    active_profile_index: usize,
    shared: Shared<'a>,
    profiles: Vec<Sampled<'a>>,
}

#[derive(Serialize)]
struct Shared<'a> {
    frames: Vec<Frame<'a>>,
}

#[derive(Serialize)]
struct Frame<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Sampled<'a> {
    r#type: &'static str,
    name: &'static str,
    unit: &'static str,
    start_value: i64,
    end_value: i64,
    /// Frame indices, outermost first.
    samples: Vec<&'a [u32]>,
    weights: Vec<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn profiles_add_up_and_refer_to_frames() {
        let profile = testing::small();
        let file = testing::json(&profile, "speedscope");
        let frames = file["shared"]["frames"].as_array().expect("a list").len() as u64;
        assert_eq!(file["activeProfileIndex"], 3);
        for (value, sampled) in Value::COLUMNS.iter().zip(file["profiles"].as_array().expect("a list")) {
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            assert_eq!(sampled["endValue"].as_i64(), Some(total.round() as i64));
            let weights: i64 = sampled["weights"].as_array().expect("a list").iter().filter_map(|w| w.as_i64()).sum();
            assert_eq!(weights, total.round() as i64);
            let samples = sampled["samples"].as_array().expect("a list");
            assert_eq!(samples.len(), sampled["weights"].as_array().expect("a list").len());
            let ids = samples.iter().flat_map(|sample| sample.as_array().expect("a list"));
            assert!(ids.into_iter().all(|id| id.as_u64().is_some_and(|id| id < frames)));
        }
    }
}
