//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/profile.rs"]
mod profile;
#[path = "../../../fuzz/shared/read.rs"]
mod read;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_profile_are_checked() {
    seeds::replay("profile", |seed| profile::check(seed, true, |_| {}));
}

#[test]
fn seeds_of_read_heap_v2_are_checked() {
    seeds::replay("read_heap_v2", read::check);
}

#[test]
fn seeds_of_read_json_are_checked() {
    seeds::replay("read_json", read::check);
}

#[test]
fn seeds_of_read_parquet_are_checked() {
    seeds::replay("read_parquet", read::check);
}

#[test]
fn seeds_of_read_pprof_are_checked() {
    seeds::replay("read_pprof", read::check);
}
