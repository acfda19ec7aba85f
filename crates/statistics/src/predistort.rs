//! Pre-distortion for jemalloc's `heap_v2` format. Its reader unbiases the sums of each stack, so a writer of unbiased
//! sums has to apply the inverse first.

/// Figures of a stack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predistorted {
    /// Number of objects.
    pub objects: f64,
    /// Number of bytes.
    pub bytes: f64,
}

/// The figures to write so that `jeprof` reads the given unbiased totals of a stack. `jeprof` computes
/// x = bytes/objects and divides both by 1 − e^(−x/R); this multiplies both by that factor, which keeps x.
///
/// It is meant for the totals of a stack, not for single samples. Without objects or bytes the result is zero.
pub fn predistort(objects: f64, bytes: f64, interval: u64) -> Predistorted {
    if objects <= 0.0 || bytes <= 0.0 || interval == 0 {
        return Predistorted { objects: 0.0, bytes: 0.0 };
    }
    let factor = -(-(bytes / objects) / interval as f64).exp_m1();
    Predistorted { objects: objects * factor, bytes: bytes * factor }
}

/// The unbiased totals that `jeprof` computes from the numbers of a line. It does not change a line without objects or
/// bytes.
pub fn jeprof_scales(objects: f64, bytes: f64, interval: u64) -> Predistorted {
    if objects == 0.0 || bytes == 0.0 {
        return Predistorted { objects, bytes };
    }
    let factor = -(-(bytes / objects) / interval as f64).exp_m1();
    Predistorted { objects: objects / factor, bytes: bytes / factor }
}
