//! Frames, each encoded once.

use std::cell::Cell;

use serde::Serialize;
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
        let again = Frame { system_name: None, ..frame.clone() };
        Ok(Self {
            full: frame_json(profile, frame)?,
            again: frame.system_name.is_some().then(|| frame_json(profile, &again)).transpose()?,
            written: Cell::new(false),
        })
    }

    /// The JSON for the next place where the frame occurs.
    pub(super) fn next(&self) -> &RawValue {
        let again = self.again.as_deref().filter(|_| self.written.replace(true));
        again.unwrap_or(&self.full)
    }
}

fn frame_json(profile: &Profile, frame: &Frame) -> serde_json::Result<Box<RawValue>> {
    #[derive(Serialize)]
    struct FrameJson<'a> {
        function: Option<&'a str>,
        file: Option<&'a str>,
        line: Option<u32>,
        module: Option<&'a str>,
        build_id: Option<String>,
        address: u64,
        inlined: bool,
        reason: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        file_offset: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        system_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        function_start: Option<u64>,
    }
    let module = frame.module.and_then(|index| profile.modules.get(index));
    let function = function_name(profile, frame);
    to_raw_value(&FrameJson {
        function: function.as_deref(),
        file: frame.file.as_deref(),
        line: frame.line,
        module: module.map(|module| &*module.path),
        build_id: module.and_then(|module| module.build_id.as_deref()).map(units::hex),
        address: frame.address,
        inlined: frame.inlined,
        reason: frame.reason.as_deref(),
        file_offset: frame.file_offset,
        system_name: frame.system_name.as_deref(),
        function_start: frame.function_start,
    })
}
