//! What the modules that targets map are: which have an allocator to hook, and why others have not.

use std::collections::{BTreeSet, HashMap};

use super::{Attaching, Look, MOST_REMARKS, modules_of};
use crate::attach::Missing;
use crate::attach::hooks::FileKey;
use crate::cli::plan::RecordPlan;
use crate::host::Host;
use crate::host::mappings::ModuleId;
use crate::host::modules::{ModuleKind, ModuleSource};
use crate::host::open::Unreadable;
use crate::host::own_memory::give_memory_back;

impl Attaching {
    /// The file of a module that has an allocator.
    pub(super) fn file_of(&mut self, host: &mut Host, module: ModuleId) -> Option<FileKey> {
        if let Some(known) = self.modules.get(&module) {
            return known.file();
        }
        let look = self.look_at(host, module).ok()?;
        let key = look.file();
        self.modules.insert(module, look);
        key
    }

    /// Tells of each file how many of the named processes map it.
    pub(super) fn expect_users(&mut self, plan: &RecordPlan, host: &mut Host) {
        let mut users: HashMap<ModuleId, usize> = HashMap::new();
        for process in &plan.targets.running {
            let modules: BTreeSet<ModuleId> = modules_of(host, process.pid).into_iter().collect();
            modules.into_iter().for_each(|module| *users.entry(module).or_default() += 1);
        }
        for (module, users) in users {
            if let Some(key) = self.file_of(host, module) {
                self.hooks.expect(key, users);
            }
        }
    }

    /// Looks into many modules at once, before they are hooked one by one.
    pub(super) fn plan_all(&mut self, host: &mut Host, modules: &[ModuleId]) {
        let mut files = Vec::new();
        for &module in modules {
            let file = host.modules().get(module).filter(|module| module.kind == ModuleKind::File);
            let Some(path) = file.map(|module| module.path.to_string()) else { continue };
            if let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) {
                files.push((path, file));
            }
        }
        self.hooks.look_at_all(files);
        give_memory_back();
    }

    /// What a module is. `Err`: cannot be told now, but maybe later.
    pub(super) fn look_at(&mut self, host: &mut Host, module: ModuleId) -> Result<Look, ()> {
        let (kind, path) = host.modules().get(module).map(|module| (module.kind, module.path.clone())).ok_or(())?;
        if kind != ModuleKind::File {
            return Ok(Look::Nothing);
        }
        let file = match host.modules_mut().source(module) {
            Ok(ModuleSource::File(file)) => file,
            Ok(ModuleSource::Memory(_)) | Err(Unreadable::NoFile | Unreadable::NotElf) => return Ok(Look::Nothing),
            Err(reason @ (Unreadable::Gone | Unreadable::Replaced)) => {
                log::debug!("{path}: {reason}");
                return Err(());
            }
            Err(reason) => return Ok(self.refused(&path, &reason.to_string())),
        };
        match self.hooks.look_at(&path, &file) {
            Ok((key, true)) => Ok(Look::Hook(key)),
            Ok((key, false)) => Ok(match self.hooks.refusal(key).map(ToString::to_string) {
                Some(reason) => self.refused(&path, &reason),
                None => Look::Nothing,
            }),
            Err(error) => {
                self.refuse(error.to_string());
                Err(())
            }
        }
    }

    pub(super) fn refused(&mut self, path: &str, reason: &str) -> Look {
        self.refuse(format!("{path}: {reason}"));
        Look::Refused(Missing::new(path, reason))
    }

    pub(super) fn refuse(&mut self, reason: String) {
        log::info!("{reason}");
        if self.refused.len() < MOST_REMARKS {
            self.refused.insert(reason);
        }
    }
}
