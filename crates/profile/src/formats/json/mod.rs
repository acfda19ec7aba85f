//! JSON: the whole profile, with confidence intervals. [`read`](crate::read) reads it back without loss, except for
//! which of a program's processes a stack belongs to, unless stacks are grouped by process.

mod figures;
mod frames;
mod processes;
mod stacks;

use std::io;

use heapbpf_audit::FileAudit;
use heapbpf_statistics::estimators::Estimator;
use indexmap::IndexSet;
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};
use serde_json::json;

use super::{FormatError, WriteOptions};
use crate::escape::JsonText;
use crate::estimates::Pool;
use crate::group::GroupBy;
use crate::intern::Interned;
use crate::model::Profile;
use crate::programs;
use crate::units;

use self::figures::Figures;
use self::frames::EncodedFrame;
pub(crate) use self::frames::FrameJson;
pub(crate) use self::processes::TotalJson;
use self::processes::{Programs, processes};
use self::stacks::Stacks;

pub(super) fn write(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let group_by = options.group_of(profile);
    if group_by.separates_processes() {
        return write_rows(profile, options, out);
    }
    write_rows(&programs::put_together(profile, group_by == GroupBy::Cgroup), options, out)
}

/// The same format, compressed.
pub(super) fn write_gz(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    super::gzipped(out, |gzip| write(profile, options, gzip))
}

fn write_rows(profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
    let interned = Interned::new(profile);
    let frames = interned.frames.iter().map(|frame| EncodedFrame::of(profile, frame)).collect::<Result<Vec<_>, _>>()?;
    let writer = Writer(Stacks { profile, confidence: options.confidence, interned: &interned, frames: &frames });
    serde_json::to_writer(JsonText(&mut *out), &writer)?;
    out.write_all(b"\n")?;
    Ok(())
}

/// Writes a profile, given its stacks.
struct Writer<'a>(Stacks<'a>);

impl Serialize for Writer<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (profile, confidence) = (self.0.profile, self.0.confidence);
        let mut top = serializer.serialize_struct("Profile", 24)?;
        top.serialize_field("version", &profile.header.version)?;
        top.serialize_field("interval_bytes", &profile.header.interval)?;
        let earlier = Some(&profile.header.earlier_intervals).filter(|earlier| !earlier.is_empty());
        known(&mut top, "earlier_intervals_bytes", earlier)?;
        top.serialize_field("criterion", profile.header.criterion.name())?;
        top.serialize_field("unwind", &profile.header.unwind)?;
        top.serialize_field("started", &units::rfc3339(profile.header.started))?;
        top.serialize_field("time", &units::rfc3339(profile.header.time))?;
        let unread = profile.header.unread;
        let unread = unread.map(|it| json!({"records": it.records, "of": it.of, "share": it.share()}));
        known(&mut top, "unread", unread)?;
        top.serialize_field("duration_seconds", &profile.header.duration.as_secs_f64())?;
        known(&mut top, "growth_seconds", profile.header.growth_over.map(|over| over.as_secs_f64()))?;
        top.serialize_field("recordings", &profile.header.recordings)?;
        top.serialize_field("host", &profile.header.host)?;
        top.serialize_field("live", &profile.header.live)?;
        top.serialize_field("ended_apart", &profile.header.ended_apart)?;
        top.serialize_field("samples_known", &profile.header.samples_known)?;
        top.serialize_field("estimator", Estimator::HorvitzThompson.name())?;
        top.serialize_field("time_windows", &profile.header.time_windows)?;
        top.serialize_field("confidence", &confidence)?;
        top.serialize_field("totals", &Figures::of_pool(profile, confidence, &Pool::whole(profile), None))?;
        let apart = programs::by_process(profile);
        // The audit of each file is stored once for all processes that map it.
        let audits = apart.processes.iter().chain(&apart.idle).flat_map(|process| &process.audit);
        let audits: IndexSet<&FileAudit> = audits.map(|file| &**file).collect();
        top.serialize_field("processes", &processes(&apart, confidence, &audits, &Programs::of(profile)))?;
        top.serialize_field("audit", &audits.iter().collect::<Vec<_>>())?;
        top.serialize_field("modules", &profile.modules)?;
        top.serialize_field("stacks", &self.0)?;
        top.serialize_field("counters", &profile.counters)?;
        top.serialize_field("notes", &profile.notes)?;
        top.end()
    }
}

/// Writes a field, unless its value is not known.
fn known<S: SerializeStruct>(
    fields: &mut S,
    name: &'static str,
    value: Option<impl Serialize>,
) -> Result<(), S::Error> {
    value.map_or(Ok(()), |value| fields.serialize_field(name, &value))
}

#[cfg(test)]
mod tests;
