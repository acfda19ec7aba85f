//! Firefox Profiler: native allocations, one thread per program or process.
//!
//! A profile has sums per stack, not single allocations. For each stack, what is in use is written as allocations
//! without a deallocation, and the rest as one allocation with its deallocation.

use std::collections::HashMap;
use std::io;

use fxprof_processed_profile as fxprof;
use fxprof_processed_profile::{CpuDelta, ReferenceTimestamp, SamplingInterval, StackHandle, ThreadHandle, Timestamp};

use super::{FormatError, WriteOptions};
use crate::escape::{JsonText, escaped};
use crate::group::{GroupBy, Groups, process_name};
use crate::intern::Interned;
use crate::model::{Octave, Profile, Row};
use crate::naming::frame_name;
use crate::report::subject;
use crate::round::largest_remainder;

pub(super) fn write_gz(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let converted = converted(profile, options.group_of(profile));
    super::gzipped(out, |gzip| Ok(serde_json::to_writer(JsonText(gzip), &converted)?))
}

/// The same format without compression.
pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    Ok(serde_json::to_writer(JsonText(out), &converted(profile, options.group_of(profile)))?)
}

/// An allocation or a deallocation.
struct Event {
    nanoseconds: u64,
    stack: Option<StackHandle>,
    /// Stands for an address; an allocation and its deallocation share it.
    block: u64,
    /// Negative for a deallocation.
    bytes: i64,
}

/// A program or process, with its thread in the file.
struct Track {
    thread: ThreadHandle,
    events: Vec<Event>,
}

fn converted(profile: &Profile, group_by: GroupBy) -> fxprof::Profile {
    let interned = Interned::for_viewers(profile);
    let mut file = fxprof::Profile::new(
        &format!("heapbpf · {}", subject(profile)),
        ReferenceTimestamp::from(profile.header.started),
        SamplingInterval::from_millis(1),
    );
    file.set_os_name("Linux");
    file.set_symbolicated(true);
    let category = file.add_category("Memory", fxprof::CategoryColor::Orange);
    let names: Vec<fxprof::Frame> = interned
        .frames
        .iter()
        .map(|frame| fxprof::Frame::Label(file.intern_string(&escaped(&frame_name(profile, frame)))))
        .collect();
    let groups = Groups::new(profile, group_by);
    let mut tracks: Vec<Track> = Vec::new();
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let end = profile.header.duration.as_nanos().min(u128::from(u64::MAX)) as u64;
    let allocated = largest_remainder(&profile.rows.iter().map(|row| row.alloc.bytes).collect::<Vec<_>>());
    let in_use = largest_remainder(&profile.rows.iter().map(|row| row.inuse.bytes).collect::<Vec<_>>());
    let mut blocks = 0;
    for (index, (row, &stack)) in profile.rows.iter().zip(&interned.stack_of_row).enumerate() {
        let number = *numbers.entry(groups.name(row).into_owned()).or_insert_with_key(|name| {
            let thread = track(&mut file, profile, row, name, end);
            tracks.push(Track { thread, events: Vec::new() });
            tracks.len() - 1
        });
        let Track { thread, events } = &mut tracks[number];
        let frames = interned.frame_ids(stack).iter().rev().map(|&frame| fxprof::FrameInfo {
            frame: names[frame as usize].clone(),
            category_pair: category.into(),
            flags: fxprof::FrameFlags::empty(),
        });
        let stack = file.intern_stack_frames(*thread, frames);
        let mut add = |nanoseconds, bytes: i64, freed: bool| {
            if bytes > 0 {
                blocks += 1;
                events.push(Event { nanoseconds, stack, block: blocks, bytes });
                events.extend(freed.then_some(Event { nanoseconds: end, stack, block: blocks, bytes: -bytes }));
            }
        };
        by_age(row, in_use[index]).into_iter().for_each(|(age, bytes)| add(end.saturating_sub(age), bytes, false));
        add(0, allocated[index].saturating_sub(in_use[index]), profile.header.live);
    }
    for mut track in tracks {
        // The viewer expects allocations in time order.
        track.events.sort_by_key(|event| event.nanoseconds);
        for Event { nanoseconds, stack, block, bytes } in track.events {
            file.add_allocation_sample(track.thread, moment(nanoseconds), stack, block, bytes);
        }
    }
    file
}

fn moment(nanoseconds: u64) -> Timestamp {
    Timestamp::from_nanos_since_reference(nanoseconds)
}

/// Adds a process with one thread for the program or process of a row.
fn track(file: &mut fxprof::Profile, profile: &Profile, row: &Row, name: &str, end: u64) -> ThreadHandle {
    let process = profile.processes.get(row.key.process);
    let name = match (name, process) {
        ("", Some(process)) if profile.processes.len() == 1 => process_name(process),
        ("", _) => subject(profile),
        _ => name.to_owned(),
    };
    let pid = process.map_or(0, |process| process.pid);
    let handle = file.add_process(&escaped(&name), pid, moment(0));
    let thread = file.add_thread(handle, pid, moment(0), true);
    file.add_initial_visible_thread(thread);
    // Without time samples, the viewer would not know how long the recording was.
    for time in [0, end] {
        file.add_sample(thread, moment(time), None, CpuDelta::ZERO, 0);
    }
    thread
}

/// Bytes in use by age in nanoseconds. They are divided among the octaves of age in proportion to the samples in use;
/// the age is the middle of the octave. Without ages, all bytes are as old as the recording.
fn by_age(row: &Row, bytes: i64) -> Vec<(u64, i64)> {
    let ages = row.lifetimes.as_ref().map_or(&[][..], |lifetimes| &lifetimes.ages);
    let left: Vec<&Octave> = ages.iter().filter(|age| age.left > 0 && age.exponent < 63).collect();
    let all: f64 = left.iter().map(|age| age.left as f64).sum();
    let Some((oldest, others)) = left.split_last() else { return vec![(u64::MAX, bytes)] };
    let middle = |age: &Octave| (1_u64 << age.exponent) + (1_u64 << age.exponent) / 2;
    let mut rest = bytes;
    let mut parts = Vec::new();
    for age in others {
        let part = ((bytes as f64 * (age.left as f64 / all)) as i64).clamp(0, rest.max(0));
        rest -= part;
        parts.push((middle(age), part));
    }
    parts.push((middle(oldest), rest));
    parts
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::testing;

    fn written(profile: &Profile) -> Json {
        let file = testing::written(profile, "firefox");
        serde_json::from_reader(flate2::read::GzDecoder::new(&file[..])).expect("JSON")
    }

    fn list<'a>(value: &'a Json, name: &str) -> &'a Vec<Json> {
        value[name].as_array().unwrap_or_else(|| panic!("{name} in {value}"))
    }

    /// Names of a stack's functions, innermost first.
    fn functions(thread: &Json, stack: u64) -> Vec<String> {
        let (stacks, frames, functions) = (&thread["stackTable"], &thread["frameTable"], &thread["funcTable"]);
        let at = |table: &Json, column: &str, row: u64| table[column][row as usize].as_u64();
        let mut names = Vec::new();
        let mut next = Some(stack);
        while let Some(stack) = next {
            let function = at(frames, "func", at(stacks, "frame", stack).expect("a frame")).expect("a function");
            let name = at(functions, "name", function).expect("a name");
            names.push(thread["stringArray"][name as usize].as_str().expect("text").to_owned());
            next = at(stacks, "prefix", stack);
        }
        names
    }

    /// For each thread: bytes retained, bytes allocated in total, and the largest retained stack.
    fn sums(thread: &Json) -> (i64, i64, Vec<String>) {
        let events = &thread["nativeAllocations"];
        let (mut allocated, mut kept) = (0, HashMap::new());
        let mut last = 0.0;
        for index in 0..events["length"].as_u64().expect("a length") as usize {
            let (bytes, block) = (events["weight"][index].as_i64().expect("bytes"), &events["memoryAddress"][index]);
            let time = events["time"][index].as_f64().expect("milliseconds");
            assert!(time >= last && time <= 30_500.0, "{time} after {last}");
            last = time;
            if bytes > 0 {
                allocated += bytes;
                assert!(kept.insert(block.to_string(), (bytes, events["stack"][index].as_u64())).is_none());
            } else {
                assert_eq!(kept.remove(&block.to_string()).map(|(bytes, _)| bytes), Some(-bytes));
            }
        }
        let retained = kept.values().map(|(bytes, _)| bytes).sum();
        let largest = kept.values().max_by_key(|(bytes, _)| bytes).and_then(|(_, stack)| *stack);
        (retained, allocated, largest.map(|stack| functions(thread, stack)).unwrap_or_default())
    }

    #[test]
    fn retained_and_allocated_bytes_are_those_of_the_profile() {
        let profile = testing::small();
        let file = written(&profile);
        assert!(file["meta"]["product"].as_str().is_some_and(|text| text.contains("heapbpf · 2 processes")));
        let threads = list(&file, "threads");
        let names: Vec<_> = threads.iter().filter_map(|thread| thread["processName"].as_str()).collect();
        assert_eq!(names, ["server (4242)", "worker \"x\" (4300)"]);
        for (process, thread) in threads.iter().enumerate() {
            let rows = || profile.rows.iter().filter(|row| row.key.process == process);
            let (retained, allocated, largest) = sums(thread);
            assert!((retained as f64 - rows().map(|row| row.inuse.bytes).sum::<f64>()).abs() <= 2.0);
            assert!((allocated as f64 - rows().map(|row| row.alloc.bytes).sum::<f64>()).abs() <= 2.0);
            assert!(
                largest.iter().any(|name| name == "parse_value") && largest.last().is_some_and(|name| name == "main")
            );
        }
    }

    /// Of the first row's 20 samples in use, 17 are between 8.6 and 17.2 s old, and 3 between 1.1 and 2.1 s.
    #[test]
    fn what_is_in_use_was_allocated_when_its_ages_say() {
        let profile = testing::small();
        let parts = by_age(&profile.rows[0], 2_000);
        let octave = |exponent: u32| 3_u64 << (exponent - 1);
        assert_eq!(parts, [(octave(30), 300), (octave(33), 1_700)]);
        assert_eq!(by_age(&profile.rows[4], 7), [(u64::MAX, 7)], "no ages");
    }

    #[test]
    fn without_frees_nothing_is_deallocated_and_names_are_escaped() {
        let mut profile = testing::small();
        profile.header.live = false;
        profile.processes[0].comm = "a\u{1b}[31mb".into();
        profile.rows.iter_mut().for_each(|row| (row.inuse, row.lifetimes) = Default::default());
        let file = written(&profile);
        let thread = &list(&file, "threads")[0];
        assert!(thread["processName"].as_str().is_some_and(|name| name.contains("\\u{1b}") || name.contains("\\x1b")));
        let weights = list(&thread["nativeAllocations"], "weight");
        assert!(!weights.is_empty() && weights.iter().all(|bytes| bytes.as_i64().is_some_and(|bytes| bytes > 0)));
    }
}
