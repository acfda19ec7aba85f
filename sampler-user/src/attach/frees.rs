//! Whose frees are tracked, and since when they are tracked again after they were given up.

use std::collections::{HashMap, HashSet};

use super::files::FileKey;

/// The processes that one set of links serves: the unit for which tracking of frees is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Served {
    /// All processes that map a file.
    File(FileKey),
    /// One process, by its id, with links of its own.
    Process(u32),
}

impl Served {
    /// Whom links to a file serve that were made for a process (`pid` `None`: for every process).
    pub(super) fn of(key: FileKey, pid: Option<u32>) -> Self {
        pid.map_or(Self::File(key), Self::Process)
    }
}

/// Whose frees are tracked.
#[derive(Debug, Default)]
pub(super) struct FreeTracking {
    /// Whether the recording tracks frees, as far as they are not given up.
    wanted: bool,
    /// Whether all frees are given up.
    none: bool,
    /// Processes whose frees are given up while those of others are tracked.
    without: HashSet<Served>,
    /// When frees were tracked again (CLOCK_MONOTONIC) that had been given up alone.
    again: HashMap<Served, u64>,
    /// The same after all frees had been given up.
    all_again_ns: Option<u64>,
}

impl FreeTracking {
    pub(super) fn new(wanted: bool) -> Self {
        Self { wanted, ..Self::default() }
    }

    /// Whether frees of any process are tracked.
    pub(super) const fn are_tracked(&self) -> bool {
        self.wanted && !self.none
    }

    /// Whether the frees of these processes are tracked.
    pub(super) fn includes(&self, served: Served) -> bool {
        self.are_tracked() && !self.without.contains(&served)
    }

    /// Whether the frees of these processes were given up.
    pub(super) fn gave_up(&self, served: Served) -> bool {
        self.wanted && !self.includes(served)
    }

    /// Whether frees of all, or of some, were given up.
    pub(super) fn lacks_any(&self) -> bool {
        self.wanted && (self.none || !self.without.is_empty())
    }

    /// Whether all frees were given up.
    pub(super) const fn lacks_all(&self) -> bool {
        self.wanted && self.none
    }

    pub(super) fn give_up(&mut self, served: Served) {
        self.without.insert(served);
    }

    pub(super) fn give_up_all(&mut self) {
        self.none = true;
    }

    /// Takes up all frees again but those of `except`. Returns whether they had been given up, as a function.
    pub(super) fn take_up(&mut self, except: &[Served]) -> impl Fn(Served) -> bool + use<> {
        let (all, before) = (std::mem::take(&mut self.none), std::mem::take(&mut self.without));
        self.without.extend(except);
        let without = self.without.clone();
        move |served| !without.contains(&served) && (all || before.contains(&served))
    }

    /// Notes that these frees are tracked again. `all`: after all had been given up.
    pub(super) fn tracked_again(&mut self, served: impl IntoIterator<Item = Served>, all: bool, now_ns: u64) {
        self.again.extend(served.into_iter().map(|it| (it, now_ns)));
        if all {
            self.all_again_ns = Some(now_ns);
        }
    }

    /// Whether any frees were taken up again.
    pub(super) fn was_taken_up(&self) -> bool {
        self.all_again_ns.is_some() || !self.again.is_empty()
    }

    /// When the frees of these processes were last tracked again (CLOCK_MONOTONIC); `None` if they always were.
    pub(super) fn since(&self, served: Served) -> Option<u64> {
        self.again.get(&served).copied().max(self.all_again_ns)
    }

    pub(super) fn forget(&mut self, served: Served) {
        self.without.remove(&served);
        self.again.remove(&served);
    }
}
