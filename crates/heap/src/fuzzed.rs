//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/records.rs"]
mod records;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_records_are_checked() {
    seeds::replay("records", records::check);
}
