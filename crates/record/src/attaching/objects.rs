//! Python's object allocator in processes that are hooked inline. The code that counts the malloc below it counts it,
//! too.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_attach::detours::{Detours, Leads, NotLed};
use heapbpf_attach::files::FileKey;
use heapbpf_attach::inline;
use heapbpf_attach::inline::objects::{self, ObjectFunction};
use heapbpf_host::Host;
use heapbpf_host::clock::monotonic_ns;
use heapbpf_host::mappings::ModuleId;
use heapbpf_host::modules::ModuleSource;
use heapbpf_probes::{ObjectTable, Runtime, object_table};
use sampler_ebpf::abi::Site;

use super::probes::Attaching;
use super::runtimes::modules_of;

/// How long, and how often, a table is checked again: an interpreter that starts up may fill it in again.
const BEGINS_FOR: Duration = Duration::from_secs(10);
const LOOK_AFTER: Duration = Duration::from_millis(50);
/// How often a process is stopped to lead its table to the jumps, and the pause between attempts.
const LEAD_ATTEMPTS: usize = 5;
const LEAD_PAUSE: Duration = Duration::from_millis(5);

/// The object allocator of an interpreter, and the interpreter's file.
type TableOfFile = (Arc<ObjectTable>, Arc<File>);

/// What is known about object allocators.
#[derive(Default)]
pub(super) struct Objects {
    /// The object allocator of each interpreter, with the interpreter's file.
    pub(super) known: HashMap<ModuleId, Option<TableOfFile>>,
    /// Names of the functions, and their sites in the kernel's table.
    sites: Vec<(String, Site)>,
    /// Interpreters that may still fill in their table again.
    pub(super) young: HashMap<u32, Young>,
}

/// An interpreter whose table leads to the mapped code.
pub(super) struct Young {
    table: Arc<ObjectTable>,
    bias: u64,
    until: Instant,
    next: Instant,
}

impl Objects {
    /// Time until a table must be checked again.
    pub(super) fn until_look(&self) -> Option<Duration> {
        let next = self.young.values().map(|young| young.next).min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }
}

impl Attaching {
    /// The functions of a Python interpreter in a process whose allocator is about to be hooked inline, if they are to
    /// be counted. Afterwards the interpreter's table leads to jumps, through which calls can be led to the mapped
    /// code.
    pub(super) fn objects_above(&mut self, host: &mut Host, pid: u32, allocator: FileKey) -> Vec<ObjectFunction> {
        if !self.counts_objects_inside {
            return Vec::new();
        }
        match self.find_objects(host, pid, allocator) {
            Ok(found) => found,
            Err(why) => {
                log::info!("process {pid}: Python's objects are not counted: {why}");
                self.standing.note_objects(pid, Err(why));
                Vec::new()
            }
        }
    }

    fn find_objects(&mut self, host: &mut Host, pid: u32, allocator: FileKey) -> Result<Vec<ObjectFunction>, String> {
        let modules = modules_of(host, pid);
        let allocators: BTreeSet<FileKey> = modules.iter().filter_map(|module| self.file_of(host, *module)).collect();
        let interpreters: Vec<ModuleId> =
            modules.into_iter().filter(|module| self.runtime_of(*module) == Some(Runtime::Python)).collect();
        let mut found = Vec::new();
        let mut aside = BTreeSet::new();
        for module in interpreters {
            found.extend(self.object_table(host, module)?);
            aside.extend(self.file_of(host, module).filter(|file| !self.has_malloc(*file)));
        }
        if aside.contains(&allocator) {
            return Ok(Vec::new());
        }
        let Some((table, file)) = found.pop() else { return Ok(Vec::new()) };
        if !found.is_empty() {
            return Err("it has several interpreters".to_owned());
        }
        if allocators.difference(&aside).any(|other| *other != allocator) {
            return Err("it has several allocators, and which one the interpreter calls is not known".to_owned());
        }
        let bias = inline::bias(pid, &file).map_err(|error| error.to_string())?;
        let sites = self.object_sites()?;
        let hooks = objects::hooks(&table, bias, &sites).ok_or("there are no unused bytes behind its code")?;
        let leads = Detours::look(pid, &table, bias).map_err(|error| NotLed::from(error).to_string())?;
        if let Some(why) = leads.why_not() {
            return Err(why.to_owned());
        }
        if leads != Leads::Around {
            let mut led = self.detours.lead(pid, &table, bias);
            for _ in 1..LEAD_ATTEMPTS {
                if !matches!(led, Err(NotLed::Stop(heapbpf_remote::Error::Busy { .. }))) {
                    break;
                }
                std::thread::sleep(LEAD_PAUSE);
                led = self.detours.lead(pid, &table, bias);
            }
            led.map_err(|error| error.to_string())?;
        }
        let now = Instant::now();
        let young = Young { table, bias, until: now + BEGINS_FOR, next: now + LOOK_AFTER };
        self.objects.young.insert(pid, young);
        Ok(hooks)
    }

    /// Whether a file's allocator has a function `malloc`. If an interpreter's own allocator has none, its object
    /// allocator does not call it: since 3.13 interpreters include mimalloc (`mi_malloc`), which builds without the
    /// global interpreter lock use in place of the object allocator.
    fn has_malloc(&self, file: FileKey) -> bool {
        self.hooks.files.plan(file).is_some_and(|plan| plan.sites.iter().any(|planned| planned.function == "malloc"))
    }

    /// The object allocator of an interpreter, and the interpreter's file.
    fn object_table(&mut self, host: &mut Host, module: ModuleId) -> Result<Option<TableOfFile>, String> {
        if let Some(known) = self.objects.known.get(&module) {
            return Ok(known.clone());
        }
        let path = host.modules().get(module).map(|module| Arc::clone(&module.path)).unwrap_or_default();
        let Ok(ModuleSource::File(file)) = host.modules_mut().source(module) else {
            return Err(format!("{path} cannot be read"));
        };
        let found = match object_table(&*file, &path) {
            Some(Ok(table)) => Some((Arc::new(table), file)),
            // A program that has an interpreter's name, or a stub that loads the library.
            None => None,
            Some(Err(why)) => return Err(format!("{path}: {why}")),
        };
        self.objects.known.insert(module, found.clone());
        Ok(found)
    }

    /// The functions' names and sites.
    fn object_sites(&mut self) -> Result<Vec<(String, Site)>, String> {
        if self.objects.sites.is_empty() {
            let functions = self.hooks.files.table.object_functions();
            let (names, sites): (Vec<String>, Vec<Site>) =
                functions.map(|(name, site)| (name.to_owned(), site)).unzip();
            let first = self.hooks.add_sites(&sites, &mut self.control).map_err(|error| error.to_string())?;
            // The BPF programs get the index of the site.
            let indexed = (first..).zip(sites).map(|(index, site)| Site { function: index as u16, ..site });
            self.objects.sites = names.into_iter().zip(indexed).collect();
        }
        Ok(self.objects.sites.clone())
    }

    /// Notes the result of leading an interpreter to the mapped code.
    pub(super) fn note_led(&mut self, pid: u32) {
        if let Some(led) = self.inline.as_mut().and_then(|inline| inline.take_led(pid)) {
            // The recording begins when everything that already runs is hooked.
            let since_ns = if self.is_starting { 0 } else { monotonic_ns() };
            self.standing.note_objects(pid, led.map(|()| since_ns));
        }
    }

    /// Checks tables again that an interpreter may have filled in again, as it does when it is told which allocator to
    /// use.
    pub(super) fn lead_anew(&mut self) {
        let now = Instant::now();
        let due: Vec<u32> =
            self.objects.young.iter().filter(|(_, young)| young.next <= now).map(|(pid, _)| *pid).collect();
        for pid in due {
            let Some(mut young) = self.objects.young.remove(&pid) else { continue };
            let why = match Detours::look(pid, &young.table, young.bias) {
                Ok(Leads::There | Leads::ToWrappers) => self.detours.lead_if_there(pid, &young.table, young.bias).err(),
                Ok(Leads::Around) => None,
                Ok(leads @ Leads::ToMalloc) => {
                    self.standing.note_objects(pid, Err(leads.why_not().unwrap_or_default().to_owned()));
                    continue;
                }
                Ok(Leads::Elsewhere | Leads::Nowhere) | Err(_) => continue,
            };
            if let Some(why) = why {
                log::info!("process {pid}: cannot redirect Python's table of allocators again: {why}");
            }
            young.next = now + LOOK_AFTER;
            if now < young.until {
                self.objects.young.insert(pid, young);
            }
        }
    }
}
