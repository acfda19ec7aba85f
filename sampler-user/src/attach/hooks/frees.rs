//! Whose frees are followed: those of all, of some, or none.

use std::sync::Arc;

use super::{FileKey, Hooks, Known};
use crate::attach::audit::LinkKind;
use crate::kernel::programs::Links;

/// Links that serve the same processes: what frees are followed, or not, for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Served {
    /// All processes that map a file.
    File(FileKey),
    /// One process, by its id, which has links of its own.
    Process(u32),
}

impl Served {
    pub(super) fn of(key: FileKey, pid: Option<u32>) -> Self {
        pid.map_or(Self::File(key), Self::Process)
    }
}

impl Hooks {
    /// Follows frees no longer, in all files. Allocations are followed meanwhile as before.
    pub fn leave_frees(&mut self, link: LinkKind) {
        self.live = false;
        self.links.values_mut().for_each(Links::leave_frees);
        for known in self.known.values_mut() {
            let Ok(planned) = &mut known.plan else { continue };
            if planned.audit.is_some() {
                planned.audit = Some(Arc::new(planned.audit(&known.path, link, false)));
            }
        }
    }

    /// Follows frees no longer for some. Allocations are followed meanwhile as before, and so are the frees of others.
    pub fn leave_frees_of(&mut self, served: Served, link: LinkKind) {
        self.without_frees.insert(served);
        let links = self.links.iter_mut().filter(|((key, pid), _)| Served::of(*key, *pid) == served);
        links.for_each(|(_, links)| links.leave_frees());
        if let Served::File(key) = served
            && let Some(Known { path, plan: Ok(planned), .. }) = self.known.get_mut(&key)
        {
            planned.audit = Some(Arc::new(planned.audit(path, link, false)));
        }
    }

    /// Whether frees are followed for some and not for others.
    pub fn follows_some_frees(&self) -> bool {
        self.live && !self.without_frees.is_empty()
    }

    /// Whether the frees of those that links serve were given up.
    pub fn gave_up_frees_of(&self, served: Served) -> bool {
        self.without_frees.contains(&served)
    }

    /// The links to a file that serve a process (`None`: any). `None`: it has none.
    pub fn serving(&self, key: FileKey, pid: Option<u32>) -> Option<Served> {
        let pid = pid.filter(|_| !self.shared.contains(&key));
        self.links.contains_key(&(key, pid)).then(|| Served::of(key, pid))
    }

    /// Path of a file that was looked at.
    pub fn path(&self, key: FileKey) -> Option<&str> {
        self.known.get(&key).map(|known| known.path.as_str())
    }
}
