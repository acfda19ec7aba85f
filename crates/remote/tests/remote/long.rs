//! The long set: repeated cases run four times as long.

use std::sync::atomic::Ordering::Relaxed;

use crate::{calls, cycles, entry, kills, probes, program};

#[test]
fn repeated_cases_for_longer() {
    program::IS_LONG.store(true, Relaxed);
    cycles::a_single_thread_comes_to_no_harm();
    cycles::two_hundred_threads_are_stopped();
    cycles::a_process_that_creates_threads_without_end_is_stopped();
    cycles::data_below_small_stacks_comes_to_no_harm();
    calls::blocking_calls_are_unaffected();
    calls::ignored_signals_end_no_call();
    entry::whenever_it_comes_to_hold_it_nothing_happens_to_the_program();
    kills::a_killed_injector_leaves_a_program_that_goes_on();
    probes::a_probe_that_goes_while_pages_are_put_back_leaves_no_breakpoint();
}
