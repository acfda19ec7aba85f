//! The countdown of each thread: the draw of its next sample, and what each call takes off.

use sampler_ebpf::{countdown, geometric, rng};

use crate::maps;
use crate::thread::ThreadState;

/// The result of a successful trial.
pub struct Success {
    /// Failed trials of this allocation before the successful one.
    pub offset: u64,
    /// Interval of the draw.
    pub interval: u64,
}

impl ThreadState {
    /// Draws the number of trials until the next success, with the current interval.
    #[inline(always)]
    pub fn draw(&mut self) {
        let Some(constants) = maps::draw_constants() else { return };
        self.interval = constants.interval;
        self.remaining = geometric::draw(rng::next(&mut self.random), constants);
    }

    /// Counts an allocation call if none of its trials succeeds. `false` means that one does, and that nothing was
    /// counted.
    #[inline(always)]
    pub fn count_unsampled(&mut self, trials: u64, size: u64) -> bool {
        if trials >= self.remaining {
            return false;
        }
        self.remaining -= trials;
        self.unsampled += 1;
        self.unsampled_bytes += size;
        true
    }

    /// Counts an allocation call and its trials. `Some` means that a trial succeeded: the call is sampled and the next
    /// success is drawn. The call's remaining trials are skipped, and nothing is carried over. The bytes of a sampled
    /// call are counted when it ends.
    #[inline(always)]
    pub fn count_down(&mut self, trials: u64, size: u64) -> Option<Success> {
        let Some(offset) = countdown::step(&mut self.remaining, trials) else {
            self.unsampled += 1;
            self.unsampled_bytes += size;
            return None;
        };
        let success = Success { offset, interval: self.interval };
        self.counters.sampled += 1;
        self.draw();
        Some(success)
    }
}
