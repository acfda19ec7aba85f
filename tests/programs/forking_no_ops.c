/* An allocator whose functions begin with a five-byte no-op, and children that use it. Prints READY, waits for a line, and prints
 * how many children ended as they should. x86-64. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 20, ALLOCATIONS = 200 };
__attribute__((used)) static char store[64] __attribute__((aligned(64)));
#define FUNCTION(NAME, BODY)                                    \
  __asm__(".text\n.globl " NAME "\n.type " NAME ", @function\n" \
          NAME ":\n  .byte 0x0f, 0x1f, 0x44, 0, 0\n  pushq %rbx\n" BODY "  popq %rbx\n  retq\n.size " NAME ", .-" NAME "\n");
FUNCTION("plain_take", "  leaq store(%rip), %rax\n")
FUNCTION("plain_give", "  xorl %eax, %eax\n")
void *plain_take(size_t);
void plain_give(void *);
static void allocate(void) {
  for (int i = 0; i < ALLOCATIONS; i++) plain_give(plain_take(100));
}
int main(void) {
  printf("READY %d\n", getpid()), fflush(stdout);
  char c = 0;
  while (c != '\n' && read(0, &c, 1) == 1) {}
  allocate();
  int well = 0;
  for (int i = 0; i < CHILDREN; i++) {
    pid_t child = fork();
    if (!child) {
      allocate();
      _exit(17);
    }
    int status = 0;
    waitpid(child, &status, 0);
    well += WIFEXITED(status) && WEXITSTATUS(status) == 17;
  }
  printf("%d of %d children ended well\n", well, CHILDREN), fflush(stdout);
  while (read(0, &c, 1) == 1 && c != '\n') {}
  return 0;
}
