/* An allocator in hand-written assembly: malloc and free have no instruction that the kernel handles cheaply, and valloc
 * begins with a byte that is not an instruction. Memory is never reused. x86-64 only. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
__attribute__((used)) static char store[256 << 20] __attribute__((aligned(64)));
__attribute__((used)) static size_t used = 64;
__asm__(
    ".text\n"
    ".globl malloc\n.type malloc, @function\n"
    "malloc:\n"
    "  movq used(%rip), %rax\n"
    "  leaq 31(%rdi,%rax), %rdx\n"
    "  andq $-16, %rdx\n"
    "  movq %rdx, used(%rip)\n"
    "  leaq store(%rip), %rdx\n"
    "  addq %rdx, %rax\n"
    "  movq %rdi, -8(%rax)\n"
    "  retq\n"
    ".size malloc, .-malloc\n"
    ".globl free\n.type free, @function\n"
    "free:\n"
    "  movq %rdi, %rax\n"
    "  retq\n"
    ".size free, .-free\n"
    ".globl valloc\n.type valloc, @function\n"
    "valloc:\n"
    "  .byte 0x06\n"
    "  retq\n"
    ".size valloc, .-valloc\n");
void *malloc(size_t);
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void *aligned_alloc(size_t alignment, size_t size) {
  used = (used + alignment - 1) & ~(alignment - 1);
  return malloc(size);
}
void *realloc(void *old, size_t size) {
  void *block = malloc(size);
  if (old) {
    size_t was = *(size_t *)((char *)old - 8);
    memcpy(block, old, was < size ? was : size);
  }
  return block;
}
