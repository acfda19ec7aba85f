//! Stand-ins on machines for which remote system calls are not implemented.

use std::convert::Infallible;
use std::ops::Range;
use std::time::Duration;

use crate::error::{Error, Refusal};
use crate::found::FoundBlob;
use crate::maps::Maps;
use crate::plan::Plan;
use crate::work::{Hooked, Mapped, Stopped, Word};

/// Maximum time that a process should be stopped.
pub const STOP_LIMIT: Duration = Duration::from_millis(20);

/// Methods of a type that has no values.
macro_rules! never_called {
    ($($(#[$about:meta])* fn $name:ident($($argument:ty),*) -> $result:ty;)*) => {
        $($(#[$about])*
        pub fn $name(&self $(, _: $argument)*) -> $result {
            match self.0 {}
        })*
    };
}

/// A process that may be stopped: there are none on this machine.
#[derive(Debug)]
pub struct Target(Infallible);

impl Target {
    /// Always refuses.
    ///
    /// # Errors
    /// Always.
    pub fn look(_: u32) -> Result<Self, Refusal> {
        Err(Refusal::Machine)
    }

    /// Allows stops at any moment.
    #[must_use]
    pub fn at_any_moment(self) -> Self {
        match self.0 {}
    }

    /// Replaces pages, if the caller's check agrees.
    ///
    /// # Errors
    /// Never: there is no such process.
    pub fn replace_if(
        &self,
        _: &Plan,
        _: &Mapped,
        _: Duration,
        _: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<Stopped<Hooked>, Error> {
        match self.0 {}
    }

    never_called! {
        /// The process's id.
        #[must_use]
        fn pid() -> i32;
        /// Whether every thread of the process has a seccomp filter.
        #[must_use]
        fn is_filtered() -> bool;
        /// Whether the process still runs the same program.
        #[must_use]
        fn is_there() -> bool;
        /// What is mapped.
        #[must_use]
        fn maps() -> &Maps;
        /// What earlier runs mapped into the process.
        #[must_use]
        fn found() -> Vec<FoundBlob>;
        /// Carries out a plan.
        ///
        /// # Errors
        /// Never: there is no such process.
        fn hook(&Plan, Duration) -> Result<Stopped<Hooked>, Error>;
        /// Maps what a plan needs.
        ///
        /// # Errors
        /// Never: there is no such process.
        fn map(&Plan, Duration) -> Result<Stopped<Mapped>, Error>;
        /// Replaces pages.
        ///
        /// # Errors
        /// Never: there is no such process.
        fn replace(&Plan, &Mapped, Duration) -> Result<Stopped<Hooked>, Error>;
        /// Writes words of the process's memory.
        ///
        /// # Errors
        /// Never: there is no such process.
        fn write_words(&[Word], Duration) -> Result<Stopped<bool>, Error>;
        /// Removes what was found.
        ///
        /// # Errors
        /// Never: there is no such process.
        fn take_out(&FoundBlob, &Range<u64>, Duration) -> Result<Stopped<()>, Error>;
    }
}

/// Why a process does not wait at its entry point.
#[derive(Debug, thiserror::Error)]
#[error("processes are held at their entry point on x86-64 Linux only")]
pub struct NotHeld;

/// A process whose next exec is awaited.
#[derive(Debug)]
pub struct Exec(Infallible);

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
pub struct Waiting(Infallible);

impl Waiting {
    /// Makes a process that has just called exec wait.
    ///
    /// # Errors
    /// Always.
    pub fn at_entry_of(_: u32, _: Duration) -> Result<Self, NotHeld> {
        Err(NotHeld)
    }

    never_called! {
        /// Whether the process waits at its entry point.
        fn is_there() -> bool;
        /// Whether the process sleeps in a system call of its own.
        fn sleeps_elsewhere() -> bool;
    }
}
