//! Go programs: what is known about their files, and the names of their functions.

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, OnceLock};

use heapbpf_go::{Places, Program, Unsupported};
use heapbpf_profile::model::Frame;
use heapbpf_unwind::mapping::ModuleId;

/// The reason of a frame outside all functions of the program.
const NO_FUNCTION: &str = "no function of the Go program at this address";
/// Maximum number of frames kept. When there are more, they are looked up again.
const MOST_FRAMES: usize = 1 << 18;

/// A file made by the Go toolchain.
#[derive(Debug)]
pub struct GoProgram {
    /// Its module.
    pub module: ModuleId,
    /// Path as a process sees it.
    pub path: Arc<str>,
    /// GNU build ID, if it has one.
    pub build_id: Option<Vec<u8>>,
    /// The file.
    pub file: Arc<File>,
    program: OnceLock<Result<Program, Unsupported>>,
}

impl GoProgram {
    /// A file of which nothing has been read yet.
    pub const fn new(module: ModuleId, path: Arc<str>, build_id: Option<Vec<u8>>, file: Arc<File>) -> Self {
        Self { module, path, build_id, file, program: OnceLock::new() }
    }

    /// Returns what the file contains. The first call reads it.
    ///
    /// # Errors
    /// Its heap profile cannot be read.
    pub fn program(&self) -> Result<&Program, Unsupported> {
        let find = || Program::find(&*self.file).and_then(|program| program.ok_or(Unsupported::NoFunctions));
        self.program.get_or_init(find).as_ref().map_err(|why| *why)
    }
}

/// Frames by file, place in memory and return address.
#[derive(Default)]
pub struct GoNames(HashMap<(ModuleId, Places, u64), Frame>);

impl GoNames {
    /// Returns the frame of a return address, without its module.
    pub fn frame(&mut self, program: &GoProgram, places: &Places, return_address: u64) -> Frame {
        if self.0.len() >= MOST_FRAMES {
            self.0.clear();
        }
        let frame = self.0.entry((program.module, *places, return_address));
        frame.or_insert_with(|| named(program, places, return_address)).clone()
    }
}

fn named(program: &GoProgram, places: &Places, return_address: u64) -> Frame {
    let address = return_address.saturating_sub(1);
    let found = program.program().ok().and_then(|known| known.functions.at(&*program.file, places, return_address));
    let Some(function) = found else {
        return Frame { address, reason: Some(NO_FUNCTION.into()), ..Frame::default() };
    };
    Frame {
        function: Some(function.name.into()),
        file: Some(function.file).filter(|file| !file.is_empty()).map(Into::into),
        line: Some(function.line).filter(|line| *line > 0),
        inlined: function.inlined,
        address,
        ..Frame::default()
    }
}
