//! The BPF programs: probes on allocator functions, process life, and the thread iterator.
#![no_std]
#![no_main]
// Adding atomically is a compiler intrinsic here, and reads of the context are in assembly; the toolchain that builds
// this file allows both.
#![feature(asm_experimental_arch, core_intrinsics)]
#![allow(internal_features)]

mod allocation;
mod arch;
mod config;
mod filter;
mod free;
mod iterator;
mod lifecycle;
mod limits;
mod mapping;
mod maps;
mod nothing;
mod output;
mod pending;
mod stack;
mod stage;
mod state;
mod task_storage;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Never reached: the verifier would refuse a program that could panic.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
