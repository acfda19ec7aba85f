//! Ablation: builds whose programs end after a given stage of a hit, to measure what each stage costs (`cargo xtask
//! bench cost --stages`). The shipped programs are complete.

/// The stage after which programs end, in a build made for measuring.
const LAST_STAGE: Option<&str> = option_env!("HEAPBPF_ABLATION");

/// Whether the programs of this build end after this stage.
pub const fn ends_after(stage: &str) -> bool {
    let Some(last) = LAST_STAGE else { return false };
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
