//! Finds the files of a saved profile's modules by build ID, on this machine or in directories with debug files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use heapbpf_elf::{Elf, Image, build_id};
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::vdso;
use heapbpf_profile::model::Module;
use heapbpf_unwind::image::ModuleFiles;

use super::debug_files;
use super::debuginfod::Debuginfod;

/// Maximum number of modules whose files are searched for. Each takes several attempts to open a file.
const MAX_MODULES: usize = 1 << 16;

/// The modules of a saved profile, as files for the symbolizer. A module's id is its index.
pub struct ByBuildId<'a> {
    modules: &'a [Module],
    directories: &'a [PathBuf],
    debuginfod: Option<Debuginfod>,
    found: HashMap<ModuleId, Result<Arc<dyn Image>, String>>,
}

impl<'a> ByBuildId<'a> {
    /// Searches for the files of `modules` in `directories` and at their paths, then for debug files on servers.
    pub fn new(modules: &'a [Module], directories: &'a [PathBuf], debuginfod: Option<Debuginfod>) -> Self {
        Self { modules, directories, debuginfod, found: HashMap::new() }
    }

    fn get(&self, module: ModuleId) -> Option<&'a Module> {
        self.modules.get(module.0 as usize)
    }

    fn find(&self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        let Some(module) = self.get(module).filter(|_| (module.0 as usize) < MAX_MODULES) else {
            return Err("too many modules".into());
        };
        let Some(build_id) = module.build_id.as_deref() else {
            return Err("it has no build ID, so its file cannot be identified".into());
        };
        let ours = (&*module.path == "[vdso]").then(vdso::image).flatten();
        if let Some(image) = ours.filter(|image| build_id::of(&**image).as_deref() == Some(build_id)) {
            return Ok(image);
        }
        let path = Path::new(&*module.path);
        let inside = self.directories.iter().flat_map(|directory| debug_files::names_in(directory, path, build_id));
        let itself = path.is_absolute().then(|| path.to_path_buf());
        let mut is_another = false;
        for candidate in inside.chain(itself) {
            let Some(opened) = debug_files::open(candidate, true) else { continue };
            if build_id::of(&opened.file).as_deref() == Some(build_id) {
                return Ok(Arc::new(opened.file));
            }
            is_another = true;
        }
        let mut refusal = String::new();
        if let Some(debuginfod) = self.debuginfod.as_ref().filter(|_| path.is_absolute()) {
            match debuginfod.lock().find(build_id) {
                Ok(file) => return Ok(Arc::new(file)),
                Err(why) => refusal = format!("; {why}"),
            }
        }
        let id = heapbpf_profile::units::hex(build_id);
        Err(match is_another {
            true => format!("files of this name have a different build ID than {id}{refusal}"),
            false => format!("no file with build ID {id} was found (see --debug-dir){refusal}"),
        })
    }
}

impl ModuleFiles for ByBuildId<'_> {
    fn image(&mut self, module: ModuleId) -> Result<Arc<dyn Image>, String> {
        if let Some(known) = self.found.get(&module) {
            return known.clone();
        }
        let found = self.find(module);
        self.found.insert(module, found.clone());
        found
    }

    fn path(&self, module: ModuleId) -> Arc<str> {
        self.get(module).map_or_else(|| "?".into(), |module| module.path.clone())
    }

    fn build_id(&self, module: ModuleId) -> Option<Vec<u8>> {
        self.get(module)?.build_id.clone()
    }

    fn is_anonymous(&self, module: ModuleId) -> bool {
        let made_by_kernel = ["//anon", "[anon", "[heap]", "[stack]"];
        self.get(module).is_some_and(|module| {
            module.path.is_empty() || made_by_kernel.iter().any(|start| module.path.starts_with(start))
        })
    }

    fn address_of_offset(&self, module: ModuleId, elf: &Elf, offset: u64) -> Option<u64> {
        if !elf.is_debug_only() {
            return elf.address_of_offset(offset);
        }
        let module = self.get(module)?;
        let past_start = offset.checked_sub(module.file_offset)?;
        elf.address_in_code(module.end.saturating_sub(module.start), past_start, procfs::page_size())
    }
}
