//! The BPF programs: probes on allocator functions, process events, and the thread iterator.
//!
//! The modules form layers: each depends only on modules above it and beside it in the list below, and never in a
//! cycle.
#![no_std]
#![no_main]
// Atomic additions use a compiler intrinsic, and reads of the context use assembly. The toolchain that builds this file
// allows both.
#![feature(asm_experimental_arch, core_intrinsics)]
#![allow(internal_features)]

// The configuration, the thread state, and access to memory.
mod config;
mod context;
mod kernel_stack;
mod memory;
mod nothing;
mod ring_array;
mod task_storage;
mod thread;

// The maps, and modules that need only them and the kernel's memory.
mod arch;
mod counters;
mod filter;
mod limits;
mod maps;
mod process;
mod target;

// Operations on a thread's state, the rings and the live map.
mod admission;
mod countdown;
mod live;
mod nesting;
mod outer_frames;
mod output;
mod pending;
mod python;
mod python_code;
mod stack;
mod stack_record;
mod steps;

// The programs.
mod allocation;
mod crash;
mod free;
#[cfg(bpf_target_arch = "x86_64")]
mod inline;
mod inline_counts;
mod iterator;
mod lifecycle;
mod mapping;
mod trial;
#[cfg(bpf_target_arch = "x86_64")]
mod usdt;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // Never reached: the verifier rejects a program that could panic.
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *sampler_ebpf::abi::LICENSE;
