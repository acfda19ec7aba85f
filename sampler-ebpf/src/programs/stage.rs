//! Programs that end early: built by `cargo xtask bench cost --stages` to measure what each stage of a hit costs, by leaving
//! out what comes after it. What is shipped is whole.

/// The stage after which a program ends, in a build that is made for measuring.
const LAST: Option<&str> = option_env!("HEAPBPF_STAGE");

/// Whether this build's programs end after that stage.
pub const fn is_last(stage: &str) -> bool {
    let Some(last) = LAST else { return false };
    let (stage, last) = (stage.as_bytes(), last.as_bytes());
    if stage.len() != last.len() {
        return false;
    }
    let mut i = 0;
    while i < stage.len() {
        if stage[i] != last[i] {
            return false;
        }
        i += 1;
    }
    true
}
