//! Hooks a `-- COMMAND` inline: at its entry point, where its libraries are mapped. Until then, probes count its calls.

use std::time::{Duration, Instant};

use heapbpf_attach::inline::forbidden;
use heapbpf_host::process::ProcessInfo;
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
        // It may execute other programs as soon as it continues.
        self.watch_execs();
        let hooked = held.map_err(|why| why.to_string()).and_then(|waiting| self.hook_waiting(pid, &waiting));
        self.attaching.held = None;
        if let Err(why) = hooked {
            self.attaching.stays_probed(pid, &why);
        }
    }

    /// From now on, makes targets that execute a program wait at its entry point.
    pub(super) fn watch_execs(&mut self) {
        // Programs of a whole host are hooked when they become active.
        if !self.attaching.takes_in() || self.attaching.execs.is_some() || self.plan.targets.are_all() {
            return;
        }
        match self.attaching.programs.watch_execs(|pid| forbidden::check(pid).is_ok(), HELD_AT_MOST) {
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
