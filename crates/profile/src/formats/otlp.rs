//! OpenTelemetry profiles (signal `v1development`): one resource per process, one profile per value.
//!
//! The message is a pprof message with dictionaries, so it is built from our pprof message. Attribute names follow
//! OpenTelemetry's semantic conventions where there are any.

use std::collections::HashMap;
use std::io;

use indexmap::IndexSet;
use prost::Message as _;

use super::pprof::{Encoded, encode_with_processes};
use super::{FormatError, WriteOptions};
use crate::model::{Process, Profile};
use crate::proto::otlp::{self, Any, AnyValue, ArrayValue, InstrumentationScope, KeyValue, Resource};
use crate::proto::pprof as proto;
use crate::value::Value;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let first = options.value_of(profile)?;
    Ok(out.write_all(&encode(profile, first).encode_to_vec())?)
}

/// Encodes a profile as the message that an OTLP receiver takes (`ExportProfilesServiceRequest` has the same encoding).
/// `first` is the value of the first profile of each resource; viewers show that one by default.
pub fn encode(profile: &Profile, first: Value) -> otlp::ProfilesData {
    let Encoded { message, process_of_sample, at_exit, values } = encode_with_processes(profile);
    let mut tables = Tables::new(&message);
    let samples: Vec<(i32, Vec<i32>)> = message.sample.iter().map(|sample| tables.sample(&message, sample)).collect();
    let about = tables.about(&message);

    let mut columns: Vec<usize> = (0..values.len()).collect();
    columns.sort_by_key(|&column| values[column] != first);
    // Values at exit follow those that pprof has columns for.
    let held = |column: usize| column.checked_sub(message.sample_type.len()).and_then(|number| at_exit.get(number));
    let value_of = |column: usize, number: usize| match held(column) {
        Some((_, values)) => values[number],
        None => message.sample[number].value[column],
    };
    let one_profile = |process: usize, column: usize| {
        let of_process = samples.iter().enumerate().zip(&process_of_sample).filter(|(_, of)| **of == process);
        let with_value = of_process.map(|((number, sample), _)| (sample, value_of(column, number)));
        let samples =
            with_value.filter(|(_, value)| *value != 0).map(|((stack_index, attribute_indices), value)| otlp::Sample {
                stack_index: *stack_index,
                attribute_indices: attribute_indices.clone(),
                values: vec![value],
            });
        let kind = held(column).map_or_else(|| message.sample_type[column], |(kind, _)| *kind);
        otlp::Profile {
            sample_type: Some(value_type(kind)),
            samples: samples.collect(),
            time_unix_nano: u64::try_from(message.time_nanos).unwrap_or(0),
            duration_nano: u64::try_from(message.duration_nanos).unwrap_or(0),
            period_type: message.period_type.map(value_type),
            period: message.period,
            attribute_indices: about.clone(),
        }
    };
    let scope = InstrumentationScope { name: "heapbpf".into(), version: profile.header.version.clone() };
    // Without frees there is no profile of memory in use, and a process that has not ended has none of memory at exit.
    let known = |process: usize| {
        let (columns, values) = (columns.iter().copied(), &values);
        columns.filter(move |&column| match values[column] {
            value if value.is_at_exit() => profile.knows_inuse(process) && profile.processes[process].ended,
            value => profile.knows_inuse(process) || !value.is_inuse(),
        })
    };
    let resource_profiles = profile
        .processes
        .iter()
        .enumerate()
        .map(|(index, process)| otlp::ResourceProfiles {
            resource: Some(resource(profile, process)),
            scope_profiles: vec![otlp::ScopeProfiles {
                scope: Some(scope.clone()),
                profiles: known(index).map(|column| one_profile(index, column)).collect(),
            }],
        })
        .collect();
    otlp::ProfilesData { resource_profiles, dictionary: Some(tables.dictionary(message)) }
}

fn value_type(kind: proto::ValueType) -> otlp::ValueType {
    otlp::ValueType { type_strindex: index(kind.r#type), unit_strindex: index(kind.unit) }
}

/// Converts a table index. Tables never have 2³¹ entries: the frames alone would exceed a host's memory.
fn index(id: i64) -> i32 {
    i32::try_from(id).unwrap_or(0)
}

fn resource(profile: &Profile, process: &Process) -> Resource {
    let mut attributes = Vec::new();
    let mut attribute = |key: &str, value: Any| {
        let value = Some(AnyValue { value: Some(value) });
        attributes.push(KeyValue { key: key.into(), value });
    };
    attribute("process.pid", Any::Int(process.pid.into()));
    if let Some(inner) = process.namespace_pid {
        attribute("process.vpid", Any::Int(inner.into()));
    }
    for (key, value) in [
        ("service.name", &process.comm),
        ("process.executable.name", &process.comm),
        ("process.executable.path", &process.exe),
        ("process.linux.cgroup", &process.cgroup),
        ("container.id", &process.placement.container),
        ("k8s.pod.uid", &process.placement.pod),
        ("systemd.unit.name", &process.placement.unit),
        ("host.name", &profile.header.host),
    ] {
        if !value.is_empty() {
            attribute(key, Any::String(value.clone()));
        }
    }
    if let Some(hook) = process.hook {
        attribute("heapbpf.hook", Any::String(hook.name().into()));
    }
    Resource { attributes }
}

/// The tables of the dictionary. The first entry of each is empty, so that index 0 means "none".
struct Tables {
    strings: Vec<String>,
    string_ids: HashMap<String, i32>,
    /// Locations of each stack.
    stacks: IndexSet<Vec<u64>>,
    attributes: Vec<otlp::KeyValueAndUnit>,
    attribute_ids: HashMap<(i32, i32), i32>,
}

impl Tables {
    fn new(message: &proto::Profile) -> Self {
        let strings = message.string_table.clone();
        let string_ids = strings.iter().cloned().zip(0..).collect();
        Self {
            strings,
            string_ids,
            stacks: IndexSet::from([Vec::new()]),
            attributes: vec![otlp::KeyValueAndUnit::default()],
            attribute_ids: HashMap::new(),
        }
    }

    fn string(&mut self, text: &str) -> i32 {
        if let Some(&id) = self.string_ids.get(text) {
            return id;
        }
        let id = self.strings.len() as i32;
        self.strings.push(text.into());
        self.string_ids.insert(text.into(), id);
        id
    }

    fn attribute(&mut self, key: &str, value: Any) -> i32 {
        let key_strindex = self.string(key);
        let value = Some(AnyValue { value: Some(value) });
        self.attributes.push(otlp::KeyValueAndUnit { key_strindex, value });
        self.attributes.len() as i32 - 1
    }

    fn text_attribute(&mut self, key: &str, text: &str) -> i32 {
        let ids = (self.string(key), self.string(text));
        if let Some(&known) = self.attribute_ids.get(&ids) {
            return known;
        }
        let id = self.attribute(key, Any::String(text.into()));
        self.attribute_ids.insert(ids, id);
        id
    }

    /// Stack index and attribute indices of a sample.
    fn sample(&mut self, message: &proto::Profile, sample: &proto::Sample) -> (i32, Vec<i32>) {
        let stack = self.stacks.insert_full(sample.location_id.clone()).0 as i32;
        let mut attributes = Vec::new();
        for label in &sample.label {
            let text = |id: i64| message.string_table[id as usize].as_str();
            match text(label.key) {
                "thread" => attributes.push(self.text_attribute("thread.name", text(label.str))),
                "incomplete" => attributes.push(self.text_attribute("heapbpf.stack.incomplete", text(label.str))),
                "source" => attributes.push(self.text_attribute("heapbpf.stack.source", text(label.str))),
                _ => {}
            }
        }
        (stack, attributes)
    }

    /// Attributes for what pprof has fields for.
    fn about(&mut self, message: &proto::Profile) -> Vec<i32> {
        let text = |id: i64| message.string_table[id as usize].clone();
        let comments = message.comment.iter().map(|&id| AnyValue { value: Some(Any::String(text(id))) }).collect();
        vec![
            self.attribute("pprof.profile.comment", Any::Array(ArrayValue { values: comments })),
            self.attribute("pprof.profile.drop_frames", Any::String(text(message.drop_frames))),
        ]
    }

    fn dictionary(mut self, message: proto::Profile) -> otlp::ProfilesDictionary {
        let mut mapping_table = vec![otlp::Mapping::default()];
        for mapping in &message.mapping {
            let build_id = message.string_table[mapping.build_id as usize].as_str();
            let attribute_indices = if build_id.is_empty() {
                Vec::new()
            } else {
                vec![self.text_attribute("process.executable.build_id.gnu", build_id)]
            };
            mapping_table.push(otlp::Mapping {
                memory_start: mapping.memory_start,
                memory_limit: mapping.memory_limit,
                file_offset: mapping.file_offset,
                filename_strindex: index(mapping.filename),
                attribute_indices,
            });
        }
        let native = self.text_attribute("profile.frame.type", "native");
        let line = |line: &proto::Line| otlp::Line { function_index: line.function_id as i32, line: line.line };
        let location = |location: &proto::Location| otlp::Location {
            mapping_index: location.mapping_id as i32,
            address: location.address,
            lines: location.line.iter().map(line).collect(),
            attribute_indices: vec![native],
        };
        let function = |function: &proto::Function| otlp::Function {
            name_strindex: index(function.name),
            system_name_strindex: index(function.system_name),
            filename_strindex: index(function.filename),
        };
        // Locations are numbered from 1 in order; entry 0 is the empty one.
        let stack =
            |locations: Vec<u64>| otlp::Stack { location_indices: locations.into_iter().map(|id| id as i32).collect() };
        let locations = std::iter::once(otlp::Location::default()).chain(message.location.iter().map(location));
        let functions = std::iter::once(otlp::Function::default()).chain(message.function.iter().map(function));
        otlp::ProfilesDictionary {
            mapping_table,
            location_table: locations.collect(),
            function_table: functions.collect(),
            link_table: vec![otlp::Link {}],
            string_table: self.strings,
            attribute_table: self.attributes,
            stack_table: self.stacks.into_iter().map(stack).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn every_process_has_every_value_and_they_add_up() {
        let profile = testing::small();
        let data = otlp::ProfilesData::decode(&*testing::written(&profile, "otlp")).expect("its own output");
        let dictionary = data.dictionary.expect("a dictionary");
        let text = |id: i32| dictionary.string_table[id as usize].as_str();
        assert_eq!(data.resource_profiles.len(), 2);
        for value in Value::COLUMNS {
            let profiles = data.resource_profiles.iter().flat_map(|resource| &resource.scope_profiles[0].profiles);
            let of_value =
                profiles.filter(|one| one.sample_type.is_some_and(|kind| text(kind.type_strindex) == value.name()));
            let sum: i64 = of_value.flat_map(|one| &one.samples).flat_map(|sample| &sample.values).sum();
            let total: f64 = profile.rows.iter().map(|row| value.of(row)).sum();
            assert_eq!(sum, total.round() as i64, "{}", value.name());
        }
        let first = &data.resource_profiles[0].scope_profiles[0].profiles[0];
        assert_eq!(text(first.sample_type.expect("a type").type_strindex), "inuse_space");
        assert_eq!((first.period, first.time_unix_nano), (524_288, 1_700_000_000_123_456_789));
    }

    #[test]
    fn a_process_whose_frees_were_given_up_has_no_profile_of_what_is_in_use() {
        let data = encode(&testing::partly_followed(), Value::InuseSpace);
        let profiles = data.resource_profiles.iter().map(|resource| resource.scope_profiles[0].profiles.len());
        assert_eq!(profiles.collect::<Vec<_>>(), [4, 2]);
    }

    #[test]
    fn stacks_of_go_s_runtime_say_so() {
        let data = encode(&testing::with_go_heap(), Value::InuseSpace);
        let dictionary = data.dictionary.expect("a dictionary");
        let text = |id: i32| dictionary.string_table[id as usize].as_str();
        let of_go = |id: &i32| {
            let attribute = &dictionary.attribute_table[*id as usize];
            let value = attribute.value.as_ref().and_then(|value| value.value.clone());
            text(attribute.key_strindex) == "heapbpf.stack.source" && value == Some(Any::String("go runtime".into()))
        };
        let profiles = data.resource_profiles.iter().flat_map(|resource| &resource.scope_profiles[0].profiles);
        let samples: Vec<_> = profiles.flat_map(|profile| &profile.samples).collect();
        let marked = samples.iter().filter(|sample| sample.attribute_indices.iter().any(of_go)).count();
        assert!(marked > 0 && marked < samples.len(), "some, and others not: {marked} of {}", samples.len());
    }

    #[test]
    fn indices_are_in_their_tables_and_entry_zero_is_empty() {
        let data = encode(&testing::small(), Value::InuseSpace);
        let dictionary = data.dictionary.expect("a dictionary");
        assert_eq!(dictionary.string_table[0], "");
        assert_eq!(dictionary.stack_table[0], otlp::Stack::default());
        assert_eq!(dictionary.mapping_table[0], otlp::Mapping::default());
        assert_eq!(dictionary.location_table[0], otlp::Location::default());
        assert_eq!(dictionary.function_table[0], otlp::Function::default());
        assert_eq!(dictionary.attribute_table[0], otlp::KeyValueAndUnit::default());
        let samples = data.resource_profiles.iter().flat_map(|resource| &resource.scope_profiles[0].profiles);
        for sample in samples.flat_map(|profile| &profile.samples) {
            let stack = &dictionary.stack_table[sample.stack_index as usize];
            assert!(!stack.location_indices.is_empty());
            for &location in &stack.location_indices {
                let location = &dictionary.location_table[location as usize];
                assert!((location.mapping_index as usize) < dictionary.mapping_table.len());
                for line in &location.lines {
                    let function = &dictionary.function_table[line.function_index as usize];
                    assert!(!dictionary.string_table[function.name_strindex as usize].is_empty());
                }
            }
            assert!(sample.attribute_indices.iter().all(|&id| (id as usize) < dictionary.attribute_table.len()));
        }
    }
}
