//! Closes links of processes that have ended, of files that no process maps any more, and of a recording that is over,
//! on a separate thread. The kernel takes tens of milliseconds for each, which would add up where many programs are
//! executed.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use heapbpf_kernel::inline::InlineLinks;
use heapbpf_kernel::programs::Links;

/// Links that a [`Closing`] closes.
pub trait Close: Send + Sized + 'static {
    /// Closes links. Returns when the kernel has removed their probes.
    fn close_all(links: impl Iterator<Item = Self>);
}

impl Close for InlineLinks {
    fn close_all(links: impl Iterator<Item = Self>) {
        Self::close(links);
    }
}

impl Close for Links {
    fn close_all(links: impl Iterator<Item = Self>) {
        Self::close(links);
    }
}

/// A thread that closes links. Dropping it waits until all links are closed.
#[derive(Debug)]
pub struct Closing<L>(Option<(Sender<L>, JoinHandle<()>)>);

impl<L> Default for Closing<L> {
    fn default() -> Self {
        Self(None)
    }
}

impl<L: Close> Closing<L> {
    /// Closes links. Returns at once.
    pub fn close(&mut self, links: L) {
        if self.0.is_none() {
            let (sender, links) = channel();
            let thread = Builder::new().name("heapbpf-close".into()).spawn(move || run(&links));
            self.0 = thread.ok().map(|thread| (sender, thread));
        }
        // If there is no thread, the links are closed when they are dropped.
        let _ = self.0.as_ref().map(|(sender, _)| sender.send(links));
    }
}

/// Closes all waiting links together.
fn run<L: Close>(links: &Receiver<L>) {
    while let Ok(first) = links.recv() {
        L::close_all(std::iter::once(first).chain(links.try_iter()));
    }
}

impl<L> Drop for Closing<L> {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}
