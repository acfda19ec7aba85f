//! Unwinds the frames of a JVM's code: finds where the caller continues. Covers x86-64 frames, as laid out in HotSpot's
//! `frame_x86.hpp` and `stubGenerator_x86_64.cpp`.

use crate::code::{Blob, Kind};
use crate::layout::Vm;

const WORD: u64 = 8;
/// Distances below an interpreted frame's frame pointer: the caller's stack pointer before it made space for the
/// callee's locals, the method, and the current bytecode.
const SENDER_SP: u64 = WORD;
const METHOD: u64 = 3 * WORD;
const BYTECODE: u64 = 8 * WORD;
/// Maximum distance of the caller's stack pointer above the frame: 255 arguments of two words.
const MOST_ARGUMENTS: u64 = 512 * WORD;

/// The registers that matter in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Where execution continues: a return address.
    pub ip: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer, if known. Compiled code uses the register for other values, too.
    pub fp: Option<u64>,
}

/// The code that runs in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Runs {
    /// An interpreted method and its current bytecode.
    Interpreted {
        /// Address of the method.
        method: u64,
        /// Address of the bytecode.
        bytecode: u64,
    },
    /// Compiled methods, at this address of their code.
    Compiled {
        /// Return address.
        pc: u64,
    },
    /// The stub through which native code calls Java.
    CallStub,
    /// Other code of the JVM.
    Stub,
}

/// Why a frame cannot be unwound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLeft<E> {
    /// A word of the stack cannot be read.
    Stack(E),
    /// The frame does not have the expected form.
    Implausible,
}

impl<E> From<E> for NotLeft<E> {
    fn from(error: E) -> Self {
        Self::Stack(error)
    }
}

/// Unwinds the frame `at`, whose code is in `blob`. `read` reads words of the stack. Returns what runs in the frame,
/// and the caller's registers. Only their direction is checked: the caller is on the same stack, further up.
///
/// # Errors
/// [`NotLeft`]
pub fn leave<E>(
    vm: &Vm,
    blob: &Blob,
    at: Registers,
    read: &mut dyn FnMut(u64) -> Result<u64, E>,
) -> Result<(Runs, Registers), NotLeft<E>> {
    if at.ip == vm.call_stub_return {
        return Ok((Runs::CallStub, leave_by_frame_pointer(at, read)?));
    }
    match blob.kind {
        Kind::Interpreter => leave_interpreted(at, read),
        Kind::Compiled => {
            let pc = match blob.original_pc(vm, at.ip) {
                // It may not have been written yet.
                Some(distance) => Some(read(at.sp.wrapping_add(distance))?).filter(|pc| blob.contains(*pc)),
                None => None,
            };
            Ok((Runs::Compiled { pc: pc.unwrap_or(at.ip) }, leave_by_size(blob.frame_bytes, at, read)?))
        }
        Kind::Stub if blob.frame_bytes > 0 => Ok((Runs::Stub, leave_by_size(blob.frame_bytes, at, read)?)),
        Kind::Stub => Ok((Runs::Stub, leave_by_frame_pointer(at, read)?)),
    }
}

/// Unwinds the frame of a stub in the alternative way, for use when the result of [`leave`] makes no sense: some stubs
/// align their stack pointer after they have set the frame pointer.
///
/// # Errors
/// [`NotLeft`]
pub fn leave_otherwise<E>(
    blob: &Blob,
    at: Registers,
    read: &mut dyn FnMut(u64) -> Result<u64, E>,
) -> Result<Registers, NotLeft<E>> {
    if blob.kind == Kind::Stub && blob.frame_bytes > 0 {
        leave_by_frame_pointer(at, read)
    } else {
        Err(NotLeft::Implausible)
    }
}

/// Unwinds a frame of fixed size, whose last words are the caller's frame pointer and the return address.
fn leave_by_size<E>(
    bytes: u64,
    at: Registers,
    read: &mut dyn FnMut(u64) -> Result<u64, E>,
) -> Result<Registers, NotLeft<E>> {
    let sp = at.sp.checked_add(bytes).ok_or(NotLeft::Implausible)?;
    if bytes < 2 * WORD {
        return Err(NotLeft::Implausible);
    }
    Ok(Registers { ip: read(sp - WORD)?, sp, fp: Some(read(sp - 2 * WORD)?) })
}

fn frame_pointer<E>(at: Registers) -> Result<u64, NotLeft<E>> {
    // The frame pointer is above the stack pointer.
    let is_usual = |fp: &u64| *fp >= at.sp && fp.is_multiple_of(WORD) && *fp <= u64::MAX - MOST_ARGUMENTS;
    at.fp.filter(is_usual).ok_or(NotLeft::Implausible)
}

fn leave_by_frame_pointer<E>(
    at: Registers,
    read: &mut dyn FnMut(u64) -> Result<u64, E>,
) -> Result<Registers, NotLeft<E>> {
    let fp = frame_pointer(at)?;
    Ok(Registers { ip: read(fp + WORD)?, sp: fp + 2 * WORD, fp: Some(read(fp)?) })
}

fn leave_interpreted<E>(
    at: Registers,
    read: &mut dyn FnMut(u64) -> Result<u64, E>,
) -> Result<(Runs, Registers), NotLeft<E>> {
    let fp = frame_pointer(at)?;
    if fp < at.sp.saturating_add(BYTECODE) {
        return Err(NotLeft::Implausible);
    }
    let runs = Runs::Interpreted { method: read(fp - METHOD)?, bytecode: read(fp - BYTECODE)? };
    let sp = read(fp - SENDER_SP)?;
    if sp < fp + 2 * WORD || sp - fp > MOST_ARGUMENTS || !sp.is_multiple_of(WORD) {
        return Err(NotLeft::Implausible);
    }
    Ok((runs, Registers { ip: read(fp + WORD)?, sp, fp: Some(read(fp)?) }))
}
