/* Allocates, then forks twenty children that allocate too, one after the other. Prints READY, waits for a line, and prints how
 * many children ended as they should. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 20, ALLOCATIONS = 500 };
static void allocate(void) {
  for (int i = 0; i < ALLOCATIONS; i++) {
    void *p = malloc(100 + (size_t)i);
    __asm__ volatile("" : "+r"(p) : : "memory");
    free(p);
  }
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
