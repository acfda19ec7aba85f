//! A module source with a single module, whose bytes are the fuzzer's.

use std::sync::Arc;

use sampler_user::host::mappings::{Mapping, ModuleId};
use sampler_user::unwind::image::{Image, ModuleFiles};

/// The module's id.
pub const MODULE: ModuleId = ModuleId(0);
/// Where it is mapped.
pub const BASE: u64 = 0x5555_5555_4000;

/// The module.
pub struct OneModule(pub Arc<Vec<u8>>);

impl OneModule {
    /// All of it mapped executable at [`BASE`].
    pub fn mappings(&self) -> Vec<Mapping> {
        let end = BASE + self.0.len() as u64;
        vec![Mapping { start: BASE, end, file_offset: 0, module: MODULE, since_ns: 0 }]
    }
}

impl ModuleFiles for OneModule {
    fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
        Ok(self.0.clone())
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
