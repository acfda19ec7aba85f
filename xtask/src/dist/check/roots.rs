//! A release in the roots of other systems: installed, run and removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::root;
use crate::context::Context;
use crate::dist::Release;
use crate::packages::{self, Package};
use crate::shell::{run_quietly, say};

/// A Debian system.
pub struct Suite {
    pub name: &'static str,
    /// Packages installed in addition to Debian's essential ones.
    packages: &'static [&'static str],
}

/// From the oldest that is available. The first has no systemd.
pub const SUITES: [Suite; 3] = [
    Suite { name: "bullseye", packages: &[] },
    Suite { name: "bookworm", packages: &["systemd"] },
    Suite { name: "trixie", packages: &["systemd"] },
];

/// Lists all files except those that dpkg and the system change by themselves.
const LIST: &str = "\
list() {
  find / -xdev \\( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /var/lib/dpkg -o -path /var/log \\
    -o -path /var/cache -o -path /run/systemd \\) -prune -o -print | sort
}
";

const INSTALL: &str = "\
list > /tmp/before
dpkg -i /tmp/heapbpf.deb
test -z \"$(dpkg --verify heapbpf)\"
";

/// What heapbpf must do wherever it is installed.
const RUN: &str = "\
heapbpf --version
heapbpf doctor
";

/// perl is the only program on every Debian system that shows which of its functions allocates.
const RECORD_PERL: &str = "\
heapbpf -i 1 -o /tmp/x.json -- perl -e 'my @a; push @a, \"x\" x 1000 for 1..5000'
heapbpf report /tmp/x.json
";

const RECORD_LEAK: &str = "\
/usr/local/bin/leak > /dev/null &
heapbpf --pid $! -i 64KiB --duration 2s -o /tmp/x.json
kill $!
heapbpf report /tmp/x.json
";

/// The unit is disabled after installation. State, and the administrator's choice to enable the unit, are gone after
/// the package is purged.
const REMOVE: &str = "\
gzip --test /usr/share/man/man1/heapbpf.1.gz /usr/share/doc/heapbpf/*.gz
if command -v systemctl; then
  test \"$(systemctl is-enabled heapbpf.service)\" = disabled
  systemd-analyze verify /usr/lib/systemd/system/heapbpf.service
  systemctl enable heapbpf.service
  test -e /etc/systemd/system/multi-user.target.wants/heapbpf.service
fi
dpkg -i /tmp/heapbpf.deb
mkdir -p /var/lib/heapbpf/spool
touch /var/lib/heapbpf/spool/profile
dpkg --remove heapbpf
test ! -e /usr/bin/heapbpf
test -e /etc/default/heapbpf
test -e /var/lib/heapbpf/spool/profile
dpkg --purge heapbpf
list > /tmp/after
diff /tmp/before /tmp/after
";

/// Installs the package in a Debian root, records there, and purges the package.
pub fn debian(context: &Context, release: &Release, suite: &Suite) -> anyhow::Result<()> {
    let dir = release.work().join("root");
    root::copy(context, &root::debian(context, suite.name, suite.packages)?, &dir)?;
    root::add(context, &release.package(), &dir, "tmp/heapbpf.deb")?;
    let said = root::run(context, &dir, &[LIST, INSTALL, RUN, RECORD_PERL, REMOVE].concat())?;
    expect(release, &said, "Perl_")?;
    root::remove(context, &dir)
}

/// Unpacks the tarball in a root without glibc, and records a program there that uses musl.
pub fn musl(context: &Context, release: &Release, alpine: Option<&Path>) -> anyhow::Result<()> {
    let dir = release.work().join("root");
    match alpine {
        Some(given) => root::copy(context, given, &dir)?,
        None => {
            say!("no root of Alpine was given (--alpine): busybox and musl from Debian stand in for it");
            root::remove(context, &dir)?;
            stand_in(context, release, &dir)?;
        }
    }
    root::add(context, &leak(context, release)?, &dir, "usr/local/bin/leak")?;
    root::add(context, &release.tarball(), &dir, "tmp/heapbpf.tar.gz")?;
    let unpack =
        "tar -xzf /tmp/heapbpf.tar.gz -C /usr/local --strip-components=1\ntest ! -e /lib/x86_64-linux-gnu/libc.so.6\n";
    let said = root::run(context, &dir, &[unpack, RUN, RECORD_LEAK].concat())?;
    expect(release, &said, "cache_insert")?;
    root::remove(context, &dir)
}

fn expect(release: &Release, said: &str, name: &str) -> anyhow::Result<()> {
    for expected in [format!("heapbpf {}", release.version).as_str(), "COUNTED EXACTLY", name] {
        ensure!(said.contains(expected), "{expected:?} is not in what was said:\n{said}");
    }
    Ok(())
}

/// Creates a root with a shell and the musl library, and nothing else.
fn stand_in(context: &Context, release: &Release, dir: &Path) -> anyhow::Result<()> {
    let downloads = release.work().join("downloads");
    fs::create_dir_all(&downloads)?;
    let names = ["busybox-static", "musl"];
    let mut download = Command::new("apt-get");
    // apt's own user, which otherwise downloads, may not write here.
    download.args(["download", "-o", "APT::Sandbox::User=root"]).args(names).current_dir(&downloads);
    run_quietly(&mut download, context.options.verbose)?;
    for entry in downloads.read_dir()? {
        let mut unpack = context.privilege.command("unpack a package", "dpkg-deb", [])?;
        run_quietly(unpack.arg("--extract").arg(entry?.path()).arg(dir), context.options.verbose)?;
    }
    for name in ["dev", "proc", "run", "sys", "tmp", "root", "etc", "usr/local"] {
        let mut make = context.privilege.command("make a directory", "mkdir", [])?;
        run_quietly(make.arg("-p").arg(dir.join(name)), context.options.verbose)?;
    }
    let mut commands = context.privilege.command("run busybox in a root", "chroot", [])?;
    commands.arg(dir).args(["/bin/busybox", "--install", "/bin"]);
    run_quietly(&mut commands, context.options.verbose)
}

/// Compiles a leaking program, linked with musl.
fn leak(context: &Context, release: &Release) -> anyhow::Result<PathBuf> {
    packages::install(context, &[Package::new("musl-tools", "compiles a program for the root with musl")])?;
    let program = release.work().join("leak-musl");
    let mut compile = Command::new("musl-gcc");
    compile.args(["-O2", "-g", "-D_GNU_SOURCE", "-pthread", "-o"]).arg(&program);
    compile.arg(context.root.join("tests/programs/leak.c"));
    run_quietly(&mut compile, context.options.verbose).context("musl-gcc failed")?;
    Ok(program)
}
