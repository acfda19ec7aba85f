/* A function with a page of its own, whose first instructions the tests displace: hooked(x) = 3x + 7. */
long hooked(long x);
__asm__(
    ".text\n.p2align 12\n.globl hooked\nhooked:\n"
    "  push %rbp\n"                  /* +0: the jump goes here */
    "  mov %rsp, %rbp\n"             /* +1 */
    "  lea (%rdi,%rdi,2), %rax\n"    /* +4 */
    "  add $7, %rax\n"               /* +8: the copy comes back here */
    "  pop %rbp\n"
    "  ret\n"
    ".p2align 12\n");
