//! Made-up functions: random instructions of the kinds that compilers put at entries.

/// Most bytes of a function.
pub const BYTES: usize = 64;

/// A function's first instructions. `code` is its address; memory in `data` may be read and written.
pub fn function(code: u64, data: &std::ops::Range<u64>, others: &[u64]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let enough = if fastrand::bool() { fastrand::usize(5..14) } else { fastrand::usize(14..BYTES - 16) };
    while bytes.len() < enough {
        let at = code + bytes.len() as u64;
        bytes.extend(instruction(at, data, code, others));
    }
    bytes
}

fn register() -> u8 {
    // Not the stack pointer.
    [0, 1, 2, 3, 5, 6, 7][fastrand::usize(..7)]
}

/// A REX prefix with W, and random extensions for the registers.
fn rex() -> u8 {
    [0x48, 0x49, 0x4c, 0x4d][fastrand::usize(..4)]
}

/// `opcode` with a memory operand relative to the instruction pointer, and what follows it.
fn relative(at: u64, data: &std::ops::Range<u64>, opcode: &[u8], register: u8, rest: &[u8]) -> Vec<u8> {
    let length = opcode.len() + 5 + rest.len();
    // Aligned for the instructions that need it.
    let target = (data.start + fastrand::u64(..data.end - data.start - 64)) & !15;
    let distance = target.wrapping_sub(at + length as u64) as u32;
    [opcode, &[register << 3 | 5], &distance.to_le_bytes(), rest].concat()
}

fn branch(at: u64, opcode: &[u8], target: u64) -> Vec<u8> {
    let distance = target.wrapping_sub(at + opcode.len() as u64 + 4) as u32;
    [opcode, &distance.to_le_bytes()].concat()
}

/// An address of code: another function, something in between, or far away.
fn target(code: u64, others: &[u64]) -> u64 {
    match fastrand::u8(..4) {
        0 if !others.is_empty() => others[fastrand::usize(..others.len())],
        1 => code + fastrand::u64(16..BYTES as u64),
        // Not among the other functions, whose first instructions are somewhere there.
        2 => code + fastrand::u64(0x10_0000..0x20_0000),
        _ => code - fastrand::u64(0x10_0000..0x20_0000),
    }
}

fn instruction(at: u64, data: &std::ops::Range<u64>, code: u64, others: &[u64]) -> Vec<u8> {
    let modrm = 0xc0 | fastrand::u8(..8) << 3 | register();
    // Between registers, without the stack pointer as a destination.
    let registers = |opcode: u8| vec![rex() & !4, opcode, 0xc0 | register() << 3 | register()];
    let byte = fastrand::u8(..);
    match fastrand::u8(..40) {
        0..4 => vec![0x50 + fastrand::u8(..8)],
        4..7 => vec![0x41, 0x50 + fastrand::u8(..8)],
        7 => vec![0xf3, 0x0f, 0x1e, 0xfa],
        8 | 9 => registers(0x89),
        10 => vec![0x48, 0x89, 0xe5],
        11 => vec![0x48, 0x83, 0xec, byte & 0x78],
        12 => vec![0x48, 0x81, 0xec, byte & 0xf8, 2, 0, 0],
        13 => vec![0x48, 0x83, 0xe4, 0xe0],
        14 => relative(at, data, &[rex() & !1, 0x8d], fastrand::u8(..8) & 3, &[]),
        15 | 16 => relative(at, data, &[rex() & !1, 0x8b], register(), &[]),
        17 => relative(at, data, &[rex() & !1, 0x89], register(), &[]),
        // cmp $byte, (%rip); cmpl $number, (%rip): the distance is not the last field.
        18 => relative(at, data, &[0x80], 7, &[byte]),
        19 => relative(at, data, &[0x83], 7, &[byte]),
        20 => relative(at, data, &[0x81], 7, &fastrand::u32(..).to_le_bytes()),
        21 => relative(at, data, &[0xf0, 0x48, 0x0f, 0xc1], register(), &[]),
        22 => relative(at, data, &[0xc7], 0, &fastrand::u32(..).to_le_bytes()),
        23 => relative(at, data, &[0x0f, 0x28], fastrand::u8(..8), &[]),
        24 => relative(at, data, &[0xff], 6, &[]),
        // test, and a conditional branch: short and near.
        25 | 26 => [registers(0x85), vec![0x70 | byte & 15, fastrand::u8(16..40)]].concat(),
        27 | 28 => [registers(0x85), branch(at + 3, &[0x0f, 0x80 | byte & 15], target(code, others))].concat(),
        29 => vec![0xeb, fastrand::u8(8..40)],
        30 => branch(
            at,
            [&[0xe9][..], &[0xf2, 0xe9], &[0x48, 0xe9], &[0x66, 0xe9]][fastrand::usize(..4)],
            target(code, others),
        ),
        31 => branch(
            at,
            [&[0xe8][..], &[0x48, 0xe8], &[0x66, 0x66, 0x48, 0xe8]][fastrand::usize(..3)],
            target(code, others),
        ),
        // Through a slot, or a register.
        32 => relative(at, data, &[0xff], [2, 4][fastrand::usize(..2)], &[]),
        33 => vec![0xff, 0xc0 | [2, 4][fastrand::usize(..2)] << 3 | register()],
        34 => vec![0x31, modrm & !0x38 | (modrm & 7) << 3],
        35 => [&[0xb8 + register()][..], &fastrand::u32(..).to_le_bytes()].concat(),
        36 => [&[0x48, 0xb8 + register()][..], &fastrand::u64(..).to_le_bytes()].concat(),
        // mov %fs:0x28, %rax; mov %rdi, 8(%rsp); lea 8(%rsp), %r10
        37 => vec![0x64, 0x48, 0x8b, 0x04, 0x25, 0x28, 0, 0, 0],
        38 => vec![0x48, 0x89, 0x04 | register() << 3 | 0x40, 0x24, byte & 0x78],
        _ => match fastrand::u8(..12) {
            0 => vec![0x4c, 0x8d, 0x54, 0x24, 8],
            // setcc, cmovcc, adc, sbb: the flags matter.
            1 => vec![0x0f, 0x90 | byte & 15, 0xc0 | register() & 3],
            2 => vec![0x48, 0x0f, 0x40 | byte & 15, 0xc0 | register() << 3 | register()],
            3 => registers(0x11),
            4 => registers(0x19),
            5 => vec![0x48, 0xc1, 0xe0 | register(), byte & 63],
            6 => vec![0x66, 0x0f, 0x1f, 0x44, 0, 0],
            7 => vec![0x9c],
            8 => vec![0x6a, byte],
            9 => vec![0xc3],
            // lea with a 32-bit address: an operand relative to eip reaches four gibibytes.
            10 => relative(at, data, &[0x67, 0x48, 0x8d], register(), &[]),
            _ => vec![0x0f, 0x29, 0x44, 0x24, byte & 0x70],
        },
    }
}
