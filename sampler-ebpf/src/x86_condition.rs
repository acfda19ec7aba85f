//! The conditions of x86-64's conditional jumps.

// Bits of the flags register.
const CARRY: u64 = 1;
const PARITY: u64 = 1 << 2;
const ZERO: u64 = 1 << 6;
const SIGN: u64 = 1 << 7;
const OVERFLOW: u64 = 1 << 11;

/// Whether a conditional jump is taken: `condition` is the low four bits of its opcode.
#[inline(always)]
#[must_use]
pub const fn holds(condition: u8, flags: u64) -> bool {
    let less = (flags & SIGN != 0) != (flags & OVERFLOW != 0);
    let positive = match condition >> 1 & 7 {
        0 => flags & OVERFLOW != 0,
        1 => flags & CARRY != 0,
        2 => flags & ZERO != 0,
        3 => flags & (CARRY | ZERO) != 0,
        4 => flags & SIGN != 0,
        5 => flags & PARITY != 0,
        6 => less,
        _ => less || flags & ZERO != 0,
    };
    positive == (condition & 1 == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The jumps by their condition, and the flags with which each is taken, from the instruction set's manual.
    #[test]
    fn each_condition_and_its_opposite() {
        let flags = |text: &str| -> u64 {
            let flag = |letter| match letter {
                'c' => CARRY,
                'p' => PARITY,
                'z' => ZERO,
                's' => SIGN,
                _ => OVERFLOW,
            };
            text.chars().map(flag).sum()
        };
        let cases: [(u8, &[&str], &[&str]); 8] = [
            (0x0, &["o", "co"], &["", "cpzs"]),
            (0x2, &["c"], &["", "pzso"]),
            (0x4, &["z"], &["", "cpso"]),
            (0x6, &["c", "z", "cz"], &["", "pso"]),
            (0x8, &["s"], &["", "cpzo"]),
            (0xa, &["p"], &["", "czso"]),
            (0xc, &["s", "o", "sz"], &["", "so", "c"]),
            (0xe, &["z", "s", "o", "zso"], &["", "so", "c"]),
        ];
        for (condition, taken, not_taken) in cases {
            for (given, expected) in
                taken.iter().map(|given| (given, true)).chain(not_taken.iter().map(|given| (given, false)))
            {
                assert_eq!(holds(condition, flags(given)), expected, "{condition:#x} {given}");
                assert_eq!(holds(condition | 1, flags(given)), !expected, "{condition:#x} | 1 {given}");
            }
        }
    }
}
