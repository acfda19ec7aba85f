//! OpenTelemetry's messages for profiles, as far as this crate writes them, from
//! `opentelemetry/proto/profiles/v1development/profiles.proto` of github.com/open-telemetry/opentelemetry-proto 1.10.
//! Index 0 of each dictionary table means "none".

/// `ProfilesData`; `ExportProfilesServiceRequest` has the same fields.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProfilesData {
    /// Profiles by resource.
    #[prost(message, repeated, tag = "1")]
    pub resource_profiles: Vec<ResourceProfiles>,
    /// The tables that the profiles refer to.
    #[prost(message, optional, tag = "2")]
    pub dictionary: Option<ProfilesDictionary>,
}

/// Tables shared by all profiles.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProfilesDictionary {
    /// Mapped files.
    #[prost(message, repeated, tag = "1")]
    pub mapping_table: Vec<Mapping>,
    /// Addresses.
    #[prost(message, repeated, tag = "2")]
    pub location_table: Vec<Location>,
    /// Functions.
    #[prost(message, repeated, tag = "3")]
    pub function_table: Vec<Function>,
    /// Links to spans.
    #[prost(message, repeated, tag = "4")]
    pub link_table: Vec<Link>,
    /// Strings.
    #[prost(string, repeated, tag = "5")]
    pub string_table: Vec<String>,
    /// Attributes.
    #[prost(message, repeated, tag = "6")]
    pub attribute_table: Vec<KeyValueAndUnit>,
    /// Call stacks.
    #[prost(message, repeated, tag = "7")]
    pub stack_table: Vec<Stack>,
}

/// The profiles of a resource, such as a process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ResourceProfiles {
    /// The resource.
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    /// Its profiles, by the program that made them.
    #[prost(message, repeated, tag = "2")]
    pub scope_profiles: Vec<ScopeProfiles>,
}

/// `opentelemetry.proto.resource.v1.Resource`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Resource {
    /// Its attributes.
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

/// Profiles that one program made.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ScopeProfiles {
    /// The program.
    #[prost(message, optional, tag = "1")]
    pub scope: Option<InstrumentationScope>,
    /// The profiles.
    #[prost(message, repeated, tag = "2")]
    pub profiles: Vec<Profile>,
}

/// `opentelemetry.proto.common.v1.InstrumentationScope`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InstrumentationScope {
    /// Name of the program.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its version.
    #[prost(string, tag = "2")]
    pub version: String,
}

/// Samples of one kind of value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Profile {
    /// Kind of value.
    #[prost(message, optional, tag = "1")]
    pub sample_type: Option<ValueType>,
    /// Stacks with values.
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<Sample>,
    /// Wall-clock time at the start, nanoseconds since 1970.
    #[prost(fixed64, tag = "3")]
    pub time_unix_nano: u64,
    /// Length in nanoseconds.
    #[prost(uint64, tag = "4")]
    pub duration_nano: u64,
    /// What `period` counts.
    #[prost(message, optional, tag = "5")]
    pub period_type: Option<ValueType>,
    /// Mean number of events between samples.
    #[prost(int64, tag = "6")]
    pub period: i64,
    /// Its attributes.
    #[prost(int32, repeated, tag = "11")]
    pub attribute_indices: Vec<i32>,
}

/// A kind of value and its unit.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct ValueType {
    /// Kind.
    #[prost(int32, tag = "1")]
    pub type_strindex: i32,
    /// Unit.
    #[prost(int32, tag = "2")]
    pub unit_strindex: i32,
}

/// A stack with its value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Sample {
    /// Stack.
    #[prost(int32, tag = "1")]
    pub stack_index: i32,
    /// Its attributes.
    #[prost(int32, repeated, tag = "2")]
    pub attribute_indices: Vec<i32>,
    /// Value.
    #[prost(int64, repeated, tag = "4")]
    pub values: Vec<i64>,
}

/// A mapped file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mapping {
    /// First address.
    #[prost(uint64, tag = "1")]
    pub memory_start: u64,
    /// Address after the last one.
    #[prost(uint64, tag = "2")]
    pub memory_limit: u64,
    /// File offset of the first address.
    #[prost(uint64, tag = "3")]
    pub file_offset: u64,
    /// File name.
    #[prost(int32, tag = "4")]
    pub filename_strindex: i32,
    /// Its attributes.
    #[prost(int32, repeated, tag = "5")]
    pub attribute_indices: Vec<i32>,
}

/// A call stack.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Stack {
    /// Locations, innermost first.
    #[prost(int32, repeated, tag = "1")]
    pub location_indices: Vec<i32>,
}

/// An address.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Location {
    /// Its mapping.
    #[prost(int32, tag = "1")]
    pub mapping_index: i32,
    /// Address.
    #[prost(uint64, tag = "2")]
    pub address: u64,
    /// Functions, innermost first.
    #[prost(message, repeated, tag = "3")]
    pub lines: Vec<Line>,
    /// Its attributes.
    #[prost(int32, repeated, tag = "4")]
    pub attribute_indices: Vec<i32>,
}

/// A line of a function.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Line {
    /// Function.
    #[prost(int32, tag = "1")]
    pub function_index: i32,
    /// Line.
    #[prost(int64, tag = "2")]
    pub line: i64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Function {
    /// Name.
    #[prost(int32, tag = "1")]
    pub name_strindex: i32,
    /// Name in the symbol table.
    #[prost(int32, tag = "2")]
    pub system_name_strindex: i32,
    /// Source file.
    #[prost(int32, tag = "3")]
    pub filename_strindex: i32,
}

/// A link to a span. Only an empty one is written.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Link {}

/// An attribute in the dictionary.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KeyValueAndUnit {
    /// Name.
    #[prost(int32, tag = "1")]
    pub key_strindex: i32,
    /// Value.
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

/// An attribute of a resource (`opentelemetry.proto.common.v1.KeyValue`).
#[derive(Clone, PartialEq, prost::Message)]
pub struct KeyValue {
    /// Name.
    #[prost(string, tag = "1")]
    pub key: String,
    /// Value.
    #[prost(message, optional, tag = "2")]
    pub value: Option<AnyValue>,
}

/// `opentelemetry.proto.common.v1.AnyValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct AnyValue {
    /// The value.
    #[prost(oneof = "Any", tags = "1, 3, 5")]
    pub value: Option<Any>,
}

/// The value of an attribute.
#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Any {
    /// A text.
    #[prost(string, tag = "1")]
    String(String),
    /// A number.
    #[prost(int64, tag = "3")]
    Int(i64),
    /// Several values.
    #[prost(message, tag = "5")]
    Array(ArrayValue),
}

/// Several values.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ArrayValue {
    /// The values.
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<AnyValue>,
}

/// `ExportProfilesServiceResponse` of `opentelemetry.proto.collector.profiles.v1development`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExportProfilesServiceResponse {
    /// The part that was not accepted.
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<ExportProfilesPartialSuccess>,
}

/// The part of a request that was not accepted.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExportProfilesPartialSuccess {
    /// Number of profiles.
    #[prost(int64, tag = "1")]
    pub rejected_profiles: i64,
    /// Why.
    #[prost(string, tag = "2")]
    pub error_message: String,
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    /// Every field has a distinct value. The bytes are what code generated from the schema (opentelemetry-proto 0.33.1)
    /// reads and writes.
    #[test]
    fn fields_have_the_numbers_and_types_of_the_schema() {
        let text = |text: &str| Some(AnyValue { value: Some(Any::String(text.into())) });
        let kind = |type_strindex| Some(ValueType { type_strindex, unit_strindex: type_strindex + 1 });
        let array = ArrayValue { values: vec![AnyValue { value: Some(Any::Int(-1)) }] };
        let profile = Profile {
            sample_type: kind(1),
            samples: vec![Sample { stack_index: 3, attribute_indices: vec![4, 5], values: vec![-6] }],
            time_unix_nano: 7,
            duration_nano: 8,
            period_type: kind(9),
            period: 11,
            attribute_indices: vec![12],
        };
        let scope = Some(InstrumentationScope { name: "n".into(), version: "v".into() });
        let attributes = vec![KeyValue { key: "k".into(), value: text("t") }];
        let data = ProfilesData {
            resource_profiles: vec![ResourceProfiles {
                resource: Some(Resource { attributes }),
                scope_profiles: vec![ScopeProfiles { scope, profiles: vec![profile] }],
            }],
            dictionary: Some(ProfilesDictionary {
                mapping_table: vec![Mapping {
                    memory_start: 13,
                    memory_limit: 14,
                    file_offset: 15,
                    filename_strindex: 16,
                    attribute_indices: vec![17],
                }],
                location_table: vec![Location {
                    mapping_index: 18,
                    address: 19,
                    lines: vec![Line { function_index: 20, line: 21 }],
                    attribute_indices: vec![22],
                }],
                function_table: vec![Function { name_strindex: 23, system_name_strindex: 24, filename_strindex: 25 }],
                link_table: vec![Link {}],
                string_table: vec!["s".into()],
                attribute_table: vec![KeyValueAndUnit {
                    key_strindex: 26,
                    value: Some(AnyValue { value: Some(Any::Array(array)) }),
                }],
                stack_table: vec![Stack { location_indices: vec![27, 28] }],
            }),
        };
        let hex: String = data.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "0a480a0a0a080a016b12030a0174123a0a060a016e12017612300a04080110021212080312020405220afaffffffff\
             ffffffff0119070000000000000020082a040809100a300b5a010c12440a0b080d100e180f20102a0111120d081210\
             131a04081410152201161a0608171018181922002a01733213081a120f2a0d0a0b18ffffffffffffffffff013a040a\
             021b1c"
        );
        let part = ExportProfilesPartialSuccess { rejected_profiles: 29, error_message: "e".into() };
        let answer = ExportProfilesServiceResponse { partial_success: Some(part) };
        assert_eq!(answer.encode_to_vec(), *b"\x0a\x05\x08\x1d\x12\x01e");
    }
}
