//! Debian packages: finds those that are missing, and installs them after printing their names.

use std::process::Command;
use std::sync::Once;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::context::Context;
use crate::shell::{announce, on_path, read, run_quietly, say};

/// Returns why packages cannot be installed on this machine, as far as that is known before trying.
pub fn refusal(context: &Context) -> Option<&'static str> {
    if on_path("apt-get").is_none() { Some("there is no apt-get") } else { context.privilege.refusal() }
}

/// Installs packages, each with what heapbpf needs it for, after printing which and why. Never removes a package:
/// rustc-web, for example, conflicts with rustc.
pub fn install(context: &Context, packages: &[(&str, &str)]) -> anyhow::Result<()> {
    let missing: Vec<&(&str, &str)> = packages.iter().filter(|(name, _)| !is_installed(name)).collect();
    let names: Vec<&str> = missing.iter().map(|(name, _)| *name).collect();
    if names.is_empty() {
        return Ok(());
    }
    if let Some(reason) = refusal(context) {
        bail!("cannot install {}: {reason}", names.join(" "));
    }
    say!("installing Debian packages, which needs root:");
    for (name, purpose) in missing {
        say!("  {name}: {purpose}");
    }
    // One refresh is enough for all installations of one call.
    static UPDATED: Once = Once::new();
    UPDATED.call_once(|| update(context));
    let mut command = apt_get(context, &format!("install {}", names.join(" ")))?;
    command.args(["install", "--yes", "--no-install-recommends", "--no-remove"]).args(&names);
    run_quietly(&mut command, context.options.verbose)
        .with_context(|| format!("apt-get could not install {}", names.join(" ")))
}

fn is_installed(name: &str) -> bool {
    let query = read(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", name]));
    query.is_ok_and(|status| status.trim() == "installed")
}

/// Refreshes the package lists. A source that does not answer is not an error here: the installation reports what is
/// missing.
fn update(context: &Context) {
    // DPkg::Lock::Timeout does not cover the lock on the lists, so this waits up to ten minutes for another apt-get.
    const ATTEMPTS: u32 = 100;
    for _ in 0..ATTEMPTS {
        let result = apt_get(context, "update the lists of packages").and_then(|mut command| {
            command.arg("update");
            announce(&command, context.options.verbose);
            read(&mut command)
        });
        match result {
            Ok(_) => return,
            Err(error) if error.to_string().contains("Could not get lock") => sleep(Duration::from_secs(6)),
            Err(error) => return say!("apt-get update failed; using the existing package lists: {error:#}"),
        }
    }
    say!("another apt-get has the package lists locked; using the existing ones");
}

fn apt_get(context: &Context, purpose: &str) -> anyhow::Result<Command> {
    let variables = [("DEBIAN_FRONTEND", "noninteractive"), ("LC_ALL", "C")];
    let mut command = context.privilege.command(purpose, "apt-get", variables)?;
    command.args(["-o", "DPkg::Lock::Timeout=600", "-o", "Acquire::Retries=3"]);
    Ok(command)
}
