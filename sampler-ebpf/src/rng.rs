//! Random numbers for the draws: xorshift64*, one word of state per thread.
//!
//! Every value but zero appears once in the period of 2^64 − 1, so the draws have the distribution of an ideal uniform
//! number. Threads get different seeds through splitmix64's mixing function. None of this is cryptographically secure.

/// Advances the state and returns 64 random bits. The state must not be 0; [`seed`] never gives 0.
#[inline(always)]
pub fn next(state: &mut u64) -> u64 {
    let mut x = *state;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    x.wrapping_mul(0x2545_f491_4f6c_dd1d)
}

/// The initial state of thread number `ordinal` in a recording with this seed; never 0.
#[inline(always)]
pub fn seed(recording_seed: u64, ordinal: u64) -> u64 {
    let mixed = mix(mix(recording_seed).wrapping_add(ordinal));
    if mixed == 0 { 1 } else { mixed }
}

/// splitmix64's step: a bijection in which every input bit affects every output bit.
#[inline(always)]
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_splitmix64() {
        // The first outputs of the reference generator started at 0 (its state advances by the golden ratio).
        assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(mix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn threads_differ_and_zero_is_avoided() {
        let mut states: Vec<u64> = (0..10_000).map(|ordinal| seed(42, ordinal)).collect();
        states.sort_unstable();
        states.dedup();
        assert_eq!(states.len(), 10_000);
        assert!(states.iter().all(|&state| state != 0));
        assert_ne!(seed(1, 0), seed(2, 0));
    }

    /// Tests the bits of one thread and the first outputs of many threads. The number of ones in n bits must be n/2 ± 5
    /// σ, where σ = √n / 2. The false alarm rate would be 6e-7 each, but the seeds are fixed, so the result never
    /// changes.
    #[test]
    fn bits_are_balanced() {
        let n = 100_000u64;
        let mut one_thread = seed(7, 0);
        for bit in 0..64 {
            let mut along = 0u64;
            let mut across = 0u64;
            for i in 0..n {
                along += next(&mut one_thread) >> bit & 1;
                across += next(&mut seed(7, i)) >> bit & 1;
            }
            for ones in [along, across] {
                let sigmas = (ones as f64 - n as f64 / 2.0) / ((n as f64).sqrt() / 2.0);
                assert!(sigmas.abs() < 5.0, "bit {bit}: {sigmas}");
            }
        }
    }
}
