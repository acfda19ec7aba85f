//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/mappings.rs"]
mod mappings;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_mappings_are_checked() {
    seeds::replay("mappings", mappings::check);
}
