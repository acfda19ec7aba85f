//! Passes the BPF programs' own diagnostics, which are rare, to the daemon's log.

use std::os::fd::BorrowedFd;

use aya_log::EbpfLogger;

use super::sys;

/// The reading end of the programs' log.
pub struct KernelLog(Option<EbpfLogger<&'static dyn log::Log>>);

impl KernelLog {
    /// Opens the log of a program that writes to it. A recording works without the log, so failure is not an error.
    pub fn open(program: BorrowedFd<'_>) -> Self {
        let logger = sys::program_id(program)
            .map_err(|error| error.to_string())
            .and_then(|id| EbpfLogger::init_from_id(id).map_err(|error| error.to_string()));
        Self(logger.inspect_err(|error| log::info!("no diagnostics from the kernel side: {error}")).ok())
    }

    /// Whether there is a log.
    pub const fn is_open(&self) -> bool {
        self.0.is_some()
    }

    /// Forwards what was written since the last call.
    pub fn flush(&mut self) {
        if let Some(logger) = &mut self.0 {
            logger.flush();
        }
    }
}
