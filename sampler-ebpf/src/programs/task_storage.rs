//! Task-local storage, declared by hand: the library has no type for it yet.

use core::ffi::c_void;
use core::ptr::{from_ref, null, null_mut};

use aya_ebpf::bindings::bpf_map_type::BPF_MAP_TYPE_TASK_STORAGE;
use aya_ebpf::bindings::{BPF_F_NO_PREALLOC, BPF_LOCAL_STORAGE_GET_F_CREATE};
use aya_ebpf::helpers::generated::{bpf_get_current_task_btf, bpf_task_storage_get};

/// A map with one value per task. The field types are what the loader reads from BTF; they hold nothing.
#[repr(C)]
pub struct TaskStorage<T: 'static> {
    r#type: *const [i32; BPF_MAP_TYPE_TASK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; BPF_F_NO_PREALLOC as usize],
}

// SAFETY: the pointers are placeholders that are never followed.
unsafe impl<T> Sync for TaskStorage<T> {}

impl<T> TaskStorage<T> {
    /// The definition.
    pub const fn new() -> Self {
        Self { r#type: null(), key: null(), value: null(), max_entries: null(), map_flags: null() }
    }

    #[inline(always)]
    fn get(&self, task: *mut c_void, flags: u64) -> *mut T {
        // SAFETY: a helper call; the kernel checks `task`.
        unsafe { bpf_task_storage_get(from_ref(self).cast_mut().cast(), task.cast(), null_mut(), flags).cast() }
    }

    /// The current task's value, if it has one.
    #[inline(always)]
    pub fn current(&self) -> Option<&'static mut T> {
        // SAFETY: no argument.
        let task = unsafe { bpf_get_current_task_btf() };
        // SAFETY: the kernel returns NULL or the value, which lives as long as the task; only the task itself writes
        // to it (and a preempting signal handler's probe cannot run inside a probe).
        unsafe { self.get(task.cast(), 0).as_mut() }
    }

    /// The current task's value, made if need be (all zero).
    #[inline(always)]
    pub fn current_or_create(&self) -> Option<&'static mut T> {
        // SAFETY: no argument.
        let task = unsafe { bpf_get_current_task_btf() };
        // SAFETY: as in `current`.
        unsafe { self.get(task.cast(), u64::from(BPF_LOCAL_STORAGE_GET_F_CREATE)).as_mut() }
    }

    /// Another task's value, if it has one.
    ///
    /// # Safety
    /// `task` is a task pointer that the kernel gave to this program.
    #[inline(always)]
    pub unsafe fn of(&self, task: *mut c_void) -> Option<&'static T> {
        // SAFETY: as in `current`; shared, so read only.
        unsafe { self.get(task, 0).as_ref() }
    }
}
