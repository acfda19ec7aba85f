//! Frames in a comparison, with the same keys as in `.json`.

use serde::Serialize;

use crate::formats::FrameJson;
use crate::model::{Frame, Profile};
use crate::report::FrameView;

/// A frame that does not refer to its profile.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiffFrame {
    /// The frame, as far as a comparison has it.
    #[serde(flatten)]
    pub frame: FrameJson,
    /// Name to show: the function's name, or the location if the function is unknown.
    #[serde(skip)]
    pub name: String,
    /// Whether tables show the frame.
    #[serde(skip)]
    pub is_shown: bool,
}

impl DiffFrame {
    pub(super) fn new(profile: &Profile, frame: &Frame, view: FrameView) -> Self {
        let whole = FrameJson::new(profile, frame);
        let frame_json = FrameJson { file_offset: None, system_name: None, function_start: None, ..whole };
        Self { frame: frame_json, name: view.name(profile, frame), is_shown: false }
    }
}
