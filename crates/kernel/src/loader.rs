//! Loads the embedded object: creates its maps in the kernel and prepares its programs for loading.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use aya::maps::{Map, MapData, MapError, StackTraceMap};
use aya_obj::btf::BtfFeatures;
use aya_obj::generated::{bpf_map_type, bpf_prog_type};
use aya_obj::{EbpfSectionKind, Features, Function, Object};
use heapbpf_host::side_by_side::on_all_processors;
use sampler_ebpf::abi::{Config, SESSION_IS_RETURN};
use zerocopy::{FromBytes, IntoBytes};

use super::btf::KernelBtf;
use super::ring_maps::{self, NewRing, RINGS, RingId};
use super::{KernelError, btf, release, sys};

/// Map sizes chosen for a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapSizes {
    /// Initial size of the events ring in bytes: a power of two. It is rounded up to whole pages.
    pub events_bytes: u32,
    /// Initial size of the stacks ring, likewise.
    pub stacks_bytes: u32,
    /// Maximum number of tracked live samples.
    pub live_max: u32,
    /// Maximum number of distinct stacks from the kernel's own stack walk.
    pub stack_traces_max: u32,
}

/// How a program will be attached. The kernel needs to know this when it loads the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgramKind {
    /// A session: one program for entry and return (kernel 6.13).
    UprobeSession,
    /// A multi link: many instructions per link (kernel 6.6).
    UprobeMulti,
    /// A perf event: one instruction per link.
    UprobePerf,
    /// A raw tracepoint.
    RawTracepoint,
    /// The raw tracepoint `sched_process_free`, whose argument the verifier knows to be a task.
    ThreadFreed,
    /// An iterator over tasks.
    TaskIterator,
}

/// A program of the object, and how it will be attached.
pub type NamedProgram = (&'static str, ProgramKind);

/// The maps in the kernel, and the programs relocated to use them.
pub struct Loader {
    /// The programs' instructions, by name. Nothing else of the object is kept, because it takes thirty times the
    /// memory.
    functions: HashMap<String, Function>,
    /// Programs that were loaded ahead and not requested yet.
    ahead: Mutex<Vec<(NamedProgram, Result<OwnedFd, KernelError>)>>,
    btf: OwnedFd,
    maps: HashMap<String, OwnedFd>,
    /// The initial rings for events and stacks, until they are taken.
    rings: [Mutex<Option<RingMaker>>; 2],
    session_is_return: Option<u32>,
    task_iterator: Option<u32>,
    thread_freed: Option<u32>,
    /// Whether this kernel seems to support multi links, that is, has the function that creates them. The function is
    /// not found if it was inlined into another.
    pub(super) knows_multi_links: bool,
    /// How many copies of a tracepoint program are linked.
    pub(super) tracepoint_copies: usize,
}

/// A thread that creates a ring. The kernel waits a grace period before the programs write to it.
type RingMaker = JoinHandle<Result<NewRing, KernelError>>;

const CALL: u8 = 0x85;
/// `BPF_PSEUDO_KFUNC_CALL`.
const KERNEL_FUNCTION: u8 = 2;

fn object_error(error: impl std::fmt::Display) -> KernelError {
    KernelError::Object(error.to_string())
}

impl Loader {
    /// Parses the object, sets its constants, and loads its type information and maps into the kernel.
    ///
    /// # Errors
    /// Names the step that the kernel refused.
    pub fn new(object: &[u8], config: &Config, sizes: &MapSizes) -> Result<Self, KernelError> {
        Self::create(object, config, sizes).map_err(KernelError::or_too_old)
    }

    fn create(object: &[u8], config: &Config, sizes: &MapSizes) -> Result<Self, KernelError> {
        let kernel_bytes = btf::read()?;
        let kernel = KernelBtf::parse(&kernel_bytes).ok_or(KernelError::UnknownBtf)?;
        let config = Config { offsets: kernel.offsets()?, ..*config };

        let mut object = Object::parse(object).map_err(object_error)?;
        object.patch_map_data(HashMap::from([("CONFIG", (config.as_bytes(), true))])).map_err(object_error)?;
        let types = object
            .fixup_and_sanitize_btf(&BtfFeatures::new(true, true, true, true, true, true, true, true))
            .map_err(object_error)?
            .ok_or_else(|| KernelError::Object("it has no type information".into()))?
            .to_bytes();
        let btf = sys::load_btf(&types).map_err(|(source, log)| match source.raw_os_error() {
            Some(libc::EPERM) => KernelError::Permission,
            _ => KernelError::BtfRefused { source, log },
        })?;

        let definitions: Vec<(String, aya_obj::Map)> = object.maps.drain().collect();
        let mut maps = HashMap::new();
        for (name, definition) in &definitions {
            maps.insert(name.clone(), create_map(name, definition, btf.as_fd(), sizes)?);
        }
        let rings = maps.get(RINGS).ok_or_else(|| object_error(format!("it has no map {RINGS}")))?;
        let make = |id, bytes| make_ring(rings, id, bytes).map(|maker| Mutex::new(Some(maker)));
        let rings = [make(RingId::Events, sizes.events_bytes)?, make(RingId::Stacks, sizes.stacks_bytes)?];
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        object
            .relocate_maps(definitions.iter().map(|(name, map)| (name.as_str(), maps[name].as_raw_fd(), map)), &text)
            .map_err(object_error)?;
        object.relocate_calls(&text).map_err(object_error)?;
        object.sanitize_functions(&Features::new(true, true, true, true, true, true, true, None));
        let programs = std::mem::take(&mut object.programs);
        let functions = programs
            .into_iter()
            .filter_map(|(name, program)| Some((name, object.functions.remove(&program.function_key())?)))
            .collect();
        Ok(Self {
            functions,
            ahead: Mutex::default(),
            btf,
            maps,
            rings,
            session_is_return: kernel.function_id("bpf_session_is_return"),
            task_iterator: kernel.function_id("bpf_iter_task"),
            thread_freed: kernel.tracepoint_id("sched_process_free"),
            knows_multi_links: kernel.function_id("bpf_uprobe_multi_link_attach").is_some(),
            tracepoint_copies: if release::preempts_tracepoints(&release::current()) { 2 } else { 1 },
        })
    }

    /// Whether this kernel supports uprobe sessions, that is, has the kernel function that they need.
    pub const fn knows_sessions(&self) -> bool {
        self.session_is_return.is_some()
    }

    /// Loads programs side by side, for [`Self::program`] to return. The verifier takes up to half a second on one CPU
    /// for each of the large ones.
    pub fn load_ahead(&self, wanted: &[NamedProgram]) {
        let instructions = |name: &str| self.functions.get(name).map(|function| function.instructions.len());
        let copies = |kind| match kind {
            ProgramKind::RawTracepoint => self.tracepoint_copies,
            ProgramKind::ThreadFreed => self.tracepoint_copies - 1,
            _ => 1,
        };
        let mut wanted: Vec<NamedProgram> =
            wanted.iter().flat_map(|it| std::iter::repeat_n(*it, copies(it.1))).collect();
        // Start with what takes longest.
        wanted.sort_by_key(|(name, _)| std::cmp::Reverse(instructions(name)));
        on_all_processors(wanted, |(name, kind)| {
            let loaded = self.load(name, kind);
            self.ahead.lock().unwrap_or_else(PoisonError::into_inner).push(((name, kind), loaded));
        });
    }

    /// Whether the object has this program for this machine.
    pub fn has(&self, name: &str) -> bool {
        self.functions.contains_key(name)
    }

    /// Returns a loaded program.
    ///
    /// # Errors
    /// The kernel refuses the program. The error contains the end of the verifier's log.
    pub fn program(&self, name: &str, kind: ProgramKind) -> Result<OwnedFd, KernelError> {
        let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
        let found = ahead.iter().position(|(wanted, _)| *wanted == (name, kind));
        let loaded = found.map(|at| ahead.swap_remove(at).1);
        drop(ahead);
        loaded.unwrap_or_else(|| self.load(name, kind)).map_err(KernelError::or_too_old)
    }

    fn load(&self, name: &str, kind: ProgramKind) -> Result<OwnedFd, KernelError> {
        let function = self.functions.get(name).ok_or_else(|| object_error(format!("it has no program {name}")))?;
        let mut instructions = function.instructions.clone();
        for instruction in &mut instructions {
            if instruction.code == CALL && instruction.imm == i32::from(SESSION_IS_RETURN) {
                let id = self.session_is_return.ok_or_else(|| KernelError::Program {
                    name: name.into(),
                    source: std::io::Error::from_raw_os_error(libc::ENOTSUP),
                    log: "this kernel has no uprobe sessions".into(),
                })?;
                instruction.set_src_reg(KERNEL_FUNCTION);
                instruction.imm = id.cast_signed();
                instruction.off = 0;
            }
        }
        let (program_type, attach_type, attach_btf_id) = match kind {
            ProgramKind::UprobeSession => (bpf_prog_type::BPF_PROG_TYPE_KPROBE, sys::ATTACH_UPROBE_SESSION, 0),
            ProgramKind::UprobeMulti => (bpf_prog_type::BPF_PROG_TYPE_KPROBE, sys::ATTACH_UPROBE_MULTI, 0),
            ProgramKind::UprobePerf => (bpf_prog_type::BPF_PROG_TYPE_KPROBE, 0, 0),
            ProgramKind::RawTracepoint => (bpf_prog_type::BPF_PROG_TYPE_RAW_TRACEPOINT, 0, 0),
            ProgramKind::ThreadFreed => (
                bpf_prog_type::BPF_PROG_TYPE_TRACING,
                aya_obj::generated::bpf_attach_type::BPF_TRACE_RAW_TP as u32,
                self.thread_freed.ok_or(KernelError::UnknownBtf)?,
            ),
            ProgramKind::TaskIterator => (
                bpf_prog_type::BPF_PROG_TYPE_TRACING,
                aya_obj::generated::bpf_attach_type::BPF_TRACE_ITER as u32,
                self.task_iterator.ok_or(KernelError::UnknownBtf)?,
            ),
        };
        let (functions, lines) = (function.func_info.func_info_bytes(), function.line_info.line_info_bytes());
        let begun = Instant::now();
        let loaded = sys::load_program(&sys::ProgramSpec {
            name,
            program_type,
            attach_type,
            attach_btf_id,
            instructions: &instructions,
            btf: self.btf.as_fd(),
            functions: sys::Records { bytes: &functions, record_bytes: function.func_info_rec_size },
            lines: sys::Records { bytes: &lines, record_bytes: function.line_info_rec_size },
        });
        if loaded.is_ok() {
            log::debug!("{name} was verified in {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
        }
        loaded.map_err(|(source, log)| match source.raw_os_error() {
            Some(libc::EPERM) => KernelError::Permission,
            _ => KernelError::Program { name: name.into(), source, log: last_lines(&log, 20) },
        })
    }

    /// A map's descriptor.
    ///
    /// # Errors
    /// The object has no such map.
    pub fn map(&self, name: &str) -> Result<BorrowedFd<'_>, KernelError> {
        self.maps.get(name).map(AsFd::as_fd).ok_or_else(|| object_error(format!("it has no map {name}")))
    }

    /// Takes one of the rings that are created with the maps. When this returns, the programs write to it.
    ///
    /// # Errors
    /// As for [`ring_maps::create`]. Or it was taken before.
    pub fn take_first_ring(&self, id: RingId) -> Result<NewRing, KernelError> {
        let unmade = || object_error(format!("its ring {} was not made", id.name()));
        let maker = self.rings.get(id as usize).and_then(|maker| maker.lock().ok()?.take());
        let made = maker.ok_or_else(unmade)?.join().unwrap_or_else(|_| Err(unmade()));
        made.map_err(KernelError::or_too_old)
    }

    /// Returns a map as one of aya's typed wrappers.
    ///
    /// # Errors
    /// The object has no such map, the kernel does not return its properties, or it is another kind of map.
    pub fn typed_map<M: TryFrom<Map, Error = MapError>>(&self, name: &str) -> Result<M, KernelError> {
        let fd = self.map(name)?.try_clone_to_owned().map_err(object_error)?;
        let failed = |error: MapError| object_error(format!("{name}: {error}"));
        MapData::from_fd(fd).and_then(Map::from_map_data).and_then(M::try_from).map_err(failed)
    }

    /// Returns a function for the addresses of a stack from the kernel's own frame-pointer walk, by its ID, innermost
    /// first; none if there is no stack with this ID.
    ///
    /// # Errors
    /// Same as [`Self::typed_map`].
    pub fn stack_traces(&self) -> Result<impl Fn(i32) -> Vec<u64> + use<>, KernelError> {
        let traces: StackTraceMap<MapData> = self.typed_map("STACK_TRACES")?;
        Ok(move |id: i32| {
            let trace = u32::try_from(id).ok().and_then(|id| traces.get(&id, 0).ok());
            trace.map(|trace| trace.frames().iter().map(|frame| frame.ip).collect()).unwrap_or_default()
        })
    }
}

/// Starts a thread that creates a ring, because programs can be loaded in the meantime.
fn make_ring(rings: &OwnedFd, id: RingId, bytes: u32) -> Result<RingMaker, KernelError> {
    let refused = |source| KernelError::of_map(id.name(), source);
    let rings = rings.try_clone().map_err(refused)?;
    let make = move || ring_maps::put_new(rings.as_fd(), id, u64::from(bytes));
    Builder::new().name("ring".into()).spawn(make).map_err(refused)
}

fn create_map(
    name: &str,
    definition: &aya_obj::Map,
    btf: BorrowedFd<'_>,
    sizes: &MapSizes,
) -> Result<OwnedFd, KernelError> {
    let refused = |source| KernelError::of_map(name, source);
    let map_type = definition.map_type();
    let max_entries = match name {
        "LIVE" => sizes.live_max,
        "STACK_TRACES" => sizes.stack_traces_max,
        _ => definition.max_entries(),
    };
    // These two kinds of map take no type information.
    let array_of_maps = bpf_map_type::BPF_MAP_TYPE_ARRAY_OF_MAPS as u32;
    let untyped = [array_of_maps, bpf_map_type::BPF_MAP_TYPE_STACK_TRACE as u32];
    let inner = (map_type == array_of_maps).then(|| ring_maps::create(name, 0)).transpose()?;
    let types = match definition {
        aya_obj::Map::Btf(map) if !untyped.contains(&map_type) => {
            Some((btf, map.def.btf_key_type_id, map.def.btf_value_type_id))
        }
        _ => None,
    };
    let map = sys::create_map(&sys::MapSpec {
        name,
        map_type,
        key_bytes: definition.key_size(),
        value_bytes: definition.value_size(),
        max_entries,
        flags: definition.map_flags(),
        btf: types,
        inner: inner.as_ref().map(|ring| ring.fd.as_fd()),
    })
    .map_err(refused)?;
    if !definition.data().is_empty() {
        let constant = definition.section_kind() == EbpfSectionKind::Rodata;
        sys::set_section(map.as_fd(), definition.data(), constant).map_err(refused)?;
    }
    Ok(map)
}

fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// Wraps an ABI type so that it can be a key or value of aya's typed maps.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abi<T>(pub T);

// SAFETY: aya copies such values to and from buffers of `size_of::<T>()` bytes, after checking that this is the map's
// key or value size. The wrapper has the layout of `T`. Any bytes are a valid `T` (`FromBytes`), and all bytes of a `T`
// are initialised (`IntoBytes`).
unsafe impl<T: FromBytes + IntoBytes + Copy + 'static> aya::Pod for Abi<T> {}
