//! Replaces BPF programs: records the registers at each site.

use std::arch::global_asm;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The kinds of sites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteKind {
    Result,
    Freeing,
    Reallocating,
    Unseen,
}

/// Registers at a site.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Event {
    pub site: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rdi: u64,
    pub rsi: u64,
    pub rdx: u64,
    pub rcx: u64,
    pub rax: u64,
    pub flags: u64,
    pub rbp: u64,
    /// The address behind the site's no-op.
    pub after: u64,
    /// The word at the stack pointer.
    pub caller: u64,
}

impl Event {
    pub fn kind(&self) -> SiteKind {
        [SiteKind::Result, SiteKind::Freeing, SiteKind::Reallocating, SiteKind::Unseen][self.site as usize]
    }
    pub fn function(&self) -> u16 {
        self.r10 as u16
    }
    pub fn index(&self) -> u16 {
        (self.r10 >> 16) as u16
    }
    pub fn event_flags(&self) -> u32 {
        (self.r10 >> 32) as u32
    }
}

static RECORDING: AtomicBool = AtomicBool::new(false);
static EVENTS: Mutex<Vec<Event>> = Mutex::new(Vec::new());
/// Calls of the recorder by site.
static CALLS: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

/// Starts or stops recording events.
pub fn record(on: bool) {
    let _ = events();
    for calls in &CALLS {
        calls.store(0, Ordering::SeqCst);
    }
    RECORDING.store(on, Ordering::SeqCst);
}

/// Takes the recorded events.
pub fn events() -> Vec<Event> {
    std::mem::take(&mut *EVENTS.lock().unwrap_or_else(|p| p.into_inner()))
}

/// How often each site was passed.
pub fn calls_recorded() -> [u64; 4] {
    std::array::from_fn(|i| CALLS[i].load(Ordering::SeqCst))
}

extern "C" fn note(event: &Event) {
    CALLS[event.site as usize].fetch_add(1, Ordering::Relaxed);
    if RECORDING.load(Ordering::Relaxed) {
        EVENTS.lock().unwrap_or_else(|p| p.into_inner()).push(*event);
    }
}

unsafe extern "C" {
    fn heapbpf_test_site_0();
    fn heapbpf_test_site_1();
    fn heapbpf_test_site_2();
    fn heapbpf_test_site_3();
}

/// A page with a jump to each site's thunk, 16 bytes apart.
pub fn trampolines() -> Vec<u8> {
    let mut page = vec![0xcc; 4096];
    let thunks = [heapbpf_test_site_0, heapbpf_test_site_1, heapbpf_test_site_2, heapbpf_test_site_3];
    for (index, thunk) in thunks.into_iter().enumerate() {
        let at = 16 * index;
        page[at..at + 6].copy_from_slice(&[0xff, 0x25, 0, 0, 0, 0]);
        page[at + 6..at + 14].copy_from_slice(&(thunk as *const () as u64).to_le_bytes());
    }
    page
}

global_asm!(
    ".macro heapbpf_test_site number",
    "heapbpf_test_site_\\number:",
    "push rbp",
    "pushfq",
    "push rax",
    "push rcx",
    "push rdx",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push \\number",
    "mov rdi, rsp",
    "mov rbp, rsp",
    "sub rsp, 16",
    "and rsp, -16",
    "call {note}",
    "mov rsp, rbp",
    "add rsp, 8",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdi",
    "pop rsi",
    "pop rdx",
    "pop rcx",
    "pop rax",
    "popfq",
    "pop rbp",
    "ret",
    ".endm",
    "heapbpf_test_site 0",
    "heapbpf_test_site 1",
    "heapbpf_test_site 2",
    "heapbpf_test_site 3",
    note = sym note,
);
