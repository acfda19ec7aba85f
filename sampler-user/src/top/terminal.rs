//! The terminal: in raw mode while the screen is shown, and restored afterwards, however that ends.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use super::output::{CLEAR, ENTER, LEAVE, bytes};

/// How long leaving waits for a frame that is being written. A dead line may never accept it.
const PATIENCE: Duration = Duration::from_secs(1);
/// Size that is assumed if the terminal does not report one.
const USUAL: Size = Size { width: 80, height: 24 };

/// The terminal.
pub struct Terminal {
    /// `None` after it was left.
    out: Mutex<Option<File>>,
    input: OwnedFd,
    /// Its settings before it was entered.
    usual: Mutex<Option<Termios>>,
    /// An eventfd that wakes the thread that shows the screen.
    wakes: OwnedFd,
}

/// The result of waiting for the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    /// There may be keys.
    Some,
    /// The time is over without input.
    None,
    /// The terminal is gone.
    Gone,
}

impl Terminal {
    /// Takes over the terminal on standard input and output.
    ///
    /// # Errors
    /// Their descriptors cannot be copied, or no event descriptor can be created.
    pub fn open() -> io::Result<Arc<Self>> {
        let out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let input = io::stdin().as_fd().try_clone_to_owned()?;
        let wakes = rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Arc::new(Self { out: Mutex::new(Some(out)), input, usual: Mutex::default(), wakes }))
    }

    /// Wakes the thread that shows the screen, or ends its next wait.
    pub fn wake(&self) {
        // If the counter is full, it ends the wait anyway.
        let _ = rustix::io::write(&self.wakes, &1_u64.to_ne_bytes());
    }

    /// Returns columns and rows.
    fn size(&self) -> Option<Size> {
        let size = rustix::termios::tcgetwinsize(&self.input).ok()?;
        let size = Size { width: size.ws_col, height: size.ws_row };
        (size.width > 0 && size.height > 0).then_some(size)
    }

    /// Switches to the screen.
    ///
    /// # Errors
    /// The terminal rejects the settings, or cannot be written.
    pub fn enter(&self) -> io::Result<()> {
        let usual = tcgetattr(&self.input)?;
        let mut raw = usual.clone();
        raw.make_raw();
        tcsetattr(&self.input, OptionalActions::Now, &raw)?;
        *self.usual.lock().unwrap_or_else(PoisonError::into_inner) = Some(usual);
        self.write(ENTER)
    }

    /// Writes a whole frame.
    ///
    /// # Errors
    /// The terminal is gone, or was left.
    pub fn write(&self, text: &str) -> io::Result<()> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let out = out.as_mut().ok_or(io::ErrorKind::BrokenPipe)?;
        out.write_all(text.as_bytes())
    }

    /// Leaves the screen, and restores the terminal. Later writes fail.
    pub fn leave(&self) {
        let until = Instant::now() + PATIENCE;
        let out = loop {
            match self.out.try_lock() {
                Ok(mut out) => break out.take(),
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner().take(),
                Err(TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(TryLockError::WouldBlock) => break None,
            }
        };
        if let Some(mut out) = out {
            let _ = out.write_all(LEAVE.as_bytes());
        }
        if let Some(usual) = self.usual.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = tcsetattr(&self.input, OptionalActions::Now, &usual);
        }
    }

    /// Returns what was typed, after [`Self::wait`] has reported input.
    ///
    /// # Errors
    /// It cannot be read, or is gone.
    pub fn read<'a>(&self, typed: &'a mut [u8; 256]) -> io::Result<&'a [u8]> {
        match rustix::io::retry_on_intr(|| rustix::io::read(&self.input, &mut *typed))? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            length => Ok(&typed[..length]),
        }
    }

    /// Waits for input, or until it is woken or the time is over.
    pub fn wait(&self, time: Duration) -> Input {
        let mut both = [PollFd::new(&self.input, PollFlags::IN), PollFd::new(&self.wakes, PollFlags::IN)];
        if poll(&mut both, Timespec::try_from(time).ok().as_ref()).is_err() {
            return Input::None;
        }
        let [input, wakes] = both.map(|polled| polled.revents());
        if !wakes.is_empty() {
            let _ = rustix::io::read(&self.wakes, &mut [0; 8]);
        }
        match input {
            input if input.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL) => Input::Gone,
            input if input.contains(PollFlags::IN) => Input::Some,
            _ => Input::None,
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Leaves the terminal when it is dropped.
pub struct Leaves(pub Arc<Terminal>);

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Draws on the terminal, each frame in one write.
pub struct Frames {
    terminal: Arc<Terminal>,
    frame: String,
    size: Size,
}

impl Frames {
    /// An empty frame.
    pub fn new(terminal: Arc<Terminal>) -> Self {
        Self { terminal, frame: String::new(), size: USUAL }
    }
}

impl Backend for Frames {
    type Error = io::Error;

    fn draw<'a, I: Iterator<Item = (u16, u16, &'a Cell)>>(&mut self, content: I) -> io::Result<()> {
        self.frame.push_str(&bytes(content));
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, _: P) -> io::Result<()> {
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.frame.push_str(CLEAR);
        Ok(())
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        Ok(self.terminal.size().unwrap_or(self.size))
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::ZERO })
    }

    fn flush(&mut self) -> io::Result<()> {
        let frame = std::mem::take(&mut self.frame);
        if frame.is_empty() { Ok(()) } else { self.terminal.write(&frame) }
    }
}
