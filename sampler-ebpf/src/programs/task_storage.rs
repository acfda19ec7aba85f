//! Task-local storage, declared by hand because the library has no type for it yet.

use core::ffi::c_void;
use core::ptr::{from_ref, null, null_mut};

use aya_ebpf::bindings::bpf_map_type::BPF_MAP_TYPE_TASK_STORAGE;
use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_LOCAL_STORAGE_GET_F_CREATE};
use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_task_storage_get};

/// A map with one value per task. The loader reads the types of the fields from BTF; the fields hold no data.
#[repr(C)]
pub struct TaskStorage<T: 'static> {
    r#type: *const [i32; BPF_MAP_TYPE_TASK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; BPF_F_NO_PREALLOC as usize],
}

// SAFETY: the fields describe the map to the loader and are never read. The map itself is accessed only through
// helpers, which may be called on any CPU.
unsafe impl<T> Sync for TaskStorage<T> {}

impl<T> TaskStorage<T> {
    /// The map's definition.
    pub const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null(), map_flags: null() }
    }

    #[inline(always)]
    fn get(&self, task: *mut c_void, flags: u64) -> *mut T {
        // SAFETY: the map is a task storage map, as the helper expects, and `task` is a task pointer: the verifier
        // rejects others.
        unsafe { bpf_task_storage_get(from_ref(self).cast_mut().cast(), task.cast(), null_mut(), flags).cast() }
    }

    /// The current task's value, if it has one.
    #[inline(always)]
    pub fn current(&self) -> Option<&'static mut T> {
        // SAFETY: the helper takes no argument.
        let task = unsafe { bpf_get_current_task_btf() };
        // SAFETY: the helper returns null or the task's value, which is initially zero and lives as long as the task.
        // Only programs that run for this task write to it, and none interrupts another: a signal handler's probe
        // cannot run inside a probe.
        unsafe { self.get(task.cast(), 0).as_mut() }
    }

    /// The current task's value, created as all zeros if it does not exist.
    #[inline(always)]
    pub fn current_or_create(&self) -> Option<&'static mut T> {
        // SAFETY: the helper takes no argument.
        let task = unsafe { bpf_get_current_task_btf() };
        // SAFETY: as in `current`.
        unsafe { self.get(task.cast(), u64::from(BPF_LOCAL_STORAGE_GET_F_CREATE)).as_mut() }
    }

    /// Returns the value of a task that has ended, if it has one.
    ///
    /// # Safety
    /// `task` is a task pointer that the kernel gave to this program, of a task that no longer runs.
    #[inline(always)]
    pub unsafe fn of_ended(&self, task: *mut c_void) -> Option<&'static mut T> {
        // SAFETY: the helper returns null or the task's value, which outlives this run because the kernel frees the
        // task afterwards. No other program runs for the task.
        unsafe { self.get(task, 0).as_mut() }
    }

    /// Another task's value, if it has one.
    ///
    /// # Safety
    /// `task` is a task pointer that the kernel gave to this program.
    #[inline(always)]
    pub unsafe fn of(&self, task: *mut c_void) -> Option<&'static T> {
        // SAFETY: the helper returns null or the task's value, which outlives this run because the iterator holds the
        // task. The task may write to the value at the same time, but only integers are read, each as it was at some
        // moment.
        unsafe { self.get(task, 0).as_ref() }
    }
}
