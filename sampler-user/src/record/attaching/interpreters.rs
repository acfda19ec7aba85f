//! The Python interpreters that targets map.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::host::mappings::ModuleId;
use heapbpf_python::{Runtime, Unsupported};

/// The interpreters that targets map.
#[derive(Default)]
pub(super) struct Interpreters {
    pub(super) known: HashMap<ModuleId, Option<Arc<Runtime>>>,
    pub(super) new: Vec<(ModuleId, Arc<Runtime>)>,
    pub(super) refused: BTreeMap<ModuleId, Unsupported>,
}
