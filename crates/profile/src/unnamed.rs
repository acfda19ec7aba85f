//! Modules whose functions have no names, and the reasons.

use crate::intern::Interned;
use crate::model::{Module, Profile};

/// Modules that have a reason for missing function names and contain frames without names, sorted by what was allocated
/// through such frames, in bytes.
pub fn modules(profile: &Profile) -> Vec<(&Module, f64)> {
    let has_reason = |index: usize| profile.modules.get(index).is_some_and(|module| module.reason.is_some());
    if !(0..profile.modules.len()).any(has_reason) {
        return Vec::new();
    }
    let interned = Interned::new(profile);
    let of_frame = |&id: &u32| {
        let frame = interned.frames[id as usize];
        frame.module.filter(|&module| frame.function.is_none() && has_reason(module))
    };
    let of_stack: Vec<Vec<usize>> = (0..interned.stacks.len() as u32)
        .map(|stack| {
            let mut modules: Vec<usize> = interned.frame_ids(stack).iter().filter_map(of_frame).collect();
            modules.sort_unstable();
            modules.dedup();
            modules
        })
        .collect();
    let mut bytes: Vec<Option<f64>> = vec![None; profile.modules.len()];
    for (row, &stack) in profile.rows.iter().zip(&interned.stack_of_row) {
        of_stack[stack as usize].iter().for_each(|&module| *bytes[module].get_or_insert(0.0) += row.alloc.bytes);
    }
    let mut found: Vec<(usize, f64)> =
        bytes.iter().enumerate().filter_map(|(at, bytes)| Some((at, (*bytes)?))).collect();
    found.sort_by(|one, other| other.1.total_cmp(&one.1));
    found.into_iter().map(|(index, bytes)| (&profile.modules[index], bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{ReportOptions, report};
    use crate::testing;

    #[test]
    fn modules_with_a_reason_and_frames_without_a_name_are_told_once() {
        let mut profile = testing::small();
        assert!(modules(&profile).is_empty(), "no module has a reason");
        for module in &mut profile.modules {
            module.reason = Some(format!("{} is stripped", module.path).into());
        }
        let paths =
            |profile: &Profile| modules(profile).iter().map(|(module, _)| module.path.to_string()).collect::<Vec<_>>();
        assert_eq!(paths(&profile), ["/srv/lib/libjson.so"], "all functions of the other one have names");
        let text = report(&profile, &ReportOptions::default());
        assert_eq!(text.matches("/srv/lib/libjson.so is stripped").count(), 1, "{text}");
        assert!(!text.contains("server is stripped"), "{text}");
    }
}
