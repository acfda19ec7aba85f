//! A private copy of an allocator in this process, hooked inline, with a recorder instead of BPF programs.
#![allow(dead_code, unused_imports)]

mod recorder;
pub mod work;

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{LazyLock, Mutex, MutexGuard};

use heapbpf_inline::abi::{
    CONTROL, CONTROL_BYTES, Control, DRAWS, MAGIC, STATE, TEXT_BYTES, Totals, VERSION, mapped_bytes,
};
use heapbpf_inline::read::{COUNTS_BYTES, Counts};
use heapbpf_inline::{Inputs, ObjectFunction, Plan, Settings, Text, WantedFunction, site_offsets};
use heapbpf_probes::{Missing, Table, inline_functions};
use heapbpf_remote::Maps;
use sampler_ebpf::constants::draw_constants;
use zerocopy::FromZeros as _;

pub use recorder::{Event, SiteKind, calls_recorded, events, record};

/// Tests hook one at a time, because there is one recorder for all.
static TURN: Mutex<()> = Mutex::new(());

pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

pub const NONE: u8 = 0xff;
/// The interval with which threads draw while nothing is sampled.
const PAUSED_INTERVAL: u64 = 1 << 16;

pub struct Hooked {
    pub plan: Plan,
    /// Names of the functions, in the order of the plan.
    pub names: Vec<String>,
    /// Functions that are not hooked, or may count twice.
    pub missing: Vec<Missing>,
    handle: *mut c_void,
    base: u64,
    mapped: u64,
    restore: Vec<(u64, Vec<u8>)>,
    _file: tempfile::TempDir,
}

pub struct Options {
    /// Whether the sites call the recorder; otherwise they stay no-ops.
    pub recorder: bool,
    /// Whether functions that may throw have twins.
    pub twins: bool,
    /// A C++ program that is loaded with the library, and uses it.
    pub driver: Option<&'static str>,
    pub interval: u64,
    pub seed: u64,
    pub set_log2: u32,
    pub criterion: u32,
    pub hook: bool,
    /// Functions of an object allocator that calls the library.
    pub objects: Vec<ObjectFunction>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            recorder: true,
            twins: true,
            driver: None,
            interval: 1,
            seed: 42,
            set_log2: 16,
            criterion: 0,
            hook: true,
            objects: Vec::new(),
        }
    }
}

/// This process's own C library, from before copies were loaded.
pub fn libc_path() -> &'static str {
    static PATH: LazyLock<String> = LazyLock::new(find_libc);
    &PATH
}

fn find_libc() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.split_whitespace().find(|p| p.contains("/libc.so") || p.contains("/libc-")).unwrap().to_owned()
}

fn mmap(address: u64, bytes: u64, protection: i32, flags: i32, file: i32) {
    let wanted = address as *mut c_void;
    // SAFETY: the caller names addresses that are free, or that it means to replace.
    let got = unsafe { libc::mmap(wanted, bytes as usize, protection, flags | libc::MAP_PRIVATE, file, 0) };
    assert_eq!(got, wanted, "{}", std::io::Error::last_os_error());
}

/// Maps `bytes` at `address`, read and execute, as a separate file.
fn map_text(address: u64, bytes: &[u8], fixed: i32) {
    // SAFETY: plain system calls; the descriptor is new.
    let file = unsafe {
        let fd = libc::memfd_create(c"heapbpf-inline".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0);
        File::from_raw_fd(fd)
    };
    file.write_all_at(bytes, 0).unwrap();
    use std::os::fd::AsRawFd as _;
    mmap(address, bytes.len() as u64, libc::PROT_READ | libc::PROT_EXEC, fixed, file.as_raw_fd());
}

impl Hooked {
    /// Loads a private copy of the library at `path`, in its own namespace, and hooks its functions.
    pub fn new(path: &str, options: &Options) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let copy = dir.path().join(Path::new(path).file_name().unwrap());
        std::fs::copy(path, &copy).unwrap();
        let loaded = options.driver.map_or_else(|| copy.clone(), |source| compile(source, &copy));
        let name = CString::new(loaded.to_str().unwrap()).unwrap();
        // SAFETY: the library's constructors are those of an ordinary allocator.
        let handle = unsafe { libc::dlmopen(libc::LM_ID_NEWLM, name.as_ptr(), libc::RTLD_NOW) };
        assert!(!handle.is_null(), "{path} does not load: {:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
        let found = inline_functions(&File::open(&copy).unwrap(), path, &Table::default()).unwrap();
        let of = |name: &str| found.functions.iter().find(|f| f.name == name).unwrap();
        let symbol = CString::new("malloc").unwrap();
        // SAFETY: the handle is open.
        let bias = unsafe { libc::dlsym(handle, symbol.as_ptr()) } as u64 - of("malloc").address;
        let texts: Vec<Text<'_>> =
            found.code.iter().map(|c| Text { address: c.address + bias, bytes: &c.bytes }).collect();
        let inner: Vec<[u64; 2]> = found.inner.iter().map(|[s, e]| [s + bias, e + bias]).collect();
        let wanted: Vec<WantedFunction<'_>> = found
            .functions
            .iter()
            .map(|f| WantedFunction {
                name: &f.name,
                address: f.address + bias,
                length: f.length,
                site: f.site,
                twin: f.twin.filter(|_| options.twins),
            })
            .collect();
        let names = found.functions.iter().map(|f| f.name.clone()).collect();
        // The library comes first in its namespace: its slots hold its own functions.
        let stubs: HashMap<u64, usize> =
            found.slots.iter().filter(|s| s.stub != s.slot).map(|s| (s.stub + bias, s.function)).collect();
        let slots: HashMap<u64, usize> = found.slots.iter().map(|s| (s.slot + bias, s.function)).collect();
        let code = heapbpf_inline_blob::code().unwrap();
        let settings = Settings {
            criterion: options.criterion,
            set_log2: options.set_log2,
            has_rdrand: std::is_x86_feature_detected!("rdrand"),
            file: [0; 3],
        };
        // One additional page for the recorder's trampolines.
        let mapped = mapped_bytes(options.set_log2);
        let span = texts.iter().map(|t| t.address).min().unwrap()
            ..texts.iter().map(|t| t.address + t.bytes.len() as u64).max().unwrap();
        let maps = Maps::parse(&std::fs::read_to_string("/proc/self/maps").unwrap(), 0);
        let base = maps.gap(&span, mapped + 4096).expect("a gap");
        // This process's own allocators might take these addresses as well.
        let reserved = libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        mmap(base, mapped + 4096, libc::PROT_NONE, reserved, -1);
        let inputs = Inputs {
            texts: &texts,
            wanted: &wanted,
            inner: &inner,
            stubs: &stubs,
            slots: &slots,
            objects: &options.objects,
            jumps: None,
            base,
        };
        let plan = Plan::new(&code, &settings, &inputs).unwrap();
        let mut hooked =
            Self { plan, names, missing: found.missing.clone(), handle, base, mapped, restore: Vec::new(), _file: dir };
        if options.hook {
            hooked.install(options, site_offsets(&code));
        }
        hooked
    }

    fn install(&mut self, options: &Options, sites: [u64; 4]) {
        let base = self.base;
        let writable = libc::PROT_READ | libc::PROT_WRITE;
        let fixed = libc::MAP_FIXED;
        mmap(base + CONTROL, CONTROL_BYTES, writable, libc::MAP_ANONYMOUS | fixed, -1);
        mmap(base + STATE, self.mapped - STATE, writable, libc::MAP_ANONYMOUS | fixed, -1);
        // SAFETY: the range is part of the mapping just made.
        let wiped = unsafe {
            libc::madvise((base + STATE) as *mut c_void, (self.mapped - STATE) as usize, libc::MADV_WIPEONFORK)
        };
        assert_eq!(wiped, 0);
        let mut control = Control {
            magic: MAGIC,
            version: u64::from(VERSION),
            seed: options.seed,
            paused: u64::from(options.interval == 0),
            ..Control::new_zeroed()
        };
        let interval = if options.interval == 0 { PAUSED_INTERVAL } else { options.interval };
        control.draws[0] = draw_constants(interval).unwrap();
        let totals = Totals { is_original: 1, ..Totals::default() };
        // SAFETY: the pages were just mapped.
        unsafe {
            std::ptr::write((base + CONTROL) as *mut Control, control);
            std::ptr::write((base + STATE) as *mut Totals, totals);
        }
        let mut text = self.plan.file.clone();
        let trampolines = recorder::trampolines();
        for (index, site) in sites.into_iter().enumerate() {
            // Like the kernel with an optimized uprobe: the no-ops become a call.
            let distance = (self.mapped + 16 * index as u64).wrapping_sub(site + 5) as i32;
            assert_eq!(text[site as usize..][..5], [0x90, 0x0f, 0x1f, 0x40, 0]);
            assert_eq!(site % 8, 0);
            if !options.recorder {
                continue;
            }
            text[site as usize] = 0xe8;
            text[site as usize + 1..][..4].copy_from_slice(&distance.to_le_bytes());
        }
        map_text(base + self.mapped, &trampolines, fixed);
        assert_eq!(text.len() as u64, TEXT_BYTES);
        map_text(base, &text, fixed);
        // The pages are mapped, with the file's content.
        let read = |address: u64, bytes: &mut [u8]| {
            // SAFETY: as said.
            bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(address as *const u8, bytes.len()) });
            true
        };
        for (address, bytes) in self.plan.runs(16, &read).unwrap() {
            // SAFETY: the pages are mapped: they are the library's.
            let before = unsafe { std::slice::from_raw_parts(address as *const u8, bytes.len()) };
            self.restore.push((address, before.to_vec()));
            map_text(address, &bytes, libc::MAP_FIXED);
        }
        self.lead(true);
    }

    /// Makes words lead to the stubs of an object allocator, or to its functions.
    fn lead(&self, to_stubs: bool) {
        for lead in &self.plan.leads {
            // SAFETY: the word belongs to the test, and lives as long as this.
            let word = unsafe { std::sync::atomic::AtomicU64::from_ptr(lead.word as *mut u64) };
            word.store(if to_stubs { lead.stub } else { lead.function }, std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// The address of a function of the library.
    pub fn symbol(&self, name: &str) -> u64 {
        let name = CString::new(name).unwrap();
        // SAFETY: the handle is open.
        unsafe { libc::dlsym(self.handle, name.as_ptr()) as u64 }
    }

    /// The library's allocation functions.
    pub fn functions(&self) -> Functions {
        // SAFETY: those are the signatures of the functions of these names.
        unsafe {
            Functions {
                malloc: self.function("malloc"),
                calloc: self.function("calloc"),
                realloc: self.function("realloc"),
                reallocarray: self.function("reallocarray"),
                posix_memalign: self.function("posix_memalign"),
                aligned_alloc: self.function("aligned_alloc"),
                free: self.function("free"),
            }
        }
    }

    /// A function of the library, or of its driver.
    ///
    /// # Safety
    /// `F` is its signature, as a function pointer.
    pub unsafe fn function<F: Copy>(&self, name: &str) -> F {
        let address = self.symbol(name);
        assert!(address != 0 && size_of::<F>() == size_of::<u64>());
        // SAFETY: a function pointer is an address, and the caller knows the signature.
        unsafe { std::mem::transmute_copy(&address) }
    }

    pub fn counts(&self) -> Counts {
        // SAFETY: mapped by install(). Other threads may write to it; tests wait until they have finished.
        let bytes = unsafe { std::slice::from_raw_parts((self.base + STATE) as *const u8, COUNTS_BYTES) };
        Counts::of(bytes).unwrap()
    }

    pub fn control(&self) -> *mut Control {
        (self.base + CONTROL) as *mut Control
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    /// Changes the sampling interval as the daemon does: the constants first, then their index. With 0, nothing is
    /// sampled, but threads go on drawing.
    pub fn set_interval(&self, interval: u64) {
        let control = self.control();
        // SAFETY: the control page stays mapped.
        unsafe { (&raw mut (*control).paused).write_volatile(u64::from(interval == 0)) };
        if interval == 0 {
            return;
        }
        // SAFETY: the control page stays mapped.
        unsafe {
            let next = ((*control).draw + 1) % DRAWS as u64;
            (&raw mut (*control).draws[next as usize]).write(draw_constants(interval).unwrap());
            (&raw mut (*control).draw).write_volatile(next);
        }
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        self.lead(false);
        for (address, bytes) in std::mem::take(&mut self.restore) {
            map_text(address, &bytes, libc::MAP_FIXED);
        }
        // SAFETY: the test has ended, and so have all threads that called the library.
        unsafe { libc::dlclose(self.handle) };
    }
}

type Pointer = *mut c_void;

#[derive(Clone, Copy)]
pub struct Functions {
    pub malloc: unsafe extern "C" fn(usize) -> Pointer,
    pub calloc: unsafe extern "C" fn(usize, usize) -> Pointer,
    pub realloc: unsafe extern "C" fn(Pointer, usize) -> Pointer,
    pub reallocarray: unsafe extern "C" fn(Pointer, usize, usize) -> Pointer,
    pub posix_memalign: unsafe extern "C" fn(*mut Pointer, usize, usize) -> i32,
    pub aligned_alloc: unsafe extern "C" fn(usize, usize) -> Pointer,
    pub free: unsafe extern "C" fn(Pointer),
}

/// Compiles C++ `source` to a shared library, which uses the library at `allocator` before any other.
fn compile(source: &str, allocator: &Path) -> PathBuf {
    let dir = allocator.parent().unwrap();
    let (code, library) = (dir.join("driver.cc"), dir.join("driver.so"));
    std::fs::write(&code, source).unwrap();
    let status = Command::new("c++")
        .args(["-std=c++17", "-O1", "-fno-builtin", "-shared", "-fPIC", "-Wl,--no-as-needed", "-o"])
        .args([&library, &code, allocator])
        .arg(format!("-Wl,-rpath,{}", dir.display()))
        .status();
    assert!(status.unwrap().success());
    library
}
