//! Demangles in a separate process, or in this one.

use std::io;
use std::os::fd::AsFd as _;
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use heapbpf_host::helper::Helper;

use super::messages::Message;
use super::names::{self, Kind};

/// Name of the process in process lists.
const NAME: &str = "heapbpf-demangler";
/// Argument that makes heapbpf run as this process. The PID of the process that asks follows.
pub const WORD: &str = "demangle-names";

/// Timeout of an answer. A name takes at most 50 ms of processor time.
const PATIENCE: Duration = Duration::from_secs(10);

/// A name was not demangled because it takes too much time or memory, or because the process is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// Demangles names. Clones share the process.
#[derive(Clone, Debug, Default)]
pub struct Demangler(Option<Arc<Mutex<Separate>>>);

impl Demangler {
    /// Creates a demangler that demangles C++ names in a separate process. [`start`](Self::start) or the first such
    /// name starts it. (The default demangler does it in this process, for as long as it takes.)
    pub fn separate() -> Self {
        Self(Some(Arc::new(Mutex::new(Separate::NotStarted))))
    }

    /// Starts the process, before this one drops the right to start any.
    pub fn start(&self) {
        if let Some(separate) = &self.0 {
            separate.lock().unwrap_or_else(PoisonError::into_inner).started();
        }
    }

    /// Ends the process. C++ names are no longer demangled.
    pub fn end(&self) {
        if let Some(separate) = &self.0 {
            *separate.lock().unwrap_or_else(PoisonError::into_inner) = Separate::Gone;
        }
    }

    /// Returns the demangled form of `name` (Rust without the hash), or `None` if it is not a mangled name.
    ///
    /// # Errors
    /// It takes too much time or memory, or the process is gone.
    pub fn demangle(&self, name: &str) -> Result<Option<String>, Refused> {
        match (&self.0, Kind::of(name)) {
            (Some(separate), Some(Kind::Cpp)) => separate.lock().unwrap_or_else(PoisonError::into_inner).demangle(name),
            _ => Ok(names::demangle(name)),
        }
    }
}

/// The process that demangles C++ names.
#[derive(Debug)]
enum Separate {
    NotStarted,
    Running(Process),
    /// It could not be started, or has ended.
    Gone,
}

impl Separate {
    fn started(&mut self) -> Option<&mut Process> {
        if matches!(self, Self::NotStarted) {
            *self = match Process::start() {
                Ok(process) => Self::Running(process),
                Err(error) => {
                    log::warn!("C++ names are not demangled: {NAME} cannot be started: {error}");
                    Self::Gone
                }
            };
        }
        match self {
            Self::Running(process) => Some(process),
            _ => None,
        }
    }

    fn demangle(&mut self, name: &str) -> Result<Option<String>, Refused> {
        let Some(process) = self.started() else { return Err(Refused) };
        process.demangle(name).unwrap_or_else(|error| {
            log::warn!("C++ names are no longer demangled: {NAME} does not answer: {error}");
            *self = Self::Gone;
            Err(Refused)
        })
    }
}

/// A running process. It ends when its standard input does.
#[derive(Debug)]
struct Process {
    input: ChildStdin,
    output: ChildStdout,
    /// Number of the last request.
    number: u32,
    /// Dropped after the pipes.
    process: Helper,
}

impl Process {
    fn start() -> io::Result<Self> {
        let mut process = Helper::start(NAME, WORD, None, [Stdio::piped(), Stdio::piped()])?;
        let (Some(input), Some(output)) = process.take_pipes() else { return Err(io::ErrorKind::BrokenPipe.into()) };
        Ok(Self { input, output, number: 0, process })
    }

    /// # Errors
    /// The process has ended, or does not answer.
    fn demangle(&mut self, name: &str) -> io::Result<Result<Option<String>, Refused>> {
        self.number = self.number.checked_add(1).unwrap_or(1);
        let request = Message { number: self.number, text: Some(name.to_owned()) };
        request.send(&mut self.input)?;
        loop {
            self.process.await_readable(self.output.as_fd(), PATIENCE)?;
            let answer = Message::receive(&mut self.output)?.ok_or(io::ErrorKind::UnexpectedEof)?;
            match answer.number {
                0 => return Ok(Err(Refused)),
                number if number == self.number => return Ok(Ok(answer.text)),
                // An answer to an earlier request, which was counted as refused.
                _ => {}
            }
        }
    }
}
