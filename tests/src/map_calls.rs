//! Finds out which operation on which map a `bpf` call is.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;

use crate::descriptors::take_descriptor;
use crate::kernel::map_name;

/// `BPF_MAP_CREATE`.
pub const MAP_CREATE: u32 = 0;
/// `BPF_MAP_LOOKUP_ELEM`.
pub const MAP_LOOKUP: u32 = 1;
/// `BPF_MAP_UPDATE_ELEM`.
pub const MAP_UPDATE: u32 = 2;
/// `BPF_MAP_DELETE_ELEM`.
pub const MAP_DELETE: u32 = 3;
/// `BPF_MAP_GET_NEXT_KEY`.
pub const MAP_NEXT_KEY: u32 = 4;
/// `BPF_MAP_FREEZE`.
pub const MAP_FREEZE: u32 = 22;
/// `BPF_MAP_LOOKUP_BATCH`.
pub const MAP_BATCH: u32 = 24;
/// `BPF_ITER_CREATE`.
pub const ITERATOR: u32 = 33;

/// All of these commands.
pub(crate) const COMMANDS: [u32; 8] =
    [MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY, MAP_FREEZE, MAP_BATCH, ITERATOR];

/// An operation on a map. Iterators have no map.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Operation {
    /// The `bpf` command.
    pub command: u32,
    /// The map's name, as the kernel truncates it.
    pub map: String,
}

impl Operation {
    /// The operation of a call that waits for its answer.
    ///
    /// # Errors
    /// The caller has ended, or its map's name cannot be read.
    pub(crate) fn of(call: &libc::seccomp_notif) -> io::Result<Self> {
        let command = call.data.args[0] as u32;
        let memory = File::open(format!("/proc/{}/mem", call.pid))?;
        let mut attributes = [0; 64];
        memory.read_exact_at(&mut attributes, call.data.args[1])?;
        let word = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|i| attributes[at + i]));
        // Offsets in the kernel's `union bpf_attr`.
        let map = match command {
            MAP_CREATE => text(&attributes[28..44]),
            ITERATOR => String::new(),
            MAP_BATCH => name_of(call.pid, word(36))?,
            _ => name_of(call.pid, word(0))?,
        };
        Ok(Self { command, map })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let command = match self.command {
            MAP_CREATE => "create",
            MAP_LOOKUP => "look up",
            MAP_UPDATE => "update",
            MAP_DELETE => "delete",
            MAP_NEXT_KEY => "next key",
            MAP_FREEZE => "freeze",
            MAP_BATCH => "read a batch",
            _ => "iterator",
        };
        write!(out, "{command} {}", self.map)
    }
}

fn text(bytes: &[u8]) -> String {
    bytes.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte)).collect()
}

/// The name of the map behind a descriptor of a thread's process.
fn name_of(thread: u32, descriptor: i32) -> io::Result<String> {
    let status = fs::read_to_string(format!("/proc/{thread}/status"))?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok());
    let map = take_descriptor(process.ok_or(io::ErrorKind::NotFound)?, descriptor)?;
    map_name(map.as_fd())
}
