//! Whether memory holds the code of a file, apart from kernel probes (uprobes). Pure.

/// A five-byte nop, and the call that Linux 6.18 puts in its place for a probe.
const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0, 0];
const CALL: u8 = 0xe8;
const BREAKPOINT: u8 = 0xcc;
/// A ten-byte nop, which later kernels replace with `lea -0x80(%rsp), %rsp` and a call. When the probe is removed, the
/// call stays, as an operand of the nop, for threads that are just before it.
pub(crate) const NOP10: [u8; 10] = [0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0];
pub(crate) const LEA: [u8; 5] = [0x48, 0x8d, 0x64, 0x24, 0x80];

/// Whether memory holds the file's code, apart from changes that probes make.
pub(crate) fn is_same_code(file: &[u8], memory: &[u8]) -> bool {
    other_code(file, memory).is_none()
}

/// The first offset at which memory does not hold the file's code. Changes that probes make do not count: a breakpoint
/// in place of an instruction's first byte, or a call in place of a nop.
#[must_use]
pub fn other_code(file: &[u8], memory: &[u8]) -> Option<usize> {
    let mut at = 0;
    while at < file.len().min(memory.len()) {
        if let Some(bytes) = bytes_of_call(&file[at..], &memory[at..]) {
            at += bytes;
        } else if file[at] == memory[at] || memory[at] == BREAKPOINT {
            at += 1;
        } else {
            return Some(at);
        }
    }
    (file.len() != memory.len()).then_some(at)
}

/// Length of the nop with which the file's code begins, if a probe has put a call into it, or is about to.
fn bytes_of_call(file: &[u8], memory: &[u8]) -> Option<usize> {
    let is_first = |first: u8, of: u8| first == of || first == BREAKPOINT;
    if file.starts_with(&NOP5) {
        return memory.first().filter(|first| is_first(**first, CALL)).map(|_| NOP5.len());
    }
    let memory = memory.get(..NOP10.len()).filter(|_| file.starts_with(&NOP10))?;
    let (first, rest, call) = (memory[0], &memory[1..LEA.len()], &memory[LEA.len()..]);
    let is_lea = is_first(first, LEA[0]) && *rest == LEA[1..];
    let is_nop = is_first(first, NOP10[0]) && *rest == NOP10[1..LEA.len()];
    ((is_lea || is_nop) && call[0] == CALL).then_some(NOP10.len())
}
