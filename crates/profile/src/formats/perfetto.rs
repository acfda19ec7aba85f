//! A Perfetto trace with one heap dump per process, for ui.perfetto.dev and its trace processor.
//!
//! A recording has wall-clock times, but Perfetto needs monotonic clocks. The recording starts one second after zero on
//! those, and a clock snapshot relates them to wall-clock time.

use std::io;
use std::time::UNIX_EPOCH;

use indexmap::IndexMap;
use prost::Message as _;

use super::{FormatError, WriteOptions};
use crate::intern::{Interned, Strings};
use crate::model::{Frame, Profile};
use crate::naming::frame_name;
use crate::proto::perfetto as proto;
use crate::round::largest_remainder;
use crate::units;
use crate::value::Value;

/// The sequence id of all packets.
const SEQUENCE: u32 = 1;
const STATE_CLEARED: u32 = 1;
const NEEDS_STATE: u32 = 2;
/// Start of the recording on the trace's clocks.
const START_NS: u64 = 1_000_000_000;
/// Maximum number of call stacks in one packet of interned data, because a packet is decoded as a whole.
const STACKS_PER_PACKET: usize = 10_000;

pub(super) fn write(profile: &Profile, _: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let mut buffer = Vec::new();
    packets(profile, |packet| {
        buffer.clear();
        // A trace is the concatenation of its packets, so it need not be in memory as a whole.
        proto::Trace { packet: vec![packet] }.encode_raw(&mut buffer);
        out.write_all(&buffer)
    })?;
    Ok(())
}

/// Passes the packets of the trace to `each`, in order.
fn packets(profile: &Profile, mut each: impl FnMut(proto::TracePacket) -> io::Result<()>) -> io::Result<()> {
    let duration = u64::try_from(profile.header.duration.as_nanos()).unwrap_or(u64::MAX);
    let end_ns = START_NS.saturating_add(duration);
    let packet = |timestamp| proto::TracePacket {
        timestamp: Some(timestamp),
        trusted_packet_sequence_id: SEQUENCE,
        ..proto::TracePacket::default()
    };
    each(proto::TracePacket {
        clock_snapshot: Some(clocks(profile)),
        sequence_flags: Some(STATE_CLEARED),
        first_packet_on_sequence: Some(true),
        ..packet(START_NS)
    })?;
    each(proto::TracePacket { process_tree: Some(process_tree(profile)), ..packet(START_NS) })?;

    let interned = Interned::for_viewers(profile);
    each(proto::TracePacket {
        interned_data: Some(names(profile, &interned)),
        sequence_flags: Some(NEEDS_STATE),
        ..packet(START_NS)
    })?;
    let stacks: Vec<u32> = (0..interned.stacks.len() as u32).collect();
    for stacks in stacks.chunks(STACKS_PER_PACKET) {
        let callstack = |&stack: &u32| proto::Callstack {
            iid: u64::from(stack) + 1,
            frame_ids: interned.frame_ids(stack).iter().rev().map(|&frame| u64::from(frame) + 1).collect(),
        };
        let callstacks = stacks.iter().map(callstack).collect();
        let data = proto::InternedData { callstacks, ..proto::InternedData::default() };
        each(proto::TracePacket { interned_data: Some(data), sequence_flags: Some(NEEDS_STATE), ..packet(START_NS) })?;
    }
    let dumps = dumps(profile, &interned, end_ns);
    let last = dumps.len().saturating_sub(1);
    for (index, dump) in dumps.into_iter().enumerate() {
        let profile_packet =
            proto::ProfilePacket { process_dumps: vec![dump], continued: index < last, index: index as u64 };
        each(proto::TracePacket {
            profile_packet: Some(profile_packet),
            sequence_flags: Some(NEEDS_STATE),
            ..packet(end_ns)
        })?;
    }
    Ok(())
}

fn clocks(profile: &Profile) -> proto::ClockSnapshot {
    use proto::clock::{BOOTTIME, MONOTONIC, MONOTONIC_COARSE, REALTIME};
    let wall = profile.header.started.duration_since(UNIX_EPOCH).unwrap_or_default();
    let wall_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
    let clock = |(clock_id, timestamp)| proto::Clock { clock_id, timestamp };
    let clocks = [(REALTIME, wall_ns), (MONOTONIC, START_NS), (MONOTONIC_COARSE, START_NS), (BOOTTIME, START_NS)];
    proto::ClockSnapshot { clocks: clocks.map(clock).into() }
}

fn process_tree(profile: &Profile) -> proto::ProcessTree {
    let pid = |pid: u32| i32::try_from(pid).unwrap_or(i32::MAX);
    let process = |process: &crate::model::Process| proto::Process {
        pid: pid(process.pid),
        cmdline: vec![process.comm.clone()],
        nspid: process.namespace_pid.map(pid).into_iter().collect(),
        cmdline_is_comm: true,
    };
    proto::ProcessTree { processes: profile.processes.iter().map(process).collect() }
}

/// Interned strings, mappings and frames. Ids of mappings and frames are indices plus one.
fn names(profile: &Profile, interned: &Interned) -> proto::InternedData {
    let (mut functions, mut sources, mut paths, mut build_ids) =
        (Strings::default(), Strings::default(), Strings::default(), Strings::default());
    let mapping = |(module, iid): (&crate::model::Module, u64)| proto::Mapping {
        iid,
        build_id: module.build_id.as_deref().map_or(0, |id| build_ids.id(&units::hex(id))),
        start: module.start,
        end: module.end,
        path_string_ids: module.path.split('/').filter(|part| !part.is_empty()).map(|part| paths.id(part)).collect(),
        exact_offset: module.file_offset,
    };
    let mappings: Vec<proto::Mapping> = profile.modules.iter().zip(1..).map(mapping).collect();
    let frame = |(frame, iid): (&&Frame, u64)| proto::Frame {
        iid,
        function_name_id: functions.id(&frame_name(profile, frame)),
        mapping_id: frame.module.filter(|&module| module < mappings.len()).map_or(0, |module| module as u64 + 1),
        rel_pc: frame.file_offset.unwrap_or(frame.address),
        source_path_iid: frame.file.as_deref().map(|file| sources.id(file)),
        line_number: frame.line,
    };
    let frames = interned.frames.iter().zip(1..).map(frame).collect();
    proto::InternedData {
        function_names: table(functions),
        frames,
        callstacks: Vec::new(),
        build_ids: table(build_ids),
        mapping_paths: table(paths),
        source_paths: table(sources),
        mappings,
    }
}

/// Interned strings without the empty one, whose id stands for none.
fn table(strings: Strings) -> Vec<proto::InternedString> {
    let string = |(text, iid): (String, u64)| proto::InternedString { iid, str: text.into_bytes() };
    strings.0.into_iter().zip(0..).skip(1).map(string).collect()
}

/// The heap of each process: what it allocated since the start, and how much of that was freed.
fn dumps(profile: &Profile, interned: &Interned, end_ns: u64) -> Vec<proto::ProcessHeapSamples> {
    let mut dumps: Vec<proto::ProcessHeapSamples> = profile
        .processes
        .iter()
        .map(|process| proto::ProcessHeapSamples {
            pid: process.pid.into(),
            samples: Vec::new(),
            disconnected: process.ended,
            timestamp: end_ns,
            heap_name: "libc.malloc".into(),
            sampling_interval_bytes: profile.header.interval,
            orig_sampling_interval_bytes: profile.header.interval,
        })
        .collect();
    let mut sums: IndexMap<(usize, u32), [f64; 4]> = IndexMap::new();
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        if row.key.process >= dumps.len() {
            continue;
        }
        let sums = sums.entry((row.key.process, stack)).or_default();
        sums.iter_mut().zip(Value::COLUMNS).for_each(|(sum, value)| *sum += value.of(row));
    }
    let column = |value: usize| {
        let column: Vec<f64> = sums.values().map(|values| values[value]).collect();
        largest_remainder(&column)
    };
    let columns = [column(0), column(1), column(2), column(3)];
    let whole = |value: i64| u64::try_from(value).unwrap_or(0);
    for (index, (process, stack)) in sums.keys().enumerate() {
        let [alloc_objects, alloc, inuse_objects, inuse] = columns.each_ref().map(|column| column[index]);
        // Without frees, nothing is reported as freed.
        let freed = |alloc: i64, inuse: i64| if profile.knows_inuse(*process) { whole(alloc - inuse) } else { 0 };
        dumps[*process].samples.push(proto::HeapSample {
            callstack_id: u64::from(*stack) + 1,
            self_allocated: whole(alloc),
            self_freed: freed(alloc, inuse),
            alloc_count: whole(alloc_objects),
            free_count: freed(alloc_objects, inuse_objects),
        });
    }
    dumps
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn trace(profile: &Profile) -> Vec<proto::TracePacket> {
        proto::Trace::decode(&*testing::written(profile, "perfetto")).expect("its own output").packet
    }

    #[test]
    fn a_trace_keeps_perfettos_rules() {
        let profile = testing::small();
        let packets = trace(&profile);
        assert!(packets.iter().all(|packet| packet.trusted_packet_sequence_id == SEQUENCE));
        assert!(packets[0].clock_snapshot.is_some() && packets[0].sequence_flags == Some(STATE_CLEARED));
        assert!(packets.windows(2).all(|pair| pair[0].timestamp <= pair[1].timestamp));
        let processes = packets.iter().find_map(|packet| packet.process_tree.as_ref()).expect("a process tree");
        assert_eq!(processes.processes[0].cmdline, ["server"]);
        let dumps: Vec<_> = packets.iter().filter_map(|packet| packet.profile_packet.as_ref()).collect();
        let flags: Vec<_> = dumps.iter().map(|dump| (dump.index, dump.continued)).collect();
        assert_eq!(flags, [(0, true), (1, false)]);
    }

    #[test]
    fn dumps_add_up_and_refer_to_interned_data() {
        for profile in [testing::small(), testing::large(100, 20)] {
            let packets = trace(&profile);
            let data: Vec<_> = packets.iter().filter_map(|packet| packet.interned_data.as_ref()).collect();
            let frames: Vec<_> = data.iter().flat_map(|data| &data.frames).collect();
            let stacks: Vec<_> = data.iter().flat_map(|data| &data.callstacks).collect();
            assert!(stacks.iter().flat_map(|stack| &stack.frame_ids).all(|&id| id >= 1 && id <= frames.len() as u64));
            let names = data[0].function_names.len() as u64;
            assert!(frames.iter().all(|frame| frame.function_name_id >= 1 && frame.function_name_id <= names));
            let dumps = packets.iter().filter_map(|packet| packet.profile_packet.as_ref());
            let samples: Vec<_> = dumps.flat_map(|dump| &dump.process_dumps[0].samples).collect();
            assert!(samples.iter().all(|sample| sample.self_freed <= sample.self_allocated));
            assert!(samples.iter().all(|sample| sample.callstack_id <= stacks.len() as u64));
            let total = |value: Value| profile.rows.iter().map(|row| value.of(row)).sum::<f64>().round() as u64;
            let sum = |of: fn(&proto::HeapSample) -> u64| samples.iter().map(|sample| of(sample)).sum::<u64>();
            assert_eq!(sum(|sample| sample.self_allocated), total(Value::AllocSpace));
            assert_eq!(sum(|sample| sample.self_allocated - sample.self_freed), total(Value::InuseSpace));
            assert_eq!(sum(|sample| sample.alloc_count - sample.free_count), total(Value::InuseObjects));
        }
    }
}
