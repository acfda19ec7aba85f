//! Call frame information written by hand (x86-64): register rules that compilers rarely use.

use heapbpf_testing::own_process::{Library, OwnProcess, exported_name, unwind};
use heapbpf_unwind::raw::{Completeness, Reason};

/// A function that calls `callee` and can only be unwound by its own rbx, which `callee` has to restore. It equals the
/// canonical frame address of `callee`.
const OUTER: &str = r#"
#define FUNCTION(name, ...) __asm__(".globl " #name "\n.type " #name ",@function\n" #name ":\n.cfi_startproc\n" __VA_ARGS__ \
        "\n.cfi_endproc\n.size " #name ", .-" #name "\n");
FUNCTION(outer, "push %rbx\n.cfi_adjust_cfa_offset 8\n.cfi_offset %rbx, -16\nmov %rsp, %rbx\n.cfi_def_cfa %rbx, 16\n"
         "sub $16, %rsp\nmov %rsp, %rbx\n.cfi_def_cfa %rbx, 32\n"
         "call callee\nxor %eax, %eax\nadd $16, %rsp\n.cfi_def_cfa %rsp, 16\npop %rbx\n.cfi_def_cfa_offset 8\nret")
"#;

/// Captures a stack in a callback from `callee`, which consists of these lines. Returns the names of the innermost
/// frames, how the stack ends, and the reason for bad unwind information in this module.
fn unwound(callee: &str, flags: &[&str]) -> Option<(Vec<String>, Completeness, Reason)> {
    let lines: String = callee.lines().map(|line| format!("\"{}\\n\"", line.trim())).collect();
    let library = Library::compile(&format!("{OUTER}\nFUNCTION(callee, {lines})\n"), flags)?;
    let capture = library.capture("outer", 0);
    let process = OwnProcess::read().expect("/proc");
    let module = process.module(library.path.to_str().expect("UTF-8")).expect("mapped");
    let stack = unwind(&process, &capture);
    let names = stack.frames.iter().take(2).map(|frame| exported_name(frame.address)).collect();
    Some((names, stack.completeness.clone(), Reason::BadUnwindInformation(module)))
}

/// Clobbers rbx around the call, and describes its location by `rule`.
fn saving(save: &str, rule: &str, restore: &str) -> String {
    format!(
        "push %rbp\n.cfi_adjust_cfa_offset 8\n.cfi_offset %rbp, -16\n{save}\n{rule}\nxor %ebx, %ebx\ncall *%rdi\n{restore}\npop %rbp\nret"
    )
}

#[test]
fn every_rule_of_a_register_leads_to_the_caller() {
    for (name, callee) in [
        ("register", saving("mov %rbx, %rbp", ".cfi_register %rbx, %rbp", "mov %rbp, %rbx")),
        ("value at an offset", saving("", ".cfi_val_offset %rbx, 0", "lea 16(%rsp), %rbx")),
        // DW_CFA_val_expression rbx: DW_OP_plus_uconst 0.
        ("value of an expression", saving("", ".cfi_escape 0x16, 3, 2, 0x23, 0", "lea 16(%rsp), %rbx")),
        // DW_CFA_expression rbx: DW_OP_lit24, DW_OP_minus.
        (
            "saved at an expression",
            saving(
                "push %rbx\n.cfi_adjust_cfa_offset 8\nsub $8, %rsp\n.cfi_adjust_cfa_offset 8",
                ".cfi_escape 0x10, 3, 2, 0x48, 0x1c",
                "add $8, %rsp\npop %rbx",
            ),
        ),
        // DW_CFA_def_cfa_expression: DW_OP_breg7 16.
        (
            "frame address of an expression",
            saving("mov %rbx, %rbp", ".cfi_register %rbx, %rbp\n.cfi_escape 0x0f, 2, 0x77, 16", "mov %rbp, %rbx"),
        ),
    ] {
        let Some((names, completeness, _)) = unwound(&callee, &["-O2"]) else { return };
        assert_eq!(names, ["callee", "outer"], "{name}");
        assert_eq!(completeness, Completeness::Complete, "{name}");
    }
}

#[test]
fn lost_registers_end_the_walk_where_they_are_needed() {
    let push = "push %rbx\n.cfi_adjust_cfa_offset 8\nsub $8, %rsp\n.cfi_adjust_cfa_offset 8";
    let pop = "add $8, %rsp\npop %rbx";
    for (name, rule) in [
        ("undefined", ".cfi_undefined %rbx"),
        // rbp has an expression, which does not matter here, so that the row is evaluated.
        ("undefined in a row", ".cfi_undefined %rbx\n.cfi_escape 0x16, 6, 2, 0x23, 0"),
        ("a register that is unknown", ".cfi_register %rbx, %r15"),
        // DW_OP_reg3, which is not an address.
        ("no address", ".cfi_escape 0x16, 3, 1, 0x53"),
        // DW_OP_call_frame_cfa is not allowed here.
        ("a malformed expression", ".cfi_escape 0x16, 3, 1, 0x9c"),
    ] {
        let Some((names, completeness, bad)) = unwound(&saving(push, rule, pop), &["-O2"]) else { return };
        assert_eq!(names[0], "callee", "{name}");
        assert_eq!(completeness, Completeness::Truncated(bad), "{name}");
    }
}

#[test]
fn frames_never_lead_backwards() {
    // DW_CFA_def_cfa_expression { DW_OP_breg7 -64 }: below this frame, where a return address happens to be saved.
    let callee = "sub $120, %rsp\n.cfi_adjust_cfa_offset 120\n.cfi_escape 0x0f, 3, 0x77, 0x40, 0x40\ncall *%rdi\nadd $120, %rsp\nret";
    let Some((names, completeness, _)) = unwound(callee, &["-O2"]) else { return };
    assert_eq!(names, ["callee"]);
    // The word lies below the copied stack.
    assert_eq!(completeness, Completeness::Truncated(Reason::OtherStack));
    // DW_CFA_def_cfa rsp 0, with the return address at the frame address: the stack pointer would not change.
    let callee = "sub $24, %rsp\nlea 1f(%rip), %rax\nmov %rax, (%rsp)\n.cfi_def_cfa %rsp, 0\n.cfi_offset %rip, 0\ncall *%rdi\n1:\nadd $24, %rsp\nret";
    let Some((names, completeness, _)) = unwound(callee, &["-O2"]) else { return };
    assert_eq!((&*names[0], completeness), ("callee", Completeness::Truncated(Reason::BrokenChain)));
}

/// A handler that returns to the trampoline `restorer`.
const HANDLER: &str = r#"
#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void restorer(void);
struct action { void (*handler)(int); unsigned long flags; void (*restorer)(void); unsigned long mask; };
static void (*current)(void);
volatile int sink;

__attribute__((visibility("default"))) void on_signal(int number) { current(); sink += number; }

__attribute__((visibility("default"))) int trapped(void (*capture)(void), int depth) {
    struct action action = {on_signal, 0x04000000, restorer, 0}, before; /* SA_RESTORER */
    current = capture;
    syscall(SYS_rt_sigaction, SIGTRAP, &action, &before, 8);
    __asm__ volatile("int3");
    syscall(SYS_rt_sigaction, SIGTRAP, &before, 0, 8);
    return sink + depth;
}
"#;

/// Without call frame information, as in other C libraries.
const BARE_RESTORER: &str = r#"
__asm__("nop\n.globl restorer\n.type restorer,@function\nrestorer:\nmov $15, %rax\nsyscall\nnop\n");
"#;

/// As in glibc: the entry begins one byte early, so that it covers the return address minus one. rip, rsp, rbp and rbx
/// are in the `ucontext` at the stack pointer.
const RESTORER: &str = r#"
__asm__(".cfi_startproc simple\n.cfi_signal_frame\n"
        ".cfi_escape 0x0f, 4, 0x77, 0xa0, 1, 6\n.cfi_escape 0x10, 16, 3, 0x77, 0xa8, 1\n"
        ".cfi_escape 0x10, 6, 3, 0x77, 0xf8, 0\n.cfi_escape 0x10, 3, 3, 0x77, 0x80, 1\n"
        "nop\n.globl restorer\n.type restorer,@function\nrestorer:\nmov $15, %rax\nsyscall\n.cfi_endproc\nnop\n");
"#;

#[test]
fn signal_trampolines_are_named_and_lead_to_what_the_signal_interrupted() {
    for trampoline in [BARE_RESTORER, RESTORER] {
        let source = format!("{trampoline}{HANDLER}");
        let Some(library) = Library::compile(&source, &["-O2", "-fomit-frame-pointer"]) else { return };
        let capture = library.capture("trapped", 1);
        let stack = unwind(&OwnProcess::read().expect("/proc"), &capture);
        let names: Vec<String> = stack.frames.iter().map(|frame| exported_name(frame.address)).collect();
        assert_eq!(names[..3], ["on_signal", "restorer", "trapped"], "{trampoline}: {:?}", stack.completeness);
        assert_eq!(stack.completeness, Completeness::Complete, "{trampoline}");
    }
}
