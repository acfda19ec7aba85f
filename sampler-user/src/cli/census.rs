//! `heapbpf census`: what is in use in running processes, by type and size.

use anyhow::Context as _;
use heapbpf_host::census;
use heapbpf_host::process::{Target, select};
use heapbpf_profile::escape::pretty_json;
use heapbpf_record::progress_line::during;
use heapbpf_symbols::demangle::Demangler;

use super::args::CensusArgs;
use super::compare::print;
use super::error::PlanError;
use super::values::CensusFormat;
use crate::view::TableOptions;
use crate::view::census::{Counted, Counts, table};

/// Counts and prints the result. Returns the exit status.
///
/// # Errors
/// A process does not exist or its heap cannot be read (what was counted in other processes is printed first), or the
/// output cannot be written.
pub fn run(args: &CensusArgs) -> anyhow::Result<u8> {
    let targets: Vec<Target> = args.pids.iter().map(|pid| Target::Pid(*pid)).collect();
    let processes = select(&targets).map_err(PlanError::from)?;
    let (demangler, mut counts, mut refused) = (Demangler::separate(), Counts::default(), None);
    for process in processes {
        let named = format!("{} ({})", process.comm, process.pid);
        let reading = named.clone();
        match during(move || format!("counting what is in use in {reading}"), || census::take(&process, args.limit)) {
            Ok(taken) => counts.processes.push(Counted::new(&process, taken, &demangler)),
            Err(why) => refused = refused.or_else(|| Some(PlanError::Blocked(format!("no census of {named}: {why}")))),
        }
    }
    if !counts.processes.is_empty() {
        print(&match args.format {
            CensusFormat::Json => pretty_json(&counts).context("cannot write the census as JSON")?,
            CensusFormat::Text => {
                let options = TableOptions { top: args.top, ..TableOptions::of_output(args.color) };
                let tables: Vec<String> = counts.processes.iter().map(|it| table(it, options)).collect();
                tables.join("\n")
            }
        })?;
    }
    refused.map_or(Ok(0), |refused| Err(refused.into()))
}
