//! Fetches debug files by build ID from debuginfod servers (<https://sourceware.org/elfutils/Debuginfod.html>).

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use heapbpf_elf::{Elf, SHT_NOBITS, Section};
use heapbpf_profile::units::hex;
use tempfile::NamedTempFile;

use super::cache::{Cache, Cached};
use super::settings::Settings;
use crate::http_client;
use crate::progress::Progress;

/// Maximum length of a build ID that is requested, bytes. Linkers make them 8 to 32 bytes long.
const MAX_ID_BYTES: usize = 64;
/// Maximum number of redirects followed for a file.
const MAX_REDIRECTS: u32 = 5;
/// Number of bytes received at a time.
const CHUNK_BYTES: usize = 64 << 10;
/// Timeout of a connection.
const CONNECT_TIME: Duration = Duration::from_secs(10);
/// Maximum number of failures remembered besides the cache.
const MOST_REMEMBERED: usize = 1 << 16;

/// A client of debuginfod servers.
pub struct Client {
    settings: Settings,
    cache: Option<Cache>,
    agent: Option<ureq::Agent>,
    servers: Vec<Server>,
    /// Build IDs that were requested without success, with time and reason. Works even if the cache cannot be written.
    absent: HashMap<Vec<u8>, (Instant, String)>,
    received_bytes: u64,
    batch_ends: Instant,
    is_cleaned: bool,
    progress: Arc<Progress>,
}

struct Server {
    url: String,
    /// Until when the server is not asked again, and why.
    resting: Option<(Instant, String)>,
}

/// Why a server did not deliver a file.
enum Failure {
    /// It does not have the file.
    Absent,
    /// Its file exceeds a limit.
    Above(String),
    /// It misbehaves, so it is not asked again for a while.
    Server(String),
    /// The file cannot be kept here.
    Here(String),
}

impl Client {
    /// A client that has not asked any server yet.
    pub fn new(settings: Settings) -> Self {
        let servers = settings.servers.iter().map(|url| Server { url: url.clone(), resting: None }).collect();
        Self {
            cache: settings.cache.clone().map(Cache::new),
            agent: None,
            servers,
            absent: HashMap::new(),
            received_bytes: 0,
            batch_ends: Instant::now() + settings.limits.batch_time,
            is_cleaned: false,
            progress: Arc::default(),
            settings,
        }
    }

    /// Reports downloads to `progress`.
    pub fn tell(&mut self, progress: Arc<Progress>) {
        self.progress = progress;
    }

    /// Starts a new batch of files, with a new time limit.
    pub fn begin_batch(&mut self) {
        self.batch_ends = Instant::now() + self.settings.limits.batch_time;
    }

    /// Returns the debug file with this build ID.
    ///
    /// # Errors
    /// Returns a text for the user.
    pub fn find(&mut self, build_id: &[u8]) -> Result<File, String> {
        if build_id.is_empty() || build_id.len() > MAX_ID_BYTES {
            return Err("its build ID has an unusual length".into());
        }
        let Some(cache) = self.cache.clone() else {
            return Err("there is no cache directory for debuginfod (HOME is not set)".into());
        };
        let id = hex(build_id);
        match cache.get(&id) {
            Cached::File(file) if is_wanted(&file, build_id) => return Ok(file),
            Cached::File(_) => cache.remove(&id),
            Cached::Absent => return Err(self.none_has_it()),
            Cached::Nothing => {}
        }
        if let Some((_, why)) = self.absent.get(build_id).filter(|(when, _)| when.elapsed() < self.settings.limits.rest)
        {
            return Err(why.clone());
        }
        let found = self.ask_all(&cache, &id, build_id);
        if let Err(why) = &found {
            if self.absent.len() >= MOST_REMEMBERED {
                self.absent.clear();
            }
            self.absent.insert(build_id.to_vec(), (Instant::now(), why.clone()));
        }
        found
    }

    fn none_has_it(&self) -> String {
        match &self.servers[..] {
            [only] => format!("{} has no debug file for it", only.url),
            _ => "no debuginfod server has a debug file for it".into(),
        }
    }

    fn ask_all(&mut self, cache: &Cache, id: &str, build_id: &[u8]) -> Result<File, String> {
        if !std::mem::replace(&mut self.is_cleaned, true) {
            cache.clean();
        }
        let mut reasons = Vec::new();
        for at in 0..self.servers.len() {
            if let Some((until, why)) = &self.servers[at].resting
                && Instant::now() < *until
            {
                reasons.push(why.clone());
                continue;
            }
            let url = self.servers[at].url.clone();
            log::debug!("asking {url} for the debug file of build ID {id}");
            let asked = self.ask(&url, cache, id, build_id);
            self.progress.end_download();
            match asked {
                Ok(file) => return Ok(file),
                Err(Failure::Absent) => {}
                Err(Failure::Above(why)) => reasons.push(format!("{url}: {why}")),
                Err(Failure::Here(why)) => return Err(why),
                Err(Failure::Server(why)) => {
                    let why = format!("{url}: {why}");
                    log::warn!("{why}; not asking it again for {} s", self.settings.limits.rest.as_secs());
                    self.servers[at].resting = Some((Instant::now() + self.settings.limits.rest, why.clone()));
                    reasons.push(why);
                }
            }
        }
        if reasons.is_empty() {
            if let Err(error) = cache.put_absent(id) {
                log::debug!("cannot remember that {id} has no debug file: {error}");
            }
            return Err(self.none_has_it());
        }
        Err(reasons.join("; "))
    }

    /// Downloads a file from one server.
    fn ask(&mut self, server: &str, cache: &Cache, id: &str, build_id: &[u8]) -> Result<File, Failure> {
        let limits = self.settings.limits.clone();
        let left = self.batch_ends.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = limits.batch_time.as_secs();
            return Err(Failure::Above(format!("not asked, because all files together took {seconds} s")));
        }
        let here = |error: std::io::Error| Failure::Here(format!("debuginfod's cache: {error}"));
        let most = limits.file_bytes.min(limits.all_bytes.saturating_sub(self.received_bytes));
        let mut file = cache.begin(id).map_err(here)?;
        let url = format!("{server}/buildid/{id}/debuginfo");
        let request = self.agent().get(&url).config();
        let request = request
            .https_only(server.starts_with("https:"))
            .timeout_global(Some(limits.file_time.min(left)))
            .timeout_recv_response(Some(limits.silence))
            .timeout_per_read(Some(limits.silence));
        let mut response = request.build().call().map_err(|error| Failure::Server(http_client::reason(&error)))?;
        match response.status().as_u16() {
            200 => {}
            404 => return Err(Failure::Absent),
            status => return Err(Failure::Server(format!("status {status}"))),
        }
        let claimed = response.body().content_length();
        if let Some(bytes) = claimed.filter(|bytes| *bytes > most) {
            return Err(Failure::Above(too_large(bytes, most)));
        }
        let received = self.receive(id, claimed, &mut response.body_mut().as_reader(), &mut file, most);
        received?;
        if !is_wanted(file.as_file(), build_id) {
            return Err(Failure::Server("sent a different file than requested".into()));
        }
        cache.put(id, file).map_err(here)
    }

    fn receive(
        &mut self,
        id: &str,
        claimed: Option<u64>,
        from: &mut dyn Read,
        to: &mut NamedTempFile,
        most: u64,
    ) -> Result<(), Failure> {
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut received = 0;
        loop {
            let length = from.read(&mut buffer).map_err(|error| Failure::Server(error.to_string()))?;
            if received == 0 && !buffer[..length].starts_with(b"\x7fELF".get(..length.min(4)).unwrap_or_default()) {
                return Err(Failure::Server("sent something that is not an ELF file".into()));
            }
            received += length as u64;
            self.received_bytes += length as u64;
            if length == 0 {
                return Ok(());
            }
            if received > most {
                return Err(Failure::Above(too_large(received, most)));
            }
            to.write_all(&buffer[..length]).map_err(|error| Failure::Here(format!("debuginfod's cache: {error}")))?;
            self.progress.download(id, received, claimed);
        }
    }

    fn agent(&mut self) -> ureq::Agent {
        let make = || {
            let settings = http_client::settings().timeout_connect(Some(CONNECT_TIME)).max_redirects(MAX_REDIRECTS);
            settings.build().new_agent()
        };
        self.agent.get_or_insert_with(make).clone()
    }
}

fn too_large(bytes: u64, most: u64) -> String {
    format!("a file of more than {} MiB is above the limit of {} MiB", (bytes - 1) >> 20, most >> 20)
}

/// Whether a file is a complete ELF file with this build ID.
fn is_wanted(file: &File, build_id: &[u8]) -> bool {
    let (Ok(elf), Ok(metadata)) = (Elf::read(file), file.metadata()) else { return false };
    let is_there = |section: &Section| {
        section.kind == SHT_NOBITS || section.offset.checked_add(section.bytes).is_some_and(|end| end <= metadata.len())
    };
    // The build ID is near the beginning of a file, so a truncated file may have it.
    !elf.sections.is_empty()
        && elf.sections.iter().all(is_there)
        && heapbpf_elf::build_id::of(file).as_deref() == Some(build_id)
}
