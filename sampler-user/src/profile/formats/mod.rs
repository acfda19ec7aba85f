//! Output formats: one file each, one trait, one table.

#[cfg(test)]
mod at_exit_tests;
#[cfg(test)]
mod consumers_tests;
mod folded;
mod heap_v2;
mod html;
mod json;
mod otlp;
mod parquet;
mod perfetto;
mod pprof;
#[cfg(test)]
mod speed_tests;
mod speedscope;
mod svg;

use std::path::Path;
use std::{fmt, io};

use thiserror::Error;

pub use self::otlp::encode as encode_otlp;
pub use self::pprof::encode as encode_pprof;
pub(super) use self::pprof::{AT_EXIT, ENDED_APART};
use super::group::GroupBy;
use super::model::Profile;
use super::value::Value;

/// How a profile is written, as far as a format leaves a choice.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// The value of formats that carry one only; `None`: bytes in use, or allocated if frees were not followed.
    pub value: Option<Value>,
    /// Confidence level of intervals, 0 to 1.
    pub confidence: f64,
    /// What the outermost frame of flame graphs says; `None`: the process if there are several.
    pub group_by: Option<GroupBy>,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self { value: None, confidence: 0.95, group_by: None }
    }
}

impl WriteOptions {
    /// The value to write, or the reason why this profile does not have it.
    pub fn value_of(&self, profile: &Profile) -> Result<Value, FormatError> {
        let value = self.value.unwrap_or_else(|| Value::default_of(profile));
        if value.needs_frees() && !profile.live {
            return Err(FormatError::NotLive(value.name()));
        }
        Ok(value)
    }

    /// What rows are put together by.
    pub fn group_of(&self, profile: &Profile) -> GroupBy {
        self.group_by.unwrap_or_else(|| GroupBy::default_of(profile))
    }
}

/// Why a profile could not be written in a format.
#[derive(Debug, Error)]
pub enum FormatError {
    /// The destination failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The JSON encoder failed for a reason other than its destination.
    #[error("cannot write the profile as JSON: {0}")]
    Json(serde_json::Error),
    /// No format has this extension.
    #[error("{name}: no format has this extension; known ones are {known} (or choose one with --format)")]
    UnknownExtension {
        /// File name.
        name: String,
        /// Known extensions.
        known: String,
    },
    /// No format has this name.
    #[error("no format is called {name:?}; known ones are {known}")]
    UnknownFormat {
        /// What was asked for.
        name: String,
        /// Known names.
        known: String,
    },
    /// Values that need frees, of a profile without.
    #[error("this profile has no {0}: frees were not followed (--no-live); choose alloc_space or alloc_objects")]
    NotLive(&'static str),
    /// What else a format cannot say.
    #[error("{format} cannot hold this profile: {reason}")]
    Unsupported {
        /// Name of the format.
        format: &'static str,
        /// Why.
        reason: String,
    },
}

impl From<serde_json::Error> for FormatError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_io() { Self::Io(error.into()) } else { Self::Json(error) }
    }
}

/// An output format.
pub trait Format: Sync {
    /// Name for `--format`.
    fn name(&self) -> &'static str;

    /// File name endings, with their dot; the first is the one that default names get.
    fn extensions(&self) -> &'static [&'static str];

    /// Writes a profile. The caller buffers `out`.
    fn write(&self, profile: &Profile, options: &WriteOptions, out: &mut dyn io::Write) -> Result<(), FormatError>;

    /// What a user can do next with the file, as one line.
    fn how_to_open(&self, file: &str) -> String;

    /// Whether a file holds one process only, so that a profile of several becomes several files.
    fn one_process_per_file(&self) -> bool {
        false
    }
}

impl fmt::Debug for dyn Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Every format. An extension that ends in another one's comes first.
pub static FORMATS: &[&dyn Format] = &[
    &pprof::Pprof,
    &speedscope::Speedscope,
    &json::Json,
    &folded::Folded,
    &svg::Svg,
    &html::Html,
    &heap_v2::HeapV2,
    &perfetto::Perfetto,
    &parquet::Parquet,
    &otlp::Otlp,
];

/// The format with this name.
pub fn by_name(name: &str) -> Result<&'static dyn Format, FormatError> {
    FORMATS.iter().copied().find(|format| format.name() == name).ok_or_else(|| FormatError::UnknownFormat {
        name: name.into(),
        known: FORMATS.iter().map(|format| format.name()).collect::<Vec<_>>().join(", "),
    })
}

/// The format that a file's name ends in.
pub fn by_extension(path: &Path) -> Result<&'static dyn Format, FormatError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    FORMATS
        .iter()
        .copied()
        .find(|format| extension_of(*format, &name).is_some())
        .ok_or_else(|| FormatError::UnknownExtension { name: path.display().to_string(), known: known_extensions() })
}

/// The format for a file: named by `--format`, else by the file's extension.
pub fn choose(path: &Path, name: Option<&str>) -> Result<&'static dyn Format, FormatError> {
    match name {
        Some(name) => by_name(name),
        None => by_extension(path),
    }
}

/// The ending of `name` that belongs to this format, if it has one (and something before it).
pub fn extension_of(format: &dyn Format, name: &str) -> Option<&'static str> {
    format.extensions().iter().copied().find(|extension| name.len() > extension.len() && name.ends_with(extension))
}

fn known_extensions() -> String {
    FORMATS.iter().flat_map(|format| format.extensions()).copied().collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extensions_choose_formats() {
        for (file, name) in
            [("a.pb.gz", "pprof"), ("/x/b.json", "json"), ("c.d.folded", "folded"), ("x.speedscope.json", "speedscope")]
        {
            assert_eq!(by_extension(Path::new(file)).map(|format| format.name()).ok(), Some(name), "{file}");
        }
    }

    #[test]
    fn an_unknown_extension_lists_the_known_ones() {
        for file in ["x.txt", "x", ".json", "", "x.gz"] {
            let error = by_extension(Path::new(file)).map(|format| format.name()).expect_err(file).to_string();
            for format in FORMATS {
                assert!(format.extensions().iter().all(|extension| error.contains(extension)), "{error}");
            }
        }
    }

    #[test]
    fn every_format_is_found_by_its_name_and_no_extension_hides_another() {
        for format in FORMATS {
            assert_eq!(by_name(format.name()).map(|found| found.name()).ok(), Some(format.name()));
            for extension in format.extensions() {
                let file = format!("x{extension}");
                assert_eq!(by_extension(Path::new(&file)).map(|found| found.name()).ok(), Some(format.name()));
            }
        }
        assert!(by_name("bmp").is_err());
    }
}
