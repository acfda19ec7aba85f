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
    fn releases_are_compared_by_their_first_two_numbers() {
        // Before bpf_loop, exits with memory, preempts programs at tracepoints.
        for (release, expected) in [
            ("5.4.0-42-generic\n", [true, false, false]),
            ("5.10.0-46-cloud-amd64", [true, false, false]),
            ("5.16", [true, false, false]),
            ("5.17.0-9-amd64", [false, false, false]),
            ("6.15", [false, false, false]),
            ("6.16.0-rc1", [false, true, false]),
            ("7.0.0-rc1", [false, true, true]),
            ("10.0", [false, true, true]),
            ("", [false, false, true]),
            ("next", [false, false, true]),
        ] {
            let found = [is_before_loops(release), exits_with_memory(release), preempts_tracepoints(release)];
            assert_eq!(found, expected, "{release}");
        }
    }
}
