//! Decides what depends on the kernel's release, where the kernel itself does not report it.

/// The first release with `bpf_loop`.
const LOOPS: (u32, u32) = (5, 17);
/// The first release whose programs at tracepoints may be preempted (commits f7d327654b88 and a46023d5616e).
const PREEMPTS_TRACEPOINTS: (u32, u32) = (7, 0);
/// The first release that reports an exit before the process loses its memory.
const EXITS_WITH_MEMORY: (u32, u32) = (6, 16);

/// The kernel's release, as `uname -r` prints it. Empty if it cannot be read.
pub fn current() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Whether a release is older than the first with `bpf_loop`.
pub fn is_before_loops(release: &str) -> bool {
    version_of(release).is_some_and(|version| version < LOOPS)
}

/// Whether programs at tracepoints may be preempted. `true` if the release is not understood.
pub fn preempts_tracepoints(release: &str) -> bool {
    version_of(release).is_none_or(|version| version >= PREEMPTS_TRACEPOINTS)
}

/// Whether a process still has its memory when its exit is reported. `false` if the release is not understood.
pub fn exits_with_memory(release: &str) -> bool {
    version_of(release).is_some_and(|version| version >= EXITS_WITH_MEMORY)
}

/// The first two numbers of a release.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|digits| digits.parse::<u32>().ok());
    Some((numbers.next()?, numbers.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_before_5_17_are_too_old() {
        for release in ["5.10.0-46-cloud-amd64", "5.16", "4.19.0", "5.4.0-42-generic\n"] {
            assert!(is_before_loops(release), "{release}");
        }
        for release in ["5.17.0", "6.1.0-56-cloud-amd64", "10.0", "", "next"] {
            assert!(!is_before_loops(release), "{release}");
        }
    }

    #[test]
    fn exits_are_reported_with_memory_since_6_16() {
        let with = |releases: &[&str]| releases.iter().filter(|release| exits_with_memory(release)).count();
        assert_eq!(with(&["6.12.48+deb13-amd64", "6.15", "5.17.0", "", "next"]), 0);
        assert_eq!(with(&["6.16.0-rc1", "6.18.44-cloud", "7.0"]), 3);
    }

    #[test]
    fn programs_may_be_preempted_since_7_0() {
        for release in ["6.18.44-cloud", "5.17.0-9-amd64"] {
            assert!(!preempts_tracepoints(release), "{release}");
        }
        for release in ["7.0.0-rc1", "7.3.4+deb13", "10.0", ""] {
            assert!(preempts_tracepoints(release), "{release}");
        }
    }
}
