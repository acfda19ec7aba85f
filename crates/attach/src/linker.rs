//! What hooking a file needs from the kernel, as traits. [`Programs`] and [`ControlMaps`] implement them; tests use
//! fakes.

use std::ffi::CString;

use heapbpf_audit::LinkKind;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::control::ControlMaps;
use heapbpf_kernel::programs::{Links, ProbePoint, Programs};
use sampler_ebpf::abi::{FileRanges, Site};

/// Instructions where the kernel refuses a probe, as file offset and error text.
pub type Refused = Vec<(u64, String)>;

/// Links, or why the kernel refuses them.
pub type LinkResult<L> = Result<(L, Refused), KernelError>;

/// Links instructions of files to BPF programs.
pub trait Linker {
    /// The links to one file. Dropping them removes the probes.
    type Links: ProbeLinks;

    /// Kind of the links that it makes.
    fn kind(&self) -> LinkKind;

    /// Links all `points` of a file, for one process or for all that map it.
    ///
    /// # Errors
    /// The kernel refuses. Then nothing is linked.
    fn link(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> Result<Self::Links, KernelError>;

    /// Links each point separately. Points whose instruction the kernel refuses are skipped and returned, as file
    /// offset and error text.
    ///
    /// # Errors
    /// The kernel refuses the file or the process. Then nothing is linked.
    fn link_each(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> LinkResult<Self::Links>;
}

/// The links to one file.
pub trait ProbeLinks {
    /// Removes the probes of freeing functions. Those of allocating functions stay, without a gap.
    fn stop_tracking_frees(&mut self);
}

/// Where the BPF programs look up the sites of hooked files.
pub trait SiteTable {
    /// Adds a file's code ranges and sites. Returns the index of the first site.
    ///
    /// # Errors
    /// The table is full.
    fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError>;

    /// Frees the places of the file whose first site has this index, for other files. None of its calls may be in
    /// progress.
    fn remove_file(&mut self, first_site: u32);
}

impl Linker for Programs {
    type Links = Links;

    fn kind(&self) -> LinkKind {
        self.kind
    }

    fn link(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> Result<Links, KernelError> {
        self.attach(path, points, pid)
    }

    fn link_each(&self, path: &CString, points: &[ProbePoint], pid: Option<u32>) -> LinkResult<Links> {
        self.attach_each(path, points, pid)
    }
}

impl ProbeLinks for Links {
    fn stop_tracking_frees(&mut self) {
        Self::stop_tracking_frees(self);
    }
}

impl SiteTable for ControlMaps {
    fn add_file(&mut self, ranges: &FileRanges, sites: &[Site]) -> Result<u32, KernelError> {
        Self::add_file(self, ranges, sites)
    }

    fn remove_file(&mut self, first_site: u32) {
        Self::remove_file(self, first_site);
    }
}
