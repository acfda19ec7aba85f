//! Descriptions of allocators, as `--alloc` takes them.

use heapbpf_probes::CustomAllocator;

/// Checks a description: it is accepted, or refused with the place of the error.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<CustomAllocator>() {
        Ok(taken) => {
            assert!(!taken.file.is_empty() && text.starts_with(&taken.file) && taken.is_for(&taken.file));
            assert!(
                !taken.functions.is_empty() && taken.functions.iter().all(|function| text.contains(&function.symbol))
            );
        }
        Err(refused) => {
            let said = refused.to_string();
            let (_, place) = said.rsplit_once(" at character ").expect("it says where");
            let place = place.split(';').next().and_then(|place| place.parse::<usize>().ok()).expect("a number");
            assert!((1..=text.chars().count() + 1).contains(&place), "{said}");
        }
    }
}
