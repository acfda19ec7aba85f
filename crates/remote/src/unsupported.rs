//! Stand-ins on machines for which remote system calls are not implemented.

use std::convert::Infallible;
use std::time::Duration;

use crate::error::{Error, Refusal};
use crate::found::FoundBlob;
use crate::maps::Maps;
use crate::outcome::{Hooked, Mapped, Stopped, Word};
use crate::plan::Plan;

/// Maximum time that a process should be stopped.
pub const STOP_LIMIT: Duration = Duration::from_millis(20);

/// A process that may be stopped: there are none on this machine.
#[derive(Debug)]
pub struct Target(Infallible);

impl Target {
    /// Always refuses.
    ///
    /// # Errors
    /// Always.
    pub fn look(_pid: u32) -> Result<Self, Refusal> {
        Err(Refusal::Machine)
    }

    /// Allows stops at any moment.
    #[must_use]
    pub fn at_any_moment(self) -> Self {
        match self.0 {}
    }

    /// The process's id.
    #[must_use]
    pub fn pid(&self) -> i32 {
        match self.0 {}
    }

    /// Whether every thread of the process has a seccomp filter.
    #[must_use]
    pub fn is_filtered(&self) -> bool {
        match self.0 {}
    }

    /// Whether the process still runs the same program.
    #[must_use]
    pub fn is_there(&self) -> bool {
        match self.0 {}
    }

    /// What is mapped.
    #[must_use]
    pub fn maps(&self) -> &Maps {
        match self.0 {}
    }

    /// What earlier runs mapped into the process.
    #[must_use]
    pub fn found(&self) -> Vec<FoundBlob> {
        match self.0 {}
    }

    /// Carries out a plan.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn hook(&self, _plan: &Plan, _limit: Duration) -> Result<Stopped<Hooked>, Error> {
        match self.0 {}
    }

    /// Maps what a plan needs.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn map(&self, _plan: &Plan, _limit: Duration) -> Result<Stopped<Mapped>, Error> {
        match self.0 {}
    }

    /// Replaces pages.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn replace(&self, _plan: &Plan, _mapped: &Mapped, _limit: Duration) -> Result<Stopped<Hooked>, Error> {
        match self.0 {}
    }

    /// Replaces pages, if the caller's check agrees.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn replace_if(
        &self,
        _plan: &Plan,
        _mapped: &Mapped,
        _limit: Duration,
        _is_moment: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<Stopped<Hooked>, Error> {
        match self.0 {}
    }

    /// Writes words of the process's memory.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn write_words(&self, _words: &[Word], _limit: Duration) -> Result<Stopped<bool>, Error> {
        match self.0 {}
    }

    /// Removes what was found.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn take_out(
        &self,
        _found: &FoundBlob,
        _emptied: &std::ops::Range<u64>,
        _limit: Duration,
    ) -> Result<Stopped<()>, Error> {
        match self.0 {}
    }
}

/// Why a process does not wait at its entry point.
#[derive(Debug, thiserror::Error)]
#[error("processes are held at their entry point on x86-64 Linux only")]
pub struct NotHeld;

/// A process whose next exec is awaited.
#[derive(Debug)]
pub struct Exec(std::convert::Infallible);

impl Exec {
    /// Awaits the next exec of a process.
    ///
    /// # Errors
    /// Always.
    pub fn of(_: u32) -> Result<Self, NotHeld> {
        Err(NotHeld)
    }

    /// Waits for the exec.
    ///
    /// # Errors
    /// Never called.
    pub fn wait(self) -> Result<Waiting, NotHeld> {
        match self.0 {}
    }
}

/// A process that waits at its entry point.
#[derive(Debug)]
pub struct Waiting(std::convert::Infallible);

impl Waiting {
    /// Makes a process that has just called exec wait.
    ///
    /// # Errors
    /// Always.
    pub fn at_entry_of(_: u32, _: Duration) -> Result<Self, NotHeld> {
        Err(NotHeld)
    }

    /// Whether the process waits at its entry point.
    pub fn is_there(&self) -> bool {
        match self.0 {}
    }
}
