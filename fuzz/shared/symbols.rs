//! Symbol tables and debug information of a module: every address gets a name or a reason.

use std::sync::Arc;

use sampler_user::host::mappings::ModuleId;
use sampler_user::symbols::symbolizer::{Options, Symbolizer};

#[path = "one_module.rs"]
mod one_module;

use one_module::{BASE, OneModule};

const MODULE: ModuleId = ModuleId(0);

/// Checks a file.
pub fn check(data: &[u8]) {
    let mut module = OneModule(MODULE, Arc::new(data.to_vec()));
    assert_eq!(module.mappings()[0].start, BASE);
    let mut symbolizer = Symbolizer::new(Options { debug_directories: vec![], ..Options::default() });
    let offsets: Vec<u64> = (0..data.len() as u64).step_by(131).collect();
    symbolizer.symbolize(&mut module, offsets.iter().map(|offset| (MODULE, *offset)));
    assert!(offsets.iter().all(|offset| !symbolizer.get(MODULE, *offset).is_empty()), "a name or a reason");
}
