//! `heapbpf diff` and `heapbpf merge`.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use heapbpf_profile::diff::{self, DiffOptions};
use heapbpf_profile::escape::pretty_json;
use heapbpf_profile::formats::{FormatError, WriteOptions};
use heapbpf_profile::merge;
use heapbpf_profile::page;
use heapbpf_profile::value::Value;
use heapbpf_record::output::Output;
use heapbpf_record::progress_line::during;

use super::error::PlanError;
use super::pictures::write_bytes;
use super::read_args::{DiffArgs, MergeArgs};
use super::values::OutputFile;
use super::{frames, profiles};
use crate::view::TableOptions;
use crate::view::diff::table;

/// Shows what grew between two profiles.
///
/// # Errors
/// A file cannot be read or is not a profile.
pub fn diff(args: &DiffArgs) -> anyhow::Result<u8> {
    let products = args.outputs.iter().map(|file| product(file, args)).collect::<Result<Vec<_>, _>>()?;
    let (before, after) = (profiles::open(&args.before)?, profiles::open(&args.after)?);
    let frames = frames::view(args.frames)?;
    let mut options = DiffOptions { confidence: args.confidence, frames, ..DiffOptions::default() };
    options.exposure = args.per.unwrap_or(options.exposure);
    options.values.extend(args.value);
    if let Some(group_by) = args.group_by {
        options.group_by = group_by;
    }
    let diff = during(|| "comparing".into(), || diff::diff(&before, &after, &options));
    let as_json = || pretty_json(&diff).context("cannot write the comparison as JSON");
    let as_text = |of: TableOptions| table(&diff, &TableOptions { top: args.top, stacks: args.stacks, ..of });
    for (path, product) in &products {
        let bytes = match product {
            Product::Json => as_json()?.into_bytes(),
            Product::Csv => diff::csv(&diff, args.stacks).context("cannot write the comparison as CSV")?,
            Product::Page => {
                let growth = page::growth_data(&before, &after, args.confidence, frames);
                let DiffArgs { confidence, group_by, .. } = *args;
                let write = WriteOptions { value: None, confidence, group_by, frames };
                let data = page::page_data(&after, Value::InuseSpace, &write);
                let text = as_text(TableOptions { width: 130, ..TableOptions::default() });
                page::static_page(&data, &text, Some(&growth)).context("cannot write the page")?.into_bytes()
            }
        };
        write_bytes(path, args.force, &bytes)?;
    }
    if !products.is_empty() {
        return Ok(0);
    }
    print(&if args.json { as_json()? } else { as_text(TableOptions::of_output(args.color)) })
}

/// How a comparison is written.
enum Product {
    Json,
    Csv,
    /// The second profile's web page, with what grew since the first.
    Page,
}

/// Checks an output file. Returns its path and what to write to it.
fn product<'a>(file: &'a OutputFile, args: &DiffArgs) -> Result<(&'a Path, Product), PlanError> {
    let path = file.path.as_path();
    let format = file.format(None).map_err(|error| match error {
        FormatError::UnknownExtension { name, .. } => {
            PlanError::Usage(format!("{name}: write -o json:{name}; a comparison can be written as html, csv or json"))
        }
        error => error.into(),
    })?;
    Output::new(path, format, args.force).check()?;
    let product = match format.name() {
        "json" => Product::Json,
        "csv" => Product::Csv,
        "html" if args.value.is_none_or(|value| value == Value::InuseSpace) => Product::Page,
        "html" => {
            let text = "the page always compares bytes in use: leave out --value, or write csv or json".to_owned();
            return Err(PlanError::Usage(text));
        }
        name => {
            let text = format!("a comparison can be written as html, csv or json; {name} holds only one profile");
            return Err(PlanError::Usage(text));
        }
    };
    Ok((path, product))
}

/// Adds up profiles.
///
/// # Errors
/// A file cannot be read, the profiles do not match, or the sum cannot be written.
pub fn merge(args: &MergeArgs) -> anyhow::Result<u8> {
    let format = args.output.format(args.format.as_deref()).map_err(PlanError::Format)?;
    let output = Output::new(&args.output.path, format, args.force);
    output.check()?;
    let inputs = args.profiles.iter().map(|path| profiles::open(path)).collect::<Result<Vec<_>, _>>()?;
    let merged = during(|| format!("adding {} profiles", args.profiles.len()), || merge::merge(inputs))?;
    during(|| format!("writing {}", args.output.path.display()), || output.write(&merged, &WriteOptions::default()))?;
    Ok(0)
}

/// Writes to standard output. A reader that closes the pipe (`| head`) is not an error.
pub fn print(text: &str) -> anyhow::Result<u8> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(0),
        other => other.map(|()| 0).context("cannot write to standard output"),
    }
}
