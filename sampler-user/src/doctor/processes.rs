//! What a recording of a process would observe: its allocators, the probes on them, and how its stacks are unwound and
//! symbolized.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use heapbpf_attach::detours::check_objects;
use heapbpf_attach::dropped::dropped_mappings;
use heapbpf_attach::files::FileKey;
use heapbpf_attach::hooks::Hooks;
use heapbpf_attach::inline::preview::Preview;
use heapbpf_attach::inline::{self, Refused};
use heapbpf_attach::libraries::{expected, find_program};
use heapbpf_attach::linker::Linker as _;
use heapbpf_attach::moved_text;
use heapbpf_audit::{AttachEntry, Covered, FileAudit, LinkKind, Missing};
use heapbpf_elf::Elf;
use heapbpf_host::Host;
use heapbpf_host::arenas::{ArenaReader, ArenaRequest};
use heapbpf_host::environment::php_calls_malloc;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::{ModuleKind, ModuleSource};
use heapbpf_host::open::Unreadable;
use heapbpf_host::process::ProcessInfo;
use heapbpf_host::resident;
use heapbpf_host::shadow_stacks;
use heapbpf_java::Library;
use heapbpf_kernel::control::ControlMaps;
use heapbpf_kernel::programs::Programs;
use heapbpf_probes::Runtime;
use heapbpf_profile::model::{Resident, glibc_version};
use heapbpf_profile::units;
use heapbpf_symbols::{debug_files, java};
use serde::Serialize;

/// Type of the program header that locates `.eh_frame_hdr`.
const PT_GNU_EH_FRAME: u32 = 0x6474_e550;

/// What a recording of a process would observe.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ProcessAudit {
    /// Process id. `None` for a command that is not running yet.
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
    /// Anonymous memory outside the heaps of its allocators, bytes, if it is much. What it is used for is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unaccounted_bytes: Option<u64>,
    /// Whether its memory could not be read, so that nothing is known of memory outside these heaps.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub memory_unread: bool,
    /// Features of the allocator that no probe can track, if the program uses them.
    pub limits: Vec<Missing>,
    /// What `--hook inline` would do to each of its allocators. Empty for a command that is not running yet.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub inline: Vec<InlineAudit>,
    /// Version of the Python interpreter whose functions stacks show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// Version of the JVM whose methods stacks show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub java: Option<String>,
    /// Its executable files and memory, for unwinding and symbolization.
    pub modules: Vec<ModuleAudit>,
}

/// How long reading the arenas of one process may take.
const ARENAS_LONGEST: Duration = Duration::from_millis(500);

/// The remark about a process whose memory cannot be read.
const UNREAD: &str = "could not be read: whether much of it is in no known heap is not known";

impl ProcessAudit {
    /// Whether some of its memory may be in no known heap, although no call would be missed.
    #[must_use]
    pub const fn may_hide_memory(&self) -> bool {
        self.unaccounted_bytes.is_some() || self.memory_unread
    }

    /// Records large anonymous memory outside known heaps, unless the heap of its runtime is already reported. Without
    /// samples, only the heaps of C libraries and Python's arenas are distinguished from other memory: as in a
    /// recording, glibc's own records say where its large blocks and the arenas are.
    fn look_at_memory(&mut self, process: &ProcessInfo, arenas: &mut ArenaReader) {
        if self.missing.iter().chain(&self.limits).any(|missing| missing.what.contains("own heap")) {
            return;
        }
        let (pid, start_ns) = (process.pid, process.start_ns);
        let with = |heaps: &[Range<u64>]| resident::of(pid, start_ns, Vec::new(), heaps);
        let lacks_allocator = self.allocators.is_empty();
        let much_of = |it: Resident| {
            let unknown = if lacks_allocator { it.heap_bytes } else { 0 };
            Some(it.not_seen_bytes().saturating_add(unknown)).filter(|bytes| it.is_much(*bytes as f64))
        };
        let Some(resident) = with(&[]) else {
            // A process that has ended has no sums either.
            self.memory_unread = resident::rough(pid).is_some();
            self.limits.extend(self.memory_unread.then(|| Missing::new("memory", UNREAD)));
            return;
        };
        // Reading arenas takes longer than reading mappings, and most processes have little other memory.
        let Some(roughly) = much_of(resident) else { return };
        let read = |version| {
            let request = ArenaRequest { pid, start_ns, version, longest: ARENAS_LONGEST, with_python: true };
            arenas.read(request).ok()?.0
        };
        let heap = glibc_version(self.allocators.iter().map(String::as_str)).and_then(read);
        self.unaccounted_bytes = heap.as_ref().map_or(Some(roughly), |heap| with(&heap.ranges()).and_then(much_of));
        let Some(bytes) = self.unaccounted_bytes else { return };
        let is_other = |name: &&str| !["glibc", "Rust global"].iter().any(|libc| name.starts_with(libc));
        let others = self.allocators.iter().map(String::as_str).filter(is_other).collect::<Vec<_>>().join(", ");
        let before = match (others.as_str(), heap) {
            ("", Some(_)) => String::new(),
            ("", None) => ", or large blocks that are older than a recording".to_owned(),
            (others, _) => format!(", or blocks of {others} that are older than a recording"),
        };
        let why = format!("in no known heap; mapped by the program itself (see --mmap) or by a runtime{before}");
        self.limits.push(Missing::new(format!("{} of anonymous memory", units::bytes(bytes as f64)), why));
    }
}

/// What `--hook inline` would do to an allocator of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct InlineAudit {
    /// Path of the allocator's file.
    pub file: String,
    /// Why it cannot be hooked inline; `None` if it can.
    pub why_not: Option<String>,
    /// Functions that would be hooked.
    pub functions: usize,
    /// Bytes of its code that would be replaced by copies.
    pub replaced_bytes: u64,
    /// Bytes of address space that would be used.
    pub mapped_bytes: u64,
    /// Whether each thread has a seccomp filter. The filter is consulted only while the process is stopped, and may
    /// then forbid hooking.
    pub has_seccomp_filter: bool,
    /// Nanoseconds that it would add to an unsampled pair of malloc and free, as measured on this machine.
    pub pair_ns: Option<f64>,
    /// Whether that is only an upper bound: the true cost is below it and too small to measure.
    pub pair_is_bound: bool,
    /// Nanoseconds that probes add to such a pair, as measured on this machine.
    pub probe_pair_ns: Option<f64>,
}

impl InlineAudit {
    fn of(file: &str, preview: Result<Preview, Refused>) -> Self {
        let file = file.to_owned();
        match preview {
            Ok(Preview { functions, replaced_bytes, mapped_bytes, is_filtered }) => Self {
                file,
                functions,
                replaced_bytes,
                mapped_bytes,
                has_seccomp_filter: is_filtered,
                ..Self::default()
            },
            Err(refused) => Self::refused(&file, refused.to_string()),
        }
    }

    fn refused(file: &str, why: String) -> Self {
        Self { file: file.to_owned(), why_not: Some(why), ..Self::default() }
    }
}

/// How stacks through a module are unwound.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unwinding {
    /// With its call frame information.
    CallFrames,
    /// With frame pointers, if its code keeps them: it has no call frame information.
    FramePointers,
    /// Not at all: its file cannot be read.
    Unreadable,
}

/// Which symbols a module's frames get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Symbols {
    /// Functions, files and lines.
    Lines,
    /// All functions.
    Functions,
    /// Exported functions only, because it is stripped and has no debug file.
    Exported,
    /// No names.
    None,
}

/// A module of a process.
#[derive(Clone, Debug, Serialize)]
pub struct ModuleAudit {
    /// Its path.
    pub module: String,
    /// How stacks through it are unwound.
    pub unwinding: Unwinding,
    /// Which symbols its frames get.
    pub symbols: Symbols,
    /// Its separate debug file, if there is one.
    pub debug_file: Option<PathBuf>,
}

/// Audits running processes. With `loaded`, probes are actually placed, and removed immediately. `counts_inside`: a
/// recording counts Python objects in processes that it hooks inline.
pub fn processes(
    targets: &[ProcessInfo],
    host: &mut Host,
    hooks: &mut Hooks,
    debug_dirs: &[PathBuf],
    loaded: Option<&mut (Programs, ControlMaps)>,
    counts_inside: bool,
) -> Vec<ProcessAudit> {
    let link = loaded.as_ref().map(|(programs, _)| programs.kind);
    let mut auditor = Auditor { hooks, debug_dirs, link, loaded };
    let (mut audits, mut arenas) = (Vec::new(), ArenaReader::default());
    for process in targets {
        // A process may exit after it was selected.
        let Some(generation) = host.processes().current(process.pid) else { continue };
        let modules: BTreeSet<ModuleId> = generation.space.modules().collect();
        let dropped = dropped_mappings(&generation.space, host.modules());
        let mut found = ProcessFindings::of(ProcessAudit {
            pid: Some(process.pid),
            comm: process.comm.to_string(),
            exe: process.exe.to_string(),
            ..ProcessAudit::default()
        });
        found.refused.extend(dropped);
        found
            .refused
            .extend(shadow_stacks::forbid_return_probes(process.pid).map(|why| Missing::new("return probes", why)));
        for module in modules {
            auditor.audit_module(module, host, &mut found);
        }
        let mut audit = found.finish(auditor.hooks, counts_inside);
        audit.look_at_memory(process, &mut arenas);
        audits.push(audit);
    }
    audits
}

/// Audits the files that a command will most likely allocate with. Does not start anything.
pub fn command(
    words: &[OsString],
    hooks: &mut Hooks,
    debug_dirs: &[PathBuf],
    link: Option<LinkKind>,
    counts_inside: bool,
) -> ProcessAudit {
    let name = words.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    let mut auditor = Auditor { hooks, debug_dirs, link, loaded: None };
    let mut found = ProcessFindings::of(ProcessAudit { comm: name, ..ProcessAudit::default() });
    let program = words.first().and_then(|word| find_program(word));
    for path in expected(words) {
        let Ok(file) = File::open(&path) else { continue };
        if program.as_ref() == Some(&path) {
            found.may_move_code(&path.to_string_lossy(), &file);
        }
        auditor.audit_file(&path.to_string_lossy(), &Arc::new(file), None, &mut found);
    }
    found.finish(auditor.hooks, counts_inside)
}

/// The remark about a Go program whose heap can be read.
const GO_IS_READ: &str = "read from the runtime's own samples, if its MemProfileRate is not 0: shows what is in use since \
                          the process started, not what is allocated";

/// The remark about a program that can move its code to anonymous memory.
const MAY_MOVE: &str = "may move its code to huge pages: while its code has probes, that would kill it with SIGTRAP; afterwards, its \
                        allocations are not seen; turn this off in the program";

/// The remark about samples that a process announces, if its allocator is probed.
const NOT_FOLLOWED: &str = "announces its own samples (USDT, otel_memory): --hook usdt records these instead of calls of the \
                            allocator";

/// The audit of one process, while its modules are examined.
#[derive(Default)]
struct ProcessFindings {
    audit: ProcessAudit,
    /// What cannot be read or hooked. Reported after what the allocators miss.
    refused: Vec<Missing>,
    /// Whether the process has a Go program whose heap can be read.
    reads_go: bool,
    /// A JVM among the examined modules whose version is not known yet.
    jvm: Option<Library>,
    /// Files without an allocator whose programs announce their samples.
    announcing: Vec<FileAudit>,
    /// Python interpreters whose objects are not probed.
    interpreters: Vec<(String, Arc<File>)>,
    /// A file that cannot be hooked inline, and whose calls may lead to another file's allocator.
    calls_out: Option<String>,
}

impl ProcessFindings {
    fn of(audit: ProcessAudit) -> Self {
        Self { audit, ..Self::default() }
    }

    /// Records a language runtime that has its own heap.
    fn has_runtime(&mut self, runtime: Runtime, path: &str, file: &File, has_objects: bool) {
        let mut missing = runtime.missing();
        match runtime {
            Runtime::Go => match heapbpf_go::Program::find(file) {
                Ok(_) => {
                    self.reads_go = true;
                    let limit = Missing::new(runtime.heap(), GO_IS_READ);
                    return self.audit.limits.extend(Some(limit).filter(|limit| !self.audit.limits.contains(limit)));
                }
                Err(why) => missing.why = format!("not included: {why}"),
            },
            Runtime::Python => match heapbpf_python::Runtime::find(file, path) {
                Ok(Some(found)) => self.audit.python = Some(found.version.to_string()),
                Ok(None) => {}
                Err(why) => self.refused.push(Missing::python_frames(&why)),
            },
            Runtime::Php if self.audit.pid.is_some_and(php_calls_malloc) => return,
            Runtime::Java => match Library::find(file) {
                Ok(library) => self.jvm = library,
                Err(why) => self.refused.push(Missing::java_frames(&why)),
            },
            _ => {}
        }
        if !has_objects && runtime != Runtime::Python && !self.refused.contains(&missing) {
            self.refused.push(missing);
        }
    }

    /// Decides whether a recording would count the objects of the Python interpreter. `counts_inside`: it does in
    /// processes that it hooks inline.
    fn judge_objects(&mut self, counts_inside: bool) {
        let Some((path, file)) = self.interpreters.first() else { return };
        let inline = &self.audit.inline;
        let is_inline = self.audit.pid.is_none() || !inline.is_empty() && inline.iter().all(|it| it.why_not.is_none());
        let judged = if !counts_inside || !is_inline {
            Err(Runtime::Python.missing().why)
        } else if self.interpreters.len() > 1 {
            Err("it has several interpreters".to_owned())
        } else if inline.iter().filter(|it| it.file != *path).count() > 1 {
            Err("it has several allocators, and which one the interpreter calls is not known".to_owned())
        } else {
            check_objects(self.audit.pid, (path, file))
        };
        match judged {
            Ok(()) => {
                self.audit.allocators.push("Python objects".to_owned());
                self.audit.limits.push(Missing::free_lists());
            }
            Err(why) => self.audit.missing.push(Missing::new(Runtime::Python.heap(), why)),
        }
    }

    /// Records whether a program's file contains code that moves code to anonymous memory.
    fn may_move_code(&mut self, path: &str, file: &File) {
        let sign = moved_text::sign_in(file);
        self.audit.limits.extend(sign.map(|sign| Missing::new(path, format!("{MAY_MOVE} ({sign})"))));
    }

    /// Asks the JVM that was found in a module for its version.
    fn ask_jvm(&mut self, module: ModuleId, host: &Host) {
        let (Some(library), Some(pid)) = (self.jvm.take(), self.audit.pid) else { return };
        let Some(process) = host.processes().current(pid) else { return };
        let mut mappings = process.space.current().iter().filter(|mapping| mapping.module == module);
        let tables = mappings.find_map(|mapping| library.tables_in(mapping.start, mapping.file_offset));
        match tables.map(|tables| java::release(pid, tables)) {
            Some(Ok(version)) => self.audit.java = Some(version),
            Some(Err(why)) => self.refused.push(Missing::java_frames(&why)),
            None => {}
        }
    }

    fn finish(mut self, hooks: &Hooks, counts_inside: bool) -> ProcessAudit {
        self.audit.missing.append(&mut self.refused);
        if let Some(outer) = &self.calls_out {
            let why = format!("{outer}, which uses probes, may call this allocator; probes count both together");
            let others = self.audit.inline.iter_mut().filter(|inline| inline.why_not.is_none());
            others.for_each(|inline| *inline = InlineAudit::refused(&inline.file, why.clone()));
        }
        self.judge_objects(counts_inside);
        let Self { mut audit, reads_go, announcing, .. } = self;
        let is_probed = !audit.attach.is_empty();
        for file in announcing {
            if is_probed {
                audit.limits.push(Missing::new(file.file, NOT_FOLLOWED));
                continue;
            }
            audit.allocators.push(file.allocator);
            audit.attach.extend(file.attach);
            audit.limits.extend(file.limits);
        }
        if audit.attach.is_empty() && !reads_go {
            let why = audit.pid.and_then(moved_text::of_process);
            let why = why.unwrap_or_else(|| format!(
                "neither its program nor its libraries define an allocator that heapbpf knows (looked for {}); name \
                 another one with --alloc 'FILE:my_alloc(size=arg0)->ret,free=my_free(arg0)'",
                hooks.files.table.names()
            ));
            audit.missing.push(Missing { what: "allocations".into(), why });
        }
        audit.allocators.sort();
        audit.allocators.dedup();
        audit
    }
}

/// Everything needed to audit modules.
struct Auditor<'a> {
    hooks: &'a mut Hooks,
    debug_dirs: &'a [PathBuf],
    /// Kind of link to report.
    link: Option<LinkKind>,
    /// The loaded programs, if probes are to be placed.
    loaded: Option<&'a mut (Programs, ControlMaps)>,
}

impl Auditor<'_> {
    fn audit_module(&mut self, module: ModuleId, host: &mut Host, found: &mut ProcessFindings) {
        let Some((kind, path, build_id)) =
            host.modules().get(module).map(|module| (module.kind, module.path.to_string(), module.build_id.clone()))
        else {
            return;
        };
        let unnamed = |module: String, unwinding| {
            let (symbols, debug_file) = (Symbols::None, None);
            ModuleAudit { module, unwinding, symbols, debug_file }
        };
        match kind {
            ModuleKind::File => {}
            ModuleKind::Anonymous => {
                let code = unnamed("code made at run time".into(), Unwinding::FramePointers);
                return found.audit.modules.push(code);
            }
            _ => return,
        }
        match host.modules_mut().source(module) {
            Ok(ModuleSource::File(file)) => {
                if path == found.audit.exe {
                    found.may_move_code(&path, &file);
                }
                self.audit_file(&path, &file, build_id.as_deref(), found);
                found.ask_jvm(module, host);
            }
            Ok(ModuleSource::Memory(_)) | Err(Unreadable::NoFile | Unreadable::NotElf | Unreadable::Gone) => {}
            Err(reason) => {
                found.refused.push(Missing { what: path.clone(), why: format!("cannot be read: {reason}") });
                found.audit.modules.push(unnamed(path, Unwinding::Unreadable));
            }
        }
    }

    fn audit_file(&mut self, path: &str, file: &Arc<File>, build_id: Option<&[u8]>, found: &mut ProcessFindings) {
        self.audit_allocator(path, file, found);
        found.audit.modules.extend(describe_file(path, file, build_id, self.debug_dirs));
    }

    /// Looks for an allocator in a file, and tries to place its probes.
    fn audit_allocator(&mut self, path: &str, file: &Arc<File>, found: &mut ProcessFindings) {
        let refuse = |why: String| Missing { what: path.to_owned(), why };
        let (key, is_hookable): (FileKey, bool) = match self.hooks.files.examine(path, file) {
            Ok(examined) => examined,
            Err(error) => return found.refused.push(refuse(error.to_string())),
        };
        if let Some(runtime) = self.hooks.files.runtime(key) {
            let has_objects = self.hooks.files.objects(key).is_some();
            found.has_runtime(runtime, path, file, has_objects);
            let is_python = runtime == Runtime::Python && !has_objects;
            found.interpreters.extend(is_python.then(|| (path.to_owned(), Arc::clone(file))));
        }
        if !is_hookable {
            let reason = self.hooks.files.refusal(key);
            return found.refused.extend(reason.map(|reason| refuse(reason.to_string())));
        }
        if self.hooks.files.announces(key) {
            found.announcing.extend(self.hooks.audit_of(key, self.link.unwrap_or(LinkKind::Perf)));
            return;
        }
        if let (Some((programs, control)), Some(pid)) = (self.loaded.as_deref_mut(), found.audit.pid) {
            let is_shared = self.hooks.must_be_shared(key, programs.kind());
            let hooked = self.hooks.hook(key, (!is_shared).then_some(pid), &*programs, control);
            self.hooks.release_all();
            match hooked {
                Ok(_) => {}
                Err(error) if error.is_too_late() => {}
                Err(error) => return found.refused.push(refuse(error.to_string())),
            }
        }
        if let Some(pid) = found.audit.pid {
            let preview = inline::preview::preview(pid, (path, file), &self.hooks.files.table);
            if preview.is_err()
                && self.hooks.files.plan(key).is_some_and(|plan| plan.may_call_out || plan.may_be_interposed)
            {
                found.calls_out = Some(path.to_owned());
            }
            if let Err(why) = &preview
                && why.blinds_probes()
            {
                // A recording that started now would observe nothing, whichever hooks it uses.
                let missing = Missing::new("allocations", why.to_string());
                found.refused.extend(Some(missing).filter(|missing| !found.refused.contains(missing)));
            }
            found.audit.inline.push(InlineAudit::of(path, preview));
        }
        let Some(file) = self.hooks.audit_of(key, self.link.unwrap_or(LinkKind::Perf)) else { return };
        found.audit.allocators.push(file.allocator);
        found.audit.attach.extend(file.attach);
        found.audit.covered.extend(file.covered);
        found.audit.missing.extend(file.missing);
        found.audit.limits.extend(file.limits);
    }
}

/// Describes how stacks through a file are unwound and symbolized. Returns `None` if it is not an ELF file.
fn describe_file(path: &str, file: &File, build_id: Option<&[u8]>, debug_dirs: &[PathBuf]) -> Option<ModuleAudit> {
    let elf = Elf::read(file).ok()?;
    let has = |elf: &Elf, name: &str| elf.section(name).is_some_and(|section| section.bytes > 0);
    // A file without section headers still has the program header that locates the table.
    let table = elf.segments.iter().any(|segment| segment.kind == PT_GNU_EH_FRAME);
    let call_frames = table || has(&elf, ".eh_frame") || has(&elf, ".debug_frame");
    let own_id = build_id.map(<[u8]>::to_vec).or_else(|| heapbpf_elf::build_id::of(file));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_described_by_its_sections() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = dir.path().join("text");
        std::fs::write(&text, "not a program").expect("writes");
        let file = File::open(&text).expect("opens");
        assert!(describe_file("text", &file, None, &[]).is_none());
        let own = File::open("/proc/self/exe").expect("opens");
        let described = describe_file("/own", &own, None, &[]).expect("an ELF file");
        assert_eq!((described.module.as_str(), described.unwinding), ("/own", Unwinding::CallFrames));
        assert_ne!(described.symbols, Symbols::None, "a test program has symbols");
        assert_eq!(described.debug_file, None);
    }

    #[test]
    fn a_process_without_an_allocator_misses_its_allocations() {
        let hooks = || {
            let version = (6, 1);
            let machine = heapbpf_probes::Machine::host().unwrap_or(heapbpf_probes::Machine::X86_64);
            Hooks::new(heapbpf_probes::KernelRules::of(machine, version), heapbpf_probes::Table::default(), true)
        };
        let mut found = ProcessFindings::of(ProcessAudit::default());
        found.refused.push(Missing { what: "/go".into(), why: "a Go program".into() });
        let audit = found.finish(&hooks(), true);
        let what: Vec<&str> = audit.missing.iter().map(|missing| missing.what.as_str()).collect();
        assert_eq!(what, ["/go", "allocations"]);
        assert!(audit.missing[1].why.contains("glibc"), "{audit:?}");
        let found = ProcessFindings::of(ProcessAudit {
            allocators: vec!["b".into(), "a".into(), "b".into()],
            ..Default::default()
        });
        assert_eq!(found.finish(&hooks(), true).allocators, ["a", "b"]);
    }
}
