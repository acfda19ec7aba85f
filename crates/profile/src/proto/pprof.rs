//! pprof's messages, from `profile.proto` of github.com/google/pprof.

/// `perftools.profiles.Profile`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Profile {
    /// Kinds of the values of a sample.
    #[prost(message, repeated, tag = "1")]
    pub sample_type: Vec<ValueType>,
    /// Stacks with values.
    #[prost(message, repeated, tag = "2")]
    pub sample: Vec<Sample>,
    /// Mapped files.
    #[prost(message, repeated, tag = "3")]
    pub mapping: Vec<Mapping>,
    /// Addresses.
    #[prost(message, repeated, tag = "4")]
    pub location: Vec<Location>,
    /// Functions.
    #[prost(message, repeated, tag = "5")]
    pub function: Vec<Function>,
    /// Strings that everything else refers to; the first is empty.
    #[prost(string, repeated, tag = "6")]
    pub string_table: Vec<String>,
    /// Regular expression: readers leave out frames from a matching function inwards.
    #[prost(int64, tag = "7")]
    pub drop_frames: i64,
    /// Regular expression: exceptions to `drop_frames`.
    #[prost(int64, tag = "8")]
    pub keep_frames: i64,
    /// Wall-clock time at the start, nanoseconds since 1970.
    #[prost(int64, tag = "9")]
    pub time_nanos: i64,
    /// Length in nanoseconds.
    #[prost(int64, tag = "10")]
    pub duration_nanos: i64,
    /// What `period` counts.
    #[prost(message, optional, tag = "11")]
    pub period_type: Option<ValueType>,
    /// Mean number of events between samples.
    #[prost(int64, tag = "12")]
    pub period: i64,
    /// Free text.
    #[prost(int64, repeated, tag = "13")]
    pub comment: Vec<i64>,
    /// Name of the value to show first.
    #[prost(int64, tag = "14")]
    pub default_sample_type: i64,
}

/// A kind of value and its unit.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct ValueType {
    /// Kind.
    #[prost(int64, tag = "1")]
    pub r#type: i64,
    /// Unit.
    #[prost(int64, tag = "2")]
    pub unit: i64,
}

/// A stack with its values.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Sample {
    /// Locations, innermost first.
    #[prost(uint64, repeated, tag = "1")]
    pub location_id: Vec<u64>,
    /// One value per sample type.
    #[prost(int64, repeated, tag = "2")]
    pub value: Vec<i64>,
    /// Its labels.
    #[prost(message, repeated, tag = "3")]
    pub label: Vec<Label>,
}

/// A label: a text or a number.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Label {
    /// Name.
    #[prost(int64, tag = "1")]
    pub key: i64,
    /// Text.
    #[prost(int64, tag = "2")]
    pub str: i64,
    /// Number.
    #[prost(int64, tag = "3")]
    pub num: i64,
    /// Unit of the number.
    #[prost(int64, tag = "4")]
    pub num_unit: i64,
}

/// A mapped file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mapping {
    /// Identifier, not 0.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// First address.
    #[prost(uint64, tag = "2")]
    pub memory_start: u64,
    /// End address.
    #[prost(uint64, tag = "3")]
    pub memory_limit: u64,
    /// File offset of the first address.
    #[prost(uint64, tag = "4")]
    pub file_offset: u64,
    /// Path.
    #[prost(int64, tag = "5")]
    pub filename: i64,
    /// Build ID in hexadecimal digits.
    #[prost(int64, tag = "6")]
    pub build_id: i64,
    /// Whether functions of this mapping have been looked up.
    #[prost(bool, tag = "7")]
    pub has_functions: bool,
    /// Whether source files have been looked up.
    #[prost(bool, tag = "8")]
    pub has_filenames: bool,
    /// Whether line numbers have been looked up.
    #[prost(bool, tag = "9")]
    pub has_line_numbers: bool,
    /// Whether inlined functions have been looked up.
    #[prost(bool, tag = "10")]
    pub has_inline_frames: bool,
}

/// An address, with its functions if it was symbolized.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Location {
    /// Identifier, not 0.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Mapping, or 0.
    #[prost(uint64, tag = "2")]
    pub mapping_id: u64,
    /// Address of the call.
    #[prost(uint64, tag = "3")]
    pub address: u64,
    /// Functions at this address, the innermost inlined one first.
    #[prost(message, repeated, tag = "4")]
    pub line: Vec<Line>,
    /// Whether several symbols share this address.
    #[prost(bool, tag = "5")]
    pub is_folded: bool,
}

/// A function and a line in it.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Line {
    /// Function.
    #[prost(uint64, tag = "1")]
    pub function_id: u64,
    /// Source line.
    #[prost(int64, tag = "2")]
    pub line: i64,
}

/// A function.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Function {
    /// Identifier, not 0.
    #[prost(uint64, tag = "1")]
    pub id: u64,
    /// Name.
    #[prost(int64, tag = "2")]
    pub name: i64,
    /// Name in the symbol table.
    #[prost(int64, tag = "3")]
    pub system_name: i64,
    /// Source file.
    #[prost(int64, tag = "4")]
    pub filename: i64,
    /// Line on which it starts.
    #[prost(int64, tag = "5")]
    pub start_line: i64,
}
