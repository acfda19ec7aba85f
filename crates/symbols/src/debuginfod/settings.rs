//! Which debuginfod servers are asked, where files are kept, and what a server may cost. The environment variables are
//! those of elfutils.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Servers, cache and limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// URLs of servers, in the order in which they are asked, without a trailing slash.
    pub servers: Vec<String>,
    /// Directory of the cache. `None` if there is no home directory to keep it in.
    pub cache: Option<PathBuf>,
    /// Limits on servers.
    pub limits: Limits,
}

/// Limits on what a server may cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum size of a file, bytes (`DEBUGINFOD_MAXSIZE`).
    pub file_bytes: u64,
    /// Maximum number of bytes downloaded in total.
    pub all_bytes: u64,
    /// Maximum time without a byte from a server (`DEBUGINFOD_TIMEOUT`).
    pub silence: Duration,
    /// Maximum time for one file (`DEBUGINFOD_MAXTIME`).
    pub file_time: Duration,
    /// Maximum time for all files of one profile together.
    pub batch_time: Duration,
    /// How long a server that failed is not asked again.
    pub rest: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            file_bytes: 2 << 30,
            all_bytes: 8 << 30,
            silence: Duration::from_secs(20),
            file_time: Duration::from_secs(180),
            batch_time: Duration::from_secs(600),
            rest: Duration::from_secs(600),
        }
    }
}

/// Why a URL cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}: a server's URL must begin with http:// or https:// and have a host")]
pub struct BadUrl(String);

/// Checks and normalises the URL of a server.
///
/// # Errors
/// It is not the URL of an HTTP server.
pub fn parse_url(text: &str) -> Result<String, BadUrl> {
    let bad = || BadUrl(text.to_owned());
    let parsed: ureq::http::Uri = text.parse().map_err(|_| bad())?;
    let is_http = matches!(parsed.scheme_str(), Some("http" | "https"));
    if !is_http || parsed.host().is_none_or(str::is_empty) || parsed.query().is_some() {
        return Err(bad());
    }
    Ok(text.trim_end_matches('/').to_owned())
}

/// Reads the settings from the user's option (`--debuginfod`) and the environment. Returns `None` if neither names a
/// server. Words in the environment that are not server URLs are skipped with a warning.
pub fn read(option: &[String], variable: impl Fn(&str) -> Option<OsString>) -> Option<Settings> {
    let mut servers = option.to_vec();
    let urls = variable("DEBUGINFOD_URLS").unwrap_or_default().to_string_lossy().into_owned();
    // Newer versions of elfutils put words about signatures among the URLs: `ima:enforcing`.
    for word in urls.split_whitespace().filter(|word| !word.starts_with("ima:")) {
        match parse_url(word) {
            Ok(url) if !servers.contains(&url) => servers.push(url),
            Ok(_) => {}
            Err(error) => log::warn!("DEBUGINFOD_URLS: {error}"),
        }
    }
    if servers.is_empty() {
        return None;
    }
    let number = |name: &str| -> Option<u64> { variable(name)?.to_str()?.parse().ok().filter(|number| *number > 0) };
    let seconds = |name: &str, usual: Duration| number(name).map_or(usual, Duration::from_secs);
    let usual = Limits::default();
    let limits = Limits {
        file_bytes: number("DEBUGINFOD_MAXSIZE").unwrap_or(usual.file_bytes),
        silence: seconds("DEBUGINFOD_TIMEOUT", usual.silence),
        file_time: seconds("DEBUGINFOD_MAXTIME", usual.file_time),
        ..usual
    };
    Some(Settings { servers, cache: cache(variable), limits })
}

/// Returns the cache directory, by the rules of elfutils.
fn cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let dir = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(cache) = dir("DEBUGINFOD_CACHE_PATH") {
        return Some(cache);
    }
    let home = dir("HOME");
    // The place that old versions of elfutils used.
    if let Some(old) = home.as_ref().map(|home| home.join(".debuginfod_client_cache")).filter(|old| old.is_dir()) {
        return Some(old);
    }
    let caches = dir("XDG_CACHE_HOME").or_else(|| Some(home?.join(".cache")));
    Some(caches?.join("debuginfod_client"))
}
