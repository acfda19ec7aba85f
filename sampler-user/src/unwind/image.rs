//! Modules as unwinding and symbolization see them: bytes that are read through a kept descriptor, never mapped.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::elf::Elf;
use crate::host::in_root;
use crate::host::mappings::ModuleId;
use crate::host::modules::{ModuleKind, ModuleSource, ModuleTable};

/// The bytes of a module. Reading goes through `pread`, so a file that its owner truncates gives an error, where a
/// memory mapping would give SIGBUS.
pub trait Image: Send + Sync {
    /// Current length, bytes.
    ///
    /// # Errors
    /// Whatever the operating system says about the descriptor.
    fn length_bytes(&self) -> io::Result<u64>;

    /// Fills `buffer` from file offset `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the file ends before, else what the operating system says.
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Image for File {
    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, offset)
    }
}

impl Image for [u8] {
    fn length_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let source = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..)?.get(..buffer.len()))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(source);
        Ok(())
    }
}

impl Image for Vec<u8> {
    fn length_bytes(&self) -> io::Result<u64> {
        self.as_slice().length_bytes()
    }

    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.as_slice().read_at(offset, buffer)
    }
}

/// What unwinding and symbolization must know about modules.
pub trait ModuleFiles {
    /// The module's bytes.
    ///
    /// # Errors
    /// A text for the user: why there are none (no file behind an anonymous mapping, the permission that is missing).
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String>;

    /// Path as the process sees it, or a name like `[vdso]`.
    fn path(&self, module: ModuleId) -> Arc<str>;

    /// GNU build ID, if known.
    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>>;

    /// Whether this is anonymous executable memory (code made at run time) instead of a file.
    fn is_anonymous(&self, module: ModuleId) -> bool;

    /// Root of a process that has the module, if it is another than ours and still there.
    fn root(&self, _module: ModuleId) -> Option<PathBuf> {
        None
    }

    /// The address, as `elf` states addresses, of what lies at `offset` in the module's file.
    fn address_of_offset(&self, _module: ModuleId, elf: &Elf, offset: u64) -> Option<u64> {
        elf.address_of_offset(offset)
    }
}

impl ModuleFiles for ModuleTable {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        match self.source(module) {
            Ok(ModuleSource::File(file)) => Ok(file),
            Ok(ModuleSource::Memory(bytes)) => Ok(bytes),
            Err(reason) => Err(reason.to_string()),
        }
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.get(module).map_or_else(|| "?".into(), |module| module.path.clone())
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        Some(self.get(module)?.build_id.as_ref()?.to_vec())
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        self.get(module).is_some_and(|module| module.kind == ModuleKind::Anonymous)
    }

    fn root(&self, module: ModuleId) -> Option<PathBuf> {
        in_root::other_root(self.get(module)?.seen_in())
    }
}
