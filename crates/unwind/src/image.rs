//! The files behind mappings: a trait that supplies their bytes and names.

use std::path::PathBuf;
use std::sync::Arc;

pub use heapbpf_elf::Image;

use crate::mapping::ModuleId;
use heapbpf_elf::Elf;

/// The modules of the unwound processes: mapped files, the vDSO, and memory with code generated at run time.
///
/// Bytes are read through an [`Image`], never mapped, because the owner of a file may truncate it at any time.
pub trait ModuleFiles {
    /// Returns the module's bytes.
    ///
    /// # Errors
    /// A message for the user that says why they are not available, such as a missing permission, or no file behind an
    /// anonymous mapping.
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String>;

    /// Path as the process sees it, or a name like `[vdso]`.
    fn path(&self, module: ModuleId) -> Arc<str>;

    /// GNU build ID, if known.
    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>>;

    /// Whether this is anonymous executable memory (JIT code) instead of a file.
    fn is_anonymous(&self, module: ModuleId) -> bool;

    /// Root directory of a process that has the module mapped, if it differs from our own and still exists.
    fn root(&self, _module: ModuleId) -> Option<PathBuf> {
        None
    }

    /// Returns the address that the module's ELF headers assign to byte `offset` of its file.
    fn address_of_offset(&self, _module: ModuleId, elf: &Elf, offset: u64) -> Option<u64> {
        elf.address_of_offset(offset)
    }
}
