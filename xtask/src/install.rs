//! Installs heapbpf where `sudo heapbpf` finds it.

use crate::build;
use crate::context::Context;
use crate::shell::{run, say};

const DESTINATION: &str = "/usr/local/bin/heapbpf";

/// Builds and copies the binary. `install` replaces the file, so a running heapbpf keeps the old one.
pub fn install(context: &Context) -> anyhow::Result<()> {
    let binary = build::build(context)?;
    let mut command = context.privilege.command(&format!("write {DESTINATION}"), "install", [])?;
    run(command.args(["-D", "-m", "755"]).arg(&binary).arg(DESTINATION), context.options.verbose)?;
    say!("installed {DESTINATION}");
    Ok(())
}
