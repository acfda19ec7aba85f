//! Derives containers, pods and systemd units from the paths of control groups.
//!
//! No container engine is asked. The names that engines give to groups are the one interface that all engines share.
//! Names that do not match are ignored, because a process may name groups below its own as it likes. So a container's
//! root user can choose what is reported here for its own processes, but only within the length that the kernel allows
//! for a name.

use heapbpf_profile::model::Placement;

/// Length of the container IDs of docker, containerd, CRI-O and podman, in hexadecimal digits.
const ID_DIGITS: usize = 64;
/// Positions of the hyphens in a UUID.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];
/// Types of systemd units that processes run in, except slices, which every unit is in.
const UNIT_TYPES: [&str; 5] = [".service", ".scope", ".socket", ".mount", ".swap"];

/// What a process runs in, from the text of its `/proc/PID/cgroup`. With control groups of both versions, version 2
/// comes first, then systemd's own hierarchy, then the others. The first one that yields a value is used.
#[must_use]
pub fn of_process(text: &str) -> Placement {
    let mut groups: Vec<(&str, &str)> = text.lines().filter_map(group).collect();
    groups.sort_by_key(|(controllers, _)| match *controllers {
        "" => 0,
        "name=systemd" => 1,
        _ => 2,
    });
    let mut all = Placement::default();
    for (_, path) in groups {
        let found = of_path(path);
        for (own, found) in
            [(&mut all.container, found.container), (&mut all.pod, found.pod), (&mut all.unit, found.unit)]
        {
            if own.is_empty() {
                *own = found;
            }
        }
    }
    all
}

/// Returns the controllers and the path of a line `ID:CONTROLLERS:PATH`. The path may contain colons.
fn group(line: &str) -> Option<(&str, &str)> {
    let (_, rest) = line.split_once(':')?;
    let (controllers, path) = rest.split_once(':')?;
    Some((controllers, path.strip_suffix(" (deleted)").unwrap_or(path)))
}

/// What processes of the control group with this path run in.
#[must_use]
pub fn of_path(path: &str) -> Placement {
    let mut found = Placement::default();
    let mut parent = "";
    // The innermost of each kind counts, because containers may run in containers.
    for name in path.split('/') {
        if let Some(id) = container(name, parent) {
            found.container = id.to_owned();
        }
        if let Some(uid) = pod(name) {
            found.pod = uid;
        }
        if let Some(unit) = unit(name) {
            found.unit = unit.to_owned();
        }
        parent = name;
    }
    found
}

/// The container whose control group has this name: `ID`, `docker-ID.scope`, `cri-containerd-ID.scope`,
/// `crio-ID.scope`, `libpod-ID.scope`, `kubepods-….slice:cri-containerd:ID`. The groups of container monitors
/// (`conmon`) do not count.
pub fn container<'a>(name: &'a str, parent: &str) -> Option<&'a str> {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let (engine, id) = name.rsplit_once([':', '-']).map_or(("", name), |(engine, id)| (engine, id));
    // A podman pod has a group with an ID, too.
    if id.len() == ID_DIGITS && is_hexadecimal(id) && !engine.ends_with("conmon") && !engine.contains("_pod") {
        return Some(id);
    }
    // Fargate: `/ecs/TASK/TASK-NUMBER`. The task has no hyphens.
    let is_number = (1..=10).contains(&id.len()) && id.bytes().all(|digit| digit.is_ascii_digit());
    (is_number && !engine.is_empty() && engine == parent && engine.len() == 32 && is_hexadecimal(engine))
        .then_some(name)
}

/// The pod whose control group has this name: `podUID`, or `kubepods-QUALITY-podUID.slice` with underscores in place of
/// the hyphens of the UID.
fn pod(name: &str) -> Option<String> {
    let name = name.split_once(':').map_or(name, |(slice, _)| slice);
    let uid = match name.strip_suffix(".slice") {
        Some(slice) => {
            let (above, uid) = slice.rsplit_once("-pod")?;
            above.split('-').any(|part| part == "kubepods").then_some(uid)?
        }
        None => name.strip_prefix("pod")?,
    };
    let uid = uid.replace('_', "-");
    // The UID of a static pod is a hash, without hyphens.
    let is_hash = uid.len() == 32 && is_hexadecimal(&uid);
    (is_hash || is_uuid(&uid)).then_some(uid)
}

fn unit(name: &str) -> Option<&str> {
    // systemd puts an underscore before names that the kernel uses itself.
    let name = name.strip_prefix('_').unwrap_or(name);
    let is_unit = UNIT_TYPES.iter().any(|kind| name.strip_suffix(kind).is_some_and(|stem| !stem.is_empty()));
    is_unit.then_some(name)
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(at, byte)| match byte {
            b'-' => HYPHENS.contains(&at),
            _ => !HYPHENS.contains(&at) && matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "3f5c1b0a9e8d7c6b5a4f3e2d1c0b9a8f7e6d5c4b3a291807f6e5d4c3b2a19081";
    const OTHER: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    const UID: &str = "2c48913c-b29f-11e7-9350-020968147796";
    const HASH: &str = "b2a1f0c9d8e7f6a5b4c3d2e1f0a9b8c7";
    const TASK: &str = "447438d1540c4a0ba84d3d3e8a7a1c5f";

    /// A path with `ID`, `OTHER`, `UID`, `U_I_D`, `HASH` and `TASK` filled in.
    fn filled(path: &str) -> String {
        path.replace("U_I_D", &UID.replace('-', "_"))
            .replace("UID", UID)
            .replace("OTHER", OTHER)
            .replace("HASH", HASH)
            .replace("TASK", TASK)
            .replace("ID", ID)
    }

    #[test]
    fn paths_of_engines() {
        let table = [
            // Docker: systemd's driver, its own driver, inside another container.
            ("/system.slice/docker-ID.scope", "ID", "", "docker-ID.scope"),
            ("/docker/ID", "ID", "", ""),
            ("/docker/OTHER/docker/ID", "ID", "", ""),
            ("/system.slice/docker-OTHER.scope/system.slice/nginx.service", "OTHER", "", "nginx.service"),
            ("/../docker-ID.scope", "ID", "", "docker-ID.scope"),
            ("/system.slice/docker.service", "", "", "docker.service"),
            ("/user.slice/user-1000.slice/user@1000.service/user.slice/docker-ID.scope", "ID", "", "docker-ID.scope"),
            // Podman: with and without root, its monitors, its pods.
            ("/machine.slice/libpod-ID.scope", "ID", "", "libpod-ID.scope"),
            ("/machine.slice/libpod-ID.scope/container", "ID", "", "libpod-ID.scope"),
            ("/machine.slice/libpod-conmon-ID.scope", "", "", "libpod-conmon-ID.scope"),
            (
                "/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope/container",
                "ID",
                "",
                "libpod-ID.scope",
            ),
            ("/machine.slice/machine-libpod_pod_OTHER.slice/libpod-ID.scope", "ID", "", "libpod-ID.scope"),
            ("/machine.slice/machine-libpod_pod_OTHER.slice", "", "", ""),
            ("/libpod_parent/libpod-ID", "ID", "", ""),
            ("/libpod_parent/conmon", "", "", ""),
            ("/libpod_parent/libpod-conmon-ID", "", "", ""),
            // containerd by itself.
            ("/default/ID", "ID", "", ""),
            ("/system.slice/nerdctl-ID.scope", "ID", "", "nerdctl-ID.scope"),
            // Kubernetes: systemd's driver with containerd, CRI-O and docker; quality classes; static pods.
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podU_I_D.slice/cri-containerd-ID.scope",
                "ID",
                "UID",
                "cri-containerd-ID.scope",
            ),
            ("/kubepods.slice/kubepods-podU_I_D.slice/crio-ID.scope", "ID", "UID", "crio-ID.scope"),
            ("/kubepods.slice/kubepods-podU_I_D.slice/crio-ID.scope/container", "ID", "UID", "crio-ID.scope"),
            ("/kubepods.slice/kubepods-podU_I_D.slice/crio-conmon-ID.scope", "", "UID", "crio-conmon-ID.scope"),
            (
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-podU_I_D.slice/docker-ID.scope",
                "ID",
                "UID",
                "docker-ID.scope",
            ),
            (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podHASH.slice/cri-containerd-ID.scope",
                "ID",
                "HASH",
                "cri-containerd-ID.scope",
            ),
            // The same with the kubelet's own driver.
            ("/kubepods/burstable/podUID/ID", "ID", "UID", ""),
            ("/kubepods/podUID/ID", "ID", "UID", ""),
            ("/kubepods/besteffort/podUID/crio-ID", "ID", "UID", ""),
            ("/kubepods/burstable/podHASH/ID", "ID", "HASH", ""),
            ("/docker/OTHER/kubepods/podUID/ID", "ID", "UID", ""),
            // Kind's nodes, and containerd with a different driver than the kubelet.
            (
                "/docker/OTHER/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-podU_I_D.slice/cri-containerd-ID.scope",
                "ID",
                "UID",
                "cri-containerd-ID.scope",
            ),
            (
                "/system.slice/containerd.service/kubepods-besteffort-podU_I_D.slice:cri-containerd:ID",
                "ID",
                "UID",
                "containerd.service",
            ),
            ("/system.slice/kubepods-burstable-podU_I_D.slice:cri-containerd:ID", "ID", "UID", ""),
            // Amazon's ECS, on instances and on Fargate.
            ("/ecs/03752a671e744971a862edcee6195646/ID", "ID", "", ""),
            ("/ecs/TASK/TASK-4001061711", "TASK-4001061711", "", ""),
        ];
        for (path, container, pod, unit) in table {
            let [container, pod, unit] = [container, pod, unit].map(filled);
            assert_eq!(of_path(&filled(path)), Placement { container, pod, unit }, "{path}");
        }
    }

    #[test]
    fn paths_of_systemd() {
        let table = [
            ("/system.slice/nginx.service", "nginx.service"),
            ("/system.slice/system-getty.slice/getty@tty1.service", "getty@tty1.service"),
            ("/system.slice/system-postgresql.slice/postgresql@15-main.service", "postgresql@15-main.service"),
            ("/system.slice/dev-hugepages.mount", "dev-hugepages.mount"),
            ("/system.slice/systemd-udevd.service/udev", "systemd-udevd.service"),
            ("/system.slice/_cgroup.service", "cgroup.service"),
            ("/system.slice/foo\\x2dbar.service", "foo\\x2dbar.service"),
            ("/init.scope", "init.scope"),
            ("/user.slice/user-1000.slice/session-3.scope", "session-3.scope"),
            (
                "/user.slice/user-1000.slice/user@1000.service/app.slice/app-firefox-2912.scope",
                "app-firefox-2912.scope",
            ),
            ("/user.slice/user-1000.slice/user@1000.service/init.scope", "init.scope"),
            ("/machine.slice/systemd-nspawn@web.service/payload", "systemd-nspawn@web.service"),
            ("/user.slice/user-1000.slice", ""),
            ("/", ""),
            ("", ""),
        ];
        for (path, unit) in table {
            assert_eq!(of_path(path), Placement { unit: unit.into(), ..Placement::default() }, "{path}");
        }
    }

    #[test]
    fn names_that_only_look_alike_are_none() {
        for path in [
            "/docker/3f5c1b0a9e8d",
            "/docker/3F5C1B0A9E8D7C6B5A4F3E2D1C0B9A8F7E6D5C4B3A291807F6E5D4C3B2A19081",
            "/kubepods/pod",
            "/kubepods/pod2c48913c-b29f-11e7-9350-02096814779",
            "/kubepods/pod2c48913cb-29f-11e7-9350-020968147796",
            "/kubepods.slice/kubepods-burstable.slice",
            "/mine.slice/mine-pod2c48913c_b29f_11e7_9350_020968147796.slice",
            "/ecs/447438d1540c4a0ba84d3d3e8a7a1c5f/03752a671e744971a862edcee6195646-1",
            "/.service/.scope/_.service",
            "/a b/\u{1b}[2J/::/-",
        ] {
            assert_eq!(of_path(path), Placement::default(), "{path}");
        }
    }

    #[test]
    fn both_versions() {
        // Version 1, as docker and a kubelet with their own drivers set it up.
        let old = filled("11:cpuset:/docker/ID\n4:memory:/docker/ID\n1:name=systemd:/docker/ID\n");
        assert_eq!(of_process(&old).container, ID);
        let old = filled("12:pids:/kubepods/burstable/podUID/ID\n1:name=systemd:/kubepods/burstable/podUID/ID\n");
        assert_eq!((of_process(&old).container, of_process(&old).pod), (ID.into(), UID.into()));
        // Hybrid: version 2 gives the unit, version 1 the container.
        let hybrid = filled("5:memory:/docker/ID\n1:name=systemd:/docker/ID\n0::/system.slice/containerd.service\n");
        let Placement { container, unit, .. } = of_process(&hybrid);
        assert_eq!((container.as_str(), unit.as_str()), (ID, "containerd.service"));
        // If both give a value, version 2 wins.
        let twice = "3:cpu:/system.slice/a.service\n0::/system.slice/b.service (deleted)\n";
        assert_eq!(of_process(twice).unit, "b.service");
        let order = "3:cpu:/system.slice/a.service\n1:name=systemd:/system.slice/b.service\n";
        assert_eq!(of_process(order).unit, "b.service");
        let colons = filled("1:name=systemd:/system.slice/kubepods-burstable-podU_I_D.slice:cri-containerd:ID\n");
        assert_eq!((of_process(&colons).container, of_process(&colons).pod), (ID.into(), UID.into()));
        for none in ["", "0::/\n", "nonsense", "0:", ":::", "\n\n"] {
            assert_eq!(of_process(none), Placement::default(), "{none:?}");
        }
    }
}
