//! Replays the seeds of fuzz targets.

#[path = "../../../fuzz/shared/demangle.rs"]
mod demangle;
#[path = "../../../fuzz/shared/perf_map.rs"]
mod perf_map;
#[path = "../../../fuzz/shared/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/shared/symbols.rs"]
mod symbols;

/// The demanglers nest calls a few hundred deep. For these seeds, a release build needs less than 512 KiB of the 2 MiB
/// of stack that threads have. Without optimization they need more than 2 MiB.
const STACK_BYTES: usize = 16 << 20;

#[test]
fn seeds_of_demangle_are_checked() {
    let replay = || seeds::replay("demangle", demangle::check);
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(replay).expect("a thread");
    thread.join().expect("all seeds are checked");
}

#[test]
fn seeds_of_perf_map_are_checked() {
    seeds::replay("perf_map", perf_map::check);
}

#[test]
fn seeds_of_symbols_are_checked() {
    seeds::replay("symbols", symbols::check);
}
