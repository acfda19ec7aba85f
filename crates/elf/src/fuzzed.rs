//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/build_id.rs"]
mod build_id;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_build_id_are_checked() {
    seeds::replay("build_id", build_id::check);
}
