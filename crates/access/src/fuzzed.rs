//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/requests.rs"]
mod requests;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_requests_are_checked() {
    seeds::replay("requests", requests::check);
}
