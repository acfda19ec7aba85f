//! Reads a blob's memory, which its target can write.

use sampler_ebpf::abi::inline::SlotSums;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{
    Code, Control, Function, HEADER, Header, MAGIC, MAX_FUNCTIONS, MAX_SET_LOG2, MIN_SET_LOG2, SLOTS, SLOTS_OFFSET,
    STATE, Slot, TEXT_BYTES, Totals, VERSION,
};
use crate::error::ForeignBlob;
use crate::image::code_hash;

/// Bytes from [`STATE`] that hold all counts.
pub const COUNTS_BYTES: usize = (SLOTS_OFFSET - STATE) as usize + SLOTS * size_of::<Slot>();

/// Largest plausible count: what a process would allocate in 80 days at 10 GB a second. A target that writes more is
/// hostile, and sums of such counts must not overflow.
const MOST: u64 = 1 << 56;

/// Counts of a process, at one moment.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Counts {
    /// Outermost calls of allocation functions, including failed ones.
    pub calls: u64,
    /// Bytes that they requested, without those of calls that are known to have failed.
    pub bytes: u64,
    /// Sampled calls.
    pub sampled: u64,
    /// Bytes that sampled calls requested, without those of calls that are known to have failed.
    pub sampled_bytes: u64,
    /// Sampled calls that succeeded.
    pub reported: u64,
    /// Sampled calls that failed.
    pub failed: u64,
    /// Sampled calls that never returned: their threads have made other calls since. (While a signal handler allocates,
    /// an interrupted call in progress is counted here, too.)
    pub abandoned: u64,
    /// Unsampled calls that are known to have failed.
    pub unsampled_failed: u64,
    /// Frees of sampled blocks.
    pub frees_matched: u64,
    /// `realloc(p, 0)` that freed.
    pub zero_reallocs: u64,
    /// Threads that have slots.
    pub threads: u64,
    /// Calls by threads without a slot.
    pub slots_full: u64,
    /// Sampled blocks whose frees will not be seen.
    pub set_full: u64,
}

impl From<&SlotSums> for Counts {
    /// Converts the sums that a BPF program made when a process left its memory.
    fn from(sums: &SlotSums) -> Self {
        let counts = Self {
            calls: sums.calls,
            bytes: sums.bytes,
            sampled: sums.sampled,
            sampled_bytes: sums.sampled_bytes,
            reported: sums.reported,
            failed: sums.failed,
            abandoned: sums.sampled_call,
            unsampled_failed: sums.unsampled_failed,
            frees_matched: sums.frees_matched,
            zero_reallocs: sums.zero_reallocs,
            threads: sums.threads,
            ..Self::default()
        };
        counts.bounded()
    }
}

impl Counts {
    /// Adds up the counts in [`COUNTS_BYTES`] bytes at [`STATE`]. Sums wrap, and implausible ones are capped, because
    /// the target may have written anything.
    ///
    /// # Errors
    /// [`ForeignBlob::Truncated`].
    pub fn of(state: &[u8]) -> Result<Self, ForeignBlob> {
        let (totals, _) = Totals::read_from_prefix(state).map_err(|_| ForeignBlob::Truncated)?;
        let slots = state.get((SLOTS_OFFSET - STATE) as usize..).ok_or(ForeignBlob::Truncated)?;
        let (slots, _) = <[Slot]>::ref_from_prefix_with_elems(slots, SLOTS).map_err(|_| ForeignBlob::Truncated)?;
        let mut counts = Self { slots_full: totals.slots_full, set_full: totals.set_full, ..Self::default() };
        for slot in slots.iter().chain([&totals.shared]) {
            counts.threads += u64::from(slot.key != 0);
            let open = slot.sampled.saturating_sub(slot.reported).saturating_sub(slot.failed);
            // The shared slot has calls of many threads, so all open ones are taken to be in progress.
            let in_progress =
                if std::ptr::eq(slot, &totals.shared) { open } else { u64::from(slot.calls == slot.sampled_call) };
            counts.abandoned = counts.abandoned.wrapping_add(open.saturating_sub(in_progress));
            for (sum, value) in [
                (&mut counts.calls, slot.calls),
                (&mut counts.bytes, slot.bytes),
                (&mut counts.sampled, slot.sampled),
                (&mut counts.sampled_bytes, slot.sampled_bytes),
                (&mut counts.reported, slot.reported),
                (&mut counts.failed, slot.failed),
                (&mut counts.unsampled_failed, slot.unsampled_failed),
                (&mut counts.frees_matched, slot.frees_matched),
                (&mut counts.zero_reallocs, slot.zero_reallocs),
            ] {
                *sum = sum.wrapping_add(value);
            }
        }
        Ok(counts.bounded())
    }

    /// Caps implausible counts. A count that is a little below zero, because it was read while it changed, stays so.
    fn bounded(mut self) -> Self {
        let is_implausible = |count: &&mut u64| count.cast_signed().unsigned_abs() > MOST;
        self.all().iter_mut().filter(is_implausible).for_each(|count| *count = MOST);
        self
    }

    /// Each of these counts, combined with the same one of others.
    #[must_use]
    pub fn with(mut self, mut others: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        self.all().iter_mut().zip(others.all()).for_each(|(count, other)| *count = combine(*count, *other));
        self
    }

    /// All counts, in order of declaration.
    fn all(&mut self) -> &mut [u64] {
        <[u64]>::mut_from_bytes(self.as_mut_bytes()).unwrap_or_default()
    }
}

/// A blob that was found in a target.
#[derive(Clone, Debug)]
pub struct CheckedBlob {
    /// Its constants.
    pub header: Header,
    /// Its functions.
    pub functions: Vec<Function>,
}

impl CheckedBlob {
    /// Checks the text of a blob, [`TEXT_BYTES`] from its base, against the code of this build.
    ///
    /// # Errors
    /// [`ForeignBlob`] if it is not one of ours: it must not be touched.
    pub fn check(text: &[u8], code: &Code<'_>) -> Result<Self, ForeignBlob> {
        let text = text.get(..TEXT_BYTES as usize).ok_or(ForeignBlob::Truncated)?;
        let at_header = text.get(HEADER as usize..).ok_or(ForeignBlob::Truncated)?;
        let (header, rest) = Header::read_from_prefix(at_header).map_err(|_| ForeignBlob::Truncated)?;
        if header.magic != MAGIC {
            return Err(ForeignBlob::Magic);
        }
        if header.version != VERSION {
            return Err(ForeignBlob::Version(u64::from(header.version)));
        }
        if header.code_hash != code_hash(code)
            || text.get(crate::abi::CODE as usize..).is_none_or(|bytes| !bytes.starts_with(code.bytes))
        {
            return Err(ForeignBlob::OtherCode);
        }
        let count = header.functions as usize;
        let set_is_right = (MIN_SET_LOG2..=MAX_SET_LOG2).contains(&header.set_log2);
        if count > MAX_FUNCTIONS || !set_is_right || header.criterion > 1 {
            return Err(ForeignBlob::Nonsense);
        }
        let (functions, _) =
            <[Function]>::ref_from_prefix_with_elems(rest, count).map_err(|_| ForeignBlob::Truncated)?;
        Ok(Self { header, functions: functions.to_vec() })
    }
}

/// Checks a control page.
///
/// # Errors
/// [`ForeignBlob`] if it makes no sense.
pub fn control(bytes: &[u8]) -> Result<Control, ForeignBlob> {
    let (control, _) = Control::read_from_prefix(bytes).map_err(|_| ForeignBlob::Truncated)?;
    if control.magic != MAGIC {
        return Err(ForeignBlob::Magic);
    }
    if control.version != u64::from(VERSION) {
        return Err(ForeignBlob::Version(control.version));
    }
    if control.draw as usize >= crate::abi::DRAWS {
        return Err(ForeignBlob::Nonsense);
    }
    Ok(control)
}

#[cfg(test)]
#[path = "read_tests.rs"]
mod tests;
