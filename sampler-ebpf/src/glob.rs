//! Matches a process name against a shell pattern in a bounded number of steps, because it also runs in the kernel.

/// The longest name, including its final NUL: the kernel's `TASK_COMM_LEN`.
pub const NAME_BYTES: usize = 16;

/// Whether `name` matches `pattern`, where `*` stands for any run of bytes and `?` for any one byte. Both end at their
/// first NUL.
///
/// A pattern that starts with NUL matches nothing.
#[inline(always)]
#[must_use]
pub fn matches(pattern: &[u8; NAME_BYTES], name: &[u8; NAME_BYTES]) -> bool {
    if pattern[0] == 0 {
        return false;
    }
    // The reachable positions in the pattern after each byte of the name, as a bit set. This avoids backtracking.
    let mut reached = after_stars(1, pattern);
    let mut i = 0;
    while i < NAME_BYTES && name[i] != 0 {
        let mut next = 0_u32;
        let mut p = 0;
        while p < NAME_BYTES {
            if reached & (1 << p) != 0 {
                let wanted = pattern[p];
                if wanted == b'*' {
                    next |= 1 << p;
                } else if wanted != 0 && (wanted == b'?' || wanted == name[i]) {
                    next |= 1 << (p + 1);
                }
            }
            p += 1;
        }
        reached = after_stars(next, pattern);
        i += 1;
    }
    let mut p = 0;
    while p < NAME_BYTES {
        if pattern[p] == 0 {
            return reached & (1 << p) != 0;
        }
        p += 1;
    }
    reached & (1 << NAME_BYTES) != 0
}

/// A star also matches nothing, so the position after it is reachable too.
#[inline(always)]
fn after_stars(mut reached: u32, pattern: &[u8; NAME_BYTES]) -> u32 {
    let mut p = 0;
    while p < NAME_BYTES {
        if reached & (1 << p) != 0 && pattern[p] == b'*' {
            reached |= 1 << (p + 1);
        }
        p += 1;
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    fn padded(text: &str) -> [u8; NAME_BYTES] {
        let mut bytes = [0; NAME_BYTES];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        bytes
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("python3", "python3", true),
            ("python3", "python3.11", false),
            ("python*", "python3.11", true),
            ("*", "", true),
            ("*", "anything", true),
            ("?", "", false),
            ("?", "a", true),
            ("p?t*n", "python", true),
            ("p?t*n", "pytho", false),
            ("**n", "n", true),
            ("*a*b*c*", "xxaxxbxxcxx", true),
            ("*a*b*c*", "xxaxxcxxbxx", false),
            ("kworker/u4:0-ev", "kworker/u4:0-ev", true),
            ("aaaaaaaaaaaaaaaa", "aaaaaaaaaaaaaaa", false),
            ("", "", false),
            ("", "x", false),
        ] {
            assert_eq!(matches(&padded(pattern), &padded(name)), expected, "{pattern} against {name}");
        }
    }
}
