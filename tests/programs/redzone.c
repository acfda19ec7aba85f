/* CALLS: an allocator in hand-written assembly. Its functions keep data below the stack pointer (in the red zone, which the
 * ABI grants them) across a five-byte no-op, and the program ends if those data change. Memory is never reused. x86-64. */
#include "truth.h"
__attribute__((used)) static char store[64 << 20] __attribute__((aligned(64)));
__attribute__((used)) static size_t used = 64;
__attribute__((used)) static uint64_t corrupted;
/* Stores NAME's argument and three more words in the red zone, passes the no-op, and compares them. */
#define ACROSS_A_NO_OP                    \
  "  movq %rdi, -8(%rsp)\n"               \
  "  movq %rdi, -16(%rsp)\n"              \
  "  movq %rdi, -24(%rsp)\n"              \
  "  movq %rdi, -32(%rsp)\n"              \
  "  .byte 0x0f, 0x1f, 0x44, 0, 0\n"      \
  "  movq %rdi, %rax\n"                   \
  "  xorq -8(%rsp), %rax\n"               \
  "  movq %rdi, %rdx\n"                   \
  "  xorq -16(%rsp), %rdx\n"              \
  "  orq %rdx, %rax\n"                    \
  "  movq %rdi, %rdx\n"                   \
  "  xorq -24(%rsp), %rdx\n"              \
  "  orq %rdx, %rax\n"                    \
  "  movq %rdi, %rdx\n"                   \
  "  xorq -32(%rsp), %rdx\n"              \
  "  orq %rdx, %rax\n"                    \
  "  orq %rax, corrupted(%rip)\n"
__asm__(
    ".text\n"
    ".globl zone_take\n.type zone_take, @function\n"
    "zone_take:\n"
    ACROSS_A_NO_OP
    "  movq used(%rip), %rax\n"
    "  leaq 31(%rdi,%rax), %rdx\n"
    "  andq $-16, %rdx\n"
    "  movq %rdx, used(%rip)\n"
    "  leaq store(%rip), %rdx\n"
    "  addq %rdx, %rax\n"
    "  retq\n"
    ".size zone_take, .-zone_take\n"
    ".globl zone_give\n.type zone_give, @function\n"
    "zone_give:\n"
    ACROSS_A_NO_OP
    "  retq\n"
    ".size zone_give, .-zone_give\n");
void *zone_take(size_t);
void zone_give(void *);
SITE(00, zone_take(n))
int main(int argc, char **argv) {
  uint64_t calls = argument(argc, argv, 1, 1000);
  ready();
  for (uint64_t i = 0; i < calls; i++) {
    void *p = site_00(100 + i % 10); took(0, 100 + i % 10);
    if (i % 4) { zone_give(p); gave(0, 100 + i % 10); }
    if (corrupted) die("the red zone was overwritten");
  }
  report();
  return 0;
}
