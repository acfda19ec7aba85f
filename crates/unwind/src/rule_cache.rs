//! A cache of rules by module and file offset.

use crate::mapping::ModuleId;
use crate::rule::FoundRule;

const CACHE_SLOTS: usize = 1 << 15;

/// A direct-mapped cache of rules by module and file offset. The bytes of a module never change, so one cache serves
/// every process and every state of its mappings.
pub struct RuleCache {
    slots: Box<[Option<(ModuleId, u64, FoundRule)>]>,
}

impl Default for RuleCache {
    fn default() -> Self {
        Self { slots: vec![None; CACHE_SLOTS].into_boxed_slice() }
    }
}

impl RuleCache {
    fn slot(module: ModuleId, offset: u64) -> usize {
        let mixed = (offset ^ u64::from(module.0).rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 49) as usize % CACHE_SLOTS
    }

    /// Returns the cached rule for the code at `offset` of the file.
    pub fn get(&self, module: ModuleId, offset: u64) -> Option<FoundRule> {
        let (kept_module, kept_offset, rule) = self.slots[Self::slot(module, offset)]?;
        (kept_module == module && kept_offset == offset).then_some(rule)
    }

    /// Caches a rule, replacing any other in its slot.
    pub fn put(&mut self, module: ModuleId, offset: u64, rule: FoundRule) {
        self.slots[Self::slot(module, offset)] = Some((module, offset, rule));
    }
}
