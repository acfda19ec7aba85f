//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/profile.rs"]
mod profile;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;

#[test]
fn seeds_of_profile_are_checked() {
    seeds::replay("profile", |seed| profile::check(seed, true, |_| {}));
}
