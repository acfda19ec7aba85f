//! Perfetto's trace packets, from `perfetto_trace.proto` of github.com/google/perfetto.

/// `perfetto.protos.Trace`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Trace {
    /// Packets in order.
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<TracePacket>,
}

/// A packet of one sequence.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TracePacket {
    /// Processes.
    #[prost(message, optional, tag = "2")]
    pub process_tree: Option<ProcessTree>,
    /// One point in time on several clocks.
    #[prost(message, optional, tag = "6")]
    pub clock_snapshot: Option<ClockSnapshot>,
    /// Time on CLOCK_BOOTTIME, nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    /// Sequence, not 0.
    #[prost(uint32, tag = "10")]
    pub trusted_packet_sequence_id: u32,
    /// Strings, mappings, frames and call stacks by number.
    #[prost(message, optional, tag = "12")]
    pub interned_data: Option<InternedData>,
    /// 1: numbering restarts; 2: refers to numbers.
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    /// Heap dumps.
    #[prost(message, optional, tag = "37")]
    pub profile_packet: Option<ProfilePacket>,
    /// Whether the sequence starts here.
    #[prost(bool, optional, tag = "87")]
    pub first_packet_on_sequence: Option<bool>,
}

/// Numbers that are valid from here on.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InternedData {
    /// Function names.
    #[prost(message, repeated, tag = "5")]
    pub function_names: Vec<InternedString>,
    /// Frames.
    #[prost(message, repeated, tag = "6")]
    pub frames: Vec<Frame>,
    /// Call stacks.
    #[prost(message, repeated, tag = "7")]
    pub callstacks: Vec<Callstack>,
    /// Build IDs.
    #[prost(message, repeated, tag = "16")]
    pub build_ids: Vec<InternedString>,
    /// Parts of paths.
    #[prost(message, repeated, tag = "17")]
    pub mapping_paths: Vec<InternedString>,
    /// Source files.
    #[prost(message, repeated, tag = "18")]
    pub source_paths: Vec<InternedString>,
    /// Mapped files.
    #[prost(message, repeated, tag = "19")]
    pub mappings: Vec<Mapping>,
}

/// A string and its number.
#[derive(Clone, PartialEq, prost::Message)]
pub struct InternedString {
    /// Number, not 0.
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    /// String.
    #[prost(bytes = "vec", tag = "2")]
    pub str: Vec<u8>,
}

/// A frame.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Frame {
    /// Number, not 0.
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    /// Its function's name.
    #[prost(uint64, tag = "2")]
    pub function_name_id: u64,
    /// Its file.
    #[prost(uint64, tag = "3")]
    pub mapping_id: u64,
    /// Address in its file.
    #[prost(uint64, tag = "4")]
    pub rel_pc: u64,
    /// Source file.
    #[prost(uint64, optional, tag = "5")]
    pub source_path_iid: Option<u64>,
    /// Source line.
    #[prost(uint32, optional, tag = "6")]
    pub line_number: Option<u32>,
}

/// A call stack.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Callstack {
    /// Number, not 0.
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    /// Frames, outermost first.
    #[prost(uint64, repeated, packed = "false", tag = "2")]
    pub frame_ids: Vec<u64>,
}

/// A mapped file.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Mapping {
    /// Number, not 0.
    #[prost(uint64, tag = "1")]
    pub iid: u64,
    /// Build ID's number.
    #[prost(uint64, tag = "2")]
    pub build_id: u64,
    /// Start.
    #[prost(uint64, tag = "4")]
    pub start: u64,
    /// End.
    #[prost(uint64, tag = "5")]
    pub end: u64,
    /// Parts of its path, by number.
    #[prost(uint64, repeated, packed = "false", tag = "7")]
    pub path_string_ids: Vec<u64>,
    /// File offset of the start.
    #[prost(uint64, tag = "8")]
    pub exact_offset: u64,
}

/// Heap dumps of one point in time; all packets but the last have `continued` set.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProfilePacket {
    /// Dumps.
    #[prost(message, repeated, tag = "5")]
    pub process_dumps: Vec<ProcessHeapSamples>,
    /// Whether more packets for this point in time follow.
    #[prost(bool, tag = "6")]
    pub continued: bool,
    /// Number of the packet.
    #[prost(uint64, tag = "7")]
    pub index: u64,
}

/// The heap of a process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessHeapSamples {
    /// Process id.
    #[prost(uint64, tag = "1")]
    pub pid: u64,
    /// Stacks.
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<HeapSample>,
    /// Whether the process ended.
    #[prost(bool, tag = "6")]
    pub disconnected: bool,
    /// Time on CLOCK_MONOTONIC_COARSE, nanoseconds.
    #[prost(uint64, tag = "9")]
    pub timestamp: u64,
    /// Name of the heap.
    #[prost(string, tag = "11")]
    pub heap_name: String,
    /// Sampling interval in force.
    #[prost(uint64, tag = "12")]
    pub sampling_interval_bytes: u64,
    /// Requested sampling interval.
    #[prost(uint64, tag = "13")]
    pub orig_sampling_interval_bytes: u64,
}

/// A stack's figures since the start.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct HeapSample {
    /// Call stack.
    #[prost(uint64, tag = "1")]
    pub callstack_id: u64,
    /// Bytes allocated.
    #[prost(uint64, tag = "2")]
    pub self_allocated: u64,
    /// Bytes freed.
    #[prost(uint64, tag = "3")]
    pub self_freed: u64,
    /// Allocations.
    #[prost(uint64, tag = "5")]
    pub alloc_count: u64,
    /// Frees.
    #[prost(uint64, tag = "6")]
    pub free_count: u64,
}

/// Processes.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ProcessTree {
    /// Processes.
    #[prost(message, repeated, tag = "1")]
    pub processes: Vec<Process>,
}

/// A process.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Process {
    /// Process id.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// Command line, the program first.
    #[prost(string, repeated, tag = "3")]
    pub cmdline: Vec<String>,
    /// Process id in its own pid namespace.
    #[prost(int32, repeated, packed = "false", tag = "6")]
    pub nspid: Vec<i32>,
    /// Whether `cmdline` is only the name of the main thread.
    #[prost(bool, tag = "9")]
    pub cmdline_is_comm: bool,
}

/// One point in time on several clocks.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ClockSnapshot {
    /// Clocks.
    #[prost(message, repeated, tag = "1")]
    pub clocks: Vec<Clock>,
}

/// A clock's time.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Clock {
    /// The clock, numbered as in `clock_gettime`; see [`clock`].
    #[prost(uint32, tag = "1")]
    pub clock_id: u32,
    /// Nanoseconds.
    #[prost(uint64, tag = "2")]
    pub timestamp: u64,
}

/// Perfetto's clock numbers.
pub mod clock {
    /// CLOCK_REALTIME.
    pub const REALTIME: u32 = 1;
    /// CLOCK_MONOTONIC.
    pub const MONOTONIC: u32 = 3;
    /// CLOCK_MONOTONIC_COARSE.
    pub const MONOTONIC_COARSE: u32 = 4;
    /// CLOCK_BOOTTIME.
    pub const BOOTTIME: u32 = 6;
}
