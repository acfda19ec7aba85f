//! Names of stacks in legends, and the identity of a stack across profiles.

use heapbpf_profile::escape::escaped;
use heapbpf_profile::report::StackFigures;

/// Maximum number of functions of a stack in its name.
const CALLS: usize = 4;

/// `cache_insert ← handle_request ← main`, with the group in front.
pub fn name(stack: &StackFigures) -> String {
    let mut calls: Vec<&str> = stack.calls.iter().take(CALLS).map(String::as_str).collect();
    if stack.calls.len() > CALLS {
        calls.push("…");
    }
    if calls.is_empty() {
        calls.push("[no stack]");
    }
    let group = if stack.group.is_empty() { String::new() } else { format!("{}: ", stack.group) };
    escaped(&format!("{group}{}", calls.join(" ← "))).into_owned()
}

/// What identifies a stack in all profiles of a recording.
pub fn identity(stack: &StackFigures) -> (&str, &[String], Option<&str>) {
    (&stack.group, &stack.calls, stack.cut.as_deref())
}
