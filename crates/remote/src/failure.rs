//! Failures while a process is stopped.

use std::io;
use std::time::Duration;

use crate::error::{Busy, Error, Refusal};

/// An [`Error`] before the length of the stop is known.
#[derive(Debug)]
pub(crate) enum Failure {
    Busy(Busy),
    Refused(Refusal),
    Call(&'static str, io::Error),
    Ended,
    Trace(&'static str, io::Error),
    Patched(u64),
}

impl Failure {
    /// Adds the time that the process was stopped.
    pub(crate) fn stopped(self, stopped: Duration) -> Error {
        match self {
            Self::Refused(why) => Error::Refused(why),
            Self::Busy(why) => Error::Busy { why, stopped },
            Self::Call(call, source) => Error::Call { call: call.into(), source },
            Self::Ended => Error::Ended,
            Self::Trace(what, source) => Error::Trace { what: what.into(), source },
            Self::Patched(address) => Error::Patched(address),
        }
    }
}
