//! Ablation builds: their programs end after a given stage of a hit, or leave one out, to measure the cost of each
//! stage (`cargo xtask bench cost --stages`). The shipped programs are complete.

/// The stage after which the programs of this build end, or that they leave out. Only set in builds for measurements.
const ABLATION: Option<&str> = option_env!("HEAPBPF_ABLATION");

/// Whether the programs of this build end after this stage.
pub const fn ends_after(stage: &str) -> bool {
    is(stage)
}

/// Whether the programs of this build leave this stage out.
pub const fn leaves_out(stage: &str) -> bool {
    is(stage)
}

const fn is(stage: &str) -> bool {
    let Some(last) = ABLATION else { return false };
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
