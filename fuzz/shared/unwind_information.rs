//! Call frame information: every address of a module has a rule, in bounded time.

use heapbpf_unwind::cfi::{Budget, Context, ModuleCfi};

/// Checks a file.
pub fn check(data: &[u8]) {
    let data = data.to_vec();
    let Ok(module) = ModuleCfi::read(&data) else { return };
    let mut context = Context::new();
    for offset in (0..data.len() as u64).step_by(61) {
        let mut budget = Budget::of_one_stack();
        module.rule(&mut context, offset, true, &mut |_, _| false, &mut budget);
    }
}
