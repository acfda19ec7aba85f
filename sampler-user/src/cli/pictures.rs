//! Pictures that commands draw: chooses the format of a file and writes it.

use std::path::{Path, PathBuf};

use heapbpf_plots::Figure;
use heapbpf_record::output::{self, OutputError, STANDARD_OUTPUT};

use super::error::PlanError;

/// A picture to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    path: PathBuf,
    /// Whether it is written as pixels; otherwise as SVG.
    is_png: bool,
    force: bool,
}

impl Picture {
    /// A picture for a file (`-`: standard output), in the format of this name, or else in that of the file's
    /// extension.
    ///
    /// # Errors
    /// The format does not exist, or the file cannot be written.
    pub fn new(path: &Path, format: Option<&str>, force: bool) -> Result<Self, PlanError> {
        let extension = path.extension().map(|extension| extension.to_string_lossy().into_owned());
        let is_png = match format.or(extension.as_deref()) {
            Some("svg") => false,
            Some("png") => true,
            _ => {
                let name = path.display();
                return Err(PlanError::Usage(format!(
                    "{name}: plots are written to .svg or .png files (or with --format svg, png)"
                )));
            }
        };
        if path.as_os_str() != STANDARD_OUTPUT {
            output::check_new_file(path, force)?;
        }
        Ok(Self { path: path.into(), is_png, force })
    }

    /// Draws and writes a figure.
    ///
    /// # Errors
    /// It cannot be drawn or written.
    pub fn write(&self, figure: &Figure) -> anyhow::Result<()> {
        let bytes = if self.is_png { figure.png()? } else { figure.svg()?.into_bytes() };
        Ok(write_bytes(&self.path, self.force, &bytes)?)
    }
}

/// Writes a file. The path `-` means standard output.
///
/// # Errors
/// It cannot be written.
pub fn write_bytes(path: &Path, force: bool, bytes: &[u8]) -> Result<(), OutputError> {
    use std::io::Write as _;
    if path.as_os_str() == STANDARD_OUTPUT {
        let failed = |source| OutputError::Io { path: "standard output".into(), source };
        let mut out = std::io::stdout().lock();
        return out.write_all(bytes).and_then(|()| out.flush()).map_err(failed);
    }
    output::write_whole(path, force, |out| {
        out.write_all(bytes).map_err(|source| OutputError::Io { path: path.into(), source })
    })
}
