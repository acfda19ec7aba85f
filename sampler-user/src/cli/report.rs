//! `heapbpf report`: shows a saved profile as text tables, or writes it in another format. It can add names to a
//! profile without names.

use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

use heapbpf_host::in_root::{self, Links};
use heapbpf_profile::adjust::Adjustments;
use heapbpf_profile::escape::escaped;
use heapbpf_profile::filter::Filter;
use heapbpf_profile::formats::WriteOptions;
use heapbpf_profile::model::Profile;
use heapbpf_profile::report::{self, ReportOptions, Source, Tree, source_candidates, source_lines};
use heapbpf_record::progress_line::during;
use heapbpf_record::remarks::say;
use heapbpf_symbols::debuginfod::settings;
use heapbpf_symbols::offline::{self, Summary};
use heapbpf_symbols::options::Options;
use heapbpf_symbols::progress::Progress;

use super::compare::print;
use super::error::PlanError;
use super::profiles;
use super::read_args::ReportArgs;
use super::report_products::products;
use super::{frames, plan};
use crate::view::TableOptions;

/// Default number of table rows.
const ROWS: usize = 20;
/// Default number of functions whose source lines are shown.
const FUNCTIONS: usize = 5;
/// Maximum size of a source file that is read, in bytes.
const MOST_SOURCE: usize = 4 << 20;
/// Maximum number of reasons for missing names that are printed.
const MOST_REASONS: usize = 5;

/// Shows or writes a profile. Returns the exit status.
///
/// # Errors
/// The file cannot be read or is not a profile, or an output cannot be written.
pub fn run(args: &ReportArgs) -> anyhow::Result<u8> {
    let options = options(args)?;
    let products = products(args, &options)?;
    plan::check_debug_dirs(&args.debug_dir)?;
    if let Some(dir) = args.source.as_ref().filter(|dir| !dir.is_dir()) {
        return Err(PlanError::Blocked(format!("--source {}: there is no such directory", dir.display())).into());
    }
    let mut all = Vec::with_capacity(args.profiles.len());
    for path in &args.profiles {
        let mut profile = profiles::open(path)?;
        if args.symbolize {
            print_summary(&symbolize(&mut profile, args));
        }
        Adjustments { calibrate: args.calibrate, at: args.at }.apply(&mut profile)?;
        filter(args).apply(&mut profile);
        all.push(profile);
    }
    let Some(profile) = all.first() else { return Ok(0) };
    let ReportOptions { confidence, group_by, frames, .. } = options;
    let write = WriteOptions { value: args.value, confidence, group_by, frames };
    for product in &products {
        during(
            || format!("writing {}", product.path().display()),
            || product.write(&all, profile, args, &options, &write),
        )?;
    }
    if !products.is_empty() {
        return Ok(0);
    }
    if let Some(dir) = &args.source {
        let options = ReportOptions { top: args.top.unwrap_or(FUNCTIONS), ..options };
        let find = |file: &str| source(dir, file);
        return print(&during(|| "reading source files".into(), || source_lines(profile, &options, find)));
    }
    print(&during(|| "adding up".into(), || report::report(profile, &options)))
}

/// Reads the source file with this recorded path below a directory, or says why not. The path comes from the profiled
/// program: neither it nor a link in the directory leads out of the directory, and only regular files are opened.
fn source(dir: &Path, recorded: &str) -> Result<Source, String> {
    let mut refused = None;
    for path in source_candidates(recorded) {
        let failed = |why: &str| format!("{path}: {why}");
        let opened = in_root::find(dir, Path::new(&path), Links::Beneath);
        let file = match opened.and_then(|handle| in_root::open_regular(&handle)) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => continue,
            Err(error) => {
                let leads_out = error.raw_os_error() == Some(libc::EXDEV);
                let why = if leads_out {
                    "not read, because it leads out of the directory".into()
                } else {
                    error.to_string()
                };
                // A link at one place does not hide the file at another.
                refused.get_or_insert_with(|| failed(&why));
                continue;
            }
        };
        let mut bytes = Vec::new();
        if let Err(error) = file.take(MOST_SOURCE as u64 + 1).read_to_end(&mut bytes) {
            return Err(failed(&error.to_string()));
        }
        if bytes.len() > MOST_SOURCE {
            return Err(failed("not read, because it has more than 4 MiB"));
        }
        return Ok(Source { text: String::from_utf8_lossy(&bytes).into_owned(), path });
    }
    Err(refused.unwrap_or_else(|| "no such file in the directory".into()))
}

/// Whether the user asked only for the short answer.
fn is_brief(args: &ReportArgs) -> bool {
    let asks = args.details || args.by.is_some() || args.suspects || args.tree || args.callers.is_some();
    !asks && args.top.is_none() && args.functions == 0
}

fn options(args: &ReportArgs) -> Result<ReportOptions, PlanError> {
    let TableOptions { width, color, .. } = TableOptions::of_output(args.color);
    Ok(ReportOptions {
        width,
        color,
        group_by: args.group_by,
        sort: args.value,
        brief: is_brief(args),
        by: args.by.unwrap_or_default(),
        tree: args.callers.clone().map(Tree::Callers).or(args.tree.then_some(Tree::Down)),
        suspects: args.suspects,
        top: args.top.unwrap_or(ROWS),
        functions: args.functions,
        frames: frames::view(args.frames)?,
        confidence: args.confidence,
        source: args.profiles.first().map(|path| path.display().to_string()),
        ..ReportOptions::default()
    })
}

fn filter(args: &ReportArgs) -> Filter {
    Filter { focus: args.focus.clone(), ignore: args.ignore.clone(), hide: args.hide.clone(), show: args.show.clone() }
}

/// Adds names. Shows the progress if standard error is a terminal.
fn symbolize(profile: &mut Profile, args: &ReportArgs) -> Summary {
    let settings = settings::read(&args.debuginfod, |name| std::env::var_os(name));
    let options = Options::new(&args.debug_dir, args.max_debug_bytes).with_debuginfod(settings).demangling_apart();
    let progress = Arc::<Progress>::default();
    let shown = Arc::clone(&progress);
    let line = move || {
        let (named, of) = shown.get();
        shown
            .get_download()
            .map_or_else(|| format!("finding names: {named} of {of} places"), |download| download.to_string())
    };
    during(line, || offline::symbolize(profile, options, progress))
}

/// Prints to standard error how many names were found, and why others were not.
fn print_summary(summary: &Summary) {
    say(format!("found names for {} of {} addresses without one", summary.named, summary.asked));
    let mut reasons: Vec<_> = summary.unnamed.iter().collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    for (reason, count) in reasons.iter().take(MOST_REASONS) {
        say(format!("{count} without a name: {}", escaped(reason)));
    }
    if let Some(more @ 1..) = reasons.len().checked_sub(MOST_REASONS) {
        say(format!("and {more} more reasons (the profile has them all)"));
    }
    for note in &summary.notes {
        say(escaped(note));
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_of_the_dir_is_read() {
        if heapbpf_testing::is_emulated("no openat2(2)") {
            return;
        }
        let outer = tempfile::tempdir().expect("a temporary directory");
        let dir = outer.path().join("src");
        fs::create_dir_all(dir.join("lib")).expect("our own directory");
        fs::write(outer.path().join("secret"), "outside").expect("our own directory");
        fs::write(dir.join("lib/a.c"), "inside").expect("our own directory");
        fs::write(dir.join("large.c"), vec![b'x'; MOST_SOURCE + 1]).expect("our own directory");
        let absolute = outer.path().join("secret");
        for (link, target) in [
            ("up.c", Path::new("../secret")),
            ("absolute.c", absolute.as_path()),
            ("near.c", Path::new("lib/a.c")),
            ("out", outer.path()),
        ] {
            symlink(target, dir.join(link)).expect("our own directory");
        }
        let read = |recorded: &str| source(&dir, recorded);
        for recorded in ["/build/app/lib/a.c", "lib/../lib/a.c", "../../lib/a.c", "near.c"] {
            assert_eq!(read(recorded).map(|it| it.text).as_deref(), Ok("inside"), "{recorded}");
        }
        assert_eq!(read("/build/app/lib/a.c").map(|it| it.path).as_deref(), Ok("lib/a.c"));
        assert_eq!(read("/out/lib/a.c").map(|it| it.path).as_deref(), Ok("lib/a.c"), "the link hides nothing");
        for recorded in ["up.c", "absolute.c", "out/secret", "/x/../out/./secret"] {
            let refused = read(recorded).expect_err(recorded);
            assert!(refused.ends_with("leads out of the directory"), "{recorded}: {refused}");
        }
        for recorded in ["../secret", "/../secret", "lib/../../secret", &absolute.display().to_string(), "/etc/passwd"]
        {
            assert_eq!(read(recorded), Err("no such file in the directory".into()), "{recorded}");
        }
        assert!(read("large.c").expect_err("it is too large").ends_with("4 MiB"));
        assert!(read("lib").expect_err("a directory").contains("not a regular file"));
    }
}
