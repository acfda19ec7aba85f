//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/inline_plan.rs"]
mod inline_plan;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_inline_plan_are_checked() {
    seeds::replay("inline_plan", inline_plan::check);
}
