//! Frames in a comparison, with the same keys as in `.json`.

use std::sync::Arc;

use serde::Serialize;

use crate::model::{Frame, Profile};
use crate::naming::function_name;
use crate::report::FrameView;
use crate::units;

/// A frame that does not refer to its profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiffFrame {
    /// Function name.
    pub function: Option<String>,
    /// Source file.
    pub file: Option<String>,
    /// Source line.
    pub line: Option<u32>,
    /// Path of the module.
    pub module: Option<String>,
    /// GNU build ID of the module, hexadecimal.
    pub build_id: Option<String>,
    /// Address in the process.
    pub address: u64,
    /// Whether the function was inlined into the next frame.
    pub inlined: bool,
    /// Why there is no function name.
    pub reason: Option<String>,
    /// Name to show: the function's name, or the location if the function is unknown.
    #[serde(skip)]
    pub name: String,
    /// Whether tables show the frame.
    #[serde(skip)]
    pub is_shown: bool,
}

impl DiffFrame {
    pub(super) fn new(profile: &Profile, frame: &Frame, view: FrameView) -> Self {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        let module = frame.module.and_then(|index| profile.modules.get(index));
        Self {
            function: function_name(profile, frame).map(|name| name.into_owned()),
            file: text(&frame.file),
            line: frame.line,
            module: module.map(|module| module.path.to_string()),
            build_id: module.and_then(|module| module.build_id.as_deref()).map(units::hex),
            address: frame.address,
            inlined: frame.inlined,
            reason: text(&frame.reason),
            name: view.name(profile, frame),
            is_shown: false,
        }
    }
}
