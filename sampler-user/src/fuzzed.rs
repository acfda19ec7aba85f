//! Replays the seeds of fuzz targets.

#[path = "../../fuzz/shared/demangle.rs"]
mod demangle;
#[path = "../../fuzz/shared/mappings.rs"]
mod mappings;
#[path = "../../fuzz/shared/perf_map.rs"]
mod perf_map;
#[path = "../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../fuzz/shared/symbols.rs"]
mod symbols;

#[test]
fn seeds_of_demangle_are_checked() {
    seeds::replay("demangle", demangle::check);
}

#[test]
fn seeds_of_mappings_are_checked() {
    seeds::replay("mappings", mappings::check);
}

#[test]
fn seeds_of_perf_map_are_checked() {
    seeds::replay("perf_map", perf_map::check);
}

#[test]
fn seeds_of_symbols_are_checked() {
    seeds::replay("symbols", symbols::check);
}
