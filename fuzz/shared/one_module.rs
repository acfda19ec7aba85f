//! A source of modules with a single module, whose bytes the fuzzer controls.

use std::sync::Arc;

use heapbpf_unwind::image::{Image, ModuleFiles};
use heapbpf_unwind::mapping::{Mapping, ModuleId};

/// Address that the module is mapped at.
pub const BASE: u64 = 0x5555_5555_4000;

/// The module: its identifier and its bytes.
pub struct OneModule(pub ModuleId, pub Arc<Vec<u8>>);

impl OneModule {
    /// A mapping of the whole file, executable at [`BASE`].
    pub fn mappings(&self) -> Vec<Mapping> {
        let end = BASE + self.1.len() as u64;
        vec![Mapping { start: BASE, end, file_offset: 0, module: self.0, since_ns: 0 }]
    }
}

impl ModuleFiles for OneModule {
    fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
        Ok(self.1.clone())
    }

    fn path(&self, _: ModuleId) -> Arc<str> {
        "/fuzzed".into()
    }

    fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
        None
    }

    fn is_anonymous(&self, _: ModuleId) -> bool {
        false
    }
}
