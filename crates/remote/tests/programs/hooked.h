/* A function with a page of its own, whose first instructions the tests displace: hooked(x) = 3x + 7. */
long hooked(long x);
__asm__(
    ".text\n.p2align 12\n.globl hooked\nhooked:\n"
    "  rdtsc\n"                      /* +0: the jump goes here; slow, so that many interrupts come behind it */
    "  push %rbp\n"                  /* +2 */
    "  mov %rsp, %rbp\n"             /* +3 */
    "  lea (%rdi,%rdi,2), %rax\n"    /* +6: the copy comes back here */
    "  add $7, %rax\n"
    "  pop %rbp\n"
    "  ret\n"
    ".p2align 12\n");
