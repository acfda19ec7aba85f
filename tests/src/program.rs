//! Builds the programs with known truth, once per version of their sources.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::{Mutex, PoisonError};

use crate::environment::{programs_dir, target_dir, tool};

/// Compiler flags. Frame pointers and no tail calls give every unwinder the same true stacks. Without built-in
/// allocator functions, every call in the source is really made.
const FLAGS: &[&str] =
    &["-O2", "-g", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-builtin", "-D_GNU_SOURCE"];

/// Builds `tests/programs/<name>.c` (or `.cc`) and returns the executable.
///
/// # Panics
/// If there is no such source or it does not compile.
pub fn program(name: &str) -> PathBuf {
    build(name, name, &["-lm", "-lpthread", "-ldl"])
}

/// Builds a program under another name, with extra flags that override the usual ones.
///
/// # Panics
/// As [`program`].
pub fn program_with(name: &str, output: &str, flags: &[&str]) -> PathBuf {
    build(name, output, &[flags, &["-lm", "-lpthread", "-ldl"]].concat())
}

/// Builds a source as a shared library under another name, with extra flags.
///
/// # Panics
/// As [`program`].
pub fn library(name: &str, output: &str, flags: &[&str]) -> PathBuf {
    build(name, output, &[&["-shared", "-fPIC"], flags].concat())
}

/// Builds a program that has neither libc nor an allocator.
///
/// # Panics
/// As [`program`].
pub fn program_without_libc(name: &str) -> PathBuf {
    build(name, name, &["-static", "-nostdlib", "-fno-stack-protector"])
}

/// Builds `tests/programs/<name>.rs` with a compiler option (`-C`). Returns `None` if no Rust compiler works.
///
/// # Panics
/// If there is no such source.
pub fn rust_program(name: &str, option: &str) -> Option<PathBuf> {
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let compiler = tool("rustc")?;
    let source = programs_dir().join(name).with_extension("rs");
    let shared = programs_dir().join("rounds.rs");
    let dir = dir_for(&(read(&source), read(&shared), &compiler, option));
    let built = dir.join(name);
    if !built.exists() {
        make_dir(&dir);
        let unfinished = built.with_extension(std::process::id().to_string());
        let mut command = Command::new(compiler);
        command.args(["--edition", "2024", "-C", option, "-C", "panic=abort", "-o"]).arg(&unfinished).arg(&source);
        command.status().ok().filter(ExitStatus::success)?;
        std::fs::rename(&unfinished, &built).expect("same directory");
    }
    Some(built)
}

/// Compiles a Java program. Returns the directory of its classes.
///
/// # Panics
/// If there is no such source or it does not compile.
pub fn java_program(name: &str, compiler: &Path) -> PathBuf {
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let source = programs_dir().join(name).with_extension("java");
    let built = dir_for(&(read(&source), compiler));
    if !built.exists() {
        let unfinished = built.with_extension(std::process::id().to_string());
        make_dir(&unfinished);
        let result = Command::new(compiler).arg("-g").arg("-d").arg(&unfinished).arg(&source).output();
        let result = result.expect("javac runs");
        assert!(result.status.success(), "{name} does not compile:\n{}", String::from_utf8_lossy(&result.stderr));
        std::fs::rename(&unfinished, &built).expect("same directory");
    }
    built
}

/// Builds a Go program with extra flags, under another name. Returns `None` if there is no Go.
///
/// # Panics
/// If there is no such source or it does not compile.
pub fn go_program(name: &str, output: &str, flags: &[&str]) -> Option<PathBuf> {
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let go = tool("go")?;
    let source = programs_dir().join(name).with_extension("go");
    let built = dir_for(&(read(&source), flags, output)).join(output);
    if !built.exists() {
        let unfinished = built.with_extension(std::process::id().to_string());
        let mut command = Command::new(go);
        command.arg("build").args(flags).arg("-o").arg(&unfinished).arg(&source);
        let cache = target_dir().join("test-programs/go-cache");
        command.env("GOCACHE", cache).env("GO111MODULE", "off").env("GOFLAGS", "").env("CGO_ENABLED", "0");
        let result = command.output().expect("go runs");
        assert!(result.status.success(), "{name} does not compile:\n{}", String::from_utf8_lossy(&result.stderr));
        std::fs::rename(&unfinished, &built).expect("same directory");
    }
    Some(built)
}

/// Copies a file that will be executed. cp(1) does it: a process that another test forks at that moment would inherit
/// our descriptor that is open for writing, and the kernel does not execute a file that is open for writing.
///
/// # Panics
/// If it cannot be copied.
pub fn copy_file(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let status = Command::new("cp").arg(from.as_ref()).arg(to.as_ref()).status().expect("cp runs");
    assert!(status.success(), "{} cannot be copied", from.as_ref().display());
}

/// Makes a copy of a program under another name, so that it is another file with another process name.
///
/// # Panics
/// As [`copy_file`].
pub fn copy_of(program: &Path, dir: &Path, name: &str) -> PathBuf {
    let copy = dir.join(name);
    copy_file(program, &copy);
    copy
}

/// Held while a program is built, because several tests may want the same one at once.
static BUILDING: Mutex<()> = Mutex::new(());

fn build(name: &str, output: &str, flags: &[&str]) -> PathBuf {
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = programs_dir();
    let source =
        [format!("{name}.c"), format!("{name}.cc")].map(|file| dir.join(file)).into_iter().find(|p| p.exists());
    let source = source.unwrap_or_else(|| panic!("no program {name} in {}", dir.display()));
    let compiler = if source.extension().is_some_and(|e| e == "cc") { "c++" } else { "cc" };

    let headers = ["truth.h", "otel_memory.h"].map(|header| read(&dir.join(header)));
    let parent = dir_for(&(read(&source), headers, FLAGS, flags, output));
    let built = parent.join(output);
    if built.exists() {
        return built;
    }
    make_dir(&parent);
    let unfinished = parent.join(format!("{output}.{}", std::process::id()));
    // Flags come after the source, because the linker searches libraries in order.
    let result = Command::new(compiler).args(FLAGS).arg("-o").arg(&unfinished).arg(&source).args(flags).output();
    let result = result.unwrap_or_else(|e| panic!("cannot run {compiler} (Debian: build-essential): {e}"));
    assert!(result.status.success(), "{name} does not compile:\n{}", String::from_utf8_lossy(&result.stderr));
    belongs_like(&unfinished, &target_dir());
    std::fs::rename(&unfinished, &built).expect("same directory");
    built
}

/// The directory for what is built of these parts.
fn dir_for(parts: &impl Hash) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    target_dir().join("test-programs").join(format!("{:016x}", hasher.finish()))
}

fn make_dir(dir: &Path) {
    std::fs::create_dir_all(dir).expect("the target directory is ours");
    belongs_like(dir, &target_dir());
    belongs_like(dir.parent().expect("has a directory"), &target_dir());
}

/// Gives a built file to the owner of the target directory, who must be able to delete it after a run under sudo.
fn belongs_like(path: &Path, dir: &Path) {
    if let Ok(owner) = std::fs::metadata(dir) {
        let _ = std::os::unix::fs::chown(path, Some(owner.uid()), Some(owner.gid()));
    }
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}
