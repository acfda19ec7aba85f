//! A Rust program that announces its allocations by USDT probes (`otel_memory`), written with `asm!`. The protocol is that of
//! truth.h. One site allocates ROUNDS blocks of 100 bytes and announces each as a sample; every fourth stays allocated.
use std::arch::{asm, global_asm};

mod rounds;

global_asm!(
    ".pushsection .probes, \"aw\", @progbits",
    ".balign 2",
    "otel_memory_semaphore: .2byte 0",
    ".popsection",
    ".pushsection .stapsdt.base, \"aG\", @progbits, .stapsdt.base, comdat",
    ".weak _.stapsdt.base",
    ".hidden _.stapsdt.base",
    "_.stapsdt.base: .space 1",
    ".size _.stapsdt.base, 1",
    ".popsection",
);

macro_rules! announce {
    ($name:literal, $arguments:literal, $($operands:tt)*) => {
        unsafe {
            asm!(
                "990: nop",
                ".pushsection .note.stapsdt, \"\", @note",
                ".balign 4",
                ".4byte 992f-991f, 994f-993f, 3",
                "991: .asciz \"stapsdt\"",
                "992: .balign 4",
                "993: .8byte 990b, _.stapsdt.base, otel_memory_semaphore",
                ".asciz \"otel_memory\"",
                concat!(".asciz \"", $name, "\""),
                concat!(".asciz \"", $arguments, "\""),
                "994: .balign 4",
                ".popsection",
                $($operands)*
            )
        }
    };
}

/// What 100 bytes stand for at R = 4,095.
const STANDS_FOR: u64 = 4145;

#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn site_00(fill: u8) -> *mut [u8; 100] {
    let block = Box::into_raw(Box::new([fill; 100]));
    announce!("alloc", "8@%rdi 4@%esi 8@%rdx", in("rdi") block, in("rsi") 100_u64, in("rdx") STANDS_FOR);
    std::hint::black_box(block)
}

#[inline(never)]
fn free(block: *mut [u8; 100]) {
    announce!("free", "8@%rdi", in("rdi") block);
    drop(unsafe { Box::from_raw(block) });
}

fn main() {
    rounds::run(site_00, free);
}
