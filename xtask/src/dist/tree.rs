//! The files of a release, and where each of them goes.

use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, ensure};

use super::Release;
use crate::context::Context;
use crate::shell::{read, run_quietly};

/// The contents of a release, whatever it is packed into.
pub struct Parts {
    binary: PathBuf,
    /// Names and contents.
    man_pages: Vec<(String, Vec<u8>)>,
    /// For bash, zsh and fish.
    completions: [String; 3],
    unit: String,
    /// Names and contents.
    documents: Vec<(String, Vec<u8>)>,
}

/// Where files go in one kind of package, below its root.
pub struct Layout {
    /// The path of the binary after installation, for the systemd unit.
    pub program: &'static str,
    pub binary: &'static str,
    pub unit: &'static str,
    pub man: &'static str,
    pub bash: &'static str,
    pub zsh: &'static str,
    pub fish: &'static str,
    pub documents: &'static str,
}

impl Parts {
    /// Has the binary write its man pages and completions, and reads the rest from the source.
    pub fn collect(context: &Context, release: &Release, binary: &Path, licences: String) -> anyhow::Result<Self> {
        let dir = release.work().join("man");
        let _ = fs::remove_dir_all(&dir);
        read(Command::new(binary).arg("man").arg(&dir))?;
        let completions = |shell| read(Command::new(binary).args(["completions", shell]));
        let source = |name: &str| -> anyhow::Result<Vec<u8>> {
            let path = context.root.join(name);
            fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
        };
        let mut documents = vec![("THIRD-PARTY-LICENSES.txt".to_owned(), licences.into_bytes())];
        let texts = ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT", "docs/install.md"];
        let examples = ["packaging/prometheus/alerts.yml", "packaging/grafana/heapbpf.json"];
        for name in texts.into_iter().chain(examples) {
            let short = Path::new(name).file_name().context("a name")?.to_string_lossy().into_owned();
            documents.push((short, source(name)?));
        }
        // The licence of the BPF programs, which the binary contains.
        let gpl =
            fs::read("/usr/share/common-licenses/GPL-2").context("the GPL's text is missing (Debian: base-files)")?;
        documents.push(("LICENSE-GPL-2".to_owned(), gpl));
        Ok(Self {
            binary: binary.to_owned(),
            man_pages: files_in(&dir)?,
            completions: [completions("bash")?, completions("zsh")?, completions("fish")?],
            unit: String::from_utf8(source("packaging/heapbpf.service")?)?,
            documents,
        })
    }

    /// Writes all files below a directory. Man pages are compressed.
    pub fn place(&self, root: &Path, layout: &Layout) -> anyhow::Result<()> {
        let binary = fs::read(&self.binary).with_context(|| format!("there is no {}", self.binary.display()))?;
        write(&root.join(layout.binary), &binary, 0o755)?;
        for (name, page) in &self.man_pages {
            let file = root.join(layout.man).join(name);
            write(&file, page, 0o644)?;
            gzip(&file)?;
        }
        for (place, text) in [layout.bash, layout.zsh, layout.fish].into_iter().zip(&self.completions) {
            write(&root.join(place), text.as_bytes(), 0o644)?;
        }
        write(&root.join(layout.unit), unit_of(&self.unit, layout.program)?.as_bytes(), 0o644)?;
        for (name, text) in &self.documents {
            write(&root.join(layout.documents).join(name), text, 0o644)?;
        }
        Ok(())
    }
}

/// Returns the systemd unit of an installation.
fn unit_of(unit: &str, program: &str) -> anyhow::Result<String> {
    let starts = format!("ExecStart={program} ");
    let text = unit.replace("ExecStart=/usr/local/bin/heapbpf ", &starts);
    ensure!(text.contains(&starts), "packaging/heapbpf.service does not start /usr/local/bin/heapbpf");
    // The line on how to install it is dropped, because it is installed.
    let lines = text.lines().filter(|line| !line.starts_with("# Install it as "));
    Ok(lines.fold(String::new(), |text, line| text + line + "\n"))
}

/// Returns names and contents of the files in a directory, sorted.
fn files_in(dir: &Path) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let mut files = Vec::new();
    for entry in dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        files.push((entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path())?));
    }
    files.sort();
    Ok(files)
}

/// Compresses a file, without storing its name and time. The result's name ends in `.gz`.
pub fn gzip(path: &Path) -> anyhow::Result<()> {
    run_quietly(Command::new("gzip").args(["--best", "--no-name", "--force"]).arg(path), false)
}

/// Writes a file with these permissions, whatever the umask is, and creates the directories that it needs.
pub fn write(path: &Path, bytes: &[u8], mode: u32) -> anyhow::Result<()> {
    let dir = path.parent().context("a file has a directory")?;
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
    fs::set_permissions(path, Permissions::from_mode(mode)).with_context(|| path.display().to_string())
}

/// Sets one time on all files and directories, and the usual permissions on directories.
pub fn set_times(path: &Path, epoch: u64) -> anyhow::Result<()> {
    if path.is_dir() {
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
        for entry in path.read_dir().with_context(|| format!("cannot read {}", path.display()))? {
            set_times(&entry?.path(), epoch)?;
        }
    }
    let time = SystemTime::UNIX_EPOCH + Duration::from_secs(epoch);
    let set = File::open(path).and_then(|file| file.set_times(FileTimes::new().set_modified(time).set_accessed(time)));
    set.with_context(|| format!("cannot set the time of {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_starts_the_installed_program() {
        let unit = include_str!("../../../packaging/heapbpf.service");
        let text = unit_of(unit, "/usr/bin/heapbpf").expect("it fits");
        assert!(text.contains("\nExecStart=/usr/bin/heapbpf serve ") && !text.contains("/usr/local"), "{text}");
        assert!(unit_of("ExecStart=/opt/heapbpf serve", "/usr/bin/heapbpf").is_err());
    }

    #[test]
    fn files_have_the_permissions_and_time_that_are_asked_for() {
        let dir = std::env::temp_dir().join(format!("heapbpf-dist-{}", std::process::id()));
        let file = dir.join("bin/program");
        write(&file, b"program", 0o755).expect("there is space");
        set_times(&dir, 86_400).expect("they are ours");
        let metadata = file.metadata().expect("it is there");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o755);
        for path in [&file, &dir] {
            let time = path.metadata().expect("it is there").modified().expect("a time");
            assert_eq!(time, SystemTime::UNIX_EPOCH + Duration::from_secs(86_400));
        }
        fs::remove_dir_all(&dir).expect("ours");
    }

    #[test]
    fn what_is_compressed_has_no_time_in_it() {
        let file = std::env::temp_dir().join(format!("heapbpf-dist-{}.1", std::process::id()));
        write(&file, b"a page\n", 0o644).expect("there is space");
        gzip(&file).expect("gzip runs");
        let compressed = fs::read(file.with_extension("1.gz")).expect("it is there");
        assert_eq!(compressed[4..8], [0; 4], "the time");
        assert_eq!(compressed[3], 0, "no name follows");
        assert!(!file.exists(), "the file itself is replaced");
        fs::remove_file(file.with_extension("1.gz")).expect("ours");
    }
}
