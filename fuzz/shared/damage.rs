//! Runs an input and damaged variants of it in ordinary tests, in place of a fuzzer: unchanged, truncated, and with
//! bytes changed.

/// Values that bytes are changed to.
const VALUES: [u8; 3] = [0, 1, 0xff];
/// Approximate maximum number of variants of an input.
const MOST: usize = 300;

/// Runs `check` on an input and on variants of it. If `HEAPBPF_FUZZ_CORPUS` names a directory, also writes the input to
/// `<directory>/<target>`, as a starting point for a fuzzer.
pub fn replay(target: &str, name: &str, input: &[u8], check: impl Fn(&[u8])) {
    if let Some(dir) = std::env::var_os("HEAPBPF_FUZZ_CORPUS") {
        let dir = std::path::Path::new(&dir).join(target);
        std::fs::create_dir_all(&dir).expect("a directory for inputs");
        std::fs::write(dir.join(name), input).expect("a file for an input");
    }
    check(input);
    let step = (input.len() * VALUES.len()).div_ceil(MOST).max(1);
    for at in (0..input.len()).step_by(step) {
        let mut changed = input.to_vec();
        for value in VALUES.into_iter().chain([input[at].wrapping_add(1)]) {
            changed[at] = value;
            check(&changed);
        }
        check(&input[..at]);
    }
    // Words that are not small numbers.
    for at in (0..input.len().saturating_sub(8)).step_by(8 * step) {
        let mut changed = input.to_vec();
        for word in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 32] {
            changed[at..at + 8].copy_from_slice(&word.to_le_bytes());
            check(&changed);
        }
    }
}
