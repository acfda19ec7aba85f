//! Making jemalloc's `heap_v2` tell the truth: its reader unbiases a stack's sum, so true sums are biased beforehand.

/// A stack's figures as `heap_v2` wants them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predistorted {
    /// Objects.
    pub objects: f64,
    /// Bytes.
    pub bytes: f64,
}

/// `jeprof` computes x = bytes/objects and divides both by 1 − e^(−x/R); this multiplies both by it, which leaves x as it
/// is. Takes the unbiased totals of a stack, never single samples. Nothing or no bytes gives zeros.
pub fn predistort(objects: f64, bytes: f64, interval: u64) -> Predistorted {
    if objects <= 0.0 || bytes <= 0.0 || interval == 0 {
        return Predistorted { objects: 0.0, bytes: 0.0 };
    }
    let factor = -(-(bytes / objects) / interval as f64).exp_m1();
    Predistorted { objects: objects * factor, bytes: bytes * factor }
}

/// What `jeprof` makes of a line's numbers; it leaves a line without objects as it is.
pub fn jeprof_scales(objects: f64, bytes: f64, interval: u64) -> Predistorted {
    if objects == 0.0 || bytes == 0.0 {
        return Predistorted { objects, bytes };
    }
    let factor = -(-(bytes / objects) / interval as f64).exp_m1();
    Predistorted { objects: objects / factor, bytes: bytes / factor }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let raw = predistort(1_000.0, 64_000.0, 524_288);
        let back = jeprof_scales(raw.objects, raw.bytes, 524_288);
        assert!((back.objects - 1_000.0).abs() < 1e-9 && (back.bytes - 64_000.0).abs() < 1e-7);
        assert_eq!(predistort(0.0, 5.0, 10), Predistorted { objects: 0.0, bytes: 0.0 });
        assert_eq!(jeprof_scales(0.0, 5.0, 10), Predistorted { objects: 0.0, bytes: 5.0 });
    }
}
