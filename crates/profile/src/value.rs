//! The values of a stack: pprof's four columns, what ended processes held at exit, and how much of the memory in use is
//! in memory or swapped out.

use super::model::{InMemory, Profile, Row};
use heapbpf_statistics::sums::SampleSums;

/// One of the values of a stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Number of allocations during the recording.
    AllocObjects,
    /// Bytes requested during the recording.
    AllocSpace,
    /// Number of allocations in use at the end.
    InuseObjects,
    /// Bytes in use at the end.
    InuseSpace,
    /// Number of allocations that ended processes held at exit, in recordings that separate them from those in use.
    AtExitObjects,
    /// Bytes that ended processes held at exit, in recordings that separate them from those in use.
    AtExitSpace,
    /// Bytes in use that are in memory.
    ResidentSpace,
    /// Bytes in use that are swapped out.
    SwappedSpace,
}

impl Value {
    /// pprof's columns, in its order.
    pub const COLUMNS: [Self; 4] = [Self::AllocObjects, Self::AllocSpace, Self::InuseObjects, Self::InuseSpace];

    /// Every value: pprof's columns, then those at exit, then those that say where memory in use is.
    pub const ALL: [Self; 8] = [
        Self::AllocObjects,
        Self::AllocSpace,
        Self::InuseObjects,
        Self::InuseSpace,
        Self::AtExitObjects,
        Self::AtExitSpace,
        Self::ResidentSpace,
        Self::SwappedSpace,
    ];

    /// pprof's columns that this profile has (only those of allocation if frees were not followed), the values at exit
    /// if an ended process held memory, and where memory in use is if that was read (swapped-out memory only if there
    /// is any).
    pub fn shown_of(profile: &Profile) -> &'static [Self] {
        const IN_MEMORY: [Value; 6] = [
            Value::AllocObjects,
            Value::AllocSpace,
            Value::InuseObjects,
            Value::InuseSpace,
            Value::ResidentSpace,
            Value::SwappedSpace,
        ];
        let is_swapped = |row: &Row| row.in_memory.as_ref().is_some_and(|it| it.swapped.samples > 0);
        let left_out = usize::from(!profile.rows.iter().any(is_swapped));
        match (profile.has_at_exit(), profile.header.live && profile.knows_in_memory()) {
            (true, true) => &Self::ALL[..Self::ALL.len() - left_out],
            (true, false) => &Self::ALL[..6],
            (false, true) => &IN_MEMORY[..IN_MEMORY.len() - left_out],
            (false, false) if profile.header.live => &Self::COLUMNS,
            (false, false) => &[Self::AllocObjects, Self::AllocSpace],
        }
    }

    /// The default value of a profile: bytes in use, or bytes allocated if frees were not followed.
    pub fn default_of(profile: &Profile) -> Self {
        if profile.header.live { Self::InuseSpace } else { Self::AllocSpace }
    }

    /// Name of the value on the command line and in files, for example `inuse_space`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllocObjects => "alloc_objects",
            Self::AllocSpace => "alloc_space",
            Self::InuseObjects => "inuse_objects",
            Self::InuseSpace => "inuse_space",
            Self::AtExitObjects => "at_exit_objects",
            Self::AtExitSpace => "at_exit_space",
            Self::ResidentSpace => "resident_space",
            Self::SwappedSpace => "swapped_space",
        }
    }

    /// Name of the value in JSON, for example `inuse_bytes`.
    pub const fn json_name(self) -> &'static str {
        match self {
            Self::AllocObjects => "alloc_objects",
            Self::AllocSpace => "alloc_bytes",
            Self::InuseObjects => "inuse_objects",
            Self::InuseSpace => "inuse_bytes",
            Self::AtExitObjects => "at_exit_objects",
            Self::AtExitSpace => "at_exit_bytes",
            Self::ResidentSpace => "resident_bytes",
            Self::SwappedSpace => "swapped_bytes",
        }
    }

    /// The value with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|value| value.name() == name)
    }

    /// The value in words, for titles.
    pub fn title(self) -> &'static str {
        match self {
            Self::AllocObjects => "allocations",
            Self::AllocSpace => "bytes allocated",
            Self::InuseObjects => "objects in use",
            Self::InuseSpace => "bytes in use",
            Self::AtExitObjects => "objects held at exit",
            Self::AtExitSpace => "bytes held at exit",
            Self::ResidentSpace => "bytes in use and in memory",
            Self::SwappedSpace => "bytes in use and swapped out",
        }
    }

    /// Unit of the value: `bytes` or `count`.
    pub fn unit(self) -> &'static str {
        if self.is_bytes() { "bytes" } else { "count" }
    }

    /// Whether it counts bytes; otherwise allocations.
    pub fn is_bytes(self) -> bool {
        !matches!(self, Self::AllocObjects | Self::InuseObjects | Self::AtExitObjects)
    }

    /// Whether it is a value in use.
    pub fn is_inuse(self) -> bool {
        matches!(self, Self::InuseObjects | Self::InuseSpace) || self.is_in_memory()
    }

    /// Whether it says where memory in use is.
    pub fn is_in_memory(self) -> bool {
        matches!(self, Self::ResidentSpace | Self::SwappedSpace)
    }

    /// Whether it is a value at exit.
    pub fn is_at_exit(self) -> bool {
        matches!(self, Self::AtExitObjects | Self::AtExitSpace)
    }

    /// Whether it is known only if frees were followed.
    pub fn needs_frees(self) -> bool {
        self.is_inuse() || self.is_at_exit()
    }

    /// The sums of a row from which this value is estimated.
    pub fn sums(self, row: &Row) -> &SampleSums {
        match self {
            Self::AllocObjects | Self::AllocSpace => &row.alloc,
            Self::InuseObjects | Self::InuseSpace => &row.inuse,
            Self::AtExitObjects | Self::AtExitSpace => &row.at_exit,
            Self::ResidentSpace | Self::SwappedSpace => self.part(row.in_memory.as_deref().unwrap_or(&InMemory::NONE)),
        }
    }

    /// The sums of bytes in memory, or of those swapped out.
    pub(crate) fn part(self, in_memory: &InMemory) -> &SampleSums {
        if self == Self::SwappedSpace { &in_memory.swapped } else { &in_memory.resident }
    }

    /// The point estimate from sums, in bytes or allocations, including corrections by calibration.
    pub fn estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes + sums.bytes_correction } else { sums.objects + sums.objects_correction }
    }

    /// The unbiased point estimate from sums, without corrections. Intervals and the self-check refer to it.
    pub fn raw_estimate_of(self, sums: &SampleSums) -> f64 {
        if self.is_bytes() { sums.bytes } else { sums.objects }
    }

    /// The point estimate of a row, in bytes or allocations, including corrections.
    pub fn of(self, row: &Row) -> f64 {
        self.estimate_of(self.sums(row))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimates::Pool;
    use crate::report::{ReportOptions, report};
    use crate::{formats, merge, programs, read, testing};

    fn of(profile: &Profile, value: Value) -> Option<(f64, Option<f64>, Option<f64>)> {
        let pool = Pool::whole(profile);
        let estimate = pool.estimate(profile, value, 0.95);
        pool.knows(profile, value).then_some((estimate.estimate, estimate.low, estimate.high))
    }

    /// How much of the memory in use is in memory is a value like the others: in sums over processes, in JSON and back,
    /// in pprof, and in the report.
    #[test]
    fn what_is_in_memory_is_a_value_of_its_own() {
        let profile = testing::partly_in_memory();
        let both = [Value::ResidentSpace, Value::SwappedSpace].map(|value| of(&profile, value).expect("it is known"));
        let sum = |value: Value| profile.rows.iter().map(|row| value.of(row)).sum::<f64>();
        for ((estimate, low, high), value) in both.into_iter().zip([Value::ResidentSpace, Value::SwappedSpace]) {
            assert!(estimate > 0.0 && (estimate - sum(value)).abs() < 1.0);
            assert!(low.is_some_and(|low| low < estimate) && high.is_some_and(|high| estimate < high));
        }
        let written = testing::json(&profile, "json");
        assert_eq!(written["totals"]["resident_bytes"]["estimate"].as_f64(), Some(both[0].0));
        assert_eq!(written["totals"]["swapped_bytes"]["high"].as_f64(), both[1].2);
        let again = read::parse(&testing::written(&profile, "json")).expect("its own output");
        assert_eq!(again.rows.iter().map(|row| &row.in_memory).collect::<Vec<_>>(), {
            profile.rows.iter().map(|row| &row.in_memory).collect::<Vec<_>>()
        });
        let together = programs::put_together(&profile, false);
        assert_eq!(of(&together, Value::ResidentSpace).map(|it| it.0.round()), Some(both[0].0.round()));
        let types = formats::encode_pprof(&profile);
        let names = types.sample_type.iter().map(|kind| types.string_table[kind.r#type as usize].clone());
        assert!(names.skip(4).eq(["resident_space".to_owned(), "swapped_space".into()]));
        let text = report(&profile, &ReportOptions { width: 160, ..ReportOptions::default() });
        assert!(
            text.contains("of it in memory, ") && text.contains("swapped out") && text.contains("IN MEMORY"),
            "{text}"
        );
    }

    /// What of a mapping is in memory counts as in use, and its address space is given next to that: in sums over
    /// processes, in JSON and back, and in the report.
    #[test]
    fn the_address_space_of_mappings_is_given_beside_what_is_in_use() {
        let mut profile = testing::small();
        assert!(Pool::whole(&profile).address_space(&profile, 0.95).is_none());
        let number = profile.rows.iter().position(|row| row.inuse.samples > 0).expect("something is in use");
        let row = &mut profile.rows[number];
        let reserved = row.inuse;
        row.inuse = SampleSums { bytes: reserved.bytes / 4.0, sampled_bytes: reserved.sampled_bytes / 4, ..reserved };
        row.in_memory = Some(Box::new(InMemory { resident: row.inuse, reserved, ..InMemory::NONE }));
        assert!(!profile.knows_in_memory(), "it says nothing about blocks");
        let space = |profile: &Profile| Pool::whole(profile).address_space(profile, 0.95).expect("a mapping");
        let (estimate, variance) = space(&profile);
        assert!((estimate.estimate - reserved.bytes).abs() < 1.0 && variance == reserved.bytes_variance);
        let (low, high) = (estimate.low.expect("an interval"), estimate.high.expect("an interval"));
        assert!(low < reserved.bytes && reserved.bytes < high);
        let written = testing::json(&profile, "json");
        let both = [&written["totals"], &written["stacks"][number]].map(|of| &of["address_space_bytes"]["estimate"]);
        assert_eq!(both.map(serde_json::Value::as_f64), [Some(estimate.estimate); 2]);
        let of_rows = written["stacks"].as_array().expect("stacks").iter();
        assert_eq!(of_rows.filter(|row| !row["address_space_bytes"].is_null()).count(), 1);
        let again = read::parse(&testing::written(&profile, "json")).expect("its own output");
        assert_eq!(again.rows[number].in_memory, profile.rows[number].in_memory);
        let together = programs::put_together(&profile, false);
        assert_eq!(space(&together).0.estimate.round(), reserved.bytes.round());
        let text = report(&profile, &ReportOptions { width: 160, ..ReportOptions::default() });
        assert!(text.contains("mappings take ") && !text.contains("IN MEMORY"), "{text}");
    }

    /// It is known for a sum only if it is known for all blocks in use.
    #[test]
    fn where_blocks_are_is_unknown_if_it_is_for_some() {
        let mut profile = testing::partly_in_memory();
        profile.rows[0].in_memory = None;
        assert_eq!(of(&profile, Value::ResidentSpace), None);
        let rest = Pool::of(&profile.rows[1..]);
        assert!(rest.knows(&profile, Value::ResidentSpace));
        let merged = merge::merge(vec![testing::small(), testing::partly_in_memory()]).expect("they fit");
        assert_eq!(of(&merged, Value::ResidentSpace), None);
        let small = testing::small();
        assert_eq!((of(&small, Value::ResidentSpace), Value::shown_of(&small).len()), (None, 4));
        // For a row without blocks in use there is nothing to know.
        let mut profile = testing::partly_in_memory();
        let empty = profile.rows.iter().position(|row| row.inuse.samples == 0).expect("one was freed");
        profile.rows[empty].in_memory = None;
        assert!(of(&profile, Value::ResidentSpace).is_some());
    }
}
