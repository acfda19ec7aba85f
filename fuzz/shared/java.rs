//! HotSpot's own tables, code heaps, frames and methods, all controlled by the fuzzer.

use heapbpf_java::frames::{Registers, Runs, leave, leave_otherwise};
use heapbpf_java::scopes::scopes;
use heapbpf_java::{Blob, Memory, Method, Tables, Vm};

#[path = "memory.rs"]
pub mod memory;

use memory::Pieces;

impl Memory for Pieces {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.read(address, buffer)
    }
}

/// Variables of the library, one word each, starting at [`FIRST_VARIABLE`].
const VARIABLES: &str = "Structs StructEntryArrayStride StructEntryTypeNameOffset StructEntryFieldNameOffset \
                         StructEntryIsStaticOffset StructEntryOffsetOffset StructEntryAddressOffset Types \
                         TypeEntryArrayStride TypeEntryTypeNameOffset TypeEntrySizeOffset IntConstants \
                         IntConstantEntryArrayStride IntConstantEntryNameOffset IntConstantEntryValueOffset";
const FIRST_VARIABLE: u64 = 0x8000;
/// Maximum number of frames to walk.
const MOST_FRAMES: usize = 64;
/// Longest name of a class and a method in bytes, each of which may be escaped.
const LONGEST_NAME: usize = 2 * 4 * 1024 + 1;

/// Checks an input: instruction pointer, stack pointer, frame pointer, and memory. Whatever the input, walks go up the
/// stack, and what is read is bounded.
pub fn check(data: &[u8]) {
    let Some((registers, rest)) = data.split_first_chunk::<24>() else { return };
    let register = |at: usize| u64::from_le_bytes(registers[at..at + 8].try_into().expect("eight bytes"));
    let memory = Pieces::parse(rest);
    let symbols: Vec<(&str, u64)> = VARIABLES.split(' ').zip((FIRST_VARIABLE..).step_by(8)).collect();
    let Ok(vm) = Vm::read(&memory, &Tables::of(&symbols)) else { return };
    let mut at = Registers { ip: register(0), sp: register(8), fp: Some(register(16)) };
    let mut read = |address| memory.word(address).ok_or(());
    for _ in 0..MOST_FRAMES {
        let Ok(Some(blob)) = Blob::find(&memory, &vm, at.ip) else { break };
        assert!(blob.contains(at.ip));
        let _ = leave_otherwise(&blob, at, &mut read);
        let Ok((runs, caller)) = leave(&vm, &blob, at, &mut read) else { break };
        match runs {
            Runs::Interpreted { method, bytecode } => check_method(&memory, &vm, method, Some(bytecode)),
            Runs::Compiled { pc } => {
                for scope in scopes(&memory, &vm, &blob, pc).unwrap_or_default() {
                    check_method(&memory, &vm, scope.method, None);
                }
            }
            Runs::CallStub | Runs::Stub => {}
        }
        assert!(caller.sp > at.sp, "the caller is further up");
        at = caller;
    }
}

fn check_method(memory: &Pieces, vm: &Vm, address: u64, bytecode: Option<u64>) {
    let Ok(method) = Method::read(memory, vm, address) else { return };
    assert!(method.name.len() <= LONGEST_NAME && Method::check(memory, vm, address) == Ok(method.check));
    let index = bytecode.and_then(|bytecode| method.index_of(bytecode));
    assert!(index.is_none_or(|index| index < method.size.into()));
    for index in [0, index.unwrap_or(1), u32::MAX] {
        assert_ne!(method.line(index), Some(0));
    }
}
