//! Closes the links of exited processes on a separate thread. The kernel takes tens of milliseconds for each, which
//! would add up where many programs are executed.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use heapbpf_kernel::inline::InlineLinks;

/// A thread that closes links. Dropping it waits until all links are closed.
#[derive(Debug, Default)]
pub(super) struct Closing(Option<(Sender<InlineLinks>, JoinHandle<()>)>);

impl Closing {
    /// Closes links to code that no process maps any more. Returns at once.
    pub(super) fn close(&mut self, links: InlineLinks) {
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
fn run(links: &Receiver<InlineLinks>) {
    while let Ok(first) = links.recv() {
        InlineLinks::close(std::iter::once(first).chain(links.try_iter()));
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}
