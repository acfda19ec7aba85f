//! Stacks, with their figures, samples and lifetimes.

use heapbpf_statistics::sums::SampleSums;
use serde::ser::{SerializeSeq as _, SerializeStruct as _};
use serde::{Serialize, Serializer};

use super::figures::Figures;
use super::frames::EncodedFrame;
use super::known;
use super::processes::Programs;
use crate::intern::Interned;
use crate::model::{Profile, Row};

/// All stacks of a profile.
#[derive(Clone, Copy)]
pub(super) struct Stacks<'a> {
    pub(super) profile: &'a Profile,
    pub(super) confidence: f64,
    pub(super) interned: &'a Interned<'a>,
    /// Distinct frames, each encoded once, because most frames occur in many stacks.
    pub(super) frames: &'a [EncodedFrame],
}

impl Serialize for Stacks<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let rows = &self.profile.rows;
        let programs = Programs::of(self.profile);
        let mut sequence = serializer.serialize_seq(Some(rows.len()))?;
        for (row, &stack) in rows.iter().zip(&self.interned.stack_of_row) {
            sequence.serialize_element(&RowJson { all: *self, row, stack, programs: &programs })?;
        }
        sequence.end()
    }
}

struct RowJson<'a> {
    all: Stacks<'a>,
    row: &'a Row,
    stack: u32,
    programs: &'a Programs,
}

impl RowJson<'_> {
    /// The program of the row, and its process (index and pid) if the row belongs to a single one.
    fn owner(&self) -> (Option<usize>, Option<(usize, u32)>) {
        let Some(process) = self.all.profile.processes.get(self.row.key.process) else { return (None, None) };
        let (program, first) = self.programs.of_entry[self.row.key.process];
        let only = match (process.members.is_empty(), self.row.member) {
            (true, _) => Some((first, process.pid)),
            (false, Some(member)) => process.members.get(member).map(|it| (first + member, it.process.pid)),
            (false, None) => None,
        };
        (program, only)
    }
}

/// Numbers of samples, and what is known of their sizes.
macro_rules! samples {
    ($fields:ident, $prefix:literal, $sums:expr, $offset_sum:expr) => {
        $fields.serialize_field(concat!($prefix, "samples"), &$sums.samples)?;
        $fields.serialize_field(concat!($prefix, "zero_byte_samples"), &$sums.zero_byte_samples)?;
        $fields.serialize_field(concat!($prefix, "sampled_bytes"), &$sums.sampled_bytes)?;
        $fields.serialize_field(concat!($prefix, "offset_sum"), &$offset_sum)?;
        $fields.serialize_field(concat!($prefix, "smallest_bytes"), &$sums.smallest_bytes)?;
        $fields.serialize_field(concat!($prefix, "largest_bytes"), &$sums.largest_bytes)?;
    };
}

impl Serialize for RowJson<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (row, profile) = (self.row, self.all.profile);
        let mut fields = serializer.serialize_struct("Row", 42)?;
        let (program, only) = self.owner();
        // The index distinguishes processes that had the same pid one after the other.
        fields.serialize_field("process", &only.map(|(index, _)| index))?;
        fields.serialize_field("pid", &only.map(|(_, pid)| pid))?;
        known(&mut fields, "program", program)?;
        fields.serialize_field("thread", &*row.key.thread)?;
        fields.serialize_field("function", &*row.key.function)?;
        known(&mut fields, "source", row.key.stack.source())?;
        fields.serialize_field("interval", &row.key.interval)?;
        let offsets = |sums: &SampleSums| sums.known_offset_sum().filter(|_| profile.header.offsets_known);
        samples!(fields, "", row.alloc, offsets(&row.alloc));
        if profile.knows_inuse(row.key.process) {
            samples!(fields, "inuse_", row.inuse, offsets(&row.inuse));
        }
        // Most stacks hold nothing at exit.
        if profile.knows_inuse(row.key.process) && row.at_exit.samples > 0 {
            samples!(fields, "at_exit_", row.at_exit, offsets(&row.at_exit));
        }
        fields.serialize_field("complete", &row.key.stack.cut.is_none())?;
        fields.serialize_field("cut", &row.key.stack.cut.as_deref())?;
        fields.serialize_field("unwinder", row.key.stack.unwinder)?;
        let frames = self.all.interned.frame_ids(self.stack).iter().map(|&id| self.all.frames[id as usize].next());
        fields.serialize_field("frames", &frames.collect::<Vec<_>>())?;
        Figures::of_row(profile, self.all.confidence, row).fields::<S>(&mut fields)?;
        known(&mut fields, "peak", row.peak.as_ref())?;
        known(&mut fields, "in_memory", row.in_memory.as_ref())?;
        known(&mut fields, "growth", row.growth.as_ref())?;
        known(&mut fields, "lifetimes", row.lifetimes.as_ref())?;
        fields.end()
    }
}
