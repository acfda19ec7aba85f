//! Symbol tables and debug information of a module: every address gets a name or a reason.
#![cfg_attr(fuzzing, no_main)]

#[path = "../shared/symbols.rs"]
mod shared;

use std::panic;

/// Parsers of debug information, whose panics the symbolizer catches. In a fuzzer's build, arithmetic overflows are
/// panics, too.
const CAUGHT: [&str; 3] = ["/blazesym-", "/addr2line-", "/gimli-"];

/// libFuzzer's hook ends the program at any panic, caught or not. This hook lets panics of the parsers continue. If one
/// is not caught, the program ends.
fn let_caught_panics_go_on() {
    let fatal = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        let is_caught = panic.location().is_some_and(|at| CAUGHT.iter().any(|name| at.file().contains(name)));
        if !is_caught {
            fatal(panic);
        }
    }));
}

heapbpf_fuzz::fuzz_target!(shared::check, init: let_caught_panics_go_on());
