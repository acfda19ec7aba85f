//! Closes links of processes that have ended, of files that no process maps any more, and of a recording that is over,
//! on a separate thread. The kernel takes tens of milliseconds for each, which would add up where many programs are
//! executed.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::vec::IntoIter;

/// Closes links. Returns when the kernel has removed their probes.
type CloseAll<L> = fn(IntoIter<L>);

/// A thread that closes links. Dropping it waits until all links are closed.
#[derive(Debug)]
pub struct Closing<L> {
    close_all: CloseAll<L>,
    thread: Option<(Sender<L>, JoinHandle<()>)>,
}

impl<L: Send + 'static> Closing<L> {
    /// Has links closed by this function: `Links::close`, for example.
    pub const fn new(close_all: CloseAll<L>) -> Self {
        Self { close_all, thread: None }
    }

    /// Closes links. Returns at once.
    pub fn close(&mut self, links: L) {
        if self.thread.is_none() {
            let ((sender, links), close_all) = (channel(), self.close_all);
            let thread = Builder::new().name("heapbpf-close".into()).spawn(move || run(&links, close_all));
            self.thread = thread.ok().map(|thread| (sender, thread));
        }
        // If there is no thread, the links are closed when they are dropped.
        let _ = self.thread.as_ref().map(|(sender, _)| sender.send(links));
    }
}

/// Closes all waiting links together.
fn run<L>(links: &Receiver<L>, close_all: CloseAll<L>) {
    while let Ok(first) = links.recv() {
        let waiting: Vec<L> = std::iter::once(first).chain(links.try_iter()).collect();
        close_all(waiting.into_iter());
    }
}

impl<L> Drop for Closing<L> {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.thread.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}
