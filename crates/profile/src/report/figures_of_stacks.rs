//! The stacks of a report as data, for plots.

use heapbpf_statistics::sums::SampleSums;
use heapbpf_statistics::survival;

use super::chain::Chain;
use super::stacks::{StackKeyKind, groups_by};
use super::{Context, FrameView, ReportOptions};
use crate::estimates::Pool;
use crate::group::Groups;
use crate::model::{Lifetimes, Profile};

/// A stack in the report's table.
#[derive(Clone, Debug)]
pub struct StackFigures {
    /// Name of its group (program, process, …), the same in other recordings; empty if stacks are not grouped.
    pub group: String,
    /// Short names of its functions, innermost first.
    pub calls: Vec<String>,
    /// Full names of its functions, innermost first, which tell it apart from other stacks.
    pub functions: Vec<String>,
    /// Why the stack is incomplete; `None` if it is complete.
    pub cut: Option<String>,
    /// Its samples.
    pub pool: Pool,
    /// Lifetimes of its blocks, if they are known.
    pub lifetimes: Option<Lifetimes>,
    /// How many of its samples are worth one sample of equal weight, at least 1 (Kish): n Σw² / (Σw)².
    pub design_effect: f64,
}

/// The stacks of a report, sorted by its value, largest first. Stacks are distinguished by functions, with recursion
/// folded, so that they can be matched with those of another recording.
pub fn figures_of_stacks(profile: &Profile, options: &ReportOptions) -> Vec<StackFigures> {
    let context = Context::new(profile, options);
    let names = Groups::comparable(profile, context.group_by);
    let names_of = |chain: Chain| chain.into_iter().map(|(call, _)| call.name).collect();
    let full = FrameView { full_names: true, ..context.options.frames };
    let figures = |group: &super::stacks::Group| StackFigures {
        group: names.name(group.row).into_owned(),
        calls: names_of(group.chain(&context)),
        functions: names_of(group.chain_in(&context, full, &group.shown)),
        cut: group.cut.as_deref().map(str::to_owned),
        pool: group.pool.clone(),
        lifetimes: survival::pooled(&group.lifetimes),
        design_effect: design_effect(&group.alloc),
    };
    groups_by(&context, StackKeyKind::Functions, context.options.frames).iter().map(figures).collect()
}

/// Σw² is the variance Σ w (w − 1) plus Σw.
fn design_effect(sums: &SampleSums) -> f64 {
    let effect = sums.samples as f64 * (sums.objects_variance + sums.objects) / (sums.objects * sums.objects);
    if effect.is_finite() { effect.max(1.0) } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    #[test]
    fn stacks_are_those_of_the_report() {
        let profile = testing::small();
        let stacks = figures_of_stacks(&profile, &ReportOptions::default());
        assert_eq!(stacks.len(), 4);
        assert_eq!(stacks[0].calls, ["grow", "parse_value", "handle", "main"]);
        assert_eq!(stacks[0].group, "server /usr/bin/server");
        assert!(stacks[0].lifetimes.as_ref().is_some_and(|lives| !lives.ages.is_empty()));
        assert!(stacks.iter().any(|stack| stack.cut.is_some()));
    }

    #[test]
    fn equal_weights_are_worth_what_they_are() {
        assert!((design_effect(&testing::sums(10, 512, 4_096)) - 1.0).abs() < 1e-9);
        let mut mixed = testing::sums(10, 512, 4_096);
        mixed.add(&testing::sums(10, 1 << 20, 4_096));
        // Ten samples that stand for 9 allocations each, and ten that stand for one each.
        assert!((design_effect(&mixed) - 1.6).abs() < 0.1, "{}", design_effect(&mixed));
        assert_eq!(design_effect(&SampleSums::default()), 1.0);
    }
}
