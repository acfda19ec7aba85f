//! What of a process would be seen: its allocators, the probes on them, how its stacks unwind, which names they get.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::attach::audit::{AttachEntry, LinkKind};
use crate::attach::hooks::{FileKey, Hooks};
use crate::attach::{Covered, Missing};
use crate::host::Host;
use crate::host::mappings::ModuleId;
use crate::host::modules::{ModuleKind, ModuleSource};
use crate::host::open::Unreadable;
use crate::host::process::ProcessInfo;
use crate::kernel::programs::Programs;
use crate::kernel::steering::Steering;
use crate::symbols::debug_files;
use crate::unwind::elf::Elf;

/// Program header of the table of call frames.
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;

/// What of a process would be seen.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ProcessAudit {
    /// Process id; none for a command that does not run yet.
    pub pid: Option<u32>,
    /// Name.
    pub comm: String,
    /// Executable.
    pub exe: String,
    /// Allocators found.
    pub allocators: Vec<String>,
    /// Probes that a recording would place.
    pub attach: Vec<AttachEntry>,
    /// Functions that need no probe.
    pub covered: Vec<Covered>,
    /// What would be missed, and why.
    pub missing: Vec<Missing>,
    /// What no probe can follow, if the program uses it.
    pub limits: Vec<Missing>,
    /// Its files, for stacks and names.
    pub modules: Vec<ModuleAudit>,
}

/// How stacks through a module are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unwinding {
    /// By its call frame information.
    CallFrames,
    /// It has none: by frame pointers, if it keeps them.
    FramePointers,
    /// Its file cannot be read.
    Unreadable,
}

/// Which names a module's frames get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Symbols {
    /// Functions, files and lines.
    Lines,
    /// All functions.
    Functions,
    /// Exported functions only: it is stripped, and no debug file was found.
    Exported,
    /// None.
    None,
}

/// One executable file (or memory) of a process.
#[derive(Clone, Debug, Serialize)]
pub struct ModuleAudit {
    /// Its path.
    pub module: String,
    /// How stacks through it are found.
    pub unwinding: Unwinding,
    /// Which names its frames get.
    pub symbols: Symbols,
    /// Where its debug information is, if that is another file.
    pub debug_file: Option<PathBuf>,
}

/// Audits running processes. With `loaded`, probes are really placed, and taken away at once.
pub fn processes(
    targets: &[ProcessInfo],
    host: &mut Host,
    hooks: &mut Hooks,
    debug_dirs: &[PathBuf],
    mut loaded: Option<&mut (Programs, Steering)>,
) -> Vec<ProcessAudit> {
    let mut audits = Vec::new();
    for process in targets {
        // What vanishes in between is no error.
        let Some(life) = host.lives().current(process.pid) else { continue };
        let modules: BTreeSet<ModuleId> = life.space.current().iter().map(|mapping| mapping.module).collect();
        let mut audit = ProcessAudit {
            pid: Some(process.pid),
            comm: process.comm.to_string(),
            exe: process.exe.to_string(),
            ..ProcessAudit::default()
        };
        let mut refused = Vec::new();
        for module in modules {
            audit_module(module, host, hooks, &mut audit, &mut refused, debug_dirs, loaded.as_deref_mut());
        }
        finish(&mut audit, refused, hooks);
        audits.push(audit);
    }
    audits
}

/// Audits what a command would most likely allocate with; nothing is started.
pub fn command(words: &[OsString], hooks: &mut Hooks, debug_dirs: &[PathBuf], link: Option<LinkKind>) -> ProcessAudit {
    let name = words.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let mut audit = ProcessAudit { comm: name, ..ProcessAudit::default() };
    let mut refused = Vec::new();
    for path in crate::attach::libraries::expected(words) {
        let Ok(file) = File::open(&path) else { continue };
        let file = Arc::new(file);
        let text = path.to_string_lossy().into_owned();
        look(&text, &file, None, hooks, &mut audit, &mut refused, None, link);
        audit.modules.extend(describe_file(&text, &file, None, debug_dirs));
    }
    finish(&mut audit, refused, hooks);
    audit
}

fn finish(audit: &mut ProcessAudit, refused: Vec<Missing>, hooks: &Hooks) {
    audit.missing.extend(refused);
    if audit.attach.is_empty() {
        let why = format!(
            "neither its program nor its libraries define an allocator that heapbpf knows (looked for {}); name another \
             one with --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
            hooks.looked_for()
        );
        audit.missing.push(Missing { what: "allocations".into(), why });
    }
    audit.allocators.sort();
    audit.allocators.dedup();
}

fn audit_module(
    module: ModuleId,
    host: &mut Host,
    hooks: &mut Hooks,
    audit: &mut ProcessAudit,
    refused: &mut Vec<Missing>,
    debug_dirs: &[PathBuf],
    loaded: Option<&mut (Programs, Steering)>,
) {
    let Some((kind, path, build_id)) =
        host.modules().get(module).map(|module| (module.kind, module.path.to_string(), module.build_id.clone()))
    else {
        return;
    };
    match kind {
        ModuleKind::File => {}
        ModuleKind::Anonymous => {
            audit.modules.push(ModuleAudit {
                module: "code made at run time".into(),
                unwinding: Unwinding::FramePointers,
                symbols: Symbols::None,
                debug_file: None,
            });
            return;
        }
        _ => return,
    }
    match host.modules_mut().source(module) {
        Ok(ModuleSource::File(file)) => {
            let link = loaded.as_ref().map(|(programs, _)| programs.kind);
            look(&path, &file, audit.pid, hooks, audit, refused, loaded, link);
            audit.modules.extend(describe_file(&path, &file, build_id.as_deref(), debug_dirs));
        }
        Ok(ModuleSource::Memory(_)) | Err(Unreadable::NoFile | Unreadable::NotElf | Unreadable::Gone) => {}
        Err(reason) => {
            refused.push(Missing { what: path.clone(), why: format!("cannot be read: {reason}") });
            audit.modules.push(ModuleAudit {
                module: path,
                unwinding: Unwinding::Unreadable,
                symbols: Symbols::None,
                debug_file: None,
            });
        }
    }
}

/// Looks for an allocator in one file, and tries to place its probes.
#[allow(clippy::too_many_arguments, reason = "what is known, what is to be filled in, what may be tried")]
fn look(
    path: &str,
    file: &Arc<File>,
    pid: Option<u32>,
    hooks: &mut Hooks,
    audit: &mut ProcessAudit,
    refused: &mut Vec<Missing>,
    loaded: Option<&mut (Programs, Steering)>,
    link: Option<LinkKind>,
) {
    let refuse = |why: String| Missing { what: path.to_owned(), why };
    let key: FileKey = match hooks.look_at(path, file) {
        Ok((key, true)) => key,
        Ok((key, false)) => {
            refused.extend(hooks.refusal(key).map(|reason| refuse(reason.to_string())));
            return;
        }
        Err(error) => return refused.push(refuse(error.to_string())),
    };
    if let (Some((programs, steering)), Some(pid)) = (loaded, pid) {
        let hooked = hooks.hook(key, Some(pid), programs, steering);
        hooks.release(pid);
        match hooked {
            Ok(_) => {}
            Err(error) if error.is_too_late() => {}
            Err(error) => return refused.push(refuse(error.to_string())),
        }
    }
    let Some(found) = hooks.audit_of(key, link.unwrap_or(LinkKind::Perf)) else { return };
    audit.allocators.push(found.allocator);
    audit.attach.extend(found.attach);
    audit.covered.extend(found.covered);
    audit.missing.extend(found.missing);
    audit.limits.extend(found.limits);
}

/// How stacks through a file are found, and which names it gives; nothing for what is no program.
fn describe_file(path: &str, file: &File, build_id: Option<&[u8]>, debug_dirs: &[PathBuf]) -> Option<ModuleAudit> {
    let elf = Elf::read(file).ok()?;
    let has = |elf: &Elf, name: &str| elf.section(name).is_some_and(|section| section.bytes > 0);
    // Without section headers, the program header of the table still says where it is.
    let table = elf.segments.iter().any(|segment| segment.kind == PT_GNU_EH_FRAME);
    let call_frames = table || has(&elf, ".eh_frame") || has(&elf, ".debug_frame");
    let own_id = build_id.map(<[u8]>::to_vec).or_else(|| elf.build_id(file));
    let debug = debug_files::find(debug_dirs, Path::new(path), own_id.as_deref(), file, &elf, None);
    let symbols = match &debug {
        Some(debug) if has(&debug.elf, ".debug_info") => Symbols::Lines,
        _ if has(&elf, ".debug_info") => Symbols::Lines,
        Some(_) => Symbols::Functions,
        None if has(&elf, ".symtab") || has(&elf, ".gnu_debugdata") => Symbols::Functions,
        None if has(&elf, ".dynsym") => Symbols::Exported,
        None => Symbols::None,
    };
    Some(ModuleAudit {
        module: path.to_owned(),
        unwinding: if call_frames { Unwinding::CallFrames } else { Unwinding::FramePointers },
        symbols,
        debug_file: debug.map(|debug| debug.path),
    })
}
