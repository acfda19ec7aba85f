/* KIND: an allocator whose functions begin with a no-op of five bytes (`plain`) or ten (`long`), and children that use it. Prints READY,
 * waits for a line, and prints how many children ended as they should. x86-64. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 20, ALLOCATIONS = 200 };
__attribute__((used)) static char store[64] __attribute__((aligned(64)));
#define FUNCTION(NAME, NO_OP, BODY)                             \
  __asm__(".text\n.globl " NAME "\n.type " NAME ", @function\n" \
          NAME ":\n  .byte " NO_OP "\n  pushq %rbx\n" BODY "  popq %rbx\n  retq\n.size " NAME ", .-" NAME "\n");
#define FIVE "0x0f, 0x1f, 0x44, 0, 0"
#define TEN "0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0"
FUNCTION("plain_take", FIVE, "  leaq store(%rip), %rax\n")
FUNCTION("plain_give", FIVE, "  xorl %eax, %eax\n")
FUNCTION("long_take", TEN, "  leaq store(%rip), %rax\n")
FUNCTION("long_give", TEN, "  xorl %eax, %eax\n")
void *plain_take(size_t), *long_take(size_t);
void plain_give(void *), long_give(void *);
static int is_long;
static void allocate(void) {
  for (int i = 0; i < ALLOCATIONS; i++) {
    if (is_long) long_give(long_take(100));
    else plain_give(plain_take(100));
  }
}
int main(int argc, char **argv) {
  is_long = argc > 1 && !strcmp(argv[1], "long");
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
