//! How names are found.

use std::path::PathBuf;

use super::debug_files;
use super::debuginfod::Debuginfod;
use super::debuginfod::settings::Settings;
use super::demangle::Demangler;

/// Options of a [`Symbolizer`](super::symbolizer::Symbolizer).
#[derive(Clone, Debug)]
pub struct Options {
    /// Directories with debug files, searched in this order.
    pub debug_directories: Vec<PathBuf>,
    /// Maximum size of debug information (all `.debug_*` sections of a file, bytes) that is used for lines and inlined
    /// calls. Of larger files, only the symbol tables are used. Working memory is up to 1.6 times this (measured:
    /// 103 MiB take 155 MiB and 1.3 s for 2,000 addresses; the same file's symbol tables take 13 MiB and 0.1 s).
    pub max_debug_bytes: u64,
    /// Source of debug files that are in no directory. `None` if nothing is requested over the network.
    pub debuginfod: Option<Debuginfod>,
    /// Demangles names.
    pub demangler: Demangler,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            debug_directories: vec![debug_files::DEFAULT_DIRECTORY.into()],
            max_debug_bytes: 128 << 20,
            debuginfod: None,
            demangler: Demangler::default(),
        }
    }
}

impl Options {
    /// Options with the user's directories, followed by the default one.
    pub fn new(directories: &[PathBuf], max_debug_bytes: u64) -> Self {
        let usual = Self::default();
        let debug_directories = directories.iter().cloned().chain(usual.debug_directories).collect();
        Self { debug_directories, max_debug_bytes, ..usual }
    }

    /// Adds a client of debuginfod servers.
    #[must_use]
    pub fn with_debuginfod(self, settings: Option<Settings>) -> Self {
        Self { debuginfod: settings.map(Debuginfod::new), ..self }
    }

    /// Demangles C++ names in a separate process, because a target's names may take forever.
    #[must_use]
    pub fn demangling_apart(self) -> Self {
        Self { demangler: Demangler::separate(), ..self }
    }
}
