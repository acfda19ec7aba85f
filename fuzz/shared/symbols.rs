//! Symbol tables and debug information of a module: every address gets a name or a reason.

use std::cell::RefCell;
use std::sync::Arc;

use heapbpf_host::mappings::ModuleId;
use heapbpf_symbols::options::Options;
use heapbpf_symbols::symbolizer::Symbolizer;

#[path = "one_module.rs"]
mod one_module;

use one_module::{BASE, OneModule};

/// Number of inputs per symbolizer.
const INPUTS: u32 = 4096;

thread_local! {
    /// The symbolizer, and the number of inputs it has had. A new one for each input would read the host's package
    /// lists every time, to say which package has the symbols. Each input is another module.
    static SYMBOLIZER: RefCell<(Symbolizer, u32)> = RefCell::new((symbolizer(), 0));
}

fn symbolizer() -> Symbolizer {
    Symbolizer::new(Options { debug_directories: vec![], ..Options::default() })
}

/// Checks a file.
pub fn check(data: &[u8]) {
    SYMBOLIZER.with_borrow_mut(|(known, inputs)| {
        if *inputs == INPUTS {
            (*known, *inputs) = (symbolizer(), 0);
        }
        symbolize(known, ModuleId(*inputs), data);
        *inputs += 1;
    });
}

fn symbolize(symbolizer: &mut Symbolizer, id: ModuleId, data: &[u8]) {
    let mut module = OneModule(id, Arc::new(data.to_vec()));
    assert_eq!(module.mappings()[0].start, BASE);
    let offsets: Vec<u64> = (0..data.len() as u64).step_by(131).collect();
    symbolizer.symbolize(&mut module, offsets.iter().map(|offset| (id, *offset)));
    assert!(offsets.iter().all(|offset| !symbolizer.get(id, *offset).is_empty()), "a name or a reason");
}
