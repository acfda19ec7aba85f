//! Hooks a `-- COMMAND` inline: at its entry point, where its libraries are mapped. Until then, probes count its calls.

use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};
use std::time::{Duration, Instant};

use heapbpf_attach::inline::forbidden;
use heapbpf_host::process::ProcessInfo;
use heapbpf_kernel::KernelError;
use heapbpf_kernel::exec_watch::{ExecRing, ExecWatch};
use heapbpf_remote::{NotHeld, Waiting};
use sampler_ebpf::abi::LiveValue;

use super::state::Session;

/// Time that a command may take to reach its entry point. After that, it is no longer awaited.
const LIMIT: Duration = Duration::from_secs(5);
/// A program that a target executes continues by itself after this time, if it has not been released before.
const HELD_AT_MOST: Duration = Duration::from_secs(2);
/// Pause between two checks of the command.
const PAUSE: Duration = Duration::from_micros(500);

impl Session {
    /// Hooks a command inline that was just executed, and lets it continue. If hooking is not possible, its probes
    /// stay.
    pub(super) fn hook_command(&mut self, pid: u32, held: Result<Waiting, NotHeld>) {
        let (programs, may_watch) = (Arc::clone(&self.attaching.programs), self.may_watch_execs());
        let make_ring = || programs.exec_ring();
        let (ring, hooked) = std::thread::scope(|scope| {
            // Meanwhile, because the kernel takes a grace period for it.
            let ring = may_watch.then(|| Builder::new().spawn_scoped(scope, make_ring).ok()).flatten();
            let hooked = match &held {
                Ok(waiting) => self.hook_waiting(pid, waiting),
                Err(why) => Err(why.to_string()),
            };
            (ring.map(ScopedJoinHandle::join), hooked)
        });
        // It may execute other programs as soon as it continues.
        match ring {
            Some(Ok(ring)) => self.watch_execs_in(ring),
            _ => self.watch_execs(),
        }
        drop(held);
        self.attaching.held = None;
        if let Err(why) = hooked {
            self.attaching.stays_probed(pid, &why);
        }
    }

    /// From now on, makes targets that execute a program wait at its entry point.
    pub(super) fn watch_execs(&mut self) {
        if self.may_watch_execs() {
            let ring = self.attaching.programs.exec_ring();
            self.watch_execs_in(ring);
        }
    }

    /// Whether execs are to be watched, and are not yet. Programs of a whole host are hooked when they become active.
    fn may_watch_execs(&self) -> bool {
        self.attaching.takes_in() && self.attaching.execs.is_none() && !self.plan.targets.are_all()
    }

    fn watch_execs_in(&mut self, ring: Result<ExecRing, KernelError>) {
        let may_wait = |pid| forbidden::check(pid).is_ok();
        match ring.and_then(|ring| ExecWatch::start(ring, may_wait, HELD_AT_MOST)) {
            Ok(watch) => self.attaching.execs = Some(watch),
            Err(error) => log::warn!("the first calls of programs that targets execute may be missing: {error}"),
        }
    }

    fn hook_waiting(&mut self, pid: u32, waiting: &Waiting) -> Result<(), String> {
        let since = Instant::now();
        while !waiting.is_there() {
            if since.elapsed() > LIMIT || ProcessInfo::read(pid).is_err() {
                return Err("it did not reach its entry point in time".to_owned());
            }
            self.cycle();
            std::thread::sleep(PAUSE);
        }
        self.cycle();
        // Other threads would go on to allocate, counted by probes, while it is being hooked.
        if ProcessInfo::read(pid).map_or(true, |process| process.threads != 1) {
            return Err("its libraries started threads before its entry point".to_owned());
        }
        let mut sampled = Vec::new();
        let scanned = self.kernel.live_map.scan(|entries| {
            let own = entries.filter(|(key, value)| key.space.tgid == pid && value.sample != LiveValue::FREED);
            sampled.extend(own.map(|(key, _)| key.address));
        });
        scanned.map_err(|error| error.to_string())?;
        self.attaching.hook_at_entry(&mut self.host, pid, &sampled);
        self.recorder.set_functions(self.attaching.hooks.functions());
        Ok(())
    }
}
