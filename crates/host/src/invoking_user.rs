//! The user who started heapbpf through sudo. Files that heapbpf creates belong to this user, and a command runs as
//! this user.

/// Ids of a user and of this user's group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvokingUser {
    /// User id, never root's.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// Returns the user who invoked sudo. `None` if heapbpf was not started through sudo, or if it is not root in every
/// respect: then anybody could have made up the environment.
pub fn invoking_user() -> Option<InvokingUser> {
    let (mut real, mut effective, mut saved) = (0, 0, 0);
    // SAFETY: the call writes to three local variables.
    let status = unsafe { libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved) };
    if status != 0 {
        return None;
    }
    let variable = |name: &str| std::env::var(name).ok();
    of([real, effective, saved], variable("SUDO_UID").as_deref(), variable("SUDO_GID").as_deref())
}

fn of(own: [u32; 3], uid: Option<&str>, gid: Option<&str>) -> Option<InvokingUser> {
    // The largest number means "unchanged" in chown(2) and setresuid(2).
    let number = |text: &str| {
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|number| is_number && *number != u32::MAX)
    };
    let user = InvokingUser { uid: number(uid?)?, gid: number(gid?)? };
    (own == [0; 3] && user.uid != 0).then_some(user)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_makes_sense_is_believed_and_only_by_root() {
        let somebody = Some(InvokingUser { uid: 1000, gid: 100 });
        assert_eq!(of([0; 3], Some("1000"), Some("100")), somebody);
        for (uid, gid) in [
            (None, None),
            (Some("1000"), None),
            (None, Some("100")),
            (Some("0"), Some("0")),
            (Some("4294967295"), Some("100")),
            (Some("1000"), Some("4294967295")),
            (Some("4294967296"), Some("100")),
            (Some("-1"), Some("100")),
            (Some("+1000"), Some("100")),
            (Some(""), Some("")),
            (Some("root"), Some("100")),
        ] {
            assert_eq!(of([0; 3], uid, gid), None, "{uid:?} {gid:?}");
        }
        // A set-user-id program gets whatever environment its user likes.
        for own in [[1000, 0, 0], [0, 1000, 0], [0, 0, 1000], [1000; 3]] {
            assert_eq!(of(own, Some("1001"), Some("100")), None, "{own:?}");
        }
    }
}
