//! Time that probes have taken so far. Pure.

use sampler_ebpf::abi::Counters;

use super::controller::usage;
use super::decision::Use;
use crate::cost::probe_costs::ProbeCosts;

/// Time that probes have taken so far. Calls are priced when they are noted, as targets with more expensive probes come
/// and go.
#[derive(Debug, Default)]
pub struct Spent {
    /// Time that probes have taken, in seconds.
    pub seconds: f64,
    on: Use,
}

impl Spent {
    /// Adds the calls since the last time, at their present cost. `total`: all calls so far.
    pub fn note(&mut self, total: &Counters, costs: &ProbeCosts) {
        let used = usage(total, 0.0, 0.0);
        self.seconds += used.since(&self.on).probe_seconds(costs).max(0.0);
        self.on = used;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: ProbeCosts = ProbeCosts { allocation_ns: 500.0, free_ns: 400.0, sample_ns: 1000.0 };

    #[test]
    fn what_was_spent_stays_spent_when_probes_get_cheaper_or_dearer() {
        let total = |calls| Counters { calls, unsampled: calls, frees_seen: calls, ..Counters::default() };
        let dear = ProbeCosts { allocation_ns: 10_000.0, ..COSTS };
        let mut spent = Spent::default();
        let mut noted = |calls, costs| {
            spent.note(&total(calls), costs);
            (spent.seconds * 1e6).round()
        };
        assert_eq!([noted(1000, &COSTS), noted(1000, &dear), noted(1100, &dear)], [900.0, 900.0, 1940.0]);
        assert_eq!(noted(2100, &COSTS), 2840.0);
    }
}
