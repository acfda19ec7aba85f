//! What inline hooks would take in place of probes that the user chose. Pure.

use heapbpf_profile::units;

use super::decision::{Use, share_with};
use crate::cost::measure::Measured;
use crate::cost::probe_costs::ProbeCosts;
use crate::plan::RecordPlan;

/// Inline hooks in place of probes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InlineAdvice {
    /// The options to leave out.
    option: &'static str,
    /// What they add to a pair of malloc and free that is not sampled, ns.
    pair_ns: f64,
    /// Whether that is an upper bound.
    is_bound: bool,
}

impl InlineAdvice {
    /// The advice for a recording. `None` if no option stands in the way of inline hooks, or if what they take is not
    /// known.
    pub fn new(plan: &RecordPlan, measured: &Measured) -> Option<Self> {
        let option = plan.asks_for_probes()?;
        Some(Self { option, pair_ns: measured.inline_pair_ns?, is_bound: measured.inline_is_bound })
    }

    /// What they would take of the CPU time of targets whose probes have these costs.
    pub fn text(&self, used: &Use, costs: &ProbeCosts) -> String {
        let inline = ProbeCosts { allocation_ns: self.pair_ns, free_ns: 0.0, ..*costs };
        let share = units::at_most(share_with(used, costs, &inline), self.is_bound);
        format!("without {}, inline hooks would take {share}", self.option)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::budget) const ADVICE: InlineAdvice =
        InlineAdvice { option: "--hook probe", pair_ns: 2.0, is_bound: false };

    #[test]
    fn the_share_is_that_of_the_same_calls_without_traps() {
        let costs = ProbeCosts { allocation_ns: 500.0, free_ns: 500.0, sample_ns: 3000.0 };
        // Probes take half a second of one.
        let used = Use { allocations: 5e5, frees: 5e5, cpu_seconds: 1.0, ..Use::default() };
        assert_eq!(ADVICE.text(&used, &costs), "without --hook probe, inline hooks would take 0.2 %");
        let bound = InlineAdvice { is_bound: true, ..ADVICE };
        assert_eq!(bound.text(&used, &costs), "without --hook probe, inline hooks would take under 0.2 %");
        let sampled = Use { samples: 1e4, ..used };
        assert!(ADVICE.text(&sampled, &costs).ends_with("would take 6.2 %"), "{}", ADVICE.text(&sampled, &costs));
    }
}
