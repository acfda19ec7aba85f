//! Frames, each encoded once.

use std::cell::Cell;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::model::{Frame, Profile};
use crate::naming::function_name;
use crate::units;

/// An encoded frame.
pub(super) struct EncodedFrame {
    full: Box<RawValue>,
    /// The frame without its system name, which may be as long as the rest. A reader takes it from the first
    /// occurrence.
    again: Option<Box<RawValue>>,
    written: Cell<bool>,
}

impl EncodedFrame {
    pub(super) fn of(profile: &Profile, frame: &Frame) -> serde_json::Result<Self> {
        let mut json = FrameJson::new(profile, frame);
        let full = to_raw_value(&json)?;
        let again = json.system_name.take().map(|_| to_raw_value(&json)).transpose()?;
        Ok(Self { full, again, written: Cell::new(false) })
    }

    /// The JSON for the next place where the frame occurs.
    pub(super) fn next(&self) -> &RawValue {
        let again = self.again.as_deref().filter(|_| self.written.replace(true));
        again.unwrap_or(&self.full)
    }
}

/// A frame that does not refer to its profile.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FrameJson {
    /// Function name; of a function without a name, its module and its start.
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
    #[serde(default)]
    pub address: u64,
    /// Whether the function was inlined into the next frame.
    #[serde(default)]
    pub inlined: bool,
    /// Why there is no function name.
    pub reason: Option<String>,
    /// Offset of the address in the file of the module.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_offset: Option<u64>,
    /// Symbol name before demangling.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system_name: Option<String>,
    /// Start of a function without a name, in its file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_start: Option<u64>,
}

impl FrameJson {
    pub(crate) fn new(profile: &Profile, frame: &Frame) -> Self {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        let module = profile.module_of(frame);
        Self {
            function: function_name(profile, frame).map(|name| name.into_owned()),
            file: text(&frame.file),
            line: frame.line,
            module: module.map(|module| module.path.to_string()),
            build_id: module.and_then(|module| module.build_id.as_deref()).map(units::hex),
            address: frame.address,
            inlined: frame.inlined,
            reason: text(&frame.reason),
            file_offset: frame.file_offset,
            system_name: text(&frame.system_name),
            function_start: frame.function_start,
        }
    }
}
