//! Rules for code addresses, from the cache or from the call frame information of modules, which is loaded on demand.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::cfi::{Budget, Context, ModuleCfi, Row};
use crate::image::ModuleFiles;
use crate::mapping::{Mapping, ModuleId};
use crate::rule::{FoundRule, Rule, Section};

/// Size of unwind sections that are read between two calls of [`LoadedModules::drop_unused`], bytes, after which only
/// modules that were read less than [`MOST_READS`] times are read. Sections that do not fit into memory together are
/// read again and again; what one process maps must not cost the others their stacks.
const MOST_READ_BYTES: usize = 1 << 30;
const MOST_READS: u8 = 8;
/// Size after which no module is read, bytes.
const MOST_MORE_BYTES: usize = 8 << 30;
/// Maximum number of modules whose reads are counted. Further ones are not read beyond [`MOST_READ_BYTES`].
const MOST_COUNTED: usize = 1 << 16;
/// Why a module is not read.
const TOO_OFTEN: &str = "reading unwind sections takes too long";

/// Finds rules, and holds the data needed for that.
pub struct Rules {
    /// Rules found before.
    cache: RuleCache,
    /// Modules whose unwind sections are in memory.
    pub modules: LoadedModules,
    context: Context,
}

impl Rules {
    /// Creates an empty set of rules. At most `section_bytes` of unwind sections will be held.
    pub fn new(section_bytes: usize) -> Self {
        let modules = LoadedModules {
            budget_bytes: section_bytes,
            left_bytes: MOST_READ_BYTES,
            more_bytes: MOST_MORE_BYTES,
            ..LoadedModules::default()
        };
        Self { cache: RuleCache::default(), modules, context: Context::new() }
    }

    /// Returns the rule for the code at `address`, which must lie in `mapping`. `is_return`: it is a return address
    /// minus one.
    ///
    /// # Errors
    /// The reason why the module cannot be read.
    pub fn find(
        &mut self,
        files: &mut dyn ModuleFiles,
        mapping: &Mapping,
        address: u64,
        is_return: bool,
        budget: &mut Budget,
    ) -> Result<FoundRule, Arc<str>> {
        let file_offset = mapping.offset_of(address);
        if let Some(found) = self.cache.get(mapping.module, file_offset) {
            return Ok(found);
        }
        let found = self.evaluate(files, mapping, address, is_return, budget)?;
        self.cache.put(mapping.module, file_offset, found);
        Ok(found)
    }

    /// Like [`Self::find`], without the cache.
    ///
    /// # Errors
    /// The reason why the module cannot be read.
    pub fn evaluate(
        &mut self,
        files: &mut dyn ModuleFiles,
        mapping: &Mapping,
        address: u64,
        is_return: bool,
        budget: &mut Budget,
    ) -> Result<FoundRule, Arc<str>> {
        let (module, file_offset, context) = (mapping.module, mapping.offset_of(address), &mut self.context);
        let cfi = self.modules.cfi(files, module)?;
        let mut code =
            |offset, buffer: &mut [u8]| files.image(module).is_ok_and(|image| image.read_at(offset, buffer).is_ok());
        // The sections are hostile input. gimli promises not to panic on them; this catches a panic if it does.
        let rule = catch_unwind(AssertUnwindSafe(|| cfi.rule(context, file_offset, is_return, &mut code, budget)));
        Ok(rule.unwrap_or_else(|_| {
            self.context = Context::new();
            FoundRule { rule: Rule::Bad, synthetic: false }
        }))
    }

    /// Passes the row for `file_offset` of `module` in the entry at `offset` of `section` to `visit`; returns `None` if
    /// there is no such row, or `budget` is used up.
    pub fn with_row<T>(
        &mut self,
        files: &mut dyn ModuleFiles,
        (module, file_offset): (ModuleId, u64),
        entry: (Section, u32),
        budget: &mut Budget,
        visit: impl FnOnce(Row<'_, '_>) -> T,
    ) -> Option<T> {
        let context = &mut self.context;
        let cfi = self.modules.cfi(files, module).ok()?;
        // See `evaluate`.
        let result = catch_unwind(AssertUnwindSafe(|| cfi.with_row(context, file_offset, entry, budget, visit)));
        result.unwrap_or_else(|_| {
            self.context = Context::new();
            None
        })
    }
}

/// Unwind sections of modules, within a budget: the least recently used are dropped first.
#[derive(Default)]
pub struct LoadedModules {
    loaded: HashMap<ModuleId, Loaded>,
    budget_bytes: usize,
    /// Memory that they use, bytes.
    pub held_bytes: usize,
    /// What is left of [`MOST_READ_BYTES`] until the next [`Self::drop_unused`].
    left_bytes: usize,
    /// What is left of [`MOST_MORE_BYTES`] until then.
    more_bytes: usize,
    /// How often each module was read since the last one, at most [`MOST_READS`].
    reads: HashMap<ModuleId, u8>,
    clock: u64,
    /// The clock at the last [`Self::drop_unused`].
    looked_at: u64,
}

struct Loaded {
    cfi: Result<Arc<ModuleCfi>, Arc<str>>,
    size_bytes: usize,
    used: u64,
}

impl LoadedModules {
    /// Number of modules, including those that could not be read.
    pub fn count(&self) -> usize {
        self.loaded.len()
    }

    /// Drops modules that have not been used since the last call, and those that could not be read. Rules found in them
    /// stay cached, so few are read again.
    pub fn drop_unused(&mut self) {
        let since = std::mem::replace(&mut self.looked_at, self.clock);
        self.loaded.retain(|_, loaded| loaded.used > since && loaded.cfi.is_ok());
        self.held_bytes = self.loaded.values().map(|loaded| loaded.size_bytes).sum();
        (self.left_bytes, self.more_bytes) = (MOST_READ_BYTES, MOST_MORE_BYTES);
        self.reads.clear();
    }

    fn cfi(&mut self, files: &mut dyn ModuleFiles, module: ModuleId) -> Result<Arc<ModuleCfi>, Arc<str>> {
        self.clock += 1;
        if let Some(loaded) = self.loaded.get_mut(&module) {
            loaded.used = self.clock;
            return loaded.cfi.clone();
        }
        let uncounted = if self.reads.len() < MOST_COUNTED { 0 } else { MOST_READS };
        let reads = self.reads.get(&module).copied().unwrap_or(uncounted);
        if self.more_bytes == 0 || reads >= MOST_READS && self.left_bytes == 0 {
            return Err(TOO_OFTEN.into());
        }
        if reads < MOST_READS {
            self.reads.insert(module, reads + 1);
        }
        let cfi = load(files, module);
        let size_bytes = cfi.as_ref().map_or(0, |cfi| cfi.size_bytes()) + size_of::<ModuleCfi>();
        let cost_bytes = cfi.as_ref().map_or(0, |cfi| cfi.cost_bytes()).max(size_bytes);
        self.left_bytes = self.left_bytes.saturating_sub(cost_bytes);
        self.more_bytes = self.more_bytes.saturating_sub(cost_bytes);
        self.held_bytes += size_bytes;
        while self.held_bytes > self.budget_bytes && !self.loaded.is_empty() {
            let oldest = self.loaded.iter().min_by_key(|(_, loaded)| loaded.used).map(|(id, _)| *id);
            if let Some(evicted) = oldest.and_then(|id| self.loaded.remove(&id)) {
                self.held_bytes -= evicted.size_bytes;
            }
        }
        self.loaded.insert(module, Loaded { cfi: cfi.clone(), size_bytes, used: self.clock });
        cfi
    }
}

fn load(files: &mut dyn ModuleFiles, module: ModuleId) -> Result<Arc<ModuleCfi>, Arc<str>> {
    let image = files.image(module).map_err(Arc::<str>::from)?;
    // See `Rules::evaluate`.
    let read = catch_unwind(AssertUnwindSafe(|| ModuleCfi::read(&*image)));
    match read {
        Ok(Ok(cfi)) => Ok(Arc::new(cfi)),
        Ok(Err(error)) => Err(error.to_string().into()),
        Err(_) => Err("malformed file".into()),
    }
}

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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::image::Image;

    /// Gives every module this program's own file.
    struct Own(u32);

    impl ModuleFiles for Own {
        fn image(&mut self, _: ModuleId) -> Result<Arc<dyn Image>, String> {
            self.0 += 1;
            File::open("/proc/self/exe").map(|file| Arc::new(file) as Arc<dyn Image>).map_err(|it| it.to_string())
        }

        fn path(&self, _: ModuleId) -> Arc<str> {
            "/proc/self/exe".into()
        }

        fn build_id(&self, _: ModuleId) -> Option<Vec<u8>> {
            None
        }

        fn is_anonymous(&self, _: ModuleId) -> bool {
            false
        }
    }

    #[test]
    fn sections_that_do_not_fit_together_are_read_again_for_a_while_only() {
        let (mut rules, mut files) = (Rules::new(1), Own(0));
        let [one, two] = [1, 2].map(ModuleId);
        rules.modules.cfi(&mut files, one).expect("our own file");
        let cost = MOST_READ_BYTES - rules.modules.left_bytes;
        assert!(cost > 0);
        rules.modules.left_bytes = 3 * cost;
        let mut read = |rules: &mut Rules| [two, one].map(|module| rules.modules.cfi(&mut files, module).map(drop));
        for _ in 1..MOST_READS {
            assert_eq!(read(&mut rules), [Ok(()), Ok(())]);
        }
        assert_eq!(rules.modules.left_bytes, 0);
        assert_eq!(read(&mut rules), [Ok(()), Err(TOO_OFTEN.into())], "one was read once more, at first");
        rules.modules.drop_unused();
        assert_eq!(read(&mut rules), [Ok(()), Ok(())]);
    }

    #[test]
    fn modules_that_are_read_again_and_again_do_not_keep_others_from_being_read() {
        let (mut rules, mut files) = (Rules::new(1), Own(0));
        let mut read = |rules: &mut Rules, module| rules.modules.cfi(&mut files, ModuleId(module)).map(drop);
        for module in (0..20).map(|at| at % 2) {
            assert_eq!(read(&mut rules, module), Ok(()), "there are bytes left");
        }
        rules.modules.left_bytes = 0;
        assert_eq!(read(&mut rules, 0), Err(TOO_OFTEN.into()));
        assert_eq!(read(&mut rules, 2), Ok(()));
        rules.modules.reads.extend((100..).map(|module| (ModuleId(module), 1)).take(MOST_COUNTED));
        let counted = rules.modules.reads.len();
        assert_eq!(read(&mut rules, 3), Err(TOO_OFTEN.into()), "too many to count");
        assert_eq!(read(&mut rules, 100), Ok(()), "it is counted");
        assert_eq!(rules.modules.reads.len(), counted);
        assert!(rules.modules.more_bytes < MOST_MORE_BYTES);
        rules.modules.more_bytes = 0;
        assert_eq!(read(&mut rules, 101), Err(TOO_OFTEN.into()), "nothing is read any more");
        rules.modules.drop_unused();
        assert_eq!(read(&mut rules, 101), Ok(()));
    }

    #[test]
    fn sections_that_were_not_used_for_a_while_are_dropped() {
        let (mut rules, mut files) = (Rules::new(1 << 30), Own(0));
        let [one, two] = [1, 2].map(ModuleId);
        for module in [one, two, one] {
            rules.modules.cfi(&mut files, module).expect("our own file");
        }
        let both = rules.modules.held_bytes;
        rules.modules.drop_unused();
        assert_eq!((rules.modules.count(), files.0), (2, 2), "both were used");
        rules.modules.cfi(&mut files, one).expect("our own file");
        rules.modules.drop_unused();
        assert_eq!((rules.modules.count(), rules.modules.held_bytes), (1, both / 2));
        rules.modules.drop_unused();
        assert_eq!((rules.modules.count(), rules.modules.held_bytes), (0, 0));
        rules.modules.cfi(&mut files, two).expect("our own file");
        assert_eq!((rules.modules.held_bytes, files.0), (both / 2, 3), "read again");
    }
}
