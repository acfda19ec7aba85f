//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/unwind.rs"]
mod unwind;
#[path = "../../../fuzz/shared/unwind_information.rs"]
mod unwind_information;

#[test]
fn seeds_of_unwind_are_checked() {
    seeds::replay("unwind", unwind::check);
}

#[test]
fn seeds_of_unwind_information_are_checked() {
    seeds::replay("unwind_information", unwind_information::check);
}
