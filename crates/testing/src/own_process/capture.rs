//! Captures of the calling thread: registers and stack, as the kernel side takes them.

use std::cell::RefCell;

use heapbpf_unwind::dwarf::{Capture, Flaws};
use sampler_ebpf::abi::Registers;

use super::own_maps;

/// What the kernel side captures when an allocator returns: registers just after the return, and the stack above.
#[derive(Clone, Debug, Default)]
pub struct OwnCapture {
    /// Registers.
    pub registers: Registers,
    /// Stack from `registers.sp` up.
    pub stack: Vec<u8>,
}

impl OwnCapture {
    /// The capture as an unwinder takes it, without calls in flight.
    pub fn input(&self) -> Capture<'_> {
        Capture {
            registers: &self.registers,
            stack: self.stack.as_slice().into(),
            in_flight: &[],
            flaws: Flaws::default(),
        }
    }
}

thread_local! {
    static CAPTURE: RefCell<Option<OwnCapture>> = const { RefCell::new(None) };
}

/// Maximum number of bytes of stack that [`capture_here`] copies.
const MAX_CAPTURE_BYTES: usize = 1 << 20;

unsafe extern "C" {
    /// Captures the caller's registers and stack, as if this function were an allocator's. [`take_capture`] returns the
    /// capture.
    #[link_name = "heapbpf_capture_here"]
    pub safe fn capture_here();
}

/// Takes the last capture of this thread. Returns `None` if there is none, or if `/proc` could not be read.
pub fn take_capture() -> Option<OwnCapture> {
    CAPTURE.take()
}

/// Called by the assembler stub `heapbpf_capture_here`, with the registers of its caller.
///
/// # Safety
/// `sp` must be a stack pointer of the calling thread, at or above that of the call.
pub(crate) unsafe extern "C" fn keep_capture(ip: u64, sp: u64, fp: u64) {
    let registers = Registers { ip, sp, fp, lr: 0 };
    let Some(top) = stack_top(sp) else { return };
    let length = ((top - sp) as usize).min(MAX_CAPTURE_BYTES);
    let mut stack = vec![0; length];
    // SAFETY: `sp` to `top` is in one mapping, that of this thread's stack (the caller's promise), which is readable.
    // It holds only frames of callers, which do not run during the copy.
    unsafe { std::ptr::copy_nonoverlapping(sp as *const u8, stack.as_mut_ptr(), length) };
    CAPTURE.replace(Some(OwnCapture { registers, stack }));
}

/// Returns the end of the mapping that contains `address`.
fn stack_top(address: u64) -> Option<u64> {
    let maps = own_maps().ok()?;
    let (_, end) = maps.iter().map(|map| map.address).find(|(start, end)| (*start..*end).contains(&address))?;
    Some(end)
}
