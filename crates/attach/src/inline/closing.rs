//! Closes the links of processes that have ended, beside everything else: the kernel takes tens of milliseconds for each, and whoever
//! executes many programs would wait for that.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, JoinHandle};

use heapbpf_kernel::inline::InlineLinks;

/// A thread that closes links. Dropping it waits until all are closed.
#[derive(Debug, Default)]
pub(super) struct Closing(Option<(Sender<InlineLinks>, JoinHandle<()>)>);

impl Closing {
    /// Closes links to code that no process has mapped any more, soon.
    pub(super) fn close(&mut self, links: InlineLinks) {
        if self.0.is_none() {
            let (sender, links) = channel();
            let thread = Builder::new().name("heapbpf-close".into()).spawn(move || run(&links));
            self.0 = thread.ok().map(|thread| (sender, thread));
        }
        // Without the thread, they are closed by being dropped.
        let _ = self.0.as_ref().map(|(sender, _)| sender.send(links));
    }
}

/// Closes all that wait at once.
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
