//! Runs work that takes long, or waits for the kernel, on other threads.

use std::collections::HashSet;
use std::hash::Hash;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Maximum number of threads for work that mostly waits.
const MOST_WAITING: usize = 32;

/// Calls `work` for each item, with as many threads as there are processors. Items are started in order.
pub fn on_all_processors<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    by_threads(processors(), items, work);
}

/// The same, but leaves one processor to a thread that works at the same time.
pub fn on_other_processors<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    by_threads((processors() - 1).max(1), items, work);
}

/// Number of processors that this process may use, at least 1.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Calls `work` for each item, with many threads, because they mostly wait.
pub fn while_waiting<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    by_threads(MOST_WAITING, items, work);
}

fn by_threads<T: Send>(most: usize, items: Vec<T>, work: impl Fn(T) + Sync) {
    let threads = most.min(items.len());
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let all = || {
        while let Some(item) = next() {
            work(item);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // If it cannot be started, the others do its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, all);
        }
        all();
    });
}

/// A thread that does jobs in the order in which they are begun, while the caller goes on. It starts with the first
/// job. At most one job of each key is under way.
pub struct Aside<K, T> {
    name: &'static str,
    jobs: Option<Sender<(K, Job<T>)>>,
    done: Results<K, T>,
    under_way: HashSet<K>,
    /// The key of the job that the thread is doing.
    running: Arc<Mutex<Option<K>>>,
    /// Whether optional jobs are not done any more.
    skips_optional: Arc<AtomicBool>,
}

type Job<T> = Box<dyn FnOnce() -> T + Send>;
type Results<K, T> = (Sender<Done<K, T>>, Receiver<Done<K, T>>);

/// A finished job: its key and its result; `None` if it panicked.
pub type Done<K, T> = (K, Option<T>);

impl<K: Copy + Eq + Hash + Send + 'static, T: Send + 'static> Aside<K, T> {
    /// A thread with this name, which has nothing to do yet.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        let (under_way, running) = (HashSet::new(), Arc::default());
        Self { name, jobs: None, done: channel(), under_way, running, skips_optional: Arc::default() }
    }

    /// Begins a job. No job with the same key may be under way. Returns false, and drops the job, if the thread cannot
    /// be started.
    pub fn begin(&mut self, key: K, job: impl FnOnce() -> T + Send + 'static) -> bool {
        let job: Job<T> = Box::new(job);
        let has_begun = self.starts() && self.jobs.as_ref().is_some_and(|jobs| jobs.send((key, job)).is_ok());
        if has_begun {
            self.under_way.insert(key);
        }
        has_begun
    }

    /// The same for a job that is not done if [`Self::skip_optional`] is called before it starts. Its result is then
    /// `instead`.
    pub fn begin_optional(&mut self, key: K, job: impl FnOnce() -> T + Send + 'static, instead: T) -> bool {
        let is_skipped = Arc::clone(&self.skips_optional);
        self.begin(key, move || if is_skipped.load(Ordering::Relaxed) { instead } else { job() })
    }

    /// Skips the optional jobs that have not started yet, and all later ones.
    pub fn skip_optional(&self) {
        self.skips_optional.store(true, Ordering::Relaxed);
    }

    /// Starts the thread if it was not started yet. Returns whether there is one.
    pub fn starts(&mut self) -> bool {
        if self.jobs.is_none() {
            self.jobs = self.start();
        }
        self.jobs.is_some()
    }

    fn start(&self) -> Option<Sender<(K, Job<T>)>> {
        let (jobs, queue) = channel::<(K, Job<T>)>();
        let (done, running) = (self.done.0.clone(), Arc::clone(&self.running));
        let note = move |key| *running.lock().unwrap_or_else(PoisonError::into_inner) = key;
        let run = move || {
            for (key, job) in queue {
                note(Some(key));
                // What it reads may be hostile. If it panics, its caller must be notified all the same.
                let result = catch_unwind(AssertUnwindSafe(job)).ok();
                note(None);
                if done.send((key, result)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name(self.name.into()).spawn(run).ok().map(|_| jobs)
    }

    /// Whether there has been a job, and so there is a thread.
    #[must_use]
    pub const fn is_started(&self) -> bool {
        self.jobs.is_some()
    }

    /// Keys of the jobs whose results were not taken yet.
    #[must_use]
    pub const fn under_way(&self) -> &HashSet<K> {
        &self.under_way
    }

    /// Key of the job that has started and not finished.
    #[must_use]
    pub fn running(&self) -> Option<K> {
        *self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the result of the next finished job; `None` if none has finished since.
    pub fn next_done(&mut self) -> Option<Done<K, T>> {
        let done = self.done.1.try_recv().ok();
        self.note(done)
    }

    /// Waits for the next job to finish, and takes its result; `None` if none is under way.
    pub fn wait(&mut self) -> Option<Done<K, T>> {
        let done = if self.under_way.is_empty() { None } else { self.done.1.recv().ok() };
        self.note(done)
    }

    /// The same, but waits until `end` at most.
    pub fn wait_until(&mut self, end: Instant) -> Option<Done<K, T>> {
        let limit = end.saturating_duration_since(Instant::now());
        let done = if self.under_way.is_empty() { None } else { self.done.1.recv_timeout(limit).ok() };
        self.note(done)
    }

    fn note(&mut self, done: Option<Done<K, T>>) -> Option<Done<K, T>> {
        done.inspect(|(key, _)| _ = self.under_way.remove(key))
    }
}

/// Number of online processors, including those outside this process's affinity.
pub fn online_processors() -> usize {
    // SAFETY: `sysconf` takes a plain integer and touches no memory of ours.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) }).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_is_worked_on_once() {
        for count in [0, 1, 1000] {
            let done = Mutex::new(Vec::new());
            while_waiting((0..count).collect(), |item: i32| done.lock().unwrap().push(item));
            on_all_processors((count..2 * count).collect(), |item| done.lock().unwrap().push(item));
            on_other_processors((2 * count..3 * count).collect(), |item| done.lock().unwrap().push(item));
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert!(done.into_iter().eq(0..3 * count));
        }
    }

    #[test]
    fn jobs_are_done_aside_in_their_order_and_a_panic_ends_only_its_own() {
        let mut aside: Aside<u32, u32> = Aside::new("aside");
        assert_eq!((aside.next_done(), aside.wait(), aside.is_started()), (None, None, false), "nothing was begun");
        let (go, gate) = channel::<()>();
        assert!(aside.begin(1, move || gate.recv().map_or(0, |()| 10)));
        assert!(aside.begin(2, || panic!("as a hostile file may make it")));
        assert!(aside.begin(3, || 30));
        assert_eq!((aside.next_done(), aside.under_way().len()), (None, 3), "the first still waits");
        assert_eq!((aside.wait_until(Instant::now()), aside.under_way().len()), (None, 3), "and is not waited for");
        go.send(()).unwrap();
        let later = Instant::now() + std::time::Duration::from_secs(600);
        let done = [aside.wait_until(later), aside.wait(), aside.wait()];
        assert_eq!(done, [Some((1, Some(10))), Some((2, None)), Some((3, Some(30)))]);
        assert_eq!(aside.wait_until(later), None, "nothing is under way");
        assert!(aside.under_way().is_empty() && aside.wait().is_none());
        assert!(aside.begin(1, || 11), "the key is free again");
        assert_eq!(aside.wait(), Some((1, Some(11))));
    }

    #[test]
    fn optional_jobs_that_have_not_started_are_skipped_and_the_others_done() {
        let mut aside: Aside<u32, u32> = Aside::new("aside");
        let (has_begun, begun) = channel::<()>();
        let (go, gate) = channel::<()>();
        let first = move || {
            has_begun.send(()).unwrap();
            gate.recv().map_or(0, |()| 10)
        };
        assert!(aside.begin_optional(1, first, 11));
        assert!(aside.begin_optional(2, || panic!("it is not done"), 21));
        assert!(aside.begin(3, || 30));
        begun.recv().unwrap();
        assert_eq!((aside.running(), aside.under_way().len()), (Some(1), 3));
        aside.skip_optional();
        go.send(()).unwrap();
        let done = [aside.wait(), aside.wait(), aside.wait()];
        assert_eq!(done, [Some((1, Some(10))), Some((2, Some(21))), Some((3, Some(30)))]);
        assert_eq!(aside.running(), None);
        assert!(aside.begin_optional(4, || panic!("it is not done"), 41));
        assert_eq!(aside.wait(), Some((4, Some(41))), "later ones are skipped, too");
    }

    #[test]
    fn they_work_at_the_same_time() {
        // Each waits for all others. One after the other, they would wait forever.
        let barrier = std::sync::Barrier::new(MOST_WAITING);
        while_waiting(vec![(); MOST_WAITING], |()| {
            barrier.wait();
        });
    }
}
