//! x86-64: the System V calling convention, and the rules of the kernel's `arch/x86/kernel/uprobes.c`.

use heapbpf_audit::ProbeKind;
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind,
    Register, UsedRegister,
};
use sampler_ebpf::abi::{ACCUMULATOR, ARGUMENTS, NO_ARGUMENT};

use crate::allocators::Shape;
use crate::flow::{Flow, Target};
use crate::placement::{Arguments, KernelRules, Placement};

/// Registers of integer arguments, in order (System V ABI, §3.2.3).
const ARGUMENT_REGISTERS: [Register; ARGUMENTS as usize] =
    [Register::RDI, Register::RSI, Register::RDX, Register::RCX, Register::R8, Register::R9];
/// Maximum instructions that are followed; a first basic block is far shorter.
const BLOCK_MAX_INSTRUCTIONS: usize = 64;
/// Page size, bytes: the kernel cannot optimize a no-op that crosses a page.
const PAGE_BYTES: u64 = 4096;
/// The shortest no-op that a kernel may turn into a call, bytes: the length of a call.
const CALL_BYTES: usize = 5;

/// The no-ops that the manuals recommend and kernels know, one of each length from that of a call.
const RECOMMENDED_NO_OPS: [&[u8]; 6] = [
    b"\x0f\x1f\x44\0\0",
    b"\x66\x0f\x1f\x44\0\0",
    b"\x0f\x1f\x80\0\0\0\0",
    b"\x0f\x1f\x84\0\0\0\0\0",
    b"\x66\x0f\x1f\x84\0\0\0\0\0",
    b"\x66\x2e\x0f\x1f\x84\0\0\0\0\0",
];

/// The content of a register, as far as the instructions since the entry determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Value {
    /// The n-th argument, unchanged.
    Argument(u8),
    /// The low half of the product of two arguments.
    Product(u8, u8),
    /// Anything.
    Unknown,
}

/// The registers at one instruction of the first basic block.
struct State {
    values: [Value; 16],
    /// Whether the flags still are those of the multiplication that made the [`Value::Product`].
    flags_of_product: bool,
    /// Whether the product is known not to have overflowed.
    product_is_whole: bool,
    stack_pointer_moved: i64,
    stack_pointer_known: bool,
    /// Whether the function cannot have stored anything below the stack pointer (in its red zone).
    red_zone_is_unused: bool,
}

impl State {
    fn at_entry() -> Self {
        let mut values = [Value::Unknown; 16];
        for (number, register) in (0..).zip(ARGUMENT_REGISTERS) {
            values[register.number()] = Value::Argument(number);
        }
        Self {
            values,
            flags_of_product: false,
            product_is_whole: false,
            stack_pointer_moved: 0,
            stack_pointer_known: true,
            // A caller keeps nothing there, because its call overwrites it.
            red_zone_is_unused: true,
        }
    }

    /// The register that holds `value`, by its number in a site; the `preferred` one if that holds it.
    fn holder(&self, value: Value, preferred: u8) -> Option<u8> {
        let holds = |n: u8| {
            let argument = ARGUMENT_REGISTERS.get(usize::from(n));
            let register = argument.or((n == ACCUMULATOR).then_some(&Register::RAX));
            register.is_some_and(|register| self.values[register.number()] == value)
        };
        if holds(preferred) { Some(preferred) } else { (0..=ACCUMULATOR).find(|n| holds(*n)) }
    }

    fn find(&self, argument: u8) -> Option<u8> {
        if argument == NO_ARGUMENT { Some(argument) } else { self.holder(Value::Argument(argument), argument) }
    }

    /// Where the arguments are now; `None` unless all of them are available. The return address of an allocation must
    /// be where it was at entry, because the kernel reads it and may replace it.
    fn locate(&self, shape: Shape) -> Option<Arguments> {
        if !shape.is_free() && self.has_moved_stack() {
            return None;
        }
        let wanted = shape.arguments;
        let (old, out) = (self.find(wanted.old)?, self.find(wanted.out)?);
        if let (Some(size), Some(times)) = (self.find(wanted.size), self.find(wanted.times)) {
            return Some(Arguments { size, times, old, out });
        }
        if !self.product_is_whole {
            return None;
        }
        let size = self
            .holder(Value::Product(wanted.size, wanted.times), wanted.size)
            .or_else(|| self.holder(Value::Product(wanted.times, wanted.size), wanted.size))?;
        Some(Arguments { size, times: NO_ARGUMENT, old, out })
    }

    fn has_moved_stack(&self) -> bool {
        !self.stack_pointer_known || self.stack_pointer_moved != 0
    }

    /// Whether this is the branch taken if the product of two arguments does not fit into 64 bits.
    fn is_overflow_check(&self, instruction: &Instruction) -> bool {
        self.flags_of_product && matches!(instruction.mnemonic(), Mnemonic::Jo | Mnemonic::Jb)
    }

    fn register(&self, register: Register) -> Value {
        if register.is_gpr64() { self.values[register.number()] } else { Value::Unknown }
    }

    /// Applies `instruction`.
    fn step(&mut self, instruction: &Instruction, info: &mut InstructionInfoFactory) {
        let copied = match instruction.code() {
            Code::Mov_r64_rm64 | Code::Mov_rm64_r64
                if instruction.op0_kind() == OpKind::Register && instruction.op1_kind() == OpKind::Register =>
            {
                Some((instruction.op0_register(), self.register(instruction.op1_register())))
            }
            Code::Mul_rm64 if instruction.op0_kind() == OpKind::Register => {
                match (self.register(Register::RAX), self.register(instruction.op0_register())) {
                    (Value::Argument(a), Value::Argument(b)) => Some((Register::RAX, Value::Product(a, b))),
                    _ => None,
                }
            }
            _ => None,
        };
        for used in info.info(instruction).used_registers() {
            if is_written(used) && used.register().is_gpr() {
                let register = used.register().full_register();
                self.values[register.number()] = Value::Unknown;
                self.stack_pointer_known &= register != Register::RSP || stack_pointer_change(instruction).is_some();
            }
        }
        self.stack_pointer_moved += stack_pointer_change(instruction).unwrap_or(0);
        self.red_zone_is_unused &= self.stack_pointer_known && leaves_red_zone_unused(instruction, info);
        if let Some((register, value)) = copied {
            self.values[register.number()] = value;
        }
        if instruction.rflags_modified() != 0 {
            self.flags_of_product = false;
        }
        if matches!(copied, Some((_, Value::Product(..)))) && instruction.code() == Code::Mul_rm64 {
            self.flags_of_product = true;
            self.product_is_whole = false;
        }
    }
}

/// Whether an instruction writes, or may write, a register that it uses.
pub(super) fn is_written(used: &UsedRegister) -> bool {
    matches!(used.access(), OpAccess::Write | OpAccess::ReadWrite | OpAccess::CondWrite | OpAccess::ReadCondWrite)
}

/// How far `instruction` moves the stack pointer, bytes; `None` if that is unknown.
pub(super) fn stack_pointer_change(instruction: &Instruction) -> Option<i64> {
    if instruction.is_stack_instruction() {
        return Some(i64::from(instruction.stack_pointer_increment()));
    }
    let on_stack_pointer = instruction.op_count() == 2 && instruction.op0_register() == Register::RSP;
    match instruction.mnemonic() {
        Mnemonic::Sub if on_stack_pointer && is_immediate(instruction) => {
            Some((instruction.immediate(1) as i64).wrapping_neg())
        }
        Mnemonic::Add if on_stack_pointer && is_immediate(instruction) => Some(instruction.immediate(1) as i64),
        _ => None,
    }
}

fn is_immediate(instruction: &Instruction) -> bool {
    matches!(instruction.op1_kind(), OpKind::Immediate8to64 | OpKind::Immediate32to64)
}

/// Whether `instruction` neither stores below the stack pointer nor leaves anything there by moving it up.
fn leaves_red_zone_unused(instruction: &Instruction, info: &mut InstructionInfoFactory) -> bool {
    if stack_pointer_change(instruction).is_some_and(|bytes| bytes > 0) {
        return false;
    }
    // A push stores at the new stack pointer.
    if instruction.is_stack_instruction() || instruction.is_ip_rel_memory_operand() {
        return true;
    }
    info.info(instruction).used_memory().iter().all(|memory| {
        let is_read =
            matches!(memory.access(), OpAccess::None | OpAccess::NoMemAccess | OpAccess::Read | OpAccess::CondRead);
        let is_above = memory.base() == Register::RSP
            && memory.index() == Register::None
            && memory.displacement().cast_signed() >= 0;
        is_read || is_above || matches!(memory.segment(), Register::FS | Register::GS)
    })
}

/// Whether the kernel may turn the no-op `instruction` into a call, which writes below the stack pointer. Measurements
/// on this kernel do not matter here: a live patch may add the optimisation.
fn may_become_call(instruction: &Instruction) -> bool {
    instruction.mnemonic() == Mnemonic::Nop && instruction.len() >= CALL_BYTES
}

/// How the kernel runs `instruction`, whose encoding is `bytes`, if it is probed; `None` if it refuses the probe, or
/// would kill processes because of it. Each line was measured on Linux 6.18: 540–880 ns emulated, 17–22 µs
/// single-stepped (a virtual machine under load).
fn treatment(rules: &KernelRules, instruction: &Instruction, bytes: &[u8]) -> Option<ProbeKind> {
    if rules.optimized_no_ops.contains(bytes.len())
        && RECOMMENDED_NO_OPS.contains(&bytes)
        && instruction.ip() % PAGE_BYTES + bytes.len() as u64 <= PAGE_BYTES
    {
        // It becomes a call of a page that children which are forked later do not have. The call would kill them
        // (measured on Linux 6.18, tests/tests/company/harmless.rs).
        return None;
    }
    let prefixes = bytes.iter().take_while(|b| is_legacy_prefix(**b)).count();
    let prefixes = bytes.get(..prefixes).unwrap_or_default();
    let branches =
        instruction.is_jmp_short_or_near() || instruction.is_jcc_short_or_near() || instruction.is_call_near();
    // insn_has_bad_prefix(): lock, and the segment overrides that have no meaning in 64-bit mode.
    let refused = prefixes.iter().any(|b| matches!(b, 0xf0 | 0x2e | 0x36 | 0x3e | 0x26))
        || (branches && prefixes.contains(&0x66))
        || (rules.has_shadow_stacks && instruction.is_call_near())
        || instruction.is_invalid()
        || instruction.is_privileged()
        || matches!(
            instruction.flow_control(),
            FlowControl::Interrupt | FlowControl::Exception | FlowControl::XbeginXabortXend
        );
    if refused {
        return None;
    }
    Some(match bytes {
        [0x90] if rules.emulates_nop => ProbeKind::Emulated,
        _ if rules.emulates_long_nops && instruction.mnemonic() == Mnemonic::Nop => ProbeKind::Emulated,
        // push_setup_xol_ops(): no prefix except the one for r8 to r15.
        [0x50..=0x57] | [0x41, 0x50..=0x57] => ProbeKind::Emulated,
        // branch_setup_xol_ops(); it accepts `bnd`.
        _ if branches && prefixes.iter().all(|b| *b == 0xf2) => ProbeKind::Emulated,
        _ => ProbeKind::Stepped,
    })
}

/// How the kernel runs the first instruction of `bytes`, at `address`, if it is probed, with a description.
pub(super) fn treated(rules: &KernelRules, address: u64, bytes: &[u8]) -> Option<(ProbeKind, String)> {
    let instruction = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE).decode();
    let kind = treatment(rules, &instruction, bytes.get(..instruction.len())?)?;
    Some((kind, describe(&instruction, kind)))
}

fn is_legacy_prefix(byte: u8) -> bool {
    matches!(byte, 0x66 | 0x67 | 0xf2 | 0xf3 | 0xf0 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65)
}

/// Chooses among the instructions of the first basic block; see [`super::place`].
pub(super) fn place(
    rules: &KernelRules,
    address: u64,
    code: &[u8],
    shape: Shape,
    entered: &dyn Fn(u64) -> bool,
    avoided: &dyn Fn(u64) -> bool,
) -> Option<Placement> {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut info = InstructionInfoFactory::new();
    let mut state = State::at_entry();
    let mut best: Option<Placement> = None;
    let mut end = "the first basic block ends";
    for _ in 0..BLOCK_MAX_INSTRUCTIONS {
        if !decoder.can_decode() {
            break;
        }
        let at = decoder.position();
        let instruction = decoder.decode();
        let bytes = code.get(at..at + instruction.len()).unwrap_or_default();
        if instruction.is_invalid() {
            end = "bytes that are no instruction";
            if at == 0 {
                // The kernel decodes it as well, and may know instructions that the decoder does not.
                return Some(Placement {
                    offset: 0,
                    kind: ProbeKind::Stepped,
                    arguments: shape.arguments,
                    stack_pointer_moved: 0,
                    reason: "the entry: it begins with an instruction that heapbpf does not know; the kernel decides \
                             whether to probe it"
                        .into(),
                });
            }
            break;
        }
        if at > 0 && entered(instruction.ip()) {
            end = "a branch leads into the block";
            break;
        }
        let arguments = state.locate(shape);
        if arguments.is_none() && end == "the first basic block ends" {
            end = if !shape.is_free() && state.has_moved_stack() {
                "the return address moves away"
            } else {
                "an argument is overwritten"
            };
        }
        if let (Some(arguments), Some(kind)) = (arguments, treatment(rules, &instruction, bytes))
            && (state.red_zone_is_unused || !may_become_call(&instruction))
            && !avoided(instruction.ip())
            && best.as_ref().is_none_or(|b| kind < b.kind)
        {
            best = Some(Placement {
                offset: at as u64,
                kind,
                arguments,
                stack_pointer_moved: state.stack_pointer_moved,
                reason: describe(&instruction, kind),
            });
        }
        match instruction.flow_control() {
            FlowControl::Next => state.step(&instruction, &mut info),
            // If the product of count and size overflows, the call fails before it allocates.
            FlowControl::ConditionalBranch if state.is_overflow_check(&instruction) => state.product_is_whole = true,
            _ => break,
        }
    }
    let mut best = best?;
    if best.kind == ProbeKind::Stepped {
        best.reason = format!("{}: nothing cheaper before {end}", best.reason);
    }
    Some(best)
}

fn describe(instruction: &Instruction, kind: ProbeKind) -> String {
    use iced_x86::Formatter as _;
    let mut text = String::new();
    iced_x86::GasFormatter::new().format(instruction, &mut text);
    let what = match kind {
        ProbeKind::Optimized => "becomes a call",
        ProbeKind::Emulated => "is emulated",
        ProbeKind::Stepped => "is single-stepped",
    };
    format!("`{text}` {what}")
}

/// See [`super::flows`].
pub(super) fn flows(address: u64, code: &[u8], mut found: impl FnMut(Flow)) {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let control = instruction.flow_control();
        let target = match control {
            FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
                Target::Address(instruction.near_branch_target())
            }
            FlowControl::Call if instruction.is_call_near() => Target::Address(instruction.near_branch_target()),
            FlowControl::IndirectBranch | FlowControl::IndirectCall if instruction.is_ip_rel_memory_operand() => {
                Target::Slot(instruction.ip_rel_memory_address())
            }
            _ => continue,
        };
        let is_call = matches!(control, FlowControl::Call | FlowControl::IndirectCall);
        found(Flow { from: instruction.ip(), is_call, target });
    }
}

/// See [`super::forwards_to`].
pub(super) fn forwards_to(address: u64, code: &[u8]) -> Option<Target> {
    let mut decoder = Decoder::with_ip(64, code, address, DecoderOptions::NONE);
    let mut first = decoder.decode();
    if first.code() == Code::Endbr64 {
        first = decoder.decode();
    }
    match first.flow_control() {
        FlowControl::UnconditionalBranch => Some(Target::Address(first.near_branch_target())),
        FlowControl::IndirectBranch if first.is_ip_rel_memory_operand() => {
            Some(Target::Slot(first.ip_rel_memory_address()))
        }
        _ => None,
    }
}

#[cfg(test)]
#[path = "x86_64_tests.rs"]
mod tests;
