//! The control pages of hooked processes: all say the same. Pure.

use heapbpf_inline::abi::{Control, DRAWS, MAGIC, VERSION};
use sampler_ebpf::geometric::DrawConstants;

/// What hooked processes are told about sampling.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControlPage {
    page: Control,
}

/// Bytes to be written to a control page, in this order: offset and content. The index of the constants comes last.
pub(super) type Changes = Vec<(u64, Vec<u8>)>;

impl ControlPage {
    /// Samples by these constants from the first call on.
    pub(super) fn new(draw: DrawConstants, seed: u64) -> Self {
        let mut draws = [DrawConstants::default(); DRAWS];
        draws[0] = draw;
        Self { page: Control { magic: MAGIC, version: u64::from(VERSION), draw: 0, seed, draws } }
    }

    /// The page as it is.
    pub(super) fn page(&self) -> &Control {
        &self.page
    }

    /// The interval in use.
    pub(super) fn interval(&self) -> u64 {
        self.page.draws[self.page.draw as usize % DRAWS].interval
    }

    /// Has threads draw by these constants from their next draw on. A thread may be reading those in use, or be held up in the
    /// middle of reading earlier ones: an element is not written again until all others have been in use.
    pub(super) fn set(&mut self, draw: DrawConstants) -> Changes {
        use std::mem::{offset_of, size_of};
        use zerocopy::IntoBytes as _;
        let index = (self.page.draw as usize + 1) % DRAWS;
        self.page.draws[index] = draw;
        self.page.draw = index as u64;
        let at = offset_of!(Control, draws) + index * size_of::<DrawConstants>();
        vec![
            (at as u64, draw.as_bytes().to_vec()),
            (offset_of!(Control, draw) as u64, self.page.draw.to_ne_bytes().to_vec()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes as _;

    fn draw(interval: u64) -> DrawConstants {
        DrawConstants { interval, ..DrawConstants::default() }
    }

    #[test]
    fn changes_make_a_page_that_says_the_same_and_spare_the_constants_in_use() {
        let mut control = ControlPage::new(draw(7), 1);
        let mut target = control.page().as_bytes().to_vec();
        for interval in 8..200 {
            let in_use = heapbpf_inline::read::control(&target).expect("a control page").draw as usize;
            let before = control.interval();
            for (at, bytes) in control.set(draw(interval)) {
                let now = heapbpf_inline::read::control(&target).expect("a control page");
                assert_eq!(now.draws[in_use].interval, before, "nobody reads what is half written");
                target[at as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            assert_eq!(heapbpf_inline::read::control(&target), Ok(*control.page()));
            assert_eq!(control.interval(), interval);
        }
    }
}
