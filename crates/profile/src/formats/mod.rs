//! Output formats: a table of all, and how one is chosen.

#[cfg(test)]
mod at_exit_tests;
#[cfg(test)]
mod consumers_tests;
mod csv;
mod dhat;
mod firefox;
mod folded;
mod heap_v2;
mod html;
mod json;
mod otlp;
pub(crate) mod parquet;
mod perfetto;
mod pprof;
mod speedscope;
mod svg;

use std::io;
use std::path::Path;

use thiserror::Error;

pub(crate) use self::json::{FrameJson, TotalJson};
pub use self::otlp::encode as encode_otlp;
pub use self::pprof::encode as encode_pprof;
pub(super) use self::pprof::{ALL_PROCESSES, AT_EXIT, ENDED_APART, HOOK, NO_NAMES, NOT_INLINE};
use super::group::GroupBy;
use super::model::Profile;
use super::report::FrameView;
use super::value::Value;

/// Options for writing a profile; each format uses those that it needs.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// The value for formats that hold a single one; `None`: bytes in use, or bytes allocated if frees were not
    /// followed.
    pub value: Option<Value>,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// What the outermost frame of flame graphs shows; `None`: the program if there are several processes.
    pub group_by: Option<GroupBy>,
    /// How pages show frames. Other formats have all frames.
    pub frames: FrameView,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { value: None, confidence: 0.95, group_by: None, frames: FrameView::default() }
    }
}

/// Compresses what `write` writes, at level 5 of 9: within a few percent of the smallest file, in half the time. The
/// compressor gets large pieces, because each call to it costs as much as compressing some thousand bytes (it clears its
/// output buffer), and encoders write one number at a time.
fn gzipped(
    out: &mut dyn io::Write,
    write: impl FnOnce(&mut dyn io::Write) -> Result<(), FormatError>,
) -> Result<(), FormatError> {
    const AT_ONCE: usize = 64 << 10;
    let gzip = flate2::write::GzEncoder::new(io::BufWriter::new(out), flate2::Compression::new(5));
    let mut pieces = io::BufWriter::with_capacity(AT_ONCE, gzip);
    write(&mut pieces)?;
    let gzip = pieces.into_inner().map_err(io::IntoInnerError::into_error)?;
    io::Write::flush(&mut gzip.finish()?)?;
    Ok(())
}

impl WriteOptions {
    /// The value to write.
    pub fn value_of(&self, profile: &Profile) -> Result<Value, FormatError> {
        let value = self.value.unwrap_or_else(|| Value::default_of(profile));
        if value.needs_frees() && !profile.header.live {
            return Err(FormatError::NotLive(value.name()));
        }
        Ok(value)
    }

    /// The grouping of rows.
    pub fn group_of(&self, profile: &Profile) -> GroupBy {
        self.group_by.unwrap_or_else(|| GroupBy::default_of(profile))
    }
}

/// Why a profile could not be written in a format.
#[derive(Debug, Error)]
pub enum FormatError {
    /// Writing to the destination failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The JSON encoder failed, but not because of the destination.
    #[error("cannot write the profile as JSON: {0}")]
    Json(serde_json::Error),
    /// Neither a name nor an extension says which format to write.
    #[error("{name}: write -o {example}, or choose a format with --format; known ones are {known}")]
    UnknownExtension {
        /// File name.
        name: String,
        /// A similar output with a format.
        example: String,
        /// Known extensions, or names of formats for standard output, separated by commas.
        known: String,
    },
    /// No format has this name.
    #[error("no format is called {name:?}; known ones are {known}")]
    UnknownFormat {
        /// The requested name.
        name: String,
        /// Known names, separated by commas.
        known: String,
    },
    /// The value needs frees, which the recording did not follow.
    #[error("this profile has no {0}: frees were not tracked (--no-live); choose alloc_space or alloc_objects")]
    NotLive(&'static str),
    /// The format cannot hold this profile.
    #[error("{format} cannot hold this profile: {reason}")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// The reason.
        reason: String,
    },
}

impl From<serde_json::Error> for FormatError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_io() { Self::Io(error.into()) } else { Self::Json(error) }
    }
}

/// Writes a profile in one format.
type Writer = fn(&Profile, &WriteOptions, &mut dyn io::Write) -> Result<(), FormatError>;

/// An output format.
#[derive(Debug)]
pub struct Format {
    name: &'static str,
    /// File name extensions, with the dot; default file names get the first one.
    pub extensions: &'static [&'static str],
    writer: Writer,
    /// As [`Self::how_to_open`], where `FILE` stands for the file.
    how_to_open: &'static str,
    /// Whether a file holds a single process, so that a profile of several must be split.
    pub one_process_per_file: bool,
}

impl Format {
    const fn new(
        name: &'static str,
        extensions: &'static [&'static str],
        writer: Writer,
        how_to_open: &'static str,
    ) -> Self {
        Self { name, extensions, writer, how_to_open, one_process_per_file: false }
    }

    /// Name of the format, for `--format`.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        self.name
    }

    /// Writes a profile to `out`, which should be buffered.
    ///
    /// # Errors
    ///
    /// Writing failed, or the format cannot hold this profile.
    pub fn write(&self, profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError> {
        (self.writer)(profile, options, out)
    }

    /// A command line that opens the file, or a hint on what to do next.
    #[must_use]
    pub fn how_to_open(&self, file: &str) -> String {
        self.how_to_open.replace("FILE", file)
    }
}

const OPEN_IN_FIREFOX: &str = "load FILE at https://profiler.firefox.com, and choose Retained Memory";
const OPEN_AS_REPORT: &str = "heapbpf report FILE";
const OPEN_IN_PERFETTO: &str =
    "https://ui.perfetto.dev (Open trace file: FILE), then click the diamond in the process's heap profile";
const OPEN_IN_DUCKDB: &str =
    "duckdb -c \"SELECT frames[1] AS function, sum(inuse_bytes) FROM 'FILE' GROUP BY 1 ORDER BY 2 DESC\"";
const SEND: &str =
    "curl --data-binary @FILE -H 'Content-Type: application/x-protobuf' COLLECTOR:4318/v1development/profiles";
const OPEN_IN_DHAT: &str = "load FILE in a browser that shows /usr/libexec/valgrind/dh_view.html";
const OPEN_IN_SPEEDSCOPE: &str = "npx speedscope FILE   (or drop it on https://www.speedscope.app)";

/// All formats. A format whose extension ends in another format's extension comes before that format.
pub static FORMATS: &[Format] = &[
    Format::new("pprof", &[".pb.gz", ".pprof"], pprof::write, "go tool pprof -http=: FILE"),
    Format::new("speedscope", &[".speedscope.json"], speedscope::write, OPEN_IN_SPEEDSCOPE),
    Format::new("dhat", &[".dhat.json"], dhat::write, OPEN_IN_DHAT),
    Format::new("firefox", &[".firefox.json.gz"], firefox::write_gz, OPEN_IN_FIREFOX),
    Format::new("firefox.json", &[".firefox.json"], firefox::write, OPEN_IN_FIREFOX),
    Format::new("json", &[".json"], json::write, OPEN_AS_REPORT),
    Format::new("json.gz", &[".json.gz"], json::write_gz, OPEN_AS_REPORT),
    Format::new("csv", &[".csv"], csv::write, "column -s, -t < FILE | less -S"),
    Format::new("folded", &[".folded"], folded::write, "inferno-flamegraph FILE > flame.svg"),
    Format::new("svg", &[".svg"], svg::write, "xdg-open FILE"),
    Format::new("html", &[".html"], html::write, "xdg-open FILE"),
    Format {
        one_process_per_file: true,
        ..Format::new("heap_v2", &[".heap"], heap_v2::write, "jeprof --text PROGRAM FILE")
    },
    Format::new("perfetto", &[".perfetto-trace", ".pftrace"], perfetto::write, OPEN_IN_PERFETTO),
    Format::new("parquet", &[".parquet"], parquet::write, OPEN_IN_DUCKDB),
    Format::new("otlp", &[".otlp"], otlp::write, SEND),
];

/// Finds a format by its name.
pub fn by_name(name: &str) -> Result<&'static Format, FormatError> {
    FORMATS
        .iter()
        .find(|format| format.name() == name)
        .ok_or_else(|| FormatError::UnknownFormat { name: name.into(), known: known_names() })
}

/// Finds a format by the extension of a file name.
pub fn by_extension(path: &Path) -> Result<&'static Format, FormatError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    FORMATS.iter().find(|format| extension_of(format, &name).is_some()).ok_or_else(|| without_format(path))
}

/// The error for an output without a format. Standard output (`-`) has no extension, so its format must be named.
fn without_format(path: &Path) -> FormatError {
    let (example, known) = if path.as_os_str() == "-" {
        ("folded:-".to_owned(), known_names())
    } else {
        let extension = FORMATS.first().map_or(".json", |format| format.extensions[0]);
        (path.with_extension(&extension[1..]).display().to_string(), known_extensions())
    };
    FormatError::UnknownExtension { name: path.display().to_string(), example, known }
}

/// Splits `FORMAT:FILE`. If the text before the colon is not a format name, everything is the file name, as for
/// `./json:x`.
#[must_use]
pub fn split(output: &str) -> (Option<&str>, &str) {
    let is_format = |(name, file): &(&str, &str)| !file.is_empty() && by_name(name).is_ok();
    output.split_once(':').filter(is_format).map_or((None, output), |(name, file)| (Some(name), file))
}

/// Finds the format for a file: by `name` if given, otherwise by the extension of the file name.
pub fn choose(path: &Path, name: Option<&str>) -> Result<&'static Format, FormatError> {
    match name {
        Some(name) => by_name(name),
        None => by_extension(path),
    }
}

/// The extension of `name` that belongs to this format, if there is one and it is not the whole name.
pub fn extension_of(format: &Format, name: &str) -> Option<&'static str> {
    let is_its_end = |extension: &&str| name.len() > extension.len() && name.ends_with(*extension);
    format.extensions.iter().copied().find(is_its_end)
}

fn known_names() -> String {
    FORMATS.iter().map(Format::name).collect::<Vec<_>>().join(", ")
}

fn known_extensions() -> String {
    FORMATS.iter().flat_map(|format| format.extensions).copied().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_without_a_format_is_told_what_to_write_before_all_formats_are_listed() {
        let error = |file: &str| by_extension(Path::new(file)).map(|format| format.name()).unwrap_err().to_string();
        assert!(error("-").starts_with("-: write -o folded:-, or "), "{}", error("-"));
        assert!(FORMATS.iter().all(|format| error("-").contains(format.name())), "{}", error("-"));
        let extension = FORMATS[0].extensions[0];
        for (file, example) in [("x", "x"), ("/a/x.txt", "/a/x"), ("x.gz", "x"), ("a.b/x", "a.b/x")] {
            let text = error(file);
            assert!(text.starts_with(&format!("{file}: write -o {example}{extension}, or ")), "{text}");
        }
    }

    #[test]
    fn every_format_is_found_by_its_name_and_no_extension_hides_another() {
        for format in FORMATS {
            assert_eq!(by_name(format.name()).map(|found| found.name()).ok(), Some(format.name()));
            for extension in format.extensions {
                let file = format!("/x/c.d{extension}");
                assert_eq!(by_extension(Path::new(&file)).map(|found| found.name()).ok(), Some(format.name()));
            }
        }
        assert!(by_name("bmp").is_err());
    }

    #[test]
    fn a_format_may_be_named_before_its_file() {
        assert_eq!(split("json:x"), (Some("json"), "x"));
        assert_eq!(split("speedscope:-"), (Some("speedscope"), "-"));
        for file in ["x.json", "./json:x", "json:", ":x", "host:json:x", "/a:b/c", "-"] {
            assert_eq!(split(file), (None, file));
        }
    }

    #[test]
    fn a_name_goes_before_the_extension() {
        let chosen =
            |name| choose(Path::new("x.json"), name).map(|format| format.name()).map_err(|error| error.to_string());
        assert_eq!(chosen(None).as_deref(), Ok("json"));
        assert_eq!(chosen(Some("folded")).as_deref(), Ok("folded"));
        assert!(chosen(Some("bmp")).is_err_and(|error| error.contains("\"bmp\"") && error.contains("speedscope")));
        let apart = FORMATS.iter().filter(|format| format.one_process_per_file).map(Format::name);
        assert_eq!(apart.collect::<Vec<_>>(), ["heap_v2"]);
    }

    /// A full disk is an error of the destination, not of the format.
    #[test]
    fn errors_of_the_destination_are_its_own() {
        struct Full;
        impl io::Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::Error::from(io::ErrorKind::StorageFull))
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let profile = crate::testing::small().only_process(0);
        for format in FORMATS {
            let error = format.write(&profile, &WriteOptions::default(), &mut Full).expect_err("no space");
            assert!(
                matches!(&error, FormatError::Io(error) if error.kind() == io::ErrorKind::StorageFull),
                "{}: {error:?}",
                format.name()
            );
        }
    }

    #[test]
    fn values_in_use_need_frees() {
        let mut profile = crate::testing::small();
        profile.header.live = false;
        let options = WriteOptions { value: Some(Value::InuseSpace), ..WriteOptions::default() };
        let error = options.value_of(&profile).expect_err("no frees").to_string();
        assert!(error.contains("no inuse_space") && error.contains("--no-live"), "{error}");
        assert_eq!(WriteOptions::default().value_of(&profile).ok(), Some(Value::AllocSpace));
    }
}
