//! What `heapbpf report` writes instead of showing it: profiles in other formats, views as data, flame graphs, plots.
//! All of it is checked before a file is read.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context;
use heapbpf_plots::PlotOptions;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{ReportOptions, Tree, data};
use heapbpf_record::output::{Output, STANDARD_OUTPUT};

use super::error::PlanError;
use super::pictures::{Picture, write_bytes};
use super::pipelines;
use super::read_args::ReportArgs;
use super::values::{OutputFile, PlotArg};

/// Name of the format for tables on a terminal, which is not a file format.
const TEXT: &str = "text";
/// Maximum number of stacks with their own curve. More could not be distinguished.
const MOST_CURVES: usize = 9;
/// Default number of curves.
const CURVES: usize = 5;

/// Something to write.
#[derive(Debug)]
pub enum Product {
    /// The profile in a format.
    Profile(Output),
    /// A flame graph of the callers of functions.
    Callers(Output),
    /// A table or tree as data.
    View(PathBuf, Data),
    /// A plot.
    Plot(PlotArg, PathBuf, Picture),
}

/// Formats of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// CSV.
    Csv,
    /// JSON.
    Json,
}

/// Checks what is to be written. Returns nothing if tables are to be shown.
///
/// # Errors
/// The options contradict each other, or an output cannot be written.
pub fn products(args: &ReportArgs, options: &ReportOptions) -> Result<Vec<Product>, PlanError> {
    let usage = |text: String| PlanError::Usage(text);
    if args.profiles.len() > 1 && !args.plot.is_some_and(PlotArg::is_of_snapshots) {
        return Err(usage(
            "report shows one profile; `heapbpf diff` compares two, `heapbpf merge` adds several, and --plot timeline and overhead \
             draw the snapshots of a recording"
                .into(),
        ));
    }
    let format = args.format.as_deref();
    let standard_output = [OutputFile::from(OsString::from(STANDARD_OUTPUT))];
    let files = match (args.outputs.as_slice(), format) {
        ([], None | Some(TEXT)) if args.plot.is_some() => {
            return Err(usage(
                "--plot needs a file: -o x.svg or -o x.png (or --format svg for standard output)".into(),
            ));
        }
        ([], None | Some(TEXT)) => return Ok(Vec::new()),
        ([], Some(_)) => &standard_output,
        (files, Some(TEXT)) => {
            let first = escaped(&files[0].path.to_string_lossy()).into_owned();
            return Err(usage(format!(
                "--format text shows tables on standard output and writes no file: leave out -o {first}"
            )));
        }
        (files, _) => files,
    };
    pipelines::each_has_its_own(files.iter().map(|file| ("-o", file.path.as_path())), args.force)?;
    files.iter().map(|file| product(file, format, args, options)).collect()
}

fn product(
    file: &OutputFile,
    format: Option<&str>,
    args: &ReportArgs,
    options: &ReportOptions,
) -> Result<Product, PlanError> {
    let path = file.path.as_path();
    if let Some(plot) = args.plot {
        let format = file.format.as_deref().or(format);
        return Ok(Product::Plot(plot, path.into(), Picture::new(path, format, args.force)?));
    }
    let chosen = file.format(format)?;
    let output = Output::new(path, chosen, args.force);
    output.check()?;
    let Some(view) = data::view(options) else { return Ok(Product::Profile(output)) };
    match (chosen.name(), &options.tree) {
        ("csv", _) => Ok(Product::View(path.into(), Data::Csv)),
        ("json", _) => Ok(Product::View(path.into(), Data::Json)),
        // A flame graph shows that tree.
        ("svg" | "folded", Some(Tree::Down)) => Ok(Product::Profile(output)),
        ("svg" | "folded", Some(Tree::Callers(_))) => Ok(Product::Callers(output)),
        (name, tree) => {
            let option = match view {
                "tree" | "callers" | "suspects" => format!("--{view}"),
                by => format!("--by {by}"),
            };
            let works = if tree.is_some() { "text, csv, json, svg and folded" } else { "text, csv and json" };
            let instead = match name {
                "html" => "; the page has tables and flame graphs of its own: leave the option out",
                "svg" | "folded" => "; a flame graph shows stacks: leave the option out, or use --tree",
                _ => ", because that format holds whole profiles: leave the option out",
            };
            Err(PlanError::Usage(format!("{option} works with the formats {works}, not with {name}{instead}")))
        }
    }
}

impl Product {
    /// Path of the output.
    pub fn path(&self) -> &Path {
        match self {
            Self::Profile(output) | Self::Callers(output) => output.path(),
            Self::View(path, _) | Self::Plot(_, path, _) => path,
        }
    }

    /// Writes it. `profile` is the first of `all`.
    ///
    /// # Errors
    /// It cannot be made or written.
    pub fn write(
        &self,
        all: &[Profile],
        profile: &Profile,
        args: &ReportArgs,
        options: &ReportOptions,
        write: &WriteOptions,
    ) -> anyhow::Result<()> {
        match self {
            Self::Profile(output) => {
                output.write(profile, write)?;
            }
            Self::Callers(output) => {
                let Some(Tree::Callers(expression)) = &options.tree else { return Ok(()) };
                output.write(&heapbpf_profile::filter::callers(profile, expression), write)?;
            }
            Self::View(path, kind) => {
                let bytes = match kind {
                    Data::Csv => data::csv(profile, options).context("cannot write the table")?,
                    Data::Json => data::json(profile, options).context("cannot write the table")?.into_bytes(),
                };
                write_bytes(path, args.force, &bytes)?;
            }
            Self::Plot(plot, _, picture) => {
                let stacks = args.top.map_or(CURVES, |top| top.clamp(1, MOST_CURVES));
                let ReportOptions { confidence, group_by, frames, .. } = *options;
                let plot_options = PlotOptions { value: args.value, confidence, group_by, stacks, frames };
                let figure = match plot {
                    PlotArg::Timeline => heapbpf_plots::timeline(all, &plot_options)?,
                    PlotArg::Survival => heapbpf_plots::survival(profile, &plot_options)?,
                    PlotArg::Overhead => heapbpf_plots::overhead(all)?,
                };
                picture.write(&figure)?;
            }
        }
        Ok(())
    }
}
